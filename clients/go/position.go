package bough

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// position is where a stream is in a log, over as many calls as it takes.
type position[E Event] interface {
	// open begins the call that continues from here.
	open(context.Context) (*call[E], error)
	// accept reads the initial metadata of a call; it reports whether a server has accepted the call.
	accept(metadata.MD) bool
	// take returns the new events of a response, in order.
	take(events []E, through int64) []E
	// isOver reports whether the last event ends the stream.
	isOver() bool
	// mayEnd reports whether status OK is an end here, and not a stream that was cut.
	mayEnd() bool
	// proceed reports whether status OK is not an end because another call follows at once.
	proceed() bool
	isAccepted() bool
	id() string
	through() int64
}

// call is one call of a stream.
type call[E Event] struct {
	header func() (metadata.MD, error)
	recv   func() (events []E, through int64, err error)
}

func runCall[T any, R interface {
	*T
	GetBatch() *boughv1.EventBatch
}](stream grpc.ServerStreamingClient[T], err error) (*call[*boughv1.AgentEvent], error) {
	if err != nil {
		return nil, err
	}
	recv := func() ([]*boughv1.AgentEvent, int64, error) {
		response, err := stream.Recv()
		if err != nil {
			return nil, 0, err
		}
		batch := R(response).GetBatch()
		return batch.GetEvents(), batch.GetThroughSequence(), nil
	}
	return &call[*boughv1.AgentEvent]{header: stream.Header, recv: recv}, nil
}

func evaluationCall[T any, R interface {
	*T
	GetBatch() *boughv1.EvaluationEventBatch
}](stream grpc.ServerStreamingClient[T], err error) (*call[*boughv1.EvaluationEvent], error) {
	if err != nil {
		return nil, err
	}
	recv := func() ([]*boughv1.EvaluationEvent, int64, error) {
		response, err := stream.Recv()
		if err != nil {
			return nil, 0, err
		}
		batch := R(response).GetBatch()
		return batch.GetEvents(), batch.GetThroughSequence(), nil
	}
	return &call[*boughv1.EvaluationEvent]{header: stream.Header, recv: recv}, nil
}

// runPosition is a position in the log of a run.
//
// The first call is repeated under its request id until the position is known. From then on the run is watched from the position
// to the event at which the first call would have ended.
type runPosition struct {
	agents   boughv1.AgentServiceClient
	request  proto.Message // one of the four that runs are followed with
	follow   *boughv1.FollowOptions
	runID    string
	received int64
	accepted bool
	over     bool
	last     *boughv1.AgentEvent
	// Of the requests that a ResumeRun answers: those that may still be open here, and those that an interruption has named.
	unanswered, asked map[string]bool
	// The sequence of the last run_interrupted received; 0 for none.
	interruption int64
	// Of a watch until an interruption: whether it has every event that was recorded when it began. An interruption among those ends
	// it only if it is the last one, for then it is not answered.
	isLive bool
	// Whether the last event of the last response was a run_interrupted, also one that was known.
	isInterrupted bool
}

type runRequest interface {
	proto.Message
	GetFollow() *boughv1.FollowOptions
}

func newRunPosition(agents boughv1.AgentServiceClient, request runRequest) *runPosition {
	p := &runPosition{agents: agents, request: request, follow: request.GetFollow()}
	switch request := request.(type) {
	case *boughv1.WatchRunRequest:
		p.runID, p.received, p.accepted = request.GetRunId(), request.GetAfterSequence(), true
	case *boughv1.ResumeRunRequest:
		p.runID, p.received = request.GetRunId(), request.GetAfterSequence()
		p.unanswered, p.asked = map[string]bool{}, map[string]bool{}
		for _, answer := range request.GetAnswers() {
			p.unanswered[answer.GetInputId()] = true
		}
	}
	return p
}

func (p *runPosition) open(ctx context.Context) (*call[*boughv1.AgentEvent], error) {
	switch request := p.request.(type) {
	case *boughv1.RunRequest:
		if p.runID == "" {
			return runCall(p.agents.Run(ctx, request))
		}
	case *boughv1.ForkRunRequest:
		if p.received == 0 { // Its stream begins at the fork, whose sequence only its events show.
			return runCall(p.agents.ForkRun(ctx, request))
		}
	case *boughv1.ResumeRunRequest:
		if len(p.unanswered) > 0 {
			return runCall(p.agents.ResumeRun(ctx, p.repeated(request)))
		}
	case *boughv1.WatchRunRequest:
		watch := p.watch(request.GetUntil())
		if p.isReplaying() {
			// The last event that is known may be the interruption at which the run waits: it is asked for again.
			watch.Until, watch.AfterSequence = boughv1.WatchUntil_WATCH_UNTIL_CURRENT, max(p.received-1, 0)
		}
		return runCall(p.agents.WatchRun(ctx, watch))
	}
	return runCall(p.agents.WatchRun(ctx, p.watch(boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED)))
}

func (p *runPosition) watch(until boughv1.WatchUntil) *boughv1.WatchRunRequest {
	return &boughv1.WatchRunRequest{RunId: p.runID, AfterSequence: p.received, Until: until, Follow: p.follow}
}

