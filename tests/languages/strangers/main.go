// Starts a run that asks for answers, leaves every stream after some events and rejoins, answers, prints the tree, and reads an error.
//
// Written from clients/README.md and the documentation of grpc-go, in the folder in which the page was followed.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	boughv1 "example.com/bough-client/gen/bough/v1"
)

// patience is how many events are read before the stream is left.
const patience = 7

// batches is a stream of any of the calls that follow a run.
type batches func() (*boughv1.EventBatch, error)

// follower follows one run and remembers how far it has come.
type follower struct {
	agents  boughv1.AgentServiceClient
	runID   string
	through int64
	open    []*boughv1.InputRequest
	ended   bool
}

// read prints events until the stream ends, or until it is left; it tells which.
func (f *follower) read(next batches) (left bool, err error) {
	for count := 0; count < patience; {
		batch, err := next()
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		for _, event := range batch.GetEvents() {
			count++
			f.take(event)
		}
		f.through = max(f.through, batch.GetThroughSequence())
	}
	return true, nil
}

func (f *follower) take(event *boughv1.AgentEvent) {
	fmt.Println("event", event.Sequence)
	f.runID = event.RunId
	switch payload := event.Payload.(type) {
	case *boughv1.AgentEvent_RunInterrupted:
		f.open = payload.RunInterrupted.Requests
	case *boughv1.AgentEvent_RunCompleted, *boughv1.AgentEvent_RunFailed, *boughv1.AgentEvent_RunCancelled:
		f.ended = true
	}
}

// follow reads a stream, and rejoins by the last sequence whenever it was left, up to the next interruption or the end.
func (f *follower) follow(ctx context.Context, open func(context.Context) (batches, error)) error {
	for {
		call, leave := context.WithCancel(ctx)
		next, err := open(call)
		if err != nil {
			leave()
			return err
		}
		left, err := f.read(next)
		leave()
		if err != nil || !left || f.ended || len(f.open) > 0 {
			return err
		}
		open = f.watch
	}
}

func (f *follower) watch(ctx context.Context) (batches, error) {
	stream, err := f.agents.WatchRun(ctx, &boughv1.WatchRunRequest{
		RunId: f.runID, AfterSequence: f.through, Until: boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED,
	})
	return received(stream, err)
}

func (f *follower) start(ctx context.Context) (batches, error) {
	stream, err := f.agents.Run(ctx, &boughv1.RunRequest{
		RequestId: rand.Text(), Agent: "lead", Input: text("Orders 1001 and 1002 come back."),
		Policy: &boughv1.RunPolicy{Background: true},
	})
	return received(stream, err)
}

func (f *follower) answer(ctx context.Context) (batches, error) {
	slices.SortFunc(f.open, func(a, b *boughv1.InputRequest) int { return strings.Compare(a.Kind.String(), b.Kind.String()) })
	request := &boughv1.ResumeRunRequest{RunId: f.runID, RequestId: rand.Text(), AfterSequence: &f.through}
	for _, asked := range f.open {
		answer := &boughv1.InputAnswer{InputId: asked.InputId}
		switch asked.Kind {
		case boughv1.InputKind_INPUT_KIND_APPROVAL:
			answer.Answer = &boughv1.InputAnswer_Approval{Approval: &boughv1.ApprovalDecision{Approved: true}}
		case boughv1.InputKind_INPUT_KIND_QUESTION:
			answer.Answer = &boughv1.InputAnswer_ValueJson{ValueJson: `"it does not fit"`}
		case boughv1.InputKind_INPUT_KIND_CLIENT_TOOL:
			answer.Answer = &boughv1.InputAnswer_ToolOutcome{ToolOutcome: &boughv1.ToolOutcome{Parts: text("4711").Parts}}
		default:
			return nil, fmt.Errorf("no answer to %v", asked.Kind)
		}
		fmt.Println("answered", strings.ToLower(strings.TrimPrefix(asked.Kind.String(), "INPUT_KIND_")))
		request.Answers = append(request.Answers, answer)
	}
	f.open = nil
	stream, err := f.agents.ResumeRun(ctx, request)
	return received(stream, err)
}

// received makes one kind of stream of the streams of all calls.
func received[R interface{ GetBatch() *boughv1.EventBatch }](stream interface{ Recv() (R, error) }, err error) (batches, error) {
	if err != nil {
		return nil, err
	}
	return func() (*boughv1.EventBatch, error) {
		response, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		return response.GetBatch(), nil
	}, nil
}

func text(words string) *boughv1.Message {
	return &boughv1.Message{Parts: []*boughv1.Part{{Content: &boughv1.Part_Text{Text: words}}}}
}

func run(ctx context.Context, conn *grpc.ClientConn) error {
	f := &follower{agents: boughv1.NewAgentServiceClient(conn)}
	if err := f.follow(ctx, f.start); err != nil {
		return err
	}
	for !f.ended {
		if err := f.follow(ctx, f.answer); err != nil {
			return err
		}
	}
	tree, err := boughv1.NewEvalServiceClient(conn).GetInvocation(ctx, &boughv1.GetInvocationRequest{RunId: f.runID})
	if err != nil {
		return err
	}
	for _, agent := range tree.Invocation.Agents {
		state := strings.TrimPrefix(agent.State.String(), "EXECUTION_STATE_")
		fmt.Printf("agent %s%s %s\n", strings.Repeat("  ", int(agent.Depth)), agent.Name, state)
	}
	return nil
}

// refused calls without an agent, and prints the reason and the field.
func refused(ctx context.Context, conn *grpc.ClientConn) error {
	stream, err := boughv1.NewAgentServiceClient(conn).Run(ctx, &boughv1.RunRequest{Input: text("hi")})
	if err != nil {
		return err
	}
	_, err = stream.Recv()
	var reason, field string
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		case *errdetails.BadRequest:
			field = detail.FieldViolations[0].Field
		}
	}
	fmt.Println("error", reason, field)
	return nil
}

func main() {
	conn, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, part := range []func(context.Context, *grpc.ClientConn) error{run, refused} {
		if err := part(ctx, conn); err != nil {
			log.Fatal(err)
		}
	}
}
