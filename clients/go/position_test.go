package bough

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// cuttingServer serves a log as the protocol says, and cuts streams after a random number of events.
type cuttingServer struct {
	boughv1.AgentServiceClient
	log    []*boughv1.AgentEvent // segments that end with an interruption, and the last one with run_completed
	known  int                   // how many events are recorded
	masked bool                  // the view shows only the events that every view shows
	random *rand.Rand
	begun  map[string]int64 // where the stream of a request id begins
	// The last through_sequence that the client received in this stream; 0 for none.
	through int64
	// Whether the call asks for the current end: nothing shows that its OK came too early.
	isCurrent bool
}

func wrong(message string) error { return &Error{Code: codes.Internal, Message: message} }

// segments is a run that asks for a and b, then still for b, then for c.
func segments() []*boughv1.AgentEvent {
	var log []*boughv1.AgentEvent
	add := func(payload *boughv1.AgentEvent) {
		payload.RunId, payload.Sequence = "run", int64(len(log))+1
		log = append(log, payload)
	}
	text := func() *boughv1.AgentEvent {
		return &boughv1.AgentEvent{Payload: &boughv1.AgentEvent_LlmOutputTextDelta{LlmOutputTextDelta: &boughv1.LlmOutputTextDelta{}}}
	}
	interrupted := func(ids ...string) *boughv1.AgentEvent {
		payload := &boughv1.RunInterrupted{}
		for _, id := range ids {
			payload.Requests = append(payload.Requests, &boughv1.InputRequest{InputId: id})
		}
		return &boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunInterrupted{RunInterrupted: payload}}
	}
	resumed := func(id string) {
		add(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunResumed{RunResumed: &boughv1.RunResumed{}}})
		received := &boughv1.InputReceived{Answer: &boughv1.InputAnswer{InputId: id}}
		add(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_InputReceived{InputReceived: received}})
		add(text())
	}
	add(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunStarted{RunStarted: &boughv1.RunStarted{}}})
	add(text())
	add(interrupted("a", "b"))
	resumed("a")
	add(interrupted("b"))
	resumed("b")
	add(interrupted("c"))
	resumed("c")
	add(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunCompleted{RunCompleted: &boughv1.RunCompleted{}}})
	return log
}

func (s *cuttingServer) endAfter(sequence int64) int64 {
	for _, event := range s.log[sequence:] {
		if event.GetRunInterrupted() != nil || event.GetRunCompleted() != nil {
			return event.GetSequence()
		}
	}
	return int64(len(s.log))
}

func (s *cuttingServer) Run(_ context.Context, _ *boughv1.RunRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[boughv1.RunResponse], error) {
	return cutStream(s, 0, s.endAfter(0), func(batch *boughv1.EventBatch) *boughv1.RunResponse { return &boughv1.RunResponse{Batch: batch} }), nil
}

func (s *cuttingServer) WatchRun(_ context.Context, request *boughv1.WatchRunRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[boughv1.WatchRunResponse], error) {
	isCurrent := request.GetUntil() == boughv1.WatchUntil_WATCH_UNTIL_CURRENT
	// Until the current end it asks for its last event again.
	if after := request.GetAfterSequence(); after != s.through && !(isCurrent && after == s.through-1) {
		return nil, wrong(fmt.Sprintf("rejoined after %d, not after %d", request.GetAfterSequence(), s.through))
	}
	end := s.endAfter(request.GetAfterSequence())
	if s.isCurrent = isCurrent; isCurrent {
		end = int64(s.known)
	}
	return cutStream(s, request.GetAfterSequence(), end, func(batch *boughv1.EventBatch) *boughv1.WatchRunResponse {
		return &boughv1.WatchRunResponse{Batch: batch}
	}), nil
}

func (s *cuttingServer) ResumeRun(_ context.Context, request *boughv1.ResumeRunRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[boughv1.ResumeRunResponse], error) {
	begin, isKnown := s.begun[request.GetRequestId()]
	if !isKnown {
		begin = int64(s.known)
		s.begun[request.GetRequestId()] = begin
	}
	end := s.endAfter(begin)
	s.isCurrent = false
	s.known = max(s.known, int(end))
	after := begin
	if request.AfterSequence != nil {
		after = request.GetAfterSequence()
	} else if s.through > 0 {
		return nil, wrong("the answers were sent again although they were received")
	}
	if after >= end {
		return nil, wrong("past the end of the call, which would wait for the next one")
	}
	return cutStream(s, after, end, func(batch *boughv1.EventBatch) *boughv1.ResumeRunResponse {
		return &boughv1.ResumeRunResponse{Batch: batch}
	}), nil
}

