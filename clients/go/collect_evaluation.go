package bough

import (
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// EvaluationResult is what became of an evaluation, as far as the events of its stream show it. Its cases are not in it: the service of
// [Client.Evals] returns them in pages.
type EvaluationResult struct {
	// EvaluationID is the id; empty if there was no event.
	EvaluationID string
	// State is the state of the evaluation after the last event: SUCCEEDED if it has a verdict, whatever that is.
	State boughv1.ExecutionState
	// Verdict is whether the set passed; unspecified unless the evaluation has succeeded.
	Verdict boughv1.Verdict
	// Reason says why it did not pass, as far as neither a case nor a gate says so; empty if they say all.
	Reason string
	// Totals are the numbers over all cases, of a cancelled evaluation over what was scored; nil until it has ended or if it failed.
	Totals *boughv1.EvalTotals
	// Gates are the gates in the order of the request; empty unless the evaluation has succeeded.
	Gates []*boughv1.GateResult
	// Failure says why the evaluation failed or was cancelled; nil in any other state.
	Failure *boughv1.AgentError
	// ThroughSequence is the sequence to continue after.
	ThroughSequence int64
}

// Err returns nil if the evaluation has a verdict, passed or not, else an [*EvaluationError].
func (r *EvaluationResult) Err() error {
	if r.State == boughv1.ExecutionState_EXECUTION_STATE_SUCCEEDED {
		return nil
	}
	return &EvaluationError{EvaluationID: r.EvaluationID, State: r.State, Failure: r.Failure}
}

// CollectEvaluation follows a stream to its end and returns what became of its evaluation. Neither a set that did not pass nor an
// evaluation that failed is an error of CollectEvaluation: see [EvaluationResult.Verdict] and [EvaluationResult.Err]. If the stream
// fails, the result says how far the evaluation had come.
func CollectEvaluation(stream *EvaluationStream) (*EvaluationResult, error) {
	result := &EvaluationResult{EvaluationID: stream.ID()}
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

// Add applies the next event, for programs that read the events of a stream themselves. The zero EvaluationResult is the one before
// the first event.
func (r *EvaluationResult) Add(event *boughv1.EvaluationEvent) {
	r.EvaluationID, r.ThroughSequence = event.GetEvaluationId(), event.GetSequence()
	if r.State == boughv1.ExecutionState_EXECUTION_STATE_UNSPECIFIED {
		r.State = boughv1.ExecutionState_EXECUTION_STATE_RUNNING
	}
	switch payload := event.GetPayload().(type) {
	case *boughv1.EvaluationEvent_EvaluationTotaled:
		totaled := payload.EvaluationTotaled
		r.Totals, r.Gates, r.Reason = totaled.GetTotals(), totaled.GetGates(), totaled.GetReason()
	case *boughv1.EvaluationEvent_EvaluationCompleted:
		r.State = boughv1.ExecutionState_EXECUTION_STATE_SUCCEEDED
		r.Verdict = payload.EvaluationCompleted.GetVerdict()
	case *boughv1.EvaluationEvent_EvaluationFailed:
		r.State = boughv1.ExecutionState_EXECUTION_STATE_FAILED
		r.Failure = payload.EvaluationFailed.GetError()
	case *boughv1.EvaluationEvent_EvaluationCancelled:
		r.State = boughv1.ExecutionState_EXECUTION_STATE_CANCELLED
		r.Failure, r.Totals = payload.EvaluationCancelled.GetError(), payload.EvaluationCancelled.GetTotals()
	}
}
