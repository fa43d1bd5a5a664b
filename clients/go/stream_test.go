package bough_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
	"github.com/bough-dev/bough/clients/go/boughtest"
)

var question = &boughv1.InputRequest{InputId: "ask-a", Kind: boughv1.InputKind_INPUT_KIND_QUESTION, Prompt: "What is wrong?"}

func lead(input string) *boughv1.RunRequest {
	return &boughv1.RunRequest{Agent: "lead", Input: bough.UserMessage(input)}
}

// read returns the sequences of a stream and how it ended.
func read[E bough.Event](stream *bough.Stream[E]) (sequences []int64, failed error) {
	for event, err := range stream.Events() {
		if err != nil {
			return sequences, err
		}
		sequences = append(sequences, event.GetSequence())
	}
	return sequences, nil
}

func wantSequences(t *testing.T, got []int64, first, last int64) {
	t.Helper()
	var want []int64
	for sequence := first; sequence <= last; sequence++ {
		want = append(want, sequence)
	}
	if !slices.Equal(got, want) {
		t.Fatalf("sequences %v, want %d to %d", got, first, last)
	}
}

func wantError(t *testing.T, err error, code codes.Code, reason string) *bough.Error {
	t.Helper()
	var failed *bough.Error
	if !errors.As(err, &failed) {
		t.Fatalf("error %v, want a *bough.Error", err)
	}
	if failed.Code != code || failed.Reason != reason {
		t.Fatalf("error %v, want %s (%s)", err, code, reason)
	}
	if status.Code(err) != code {
		t.Fatalf("status %s, want %s", status.Code(err), code)
	}
	return failed
}

// calls returns the messages of one type among the requests of a server.
func calls[M proto.Message](server *boughtest.Server) (of []M) {
	for _, request := range server.Requests() {
		if message, ok := request.(M); ok {
			of = append(of, message)
		}
	}
	return of
}

func TestARunIsFollowedToItsEnd(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("Because "), boughtest.Heartbeat(), boughtest.Answer("Because of anthocyanins."))
	stream := server.Client(t).Run(t.Context(), lead("Why?"))
	sequences, err := read(stream)
	if err != nil {
		t.Fatal(err)
	}
	wantSequences(t, sequences, 1, 3)
	if stream.ID() == "" || stream.ThroughSequence() != 3 || stream.Rejoins() != 0 || stream.RequestID() == "" {
		t.Errorf("stream of %q through %d after %d rejoins", stream.ID(), stream.ThroughSequence(), stream.Rejoins())
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("after the end: %v, want io.EOF", err)
	}
}

func TestADroppedStreamRejoinsAfterItsLastSequence(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Drop(), boughtest.Text("b"), boughtest.Drop(), boughtest.Drop(),
		boughtest.Text("c"), boughtest.End(), boughtest.Text("d"), boughtest.Answer("abcd"))
	var drops []string
	client := server.Client(t, bough.WithRejoining(bough.Rejoining{
		FirstDelay: time.Millisecond, OnDrop: func(failed *bough.Error) { drops = append(drops, failed.Message) },
	}))
	stream := client.Run(t.Context(), lead("Why?"))
	sequences, err := read(stream)
	if err != nil {
		t.Fatal(err)
	}
	wantSequences(t, sequences, 1, 6)
	var after []int64
	for _, watch := range calls[*boughv1.WatchRunRequest](server) {
		if watch.GetUntil() != boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED {
			t.Errorf("rejoined until %s", watch.GetUntil())
		}
		after = append(after, watch.GetAfterSequence())
	}
	// The third drop comes right after the call was accepted, before any progress.
	if want := []int64{2, 3, 3, 4}; !slices.Equal(after, want) {
		t.Errorf("rejoined after %v, want %v", after, want)
	}
	if len(drops) != stream.Rejoins() || stream.Rejoins() < 3 {
		t.Errorf("%d rejoins, reported %q", stream.Rejoins(), drops)
	}
	if started := calls[*boughv1.RunRequest](server); len(started) != 1 {
		t.Errorf("%d calls of Run", len(started))
	}
}