// cutResponses is a stream of responses that may be cut before its end.
type cutResponses[T any] struct {
	grpc.ClientStream
	server    *cuttingServer
	header    metadata.MD
	responses []*T
	err       error
}

func (c *cutResponses[T]) Header() (metadata.MD, error) { return c.header, nil }

func (c *cutResponses[T]) Recv() (*T, error) {
	if len(c.responses) == 0 {
		return nil, c.err
	}
	next := c.responses[0]
	c.responses = c.responses[1:]
	c.server.through = any(next).(interface{ GetBatch() *boughv1.EventBatch }).GetBatch().GetThroughSequence()
	return next, nil
}

func cutStream[T any](s *cuttingServer, after, end int64, response func(*boughv1.EventBatch) *T) *cutResponses[T] {
	s.known = max(s.known, int(end))
	stream := &cutResponses[T]{server: s, header: metadata.Pairs("bough-run-id", "run"), err: io.EOF}
	stopped := end
	if s.random.IntN(3) > 0 {
		stopped = min(end, after+s.random.Int64N(6))
		stream.err = &Error{Code: codes.Unavailable}
		if s.random.IntN(3) == 0 && !s.isCurrent && stopped < end && after < stopped && s.log[stopped-1].GetRunInterrupted() == nil {
			stream.err = io.EOF // a proxy may end a stream too
		}
	}
	if s.random.IntN(8) == 0 {
		return &cutResponses[T]{err: &Error{Code: codes.Unavailable}}
	}
	for through := after; through < stopped; {
		next := min(stopped, through+1+s.random.Int64N(3))
		batch := &boughv1.EventBatch{ThroughSequence: next}
		for _, event := range s.log[through:next] {
			if !s.masked || event.GetLlmOutputTextDelta() == nil && event.GetInputReceived() == nil {
				batch.Events = append(batch.Events, event)
			}
		}
		if s.masked && stream.err == io.EOF && stopped < end && len(batch.Events) == 0 {
			stream.err = &Error{Code: codes.Unavailable}
		}
		stream.responses = append(stream.responses, response(batch))
		through = next
	}
	return stream
}

func (s *cuttingServer) read(t *testing.T, request runRequest) []int64 {
	t.Helper()
	s.isCurrent = false
	client := &Client{rejoining: Rejoining{}.withDefaults(), timing: realTiming}
	client.contact.isMade.Store(true)
	client.timing.sleep = func(context.Context, time.Duration) error { return nil }
	s.through = 0
	if watch, isWatch := request.(*boughv1.WatchRunRequest); isWatch {
		s.through = watch.GetAfterSequence()
	}
	var sequences []int64
	for event, err := range newStream(t.Context(), client, newRunPosition(s, request), "").Events() {
		if err != nil {
			t.Fatal(err)
		}
		sequences = append(sequences, event.GetSequence())
	}
	return sequences
}

func (s *cuttingServer) want(after, end int64) (sequences []int64) {
	for _, event := range s.log[after:end] {
		if !s.masked || event.GetLlmOutputTextDelta() == nil && event.GetInputReceived() == nil {
			sequences = append(sequences, event.GetSequence())
		}
	}
	return sequences
}

func TestARunItsAnswersAndItsWatchesHaveEverySequenceOnceHoweverStreamsAreCut(t *testing.T) {
	for seed := range uint64(2000) {
		random := rand.New(rand.NewPCG(seed, 7))
		server := &cuttingServer{log: segments(), random: random, masked: seed%2 == 1, begun: map[string]int64{}}
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			if got, want := server.read(t, &boughv1.RunRequest{}), server.want(0, 3); !slices.Equal(got, want) {
				t.Fatalf("Run has %v, want %v", got, want)
			}
			begin := int64(3)
			for _, id := range []string{"a", "b", "c"} {
				end, after := server.endAfter(begin), begin
				request := &boughv1.ResumeRunRequest{RunId: "run", RequestId: id, Answers: []*boughv1.InputAnswer{{InputId: id}}}
				if random.IntN(2) == 0 {
					after = random.Int64N(begin + 1)
					request.AfterSequence = proto.Int64(after)
				}
				if got, want := server.read(t, request), server.want(after, end); !slices.Equal(got, want) {
					t.Fatalf("ResumeRun of %s after %d has %v, want %v", id, after, got, want)
				}
				watch := &boughv1.WatchRunRequest{
					RunId: "run", AfterSequence: random.Int64N(end + 1), Until: boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED,
				}
				if got, want := server.read(t, watch), server.want(watch.AfterSequence, end); !slices.Equal(got, want) {
					t.Fatalf("WatchRun after %d has %v, want %v", watch.AfterSequence, got, want)
				}
				begin = end
			}
		})
	}
}
