package bough

import (
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// Result is what became of a run.
type Result struct {
	// RunID and SessionID are the ids; empty if there was no event.
	RunID, SessionID string
	// State is the state of the run after the last event of a kind that this version knows.
	State boughv1.ExecutionState
	// Answer is the final answer; nil unless the run has succeeded.
	Answer *boughv1.Message
	// Failure says why the run failed or was cancelled; nil in any other state.
	Failure *boughv1.AgentError
	// OpenRequests are what the run asks for and is not answered yet: give each an answer by [Client.Resume].
	OpenRequests []*boughv1.InputRequest
	// Usage is what the agents of the whole tree used; nil until the run has ended.
	Usage *boughv1.Usage
	// ThroughSequence is the sequence to continue after.
	ThroughSequence int64
}

// Text returns the text of the answer; empty if there is none.
func (r *Result) Text() string { return MessageText(r.Answer) }

// Interrupted reports whether the run waits for answers.
func (r *Result) Interrupted() bool {
	return r.State == boughv1.ExecutionState_EXECUTION_STATE_INPUT_REQUIRED
}

// Err returns nil if the run has succeeded, else a [*RunError].
func (r *Result) Err() error {
	if r.State == boughv1.ExecutionState_EXECUTION_STATE_SUCCEEDED {
		return nil
	}
	return &RunError{RunID: r.RunID, State: r.State, Failure: r.Failure, OpenRequests: r.OpenRequests}
}

// Collect follows a stream to its end and returns what became of its run. That the run failed or waits for input is not an error of
// Collect: see [Result.Err]. If the stream fails, the result says how far the run had come.
func Collect(stream *RunStream) (*Result, error) {
	result := &Result{RunID: stream.ID()}
	var failed error
	for event, err := range stream.Events() {
		if err != nil {
			failed = err
			break
		}
		result.Add(event)
	}
	result.ThroughSequence = stream.ThroughSequence()
	return result, failed
}

// Add applies the next event, for programs that read the events of a stream themselves. The zero Result is the one before the first
// event.
func (r *Result) Add(event *boughv1.AgentEvent) {
	r.RunID, r.SessionID, r.ThroughSequence = event.GetRunId(), event.GetSessionId(), event.GetSequence()
	if r.State == boughv1.ExecutionState_EXECUTION_STATE_UNSPECIFIED {
		r.State = boughv1.ExecutionState_EXECUTION_STATE_RUNNING
	}
	switch payload := event.GetPayload().(type) {
	case *boughv1.AgentEvent_RunQueued:
		r.State = boughv1.ExecutionState_EXECUTION_STATE_PENDING
	case *boughv1.AgentEvent_RunDequeued, *boughv1.AgentEvent_RunResumed, *boughv1.AgentEvent_RunForked:
		r.State = boughv1.ExecutionState_EXECUTION_STATE_RUNNING
	case *boughv1.AgentEvent_RunInterrupted:
		r.State = boughv1.ExecutionState_EXECUTION_STATE_INPUT_REQUIRED
		// It names every open request; a view may not have shown the events of some.
		r.OpenRequests = payload.RunInterrupted.GetRequests()
	case *boughv1.AgentEvent_InputRequested:
		r.OpenRequests = append(r.OpenRequests, payload.InputRequested.GetRequest())
	case *boughv1.AgentEvent_InputReceived:
		r.answered(payload.InputReceived.GetAnswer().GetInputId())
	case *boughv1.AgentEvent_RunCompleted:
		r.State, r.Answer = boughv1.ExecutionState_EXECUTION_STATE_SUCCEEDED, payload.RunCompleted.GetFinalAnswer()
		r.end(payload.RunCompleted.GetTreeUsage(), nil)
	case *boughv1.AgentEvent_RunFailed:
		r.State = boughv1.ExecutionState_EXECUTION_STATE_FAILED
		r.end(payload.RunFailed.GetTreeUsage(), payload.RunFailed.GetError())
	case *boughv1.AgentEvent_RunCancelled:
		r.State = boughv1.ExecutionState_EXECUTION_STATE_CANCELLED
		r.end(payload.RunCancelled.GetTreeUsage(), payload.RunCancelled.GetError())
	}
}

func (r *Result) end(usage *boughv1.Usage, failure *boughv1.AgentError) {
	r.Usage, r.Failure, r.OpenRequests = usage, failure, nil
}

func (r *Result) answered(id string) {
	var open []*boughv1.InputRequest
	for _, request := range r.OpenRequests {
		if request.GetInputId() != id {
			open = append(open, request)
		}
	}
	r.OpenRequests = open
}