func TestACallThatBrokeBeforeTheRunWasKnownIsRepeatedUnderItsRequestID(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Refuse(), boughtest.Answer("yes"))
	client := server.Client(t)
	stream := client.Run(t.Context(), lead("Why?"))
	sequences, err := read(stream)
	if err != nil {
		t.Fatal(err)
	}
	wantSequences(t, sequences, 1, 2)
	started := calls[*boughv1.RunRequest](server)
	if len(started) != 2 || started[0].GetRequestId() != started[1].GetRequestId() || started[0].GetRequestId() == "" {
		t.Errorf("calls of Run: %v", started)
	}
	if stream.ID() != "run-1" {
		t.Errorf("a second run was started: %s", stream.ID())
	}
}

func TestARequestIsNotChangedAndItsRequestIDIsKept(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Answer("yes"))
	client := server.Client(t)
	request := lead("Why?")
	first, second := client.Run(t.Context(), request), client.Run(t.Context(), request)
	if request.GetRequestId() != "" || first.RequestID() == second.RequestID() {
		t.Errorf("request ids %q, %q, %q", request.GetRequestId(), first.RequestID(), second.RequestID())
	}
	request.RequestId = "mine"
	for range 2 {
		if id, err := client.Run(t.Context(), request).Started(); id != "run-1" || err != nil {
			t.Errorf("run %q, %v", id, err)
		}
	}
}

func TestAStreamSurvivesAServerThatIsAwayForAWhile(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Wait(20*time.Millisecond), boughtest.Text("b"), boughtest.Answer("ab"))
	client := server.Client(t)
	stream := client.Run(t.Context(), lead("Why?"))
	var sequences []int64
	for event, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		sequences = append(sequences, event.GetSequence())
		if event.GetSequence() == 2 {
			server.Stop()
			time.AfterFunc(50*time.Millisecond, server.Start)
		}
	}
	wantSequences(t, sequences, 1, 4)
	if stream.Rejoins() != 1 {
		t.Errorf("%d rejoins of one outage", stream.Rejoins())
	}
}

func TestAServerThatStaysAwayEndsTheStreamAfterTheTimeout(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"))
	client := server.Client(t, bough.WithRejoining(bough.Rejoining{
		FirstDelay: time.Millisecond, LongestDelay: 5 * time.Millisecond, Timeout: 50 * time.Millisecond,
	}))
	stream := client.Run(t.Context(), lead("Why?"))
	if _, err := stream.Started(); err != nil {
		t.Fatal(err)
	}
	server.Stop()
	begin := time.Now()
	_, err := read(stream)
	wantError(t, err, codes.Unavailable, "")
	if took := time.Since(begin); took > time.Second {
		t.Errorf("it took %s", took)
	}
}

func TestFirstContactFailsFast(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener.Close()
	client, err := bough.NewClient(address)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	begin := time.Now()
	_, err = read(client.Run(t.Context(), lead("Why?")))
	wantError(t, err, codes.Unavailable, "")
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("it took %s to fail", took)
	}
	if !strings.Contains(err.Error(), address) {
		t.Errorf("the error does not say where: %v", err)
	}
}

func TestFinalStatusesAreNotRetried(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Answer("yes"))
	server.Run("broken", boughtest.Text("a"), boughtest.Fail(boughtest.Error(codes.Internal, "INTERNAL", "No.")))
	client := server.Client(t)
	id, err := client.Run(t.Context(), lead("Why?")).Started()
	if err != nil {
		t.Fatal(err)
	}
	_, err = read(client.Run(t.Context(), &boughv1.RunRequest{Agent: "leda"}))
	wantError(t, err, codes.NotFound, "UNKNOWN_AGENT")
	_, err = read(client.Watch(t.Context(), &boughv1.WatchRunRequest{RunId: "run-7"}))
	wantError(t, err, codes.NotFound, "NOT_FOUND")
	_, err = read(client.Watch(t.Context(), &boughv1.WatchRunRequest{RunId: id, AfterSequence: 99}))
	wantError(t, err, codes.OutOfRange, "SEQUENCE_OUT_OF_RANGE")
	if watches := calls[*boughv1.WatchRunRequest](server); len(watches) != 2 {
		t.Errorf("%d calls of WatchRun, want 2", len(watches))
	}
	sequences, err := read(client.Run(t.Context(), &boughv1.RunRequest{Agent: "broken"}))
	wantError(t, err, codes.Internal, "INTERNAL")
	wantSequences(t, sequences, 1, 2)
}

