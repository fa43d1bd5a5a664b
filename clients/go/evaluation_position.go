package bough

import (
	"context"
	"slices"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

type evaluationRequest interface {
	proto.Message
	GetFollow() *boughv1.EvaluationFollowOptions
}

// evaluationPosition is a position in the log of an evaluation.
type evaluationPosition struct {
	evals        boughv1.EvalServiceClient
	request      evaluationRequest
	evaluationID string
	received     int64
	accepted     bool
	over         bool
	last         *boughv1.EvaluationEvent
}

func newEvaluationPosition(evals boughv1.EvalServiceClient, request evaluationRequest) *evaluationPosition {
	p := &evaluationPosition{evals: evals, request: request}
	if watch, ok := request.(*boughv1.WatchEvaluationRequest); ok {
		p.evaluationID, p.received, p.accepted = watch.GetEvaluationId(), watch.GetAfterSequence(), true
	}
	return p
}

func (p *evaluationPosition) open(ctx context.Context) (*call[*boughv1.EvaluationEvent], error) {
	if request, ok := p.request.(*boughv1.EvaluateRequest); ok && p.evaluationID == "" {
		return evaluationCall(p.evals.Evaluate(ctx, request))
	}
	return evaluationCall(p.evals.WatchEvaluation(ctx, &boughv1.WatchEvaluationRequest{
		EvaluationId: p.evaluationID, AfterSequence: p.received, Follow: p.request.GetFollow(),
	}))
}

func (p *evaluationPosition) accept(header metadata.MD) bool {
	ids := header.Get("bough-evaluation-id")
	if len(ids) == 0 {
		return false
	}
	p.evaluationID, p.accepted = ids[0], true
	return true
}

func (p *evaluationPosition) take(events []*boughv1.EvaluationEvent, through int64) []*boughv1.EvaluationEvent {
	p.accepted = true
	known := p.received
	fresh := slices.DeleteFunc(events, func(event *boughv1.EvaluationEvent) bool {
		isKnown := event.GetSequence() <= known
		known = max(known, event.GetSequence())
		return isKnown
	})
	for _, event := range fresh {
		p.last = event
		if p.evaluationID == "" {
			p.evaluationID = event.GetEvaluationId()
		}
		switch event.GetPayload().(type) {
		case *boughv1.EvaluationEvent_EvaluationCompleted, *boughv1.EvaluationEvent_EvaluationFailed,
			*boughv1.EvaluationEvent_EvaluationCancelled:
			p.over = true
		}
	}
	p.received = max(known, through)
	return fresh
}

func (p *evaluationPosition) mayEnd() bool {
	if p.request.GetFollow().GetUntil() == boughv1.WatchUntil_WATCH_UNTIL_CURRENT {
		return true
	}
	_, isWatch := p.request.(*boughv1.WatchEvaluationRequest)
	return p.over || isWatch && p.last == nil || p.last != nil && p.last.GetPayload() == nil
}

func (p *evaluationPosition) proceed() bool    { return false }
func (p *evaluationPosition) isOver() bool     { return p.over }
func (p *evaluationPosition) isAccepted() bool { return p.accepted }
func (p *evaluationPosition) id() string       { return p.evaluationID }
func (p *evaluationPosition) through() int64   { return p.received }
