package boughtest

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

type evalService struct {
	boughv1.UnimplementedEvalServiceServer
	server *Server
}

// GetInvocation returns the record that is scripted for the runs of an agent, as far as this run has come.
func (e *evalService) GetInvocation(
	_ context.Context, request *boughv1.GetInvocationRequest,
) (*boughv1.GetInvocationResponse, error) {
	run, err := e.server.run(request.GetRunId())
	if err != nil {
		return nil, err
	}
	e.server.mu.Lock()
	tree := e.server.trees[run.script]
	e.server.mu.Unlock()
	if tree == nil {
		return nil, status.Errorf(codes.Unimplemented, "No tree of runs of %q is scripted: call Server.Tree.", run.script)
	}
	described, result := describeRun(run)
	invocation := proto.CloneOf(tree)
	invocation.RunId, invocation.SessionId, invocation.Agent = described.GetRunId(), described.GetSessionId(), described.GetAgent()
	invocation.State, invocation.Error, invocation.FinalResponse = described.GetState(), described.GetError(), result.Answer
	invocation.AsOfSequence = cmp.Or(request.GetAsOfSequence(), described.GetLastSequence())
	return &boughv1.GetInvocationResponse{Invocation: invocation}, nil
}

func (e *evalService) Evaluate(
	request *boughv1.EvaluateRequest, stream grpc.ServerStreamingServer[boughv1.EvaluateResponse],
) error {
	evaluation, err := e.server.startEvaluation(request)
	if err != nil {
		return err
	}
	return followEvaluation(evaluation, stream, 0, func(batch *boughv1.EvaluationEventBatch) error {
		return stream.Send(&boughv1.EvaluateResponse{Batch: batch})
	})
}

func (e *evalService) WatchEvaluation(
	request *boughv1.WatchEvaluationRequest, stream grpc.ServerStreamingServer[boughv1.WatchEvaluationResponse],
) error {
	evaluation, err := e.server.evaluation(request.GetEvaluationId())
	if err != nil {
		return err
	}
	return followEvaluation(evaluation, stream, request.GetAfterSequence(), func(batch *boughv1.EvaluationEventBatch) error {
		return stream.Send(&boughv1.WatchEvaluationResponse{Batch: batch})
	})
}

// GetEvaluation returns an evaluation and its result as its log shows them.
func (e *evalService) GetEvaluation(
	_ context.Context, request *boughv1.GetEvaluationRequest,
) (*boughv1.GetEvaluationResponse, error) {
	evaluation, err := e.server.evaluation(request.GetEvaluationId())
	if err != nil {
		return nil, err
	}
	described, result := describeEvaluation(evaluation)
	return &boughv1.GetEvaluationResponse{Evaluation: described, Result: &boughv1.EvalResult{
		EvaluationId: evaluation.id, EvalSetName: evaluation.script, State: result.State, Error: result.Failure,
		Verdict: result.Verdict, Totals: result.Totals, Gates: result.Gates, Reason: result.Reason,
	}}, nil
}

// ListCaseResults returns a page of the cases that are scripted for an evaluation and that match the filter.
func (e *evalService) ListCaseResults(
	_ context.Context, request *boughv1.ListCaseResultsRequest,
) (*boughv1.ListCaseResultsResponse, error) {
	evaluation, err := e.server.evaluation(request.GetEvaluationId())
	if err != nil {
		return nil, err
	}
	e.server.mu.Lock()
	cases := slices.Clone(e.server.cases[evaluation.script])
	e.server.mu.Unlock()
	cases = slices.DeleteFunc(cases, func(result *boughv1.CaseResult) bool { return !matches(result, request.GetFilter()) })
	cases, next, err := page(cases, request)
	return &boughv1.ListCaseResultsResponse{Cases: cases, NextPageToken: next}, err
}

func matches(result *boughv1.CaseResult, filter *boughv1.CaseResultFilter) bool {
	for key, value := range filter.GetLabels() {
		if found, isLabeled := result.GetLabels()[key]; !isLabeled || found != value {
			return false
		}
	}
	verdicts, ids := filter.GetVerdicts(), filter.GetCaseIds()
	return (len(verdicts) == 0 || slices.Contains(verdicts, result.GetVerdict())) &&
		(len(ids) == 0 || slices.Contains(ids, result.GetCaseId()))
}