func TestAnErrorAfterTheLastEventIsNone(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Answer("yes"))
	client := server.Client(t)
	stream := client.Run(t.Context(), lead("Why?"))
	for range 2 {
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	server.Stop()
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("after the end: %v, want io.EOF", err)
	}
}

func TestAParkedRunIsNoDrop(t *testing.T) {
	server := boughtest.NewServer(t)
	parked := boughtest.Error(codes.Unavailable, "RUN_PARKED", "The tool is gone.")
	steps := []boughtest.Step{boughtest.Text("a")}
	for range 2000 {
		steps = append(steps, boughtest.Fail(parked))
	}
	server.Run("lead", steps...)
	client := server.Client(t, bough.WithRejoining(bough.Rejoining{
		FirstDelay: time.Millisecond, LongestDelay: time.Millisecond, Timeout: 30 * time.Millisecond,
	}))
	// The server answers every call, but it cannot continue the run: the time does not begin anew.
	_, err := read(client.Run(t.Context(), lead("Why?")))
	wantError(t, err, codes.Unavailable, "RUN_PARKED")
}

func TestACallThatTheServerCancelsAsItStopsIsADrop(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Fail(status.Error(codes.Canceled, "CANCELLED")), boughtest.Answer("ab"))
	stream := server.Client(t).Run(t.Context(), lead("Why?"))
	sequences, err := read(stream)
	if err != nil {
		t.Fatal(err)
	}
	wantSequences(t, sequences, 1, 3)
	if stream.Rejoins() != 1 {
		t.Errorf("%d rejoins", stream.Rejoins())
	}
}

func TestWithoutRejoiningADropIsAnError(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Drop(), boughtest.Answer("a"))
	sequences, err := read(server.Client(t, bough.WithoutRejoining()).Run(t.Context(), lead("Why?")))
	wantError(t, err, codes.Unavailable, "")
	wantSequences(t, sequences, 1, 2)
}

func TestADeadlineEndsTheStream(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a")) // and nothing more
	client := server.Client(t)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	sequences, err := read(client.Run(ctx, lead("Why?")))
	wantSequences(t, sequences, 1, 2)
	wantError(t, err, codes.DeadlineExceeded, "DEADLINE_EXCEEDED")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v is not context.DeadlineExceeded", err)
	}
}

