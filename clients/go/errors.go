package bough

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// Error is a call that the server refused, or that did not reach it. Every call of a [Client] fails with one, those of its
// generated stubs too:
//
//	var failed *bough.Error
//	if errors.As(err, &failed) && failed.Reason == "UNKNOWN_AGENT" {
//		...
//	}
//
// It keeps the gRPC status, so [status.Code] and [status.FromError] work as well, and wraps [context.Canceled] or
// [context.DeadlineExceeded] if the caller's context ended the call.
type Error struct {
	// Code is the gRPC status code.
	Code codes.Code
	// Message is a sentence for people.
	Message string
	// Reason is the name of a [boughv1.ErrorReason] without its prefix; empty if the server sent none.
	Reason string
	// Metadata is what the server says about the reason, such as "run_id".
	Metadata map[string]string
	// Violations are the fields of an invalid request that break a rule.
	Violations []Violation
	// RetryDelay is how long the server asks to wait before the call is repeated; 0 if it does not say.
	RetryDelay time.Duration

	status *status.Status
	cause  error
}

// Violation is a field of a request that breaks a rule.
type Violation struct {
	// Field is the path of the field, such as "definitions[0].llm.model".
	Field string
	// Description says which rule it breaks.
	Description string
	// Reason is the name of a [boughv1.ErrorReason] without its prefix; empty if the server sent none.
	Reason string
}

func (e *Error) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "bough: %s", e.Code)
	if e.Reason != "" {
		fmt.Fprintf(&text, " (%s)", e.Reason)
	}
	fmt.Fprintf(&text, ": %s", e.Message)
	for _, violation := range e.Violations {
		if !strings.Contains(e.Message, violation.Description) {
			fmt.Fprintf(&text, "; %s %s", violation.Field, violation.Description)
		}
	}
	return text.String()
}

// Unwrap returns the error of the caller's context, if that ended the call.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus returns the status with all its details.
func (e *Error) GRPCStatus() *status.Status {
	if e.status != nil {
		return e.status
	}
	return status.New(e.Code, e.Message)
}

// RunError is a run without an answer: it failed, was cancelled, waits for input, or has not ended.
type RunError struct {
	// RunID is the id of the run.
	RunID string
	// State is the state of the run.
	State boughv1.ExecutionState
	// Failure says why it failed or was cancelled; nil in any other state.
	Failure *boughv1.AgentError
	// OpenRequests are what it waits for; empty in any other state.
	OpenRequests []*boughv1.InputRequest
}

func (e *RunError) Error() string {
	state := stateName(e.State)
	switch {
	case e.Failure.GetMessage() != "":
		return fmt.Sprintf("bough: run %s %s: %s", e.RunID, state, e.Failure.GetMessage())
	case len(e.OpenRequests) > 0:
		return fmt.Sprintf("bough: run %s waits for %d answers", e.RunID, len(e.OpenRequests))
	}
	return fmt.Sprintf("bough: run %s has no answer: %s", e.RunID, state)
}

// EvaluationError is an evaluation without a verdict: it failed, was cancelled, or has not ended.
type EvaluationError struct {
	// EvaluationID is the id of the evaluation.
	EvaluationID string
	// State is the state of the evaluation.
	State boughv1.ExecutionState
	// Failure says why it failed or was cancelled; nil in any other state.
	Failure *boughv1.AgentError
}

func (e *EvaluationError) Error() string {
	if e.Failure.GetMessage() != "" {
		return fmt.Sprintf("bough: evaluation %s %s: %s", e.EvaluationID, stateName(e.State), e.Failure.GetMessage())
	}
	return fmt.Sprintf("bough: evaluation %s has no verdict: %s", e.EvaluationID, stateName(e.State))
}

func stateName(state boughv1.ExecutionState) string {
	return strings.ToLower(strings.TrimPrefix(state.String(), "EXECUTION_STATE_"))
}

// callError describes the error of a call under a context; nil and io.EOF stay what they are.
func callError(ctx context.Context, err error) error {
	var known *Error
	if err == nil || err == io.EOF || errors.As(err, &known) {
		return err
	}
	described := newError(status.Convert(err))
	switch {
	case described.Code == codes.DeadlineExceeded:
		described.cause = context.DeadlineExceeded
		if described.Reason == "" { // the deadline passed here, before the server could say so
			described.Reason = "DEADLINE_EXCEEDED"
		}
	case described.Code == codes.Canceled && ctx.Err() != nil:
		described.cause = ctx.Err()
	case described.Code == codes.Canceled && described.Reason == "":
		// A server that stops cancels what it has not accepted yet. Another server can serve the call.
		described.Code = codes.Unavailable
		described.status = status.New(codes.Unavailable, described.Message)
	}
	return described
}

func newError(from *status.Status) *Error {
	described := &Error{Code: from.Code(), Message: from.Message(), status: from}
	for _, detail := range from.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			described.Reason, described.Metadata = detail.GetReason(), detail.GetMetadata()
		case *errdetails.BadRequest:
			for _, field := range detail.GetFieldViolations() {
				violation := Violation{Field: field.GetField(), Description: field.GetDescription(), Reason: field.GetReason()}
				described.Violations = append(described.Violations, violation)
			}
		case *errdetails.RetryInfo:
			described.RetryDelay = detail.GetRetryDelay().AsDuration()
		}
	}
	return described
}

func describeUnary(
	ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	return callError(ctx, invoke(ctx, method, request, response, conn, options...))
}

func describeStream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer,
	options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := open(ctx, desc, conn, method, options...)
	if err != nil {
		return nil, callError(ctx, err)
	}
	return describedStream{ClientStream: stream, caller: ctx}, nil
}

// describedStream is a stream whose errors are of type *Error.
type describedStream struct {
	grpc.ClientStream
	// The context of the stream itself is cancelled as soon as the stream has failed, whatever the caller did.
	caller context.Context
}

func (s describedStream) Header() (metadata.MD, error) {
	header, err := s.ClientStream.Header()
	return header, callError(s.caller, err)
}

func (s describedStream) SendMsg(message any) error {
	return callError(s.caller, s.ClientStream.SendMsg(message))
}

func (s describedStream) RecvMsg(message any) error {
	return callError(s.caller, s.ClientStream.RecvMsg(message))
}