// CancelEvaluation ends the evaluation with evaluation_cancelled.
func (e *evalService) CancelEvaluation(
	_ context.Context, request *boughv1.CancelEvaluationRequest,
) (*boughv1.CancelEvaluationResponse, error) {
	evaluation, err := e.server.evaluation(request.GetEvaluationId())
	if err != nil {
		return nil, err
	}
	requested := &boughv1.EvaluationCancelRequested{Note: request.GetNote()}
	failure := &boughv1.AgentError{Reason: boughv1.ErrorReason_ERROR_REASON_CANCELLED, Message: "The evaluation was cancelled."}
	evaluation.end(isEnd,
		&boughv1.EvaluationEvent{Payload: &boughv1.EvaluationEvent_EvaluationCancelRequested{EvaluationCancelRequested: requested}},
		&boughv1.EvaluationEvent{Payload: &boughv1.EvaluationEvent_EvaluationCancelled{
			EvaluationCancelled: &boughv1.EvaluationCancelled{Error: failure},
		}},
	)
	described, _ := describeEvaluation(evaluation)
	return &boughv1.CancelEvaluationResponse{Evaluation: described}, nil
}

// describeEvaluation returns an evaluation as its log shows it.
func describeEvaluation(evaluation *log[*boughv1.EvaluationEvent]) (*boughv1.Evaluation, *bough.EvaluationResult) {
	result := &bough.EvaluationResult{}
	events := evaluation.recorded()
	for _, event := range events {
		result.Add(event)
	}
	return &boughv1.Evaluation{
		EvaluationId: evaluation.id, EvalSetName: evaluation.script, Agent: events[0].GetEvaluationPlanned().GetAgent(),
		State: result.State, Error: result.Failure, Verdict: result.Verdict, Totals: result.Totals,
		LastSequence: result.ThroughSequence,
	}, result
}

// page returns a page of cases and the token of the next one.
func page(
	listed []*boughv1.CaseResult, request *boughv1.ListCaseResultsRequest,
) (of []*boughv1.CaseResult, next string, err error) {
	begin := 0
	if token := request.GetPageToken(); token != "" {
		if begin, err = strconv.Atoi(token); err != nil || begin < 0 || begin > len(listed) {
			return nil, "", statusOf(codes.InvalidArgument, "INVALID_PAGE_TOKEN", "The page token is of no page.")
		}
	}
	end := begin + int(request.GetPageSize())
	if end == begin || end >= len(listed) {
		return listed[begin:], "", nil
	}
	return listed[begin:end], strconv.Itoa(end), nil
}

func followEvaluation(
	evaluation *log[*boughv1.EvaluationEvent], stream grpc.ServerStream, after int64,
	send func(*boughv1.EvaluationEventBatch) error,
) error {
	if err := evaluation.refusal(); err != nil {
		return err
	}
	if events := evaluation.recorded(); after == int64(len(events)) && isEnd(events[len(events)-1]) {
		return nil
	}
	if err := stream.SendHeader(metadata.Pairs("bough-evaluation-id", evaluation.id)); err != nil {
		return err
	}
	return evaluation.follow(stream.Context(), after, isEnd, func(events []*boughv1.EvaluationEvent, through int64) error {
		return send(&boughv1.EvaluationEventBatch{Events: events, ThroughSequence: through})
	})
}

func isEnd(event *boughv1.EvaluationEvent) bool {
	switch event.GetPayload().(type) {
	case *boughv1.EvaluationEvent_EvaluationCompleted, *boughv1.EvaluationEvent_EvaluationFailed,
		*boughv1.EvaluationEvent_EvaluationCancelled:
		return true
	}
	return false
}

func (s *Server) startEvaluation(request *boughv1.EvaluateRequest) (*log[*boughv1.EvaluationEvent], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, isKnown := s.byRequest[request.GetRequestId()]; isKnown {
		return s.evals[id], nil
	}
	name := request.GetEvalSet().GetName()
	steps, isKnown := s.evaluations[name]
	if !isKnown {
		return nil, status.Errorf(codes.Unimplemented, "No evaluation of the set %q is scripted: call Server.Evaluation.", name)
	}
	id := s.newID("evaluation")
	number := func(event *boughv1.EvaluationEvent, sequence int64) {
		event.EvaluationId, event.Sequence, event.RecordTime = id, sequence, timestamppb.Now()
	}
	agent := cmp.Or(request.GetAgent(), request.GetEvalSet().GetAgent())
	planned := &boughv1.EvaluationPlanned{EvalSet: &boughv1.EvalSet{Name: name}, Agent: agent}
	first := &boughv1.EvaluationEvent{Payload: &boughv1.EvaluationEvent_EvaluationPlanned{EvaluationPlanned: planned}}
	never := func(*boughv1.EvaluationEvent) bool { return false }
	evaluation := newLog(id, name, []*boughv1.EvaluationEvent{first}, cloned(steps), number, never)
	s.evals[id] = evaluation
	s.remember(request.GetRequestId(), id)
	return evaluation, nil
}

func (s *Server) evaluation(id string) (*log[*boughv1.EvaluationEvent], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if evaluation := s.evals[id]; evaluation != nil {
		return evaluation, nil
	}
	return nil, statusOf(codes.NotFound, "NOT_FOUND", fmt.Sprintf("There is no evaluation %q.", id))
}