func TestADeadlineHasItsReasonInEveryCall(t *testing.T) {
	server := boughtest.NewServer(t)
	boughtest.Handle(server, boughv1.AgentService_GetRun_FullMethodName,
		func(ctx context.Context, _ *boughv1.GetRunRequest) (*boughv1.GetRunResponse, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := server.Client(t).Agents().GetRun(ctx, &boughv1.GetRunRequest{RunId: "run-1"})
	if failed := wantError(t, err, codes.DeadlineExceeded, "DEADLINE_EXCEEDED"); !errors.Is(failed, context.DeadlineExceeded) {
		t.Errorf("%v does not wrap the deadline of the context", failed)
	}
}

func TestADeadlineThatPassesBetweenTwoCallsEndsTheStream(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"))
	client := server.Client(t, bough.WithRejoining(bough.Rejoining{FirstDelay: time.Minute, LongestDelay: time.Minute, Timeout: time.Hour}))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	stream := client.Run(ctx, lead("Why?"))
	if _, err := stream.Started(); err != nil {
		t.Fatal(err)
	}
	server.Stop()
	_, err := read(stream)
	wantError(t, err, codes.DeadlineExceeded, "DEADLINE_EXCEEDED")
}

func TestCancellationEndsTheStream(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream := server.Client(t).Run(ctx, lead("Why?"))
	var failed error
	for event, err := range stream.Events() {
		failed = err
		if event.GetSequence() == 2 {
			cancel()
		}
	}
	wantError(t, failed, codes.Canceled, "")
	if !errors.Is(failed, context.Canceled) {
		t.Errorf("%v is not context.Canceled", failed)
	}
}

func TestCancellationComesBeforeEventsThatWereReceivedAlready(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Batch(boughtest.Text("a"), boughtest.Text("b"), boughtest.Answer("ab")))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream := server.Client(t).Run(ctx, lead("Why?"))
	for range 2 {
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	_, err := stream.Recv()
	wantError(t, err, codes.Canceled, "")
	if through := stream.ThroughSequence(); through != 2 {
		t.Errorf("through %d, want 2: the next event was not delivered", through)
	}
}

func TestAClosedStreamDoesNotRejoin(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"))
	stream := server.Client(t).Run(t.Context(), lead("Why?"))
	time.AfterFunc(50*time.Millisecond, stream.Close)
	_, err := read(stream)
	wantError(t, err, codes.Canceled, "")
	if watches := calls[*boughv1.WatchRunRequest](server); len(watches) != 0 {
		t.Errorf("it rejoined: %v", watches)
	}
}

func TestALoopThatIsLeftEarlyLeavesNoGoroutine(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Text("b"))
	client := server.Client(t)
	if err := client.Check(t.Context()); err != nil { // The goroutines of the connection are there from now on.
		t.Fatal(err)
	}
	before := goroutines()
	for range 20 {
		for event, err := range client.Run(t.Context(), lead("Why?")).Events() {
			if err != nil {
				t.Fatal(err)
			}
			if event.GetSequence() == 2 {
				break
			}
		}
	}
	for deadline := time.Now().Add(5 * time.Second); goroutines() > before; {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", goroutines(), before, stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func goroutines() int { return runtime.NumGoroutine() }

func TestAnInterruptionEndsRunAndResumeAndItsAnswersContinueTheRun(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Drop(), boughtest.Ask(question), boughtest.Drop(), boughtest.Answer("done"))
	client := server.Client(t)
	result, err := bough.Collect(client.Run(t.Context(), lead("Why?")))
	if err != nil {
		t.Fatal(err)
	}
	if !result.Interrupted() || len(result.OpenRequests) != 1 || result.ThroughSequence != 3 {
		t.Fatalf("result %+v", result)
	}
	var waiting *bough.RunError
	if !errors.As(result.Err(), &waiting) || waiting.OpenRequests[0].GetInputId() != "ask-a" {
		t.Fatalf("error %v", result.Err())
	}
	answer, err := bough.Reply(result.OpenRequests[0], "it does not fit")
	if err != nil {
		t.Fatal(err)
	}
	stream := client.Resume(t.Context(), &boughv1.ResumeRunRequest{RunId: result.RunID, Answers: []*boughv1.InputAnswer{answer}})
	sequences, err := read(stream)
	if err != nil {
		t.Fatal(err)
	}
	wantSequences(t, sequences, 4, 6)
	if watches := calls[*boughv1.WatchRunRequest](server); len(watches) != 2 || watches[1].GetAfterSequence() != 5 {
		t.Errorf("calls of WatchRun: %v", watches)
	}
}

// answered answers what a run waits for and follows it to its next interruption or its end.
func answered(t *testing.T, client *bough.Client, result *bough.Result) *bough.Result {
	t.Helper()
	resume := &boughv1.ResumeRunRequest{RunId: result.RunID}
	for _, request := range result.OpenRequests {
		resume.Answers = append(resume.Answers, bough.Approve(request, ""))
	}
	result, err := bough.Collect(client.Resume(t.Context(), resume))
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func untilInterrupted(runID string, after int64) *boughv1.WatchRunRequest {
	return &boughv1.WatchRunRequest{RunId: runID, AfterSequence: after, Until: boughv1.WatchUntil_WATCH_UNTIL_INTERRUPTED}
}

func TestAWatchUntilAnInterruptionPassesThoseThatAreAnswered(t *testing.T) {
	other := &boughv1.InputRequest{InputId: "ask-b"}
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Ask(question), boughtest.Text("a"), boughtest.Ask(other), boughtest.Answer("done"))
	server.Fork("lead", boughtest.Text("b"), boughtest.Answer("forked"))
	client := server.Client(t)
	first, err := bough.Collect(client.Run(t.Context(), lead("Why?")))
	if err != nil {
		t.Fatal(err)
	}
	second := answered(t, client, first)
	waiting, err := bough.Collect(client.Watch(t.Context(), untilInterrupted(first.RunID, 0)))
	if err != nil || !waiting.Interrupted() || len(waiting.OpenRequests) != 1 || waiting.OpenRequests[0].GetInputId() != "ask-b" {
		t.Fatalf("result %+v, %v", waiting, err)
	}
	if waiting.ThroughSequence != second.ThroughSequence {
		t.Errorf("watched through %d, not %d", waiting.ThroughSequence, second.ThroughSequence)
	}
	fork, err := client.Fork(t.Context(), &boughv1.ForkRunRequest{RunId: first.RunID, AfterSequence: 5}).Started()
	if err != nil {
		t.Fatal(err)
	}
	answered(t, client, second)
	for _, id := range []string{first.RunID, fork} { // The fork shares the first interruption.
		ended, err := bough.Collect(client.Watch(t.Context(), untilInterrupted(id, 0)))
		if err != nil || ended.Err() != nil {
			t.Errorf("result %+v, %v", ended, err)
		}
	}
}

func TestAWatchAfterTheInterruptionAtWhichARunWaitsEndsAtOnce(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Ask(question), boughtest.Ask(question), boughtest.Answer("done"))
	client := server.Client(t)
	first, err := bough.Collect(client.Run(t.Context(), lead("Why?")))
	if err != nil {
		t.Fatal(err)
	}
	watch := untilInterrupted(first.RunID, first.ThroughSequence)
	sequences, err := read(client.Watch(t.Context(), watch))
	if err != nil || len(sequences) != 0 {
		t.Errorf("sequences %v, %v", sequences, err)
	}
	second := answered(t, client, first)
	next, err := bough.Collect(client.Watch(t.Context(), watch))
	if err != nil || !next.Interrupted() || next.ThroughSequence != second.ThroughSequence {
		t.Errorf("result %+v, %v", next, err)
	}
	_, err = read(client.Watch(t.Context(), untilInterrupted(first.RunID, second.ThroughSequence+1)))
	wantError(t, err, codes.OutOfRange, "SEQUENCE_OUT_OF_RANGE")
}

func TestAWatchOfAnEndedRunEnds(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Answer("a"))
	client := server.Client(t)
	result, err := bough.Collect(client.Run(t.Context(), lead("Why?")))
	if err != nil || result.Text() != "a" || result.Err() != nil {
		t.Fatalf("result %+v, %v", result, err)
	}
	for after := range int64(4) {
		sequences, err := read(client.Watch(t.Context(), &boughv1.WatchRunRequest{RunId: result.RunID, AfterSequence: after}))
		if err != nil {
			t.Fatal(err)
		}
		wantSequences(t, sequences, after+1, 3)
	}
}

