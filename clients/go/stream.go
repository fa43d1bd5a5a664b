package bough

import (
	"context"
	"errors"
	"io"
	"iter"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// Event is a fact of a run or of an evaluation.
type Event interface {
	*boughv1.AgentEvent | *boughv1.EvaluationEvent
	proto.Message
	GetSequence() int64
}

// PayloadName returns the name of what happened, as in the schema, such as "tool_started"; empty for a payload that this version
// of the schema does not have.
func PayloadName[E Event](event E) string {
	message := event.ProtoReflect()
	field := message.WhichOneof(message.Descriptor().Oneofs().ByName("payload"))
	if field == nil {
		return ""
	}
	return string(field.Name())
}

// RunStream follows a run; see [Client.Run].
type RunStream = Stream[*boughv1.AgentEvent]

// EvaluationStream follows an evaluation; see [Client.Evaluate].
type EvaluationStream = Stream[*boughv1.EvaluationEvent]

// Stream follows a run or an evaluation, as its events happen.
//
// It makes its call when the first event is asked for, or by [Stream.Started]. If the connection drops, or the server is
// restarted, it rejoins after its last event: every event comes once, in order, until the event at which the first call would have
// ended. It has no events but those of the response that is being read.
//
// A call that ends with OK after an event of a kind that this version does not know ends the stream too, such as a pause of a later
// version: what it follows has not ended then, and [Result.Err] is not nil.
//
// The stream ends the call, and nothing else, if it is closed or its context is done: use CancelRun and CancelEvaluation of
// [Client.Agents] and [Client.Evals] to end what it follows. It is closed when it has ended, and when a loop over [Stream.Events]
// is left. One goroutine reads it; any may close it.
type Stream[E Event] struct {
	ctx       context.Context
	end       context.CancelFunc // ends the stream and its call
	position  position[E]
	backoff   backoff
	requestID string

	call    *call[E]
	endCall context.CancelFunc
	pending []E
	err     error // how the stream ended; nil until then
	closed  atomic.Bool
}

func newStream[E Event](ctx context.Context, client *Client, position position[E], requestID string) *Stream[E] {
	deadline, _ := ctx.Deadline()
	following, end := context.WithCancel(ctx)
	return &Stream[E]{
		ctx: following, end: end, position: position, requestID: requestID,
		backoff: backoff{
			rejoining: client.rejoining, timing: client.timing, hasContact: &client.contact, deadline: deadline,
		},
	}
}

// Events returns the events as they arrive. An error is the last pair of the loop; without one the stream has reached its end:
//
//	for event, err := range stream.Events() {
//		if err != nil {
//			return err
//		}
//		...
//	}
//
// The stream is closed when the loop is left.
func (s *Stream[E]) Events() iter.Seq2[E, error] {
	return func(yield func(E, error) bool) {
		defer s.Close()
		for {
			event, err := s.Recv()
			if err == io.EOF || !yield(event, err) || err != nil {
				return
			}
		}
	}
}

// Recv returns the next event, [io.EOF] after the last one, or an [*Error]. Prefer [Stream.Events], which closes the stream.
func (s *Stream[E]) Recv() (E, error) {
	for len(s.pending) == 0 || s.ctx.Err() != nil {
		if err := s.advance(); err != nil {
			return nil, err
		}
	}
	event := s.pending[0]
	s.pending = s.pending[1:]
	return event, nil
}

// Started waits until what the stream starts, or the answers that it brings, are accepted and durable. It returns the id of the
// run or of the evaluation. No event is lost.
func (s *Stream[E]) Started() (string, error) {
	for !s.position.isAccepted() {
		if err := s.advance(); err != nil {
			return "", err
		}
	}
	return s.position.id(), nil
}

// ID returns the id of the run or of the evaluation; empty until it is known.
func (s *Stream[E]) ID() string { return s.position.id() }

// RequestID returns the request id of the call, under which a repeated call has no second effect; empty if the call needs none.
func (s *Stream[E]) RequestID() string { return s.requestID }

// ThroughSequence returns the sequence to continue after: the caller has every event of its view up to here.
func (s *Stream[E]) ThroughSequence() int64 {
	if len(s.pending) > 0 {
		return s.pending[0].GetSequence() - 1
	}
	return s.position.through()
}

// Rejoins returns how often the stream has lost its server and rejoined, or tried to.
func (s *Stream[E]) Rejoins() int { return s.backoff.outages }

// Close ends the call. What the stream follows continues as its policy says.
func (s *Stream[E]) Close() {
	s.closed.Store(true)
	s.end()
}

// advance opens a call or receives one response.
func (s *Stream[E]) advance() error {
	if s.err != nil {
		return s.err
	}
	err := s.step()
	if err == nil {
		return nil
	}
	s.drop()
	if failed := s.recoverFrom(err); failed != nil {
		s.err = failed
		s.end()
	}
	return s.err
}

func (s *Stream[E]) step() error {
	if s.ctx.Err() != nil {
		return callErrorOf(s.ctx)
	}
	if s.call == nil {
		return s.begin()
	}
	events, through, err := s.call.recv()
	if err != nil {
		return err
	}
	s.backoff.progressed()
	s.pending = s.position.take(events, through)
	return nil
}

func (s *Stream[E]) begin() error {
	ctx, end := context.WithCancel(s.ctx)
	s.endCall = end
	call, err := s.position.open(ctx)
	if err != nil {
		return err
	}
	s.call = call
	header, err := call.header()
	if err == nil && s.position.accept(header) {
		s.backoff.answered()
	}
	return err
}

// drop ends the call, if there is one.
func (s *Stream[E]) drop() {
	if s.endCall != nil {
		s.endCall()
	}
	s.call, s.endCall = nil, nil
}

// recoverFrom waits until the stream can rejoin after an error, or returns how the stream ends.
func (s *Stream[E]) recoverFrom(err error) error {
	if s.closed.Load() {
		return &Error{Code: codes.Canceled, Message: "The stream is closed.", cause: context.Canceled}
	}
	if len(s.pending) == 0 && (s.position.isOver() || err == io.EOF && s.position.mayEnd()) {
		return io.EOF
	}
	if err == io.EOF && s.position.proceed() {
		return nil
	}
	failed := &Error{Code: codes.Unavailable, Message: "The stream ended before what it follows."}
	if err != io.EOF && !errors.As(err, &failed) {
		return err
	}
	delay, final := s.backoff.delayAfter(failed)
	if final != nil {
		return final
	}
	return s.backoff.timing.sleep(s.ctx, delay)
}