// repeated returns the call with the same answers, which have no second effect.
//
// The run cannot be watched instead: only the server knows which interruption is the first after the answers.
func (p *runPosition) repeated(request *boughv1.ResumeRunRequest) *boughv1.ResumeRunRequest {
	if request.AfterSequence == nil {
		return request
	}
	after := p.received
	if after == p.interruption && after > 0 {
		// The interruption may be the end of the stream: a mask can hide the input_received that would show it. The server ends
		// the call with that event, and past it would wait for the next one.
		after--
	}
	return &boughv1.ResumeRunRequest{
		RunId: request.GetRunId(), Answers: request.GetAnswers(), RequestId: request.GetRequestId(),
		Follow: request.GetFollow(), AfterSequence: &after,
	}
}

func (p *runPosition) accept(header metadata.MD) bool {
	ids := header.Get("bough-run-id")
	if len(ids) == 0 {
		return false
	}
	p.runID, p.accepted = ids[0], true
	return true
}

func (p *runPosition) take(events []*boughv1.AgentEvent, through int64) []*boughv1.AgentEvent {
	p.accepted = true
	if len(events) > 0 || through > 0 {
		p.settle()
	}
	if count := len(events); count > 0 {
		p.isInterrupted = events[count-1].GetRunInterrupted() != nil
	}
	known := p.received
	fresh := slices.DeleteFunc(events, func(event *boughv1.AgentEvent) bool {
		isKnown := event.GetSequence() <= known
		known = max(known, event.GetSequence())
		return isKnown
	})
	for _, event := range fresh {
		if p.runID == "" {
			p.runID = event.GetRunId()
		}
		p.last, p.over = event, p.ends(event)
	}
	p.received = max(known, through)
	return fresh
}

// settle marks the answers as received: without after_sequence a ResumeRun begins behind them.
func (p *runPosition) settle() {
	if request, ok := p.request.(*boughv1.ResumeRunRequest); ok && request.AfterSequence == nil {
		clear(p.unanswered)
	}
}

func (p *runPosition) ends(event *boughv1.AgentEvent) bool {
	switch payload := event.GetPayload().(type) {
	case *boughv1.AgentEvent_RunCompleted, *boughv1.AgentEvent_RunFailed, *boughv1.AgentEvent_RunCancelled:
		return true
	case *boughv1.AgentEvent_InputReceived:
		delete(p.unanswered, payload.InputReceived.GetAnswer().GetInputId())
	case *boughv1.AgentEvent_RunInterrupted:
		if request, ok := p.request.(*boughv1.WatchRunRequest); ok {
			return request.GetUntil() == boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED && p.isLive
		}
		p.interrupted(event.GetSequence(), payload.RunInterrupted.GetRequests())
		return len(p.unanswered) == 0
	}
	return false
}

// interrupted reads an interruption, which names every open request: one that an earlier interruption named and this one does not
// has been answered. One that none has named may not have been made yet.
func (p *runPosition) interrupted(sequence int64, requests []*boughv1.InputRequest) {
	p.interruption = sequence
	if p.unanswered == nil {
		return
	}
	named := map[string]bool{}
	for _, request := range requests {
		named[request.GetInputId()] = true
	}
	for id := range p.asked {
		if !named[id] {
			delete(p.unanswered, id)
		}
	}
	for id := range named {
		p.asked[id] = true
	}
}

// isReplaying reports whether this is a watch until an interruption that has still to read what was recorded when it began.
func (p *runPosition) isReplaying() bool {
	watch, isWatch := p.request.(*boughv1.WatchRunRequest)
	return isWatch && watch.GetUntil() == boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED && !p.isLive
}

func (p *runPosition) proceed() bool {
	isReplaying := p.isReplaying()
	p.isLive = p.isLive || isReplaying
	return isReplaying
}

func (p *runPosition) mayEnd() bool {
	if p.isReplaying() {
		return p.over || p.isInterrupted
	}
	switch request := p.request.(type) {
	case *boughv1.WatchRunRequest:
		switch request.GetUntil() {
		case boughv1.WatchUntil_WATCH_UNTIL_UNSPECIFIED, boughv1.WatchUntil_WATCH_UNTIL_TERMINAL,
			boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED:
		default:
			return true
		}
		// Nothing follows the last event of a run that has ended.
		return p.over || p.last == nil || p.last.GetPayload() == nil
	case *boughv1.ResumeRunRequest:
		// The answers may have been received although no event showed it.
		return p.over || p.last == nil || p.last.GetPayload() == nil || p.last.GetRunInterrupted() != nil
	}
	// A later version may end streams at events that are not known yet, such as a pause.
	return p.over || p.last != nil && p.last.GetPayload() == nil
}

func (p *runPosition) isOver() bool     { return p.over }
func (p *runPosition) isAccepted() bool { return p.accepted }
func (p *runPosition) id() string       { return p.runID }
func (p *runPosition) through() int64   { return p.received }