func TestAWatchOfWhatIsThereEndsInTheMiddleOfARun(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Text("b"))
	client := server.Client(t)
	stream := client.Run(t.Context(), lead("Why?"))
	defer stream.Close()
	for range 3 {
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	for after := range int64(4) {
		sequences, err := read(client.Watch(t.Context(), &boughv1.WatchRunRequest{
			RunId: stream.ID(), AfterSequence: after, Until: boughv1.WatchUntil_WATCH_UNTIL_CURRENT,
		}))
		if err != nil {
			t.Fatal(err)
		}
		wantSequences(t, sequences, after+1, 3)
	}
}

// unknown records an event with a payload of a later version.
func unknown() boughtest.Step {
	event := &boughv1.AgentEvent{}
	event.ProtoReflect().SetUnknown([]byte{0xba, 0x3f, 0x00}) // field 1015, no bytes
	return boughtest.Event(event)
}

func TestAnUnknownPayloadIsPassedOnWithItsSequence(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", unknown(), boughtest.Drop(), boughtest.Answer("yes"))
	var kinds []string
	for event, err := range server.Client(t).Run(t.Context(), lead("Why?")).Events() {
		if err != nil {
			t.Fatal(err)
		}
		kinds = append(kinds, fmt.Sprintf("%d %T %x", event.GetSequence(), event.GetPayload(), event.ProtoReflect().GetUnknown()))
	}
	if want := "2 <nil> ba3f00"; len(kinds) != 3 || kinds[1] != want {
		t.Errorf("events %q, want %q second", kinds, want)
	}
}

