package boughtest

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

type agentService struct {
	boughv1.UnimplementedAgentServiceServer
	server *Server
}

func (a *agentService) Run(request *boughv1.RunRequest, stream grpc.ServerStreamingServer[boughv1.RunResponse]) error {
	run, err := a.server.startRun(request)
	if err != nil {
		return err
	}
	return followRun(run, stream, 0, endsAtInterruption, func(batch *boughv1.EventBatch) error {
		return stream.Send(&boughv1.RunResponse{Batch: batch})
	})
}

func (a *agentService) WatchRun(
	request *boughv1.WatchRunRequest, stream grpc.ServerStreamingServer[boughv1.WatchRunResponse],
) error {
	run, err := a.server.run(request.GetRunId())
	if err != nil {
		return err
	}
	after, last, hasEnded := request.GetAfterSequence(), run.last(), run.hasEnded(isTerminal)
	ends := isTerminal
	switch request.GetUntil() {
	case boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED:
		ends = endsAtInterruption
	case boughv1.WatchUntil_WATCH_UNTIL_CURRENT:
		ends, hasEnded = func(event *boughv1.AgentEvent) bool { return event.GetSequence() >= last }, true
	}
	if hasEnded && after == last {
		return nil
	}
	return followRun(run, stream, after, ends, func(batch *boughv1.EventBatch) error {
		return stream.Send(&boughv1.WatchRunResponse{Batch: batch})
	})
}

func (a *agentService) ResumeRun(
	request *boughv1.ResumeRunRequest, stream grpc.ServerStreamingServer[boughv1.ResumeRunResponse],
) error {
	run, err := a.server.run(request.GetRunId())
	if err != nil {
		return err
	}
	from, err := a.server.answer(run, request)
	if err != nil {
		return err
	}
	after := from
	if request.AfterSequence != nil {
		after = request.GetAfterSequence()
	}
	ends := func(event *boughv1.AgentEvent) bool {
		return isTerminal(event) || event.GetRunInterrupted() != nil && event.GetSequence() > from
	}
	return followRun(run, stream, after, ends, func(batch *boughv1.EventBatch) error {
		return stream.Send(&boughv1.ResumeRunResponse{Batch: batch})
	})
}

func followRun(
	run *log[*boughv1.AgentEvent], stream grpc.ServerStream, after int64, ends func(*boughv1.AgentEvent) bool,
	send func(*boughv1.EventBatch) error,
) error {
	if err := run.refusal(); err != nil {
		return err
	}
	if err := stream.SendHeader(metadata.Pairs("bough-run-id", run.id)); err != nil {
		return err
	}
	return run.follow(stream.Context(), after, ends, func(events []*boughv1.AgentEvent, through int64) error {
		return send(&boughv1.EventBatch{Events: events, ThroughSequence: through})
	})
}

func isTerminal(event *boughv1.AgentEvent) bool {
	switch event.GetPayload().(type) {
	case *boughv1.AgentEvent_RunCompleted, *boughv1.AgentEvent_RunFailed, *boughv1.AgentEvent_RunCancelled:
		return true
	}
	return false
}

func endsAtInterruption(event *boughv1.AgentEvent) bool {
	return isTerminal(event) || event.GetRunInterrupted() != nil
}

func isInterruption(event *boughv1.AgentEvent) bool { return event.GetRunInterrupted() != nil }

// CancelRun ends the run with run_cancelled.
func (a *agentService) CancelRun(_ context.Context, request *boughv1.CancelRunRequest) (*boughv1.CancelRunResponse, error) {
	run, err := a.server.run(request.GetRunId())
	if err != nil {
		return nil, err
	}
	run.mu.Lock()
	defer run.mu.Unlock()
	if !isTerminal(run.events[len(run.events)-1]) {
		run.steps = nil
		failure := &boughv1.AgentError{Reason: boughv1.ErrorReason_ERROR_REASON_CANCELLED, Message: "The run was cancelled."}
		run.append(&boughv1.AgentEvent{
			Payload: &boughv1.AgentEvent_RunCancelled{RunCancelled: &boughv1.RunCancelled{Error: failure}},
		})
	}
	return &boughv1.CancelRunResponse{Run: &boughv1.Run{RunId: run.id, LastSequence: int64(len(run.events))}}, nil
}

func (s *Server) startRun(request *boughv1.RunRequest) (*log[*boughv1.AgentEvent], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, isKnown := s.byRequest[request.GetRequestId()]; isKnown {
		return s.runs[id], nil
	}
	steps, isKnown := s.scripts[request.GetAgent()]
	if !isKnown {
		return nil, statusOf(codes.NotFound, "UNKNOWN_AGENT", fmt.Sprintf("There is no agent %q.", request.GetAgent()))
	}
	id, session := s.newID("run"), request.GetSessionId()
	if session == "" {
		session = "session-of-" + id
	}
	number := func(event *boughv1.AgentEvent, sequence int64) {
		event.RunId, event.SessionId, event.Sequence = id, session, sequence
		event.RecordTime = timestamppb.Now()
		if event.GetAgent() == "" {
			event.Agent, event.Branch = request.GetAgent(), request.GetAgent()
		}
		if event.GetInvocationId() == "" {
			event.InvocationId = "invocation-of-" + event.GetAgent()
		}
	}
	first := &boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunStarted{RunStarted: &boughv1.RunStarted{}}}
	run := newLog(id, first, cloned(steps), number, isInterruption)
	s.runs[id] = run
	s.remember(request.GetRequestId(), id)
	return run, nil
}

