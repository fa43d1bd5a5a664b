package boughtest

import (
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// Step is a part of a script. A step that records events is played once for each run; a step that ends a stream ends the stream
// that comes to it first, and streams after it go on.
type Step struct {
	events    []proto.Message // recorded
	err       error           // ends the stream; nil, and nothing else set, ends it with OK
	isRefusal bool            // ends the stream before anything was sent
	heartbeat bool
	wait      time.Duration
}

// Event records an event of a run. The server sets its sequence, its run and its session; set the agent and the payload.
func Event(event *boughv1.AgentEvent) Step { return Step{events: []proto.Message{event}} }

// EvaluationEvent records an event of an evaluation. The server sets its sequence and its evaluation.
func EvaluationEvent(event *boughv1.EvaluationEvent) Step {
	return Step{events: []proto.Message{event}}
}

// Batch records the events of several steps at once: a stream gets them in one response.
func Batch(steps ...Step) Step {
	var batch Step
	for _, step := range steps {
		batch.events = append(batch.events, step.events...)
	}
	return batch
}

// Text records a piece of text of the root.
func Text(text string) Step {
	return Event(&boughv1.AgentEvent{
		StepId: "step-1", Attempt: 1,
		Payload: &boughv1.AgentEvent_LlmOutputTextDelta{LlmOutputTextDelta: &boughv1.LlmOutputTextDelta{Text: text}},
	})
}

// Answer ends a run with an answer.
func Answer(text string) Step {
	answer := bough.UserMessage(text)
	answer.Role = boughv1.Role_ROLE_ASSISTANT
	return Event(&boughv1.AgentEvent{
		Payload: &boughv1.AgentEvent_RunCompleted{RunCompleted: &boughv1.RunCompleted{FinalAnswer: answer}},
	})
}

// Failure ends a run with an error.
func Failure(reason boughv1.ErrorReason, message string) Step {
	failed := &boughv1.RunFailed{Error: &boughv1.AgentError{Reason: reason, Message: message}}
	return Event(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunFailed{RunFailed: failed}})
}

// Ask interrupts a run, which continues with the next step when a ResumeRun answers every request.
func Ask(requests ...*boughv1.InputRequest) Step {
	interrupted := &boughv1.RunInterrupted{Requests: requests}
	return Event(&boughv1.AgentEvent{Payload: &boughv1.AgentEvent_RunInterrupted{RunInterrupted: interrupted}})
}

// Totaled records the numbers and the gates of an evaluation, which come right before its verdict.
func Totaled(totaled *boughv1.EvaluationTotaled) Step {
	return EvaluationEvent(&boughv1.EvaluationEvent{Payload: &boughv1.EvaluationEvent_EvaluationTotaled{EvaluationTotaled: totaled}})
}

// Verdict ends an evaluation.
func Verdict(verdict boughv1.Verdict) Step {
	completed := &boughv1.EvaluationCompleted{Verdict: verdict}
	return EvaluationEvent(&boughv1.EvaluationEvent{
		Payload: &boughv1.EvaluationEvent_EvaluationCompleted{EvaluationCompleted: completed},
	})
}

// Drop ends a stream as a broken connection does.
func Drop() Step { return Fail(status.Error(codes.Unavailable, "the connection broke")) }

// Refuse ends the call that comes next before anything was sent, not even the id of what it started, as a connection that broke at
// once does. Put it first, or after a step that ends a stream.
func Refuse() Step {
	return Step{err: status.Error(codes.Unavailable, "the connection broke at once"), isRefusal: true}
}

// Fail ends a stream with a status; see [Error].
func Fail(err error) Step { return Step{err: err} }

// End ends a stream with OK before its end, as a proxy may.
func End() Step { return Step{} }

// Heartbeat sends a response without events.
func Heartbeat() Step { return Step{heartbeat: true} }

// Wait waits before the next step.
func Wait(duration time.Duration) Step { return Step{wait: duration} }

func statusOf(code codes.Code, reason, message string) error {
	described, err := status.New(code, message).WithDetails(&errdetails.ErrorInfo{Reason: reason, Domain: "bough"})
	if err != nil {
		return err
	}
	return described.Err()
}