func TestAStreamThatEndsWithOKAtAnUnknownPayloadHasEndedAndItsRunHasNot(t *testing.T) {
	request := &boughv1.InputRequest{InputId: "input-1", Kind: boughv1.InputKind_INPUT_KIND_APPROVAL}
	server := boughtest.NewServer(t)
	server.Run("lead", unknown(), boughtest.End(), boughtest.End(), boughtest.Ask(request), unknown(), boughtest.End(),
		boughtest.Answer("yes"))
	client := server.Client(t)
	stream := client.Run(t.Context(), lead("Why?"))
	run, err := bough.Collect(stream)
	if err != nil || stream.Rejoins() != 0 || run.ThroughSequence != 2 {
		t.Fatalf("%d rejoins, %+v, %v", stream.Rejoins(), run, err)
	}
	if text := "bough: run run-1 has no answer: running"; run.Err() == nil || run.Err().Error() != text || run.Interrupted() {
		t.Errorf("%v, want %q", run.Err(), text)
	}
	sequences, err := read(client.Watch(t.Context(), &boughv1.WatchRunRequest{RunId: run.RunID}))
	if err != nil {
		t.Fatal(err)
	}
	wantSequences(t, sequences, 1, 2)
	if _, err := read(client.Watch(t.Context(), untilInterrupted(run.RunID, 2))); err != nil {
		t.Fatal(err)
	}
	sequences, err = read(client.Resume(t.Context(), &boughv1.ResumeRunRequest{
		RunId: run.RunID, Answers: []*boughv1.InputAnswer{bough.Approve(request, "")},
	}))
	if err != nil {
		t.Fatal(err)
	}
	wantSequences(t, sequences, 4, 6)
}

func TestAnEvaluationIsFollowedOverDrops(t *testing.T) {
	server := boughtest.NewServer(t)
	scored := &boughv1.EvaluationEvent_CaseTrialScored{CaseTrialScored: &boughv1.CaseTrialScored{}}
	server.Evaluation("desk", boughtest.Refuse(), boughtest.Drop(), boughtest.EvaluationEvent(&boughv1.EvaluationEvent{Payload: scored}),
		boughtest.End(), boughtest.Drop(), boughtest.Verdict(boughv1.Verdict_VERDICT_FAILED))
	client := server.Client(t)
	stream := client.Evaluate(t.Context(), &boughv1.EvaluateRequest{EvalSet: &boughv1.EvalSet{Name: "desk"}})
	id, err := stream.Started()
	if err != nil || id != "evaluation-1" {
		t.Fatalf("evaluation %q, %v", id, err)
	}
	sequences, err := read(stream)
	if err != nil {
		t.Fatal(err)
	}
	wantSequences(t, sequences, 1, 3)
	for after := range int64(4) {
		sequences, err = read(client.WatchEvaluation(t.Context(), &boughv1.WatchEvaluationRequest{EvaluationId: id, AfterSequence: after}))
		if err != nil {
			t.Fatal(err)
		}
		wantSequences(t, sequences, after+1, 3)
	}
	_, err = read(client.WatchEvaluation(t.Context(), &boughv1.WatchEvaluationRequest{EvaluationId: "other"}))
	wantError(t, err, codes.NotFound, "NOT_FOUND")
}

func TestAnEvaluationIsFollowedToTheEndOfItsLogIfThatIsAskedFor(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Evaluation("desk", boughtest.End(), boughtest.Verdict(boughv1.Verdict_VERDICT_PASSED))
	stream := server.Client(t).Evaluate(t.Context(), &boughv1.EvaluateRequest{
		EvalSet: &boughv1.EvalSet{Name: "desk"},
		Follow:  &boughv1.EvaluationFollowOptions{Until: boughv1.WatchUntil_WATCH_UNTIL_CURRENT},
	})
	sequences, err := read(stream)
	if err != nil || stream.Rejoins() != 0 {
		t.Fatalf("%d rejoins, %v", stream.Rejoins(), err)
	}
	wantSequences(t, sequences, 1, 1)
}

func TestARunEndsByItsCancellation(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"))
	client := server.Client(t)
	stream := client.Run(t.Context(), lead("Why?"))
	id, err := stream.Started()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Agents().CancelRun(t.Context(), &boughv1.CancelRunRequest{RunId: id}); err != nil {
		t.Fatal(err)
	}
	result, err := bough.Collect(stream)
	if err != nil {
		t.Fatal(err)
	}
	var failed *bough.RunError
	if !errors.As(result.Err(), &failed) || failed.State != boughv1.ExecutionState_EXECUTION_STATE_CANCELLED {
		t.Errorf("error %v", result.Err())
	}
}