func (s *Server) run(id string) (*log[*boughv1.AgentEvent], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if run := s.runs[id]; run != nil {
		return run, nil
	}
	return nil, statusOf(codes.NotFound, "UNKNOWN_RUN", fmt.Sprintf("There is no run %q.", id))
}

// answer records answers, once for each request id; it returns the sequence after which they are recorded.
func (s *Server) answer(run *log[*boughv1.AgentEvent], request *boughv1.ResumeRunRequest) (int64, error) {
	run.mu.Lock()
	defer run.mu.Unlock()
	for _, event := range run.events {
		if received := event.GetInputReceived(); received != nil && received.GetRequestId() == request.GetRequestId() {
			return event.GetSequence() - 2, nil // run_resumed comes right before the first answer
		}
	}
	open := run.events[len(run.events)-1].GetRunInterrupted().GetRequests()
	left, err := unanswered(open, request.GetAnswers())
	if err != nil {
		return 0, err
	}
	from := int64(len(run.events))
	resumed := &boughv1.RunResumed{Cause: boughv1.ResumeCause_RESUME_CAUSE_ANSWER}
	run.append(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunResumed{RunResumed: resumed}})
	for _, answer := range request.GetAnswers() {
		received := &boughv1.InputReceived{Answer: answer, RequestId: request.GetRequestId()}
		run.append(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_InputReceived{InputReceived: received}})
	}
	if len(left) > 0 {
		interrupted := &boughv1.RunInterrupted{Requests: left}
		run.append(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunInterrupted{RunInterrupted: interrupted}})
	}
	run.isPaused = len(left) > 0
	return from, nil
}

func unanswered(open []*boughv1.InputRequest, answers []*boughv1.InputAnswer) ([]*boughv1.InputRequest, error) {
	answered := map[string]bool{}
	for _, answer := range answers {
		answered[answer.GetInputId()] = true
	}
	var left []*boughv1.InputRequest
	for _, request := range open {
		if !answered[request.GetInputId()] {
			left = append(left, request)
		}
		delete(answered, request.GetInputId())
	}
	for id := range answered {
		return nil, statusOf(codes.InvalidArgument, "INVALID_REQUEST", fmt.Sprintf("The run does not ask for %q.", id))
	}
	return left, nil
}

type evalService struct {
	boughv1.UnimplementedEvalServiceServer
	server *Server
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
	e.server.mu.Lock()
	evaluation := e.server.evals[request.GetEvaluationId()]
	e.server.mu.Unlock()
	if evaluation == nil {
		return statusOf(codes.NotFound, "UNKNOWN_EVALUATION", fmt.Sprintf("There is no evaluation %q.", request.GetEvaluationId()))
	}
	return followEvaluation(evaluation, stream, request.GetAfterSequence(), func(batch *boughv1.EvaluationEventBatch) error {
		return stream.Send(&boughv1.WatchEvaluationResponse{Batch: batch})
	})
}

func followEvaluation(
	evaluation *log[*boughv1.EvaluationEvent], stream grpc.ServerStream, after int64,
	send func(*boughv1.EvaluationEventBatch) error,
) error {
	if err := evaluation.refusal(); err != nil {
		return err
	}
	if evaluation.hasEnded(isEnd) && after == evaluation.last() {
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
		return nil, statusOf(codes.NotFound, "UNKNOWN_AGENT", fmt.Sprintf("There is no script for the set %q.", name))
	}
	id := s.newID("evaluation")
	number := func(event *boughv1.EvaluationEvent, sequence int64) {
		event.EvaluationId, event.Sequence, event.RecordTime = id, sequence, timestamppb.Now()
	}
	planned := &boughv1.EvaluationPlanned{EvalSet: &boughv1.EvalSet{Name: name}}
	first := &boughv1.EvaluationEvent{Payload: &boughv1.EvaluationEvent_EvaluationPlanned{EvaluationPlanned: planned}}
	never := func(*boughv1.EvaluationEvent) bool { return false }
	evaluation := newLog(id, first, cloned(steps), number, never)
	s.evals[id] = evaluation
	s.remember(request.GetRequestId(), id)
	return evaluation, nil
}

// newID returns a new id; the caller holds the lock.
func (s *Server) newID(kind string) string {
	s.count++
	return fmt.Sprintf("%s-%d", kind, s.count)
}

func (s *Server) remember(requestID, id string) {
	if requestID != "" {
		s.byRequest[requestID] = id
	}
}

// cloned returns the steps of one run; the events are numbered for it.
func cloned(steps []Step) []Step {
	mine := slices.Clone(steps)
	for index := range mine {
		mine[index].events = slices.Clone(mine[index].events)
		for number, event := range mine[index].events {
			mine[index].events[number] = proto.Clone(event)
		}
	}
	return mine
}
