package boughtest

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	bough "github.com/bough-dev/bough/clients/go"
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

func (a *agentService) ForkRun(
	request *boughv1.ForkRunRequest, stream grpc.ServerStreamingServer[boughv1.ForkRunResponse],
) error {
	fork, err := a.server.startFork(request)
	if err != nil {
		return err
	}
	return followRun(fork, stream, request.GetAfterSequence(), endsAtInterruption, func(batch *boughv1.EventBatch) error {
		return stream.Send(&boughv1.ForkRunResponse{Batch: batch})
	})
}

func (a *agentService) WatchRun(
	request *boughv1.WatchRunRequest, stream grpc.ServerStreamingServer[boughv1.WatchRunResponse],
) error {
	run, err := a.server.run(request.GetRunId())
	if err != nil {
		return err
	}
	events := run.recorded()
	after, last, hasEnded := request.GetAfterSequence(), int64(len(events)), isTerminal(events[len(events)-1])
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
	failure := &boughv1.AgentError{Reason: boughv1.ErrorReason_ERROR_REASON_CANCELLED, Message: "The run was cancelled."}
	run.end(isTerminal, &boughv1.AgentEvent{
		Payload: &boughv1.AgentEvent_RunCancelled{RunCancelled: &boughv1.RunCancelled{Error: failure}},
	})
	described, _ := describeRun(run)
	return &boughv1.CancelRunResponse{Run: described}, nil
}

func (a *agentService) GetRun(_ context.Context, request *boughv1.GetRunRequest) (*boughv1.GetRunResponse, error) {
	run, err := a.server.run(request.GetRunId())
	if err != nil {
		return nil, err
	}
	described, result := describeRun(run)
	return &boughv1.GetRunResponse{Run: described, FinalAnswer: result.Answer}, nil
}

// describeRun returns a run as its log shows it.
func describeRun(run *log[*boughv1.AgentEvent]) (*boughv1.Run, *bough.Result) {
	result := &bough.Result{}
	for _, event := range run.recorded() {
		result.Add(event)
	}
	return &boughv1.Run{
		RunId: result.RunID, SessionId: result.SessionID, Agent: run.script, State: result.State, Error: result.Failure,
		LastSequence: result.ThroughSequence, OpenRequests: result.OpenRequests, TreeUsage: result.Usage,
	}, result
}

func (s *Server) startRun(request *boughv1.RunRequest) (*log[*boughv1.AgentEvent], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, isKnown := s.byRequest[request.GetRequestId()]; isKnown {
		return s.runs[id], nil
	}
	agent := request.GetAgent()
	steps, isKnown := s.scripts[agent]
	if !isKnown {
		return nil, statusOf(codes.NotFound, "UNKNOWN_AGENT", fmt.Sprintf("There is no agent %q: script it with Server.Run.", agent))
	}
	first := &boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunStarted{RunStarted: &boughv1.RunStarted{}}}
	return s.newRun(agent, request.GetSessionId(), request.GetRequestId(), steps, first), nil
}

func (s *Server) startFork(request *boughv1.ForkRunRequest) (*log[*boughv1.AgentEvent], error) {
	origin, err := s.run(request.GetRunId())
	if err != nil {
		return nil, err
	}
	shared := origin.recorded()
	if last := int64(len(shared)); request.GetAfterSequence() > last {
		return nil, outOfRange(last)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, isKnown := s.byRequest[request.GetRequestId()]; isKnown {
		return s.runs[id], nil
	}
	steps, isKnown := s.forks[origin.script]
	if !isKnown {
		return nil, status.Errorf(codes.Unimplemented, "No fork of runs of %q is scripted: call Server.Fork.", origin.script)
	}
	var events []*boughv1.AgentEvent
	for _, event := range shared[:request.GetAfterSequence()] {
		events = append(events, proto.CloneOf(event))
	}
	forked := &boughv1.RunForked{Origin: &boughv1.ForkOrigin{RunId: origin.id, Sequence: request.GetAfterSequence()}}
	events = append(events, &boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunForked{RunForked: forked}})
	return s.newRun(origin.script, "", request.GetRequestId(), steps, events...), nil
}

// newRun begins the log of a run; the caller holds the lock.
func (s *Server) newRun(agent, session, requestID string, steps []Step, events ...*boughv1.AgentEvent) *log[*boughv1.AgentEvent] {
	id := s.newID("run")
	if session == "" {
		session = "session-of-" + id
	}
	number := func(event *boughv1.AgentEvent, sequence int64) {
		event.RunId, event.SessionId, event.Sequence = id, session, sequence
		event.RecordTime = timestamppb.Now()
		if event.GetAgent() == "" {
			event.Agent, event.Branch = agent, agent
		}
		if event.GetInvocationId() == "" {
			event.InvocationId = "invocation-of-" + event.GetAgent()
		}
	}
	run := newLog(id, agent, events, cloned(steps), number, isInterruption)
	s.runs[id] = run
	s.remember(requestID, id)
	return run
}

func (s *Server) run(id string) (*log[*boughv1.AgentEvent], error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if run := s.runs[id]; run != nil {
		return run, nil
	}
	return nil, statusOf(codes.NotFound, "NOT_FOUND", fmt.Sprintf("There is no run %q.", id))
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
