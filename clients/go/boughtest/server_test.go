package boughtest_test

import (
	"context"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
	"github.com/bough-dev/bough/clients/go/boughtest"
)

// completed starts a run and follows it to its end.
func completed(t *testing.T, client *bough.Client, agent string) *bough.Result {
	t.Helper()
	request := &boughv1.RunRequest{Agent: agent, Input: bough.UserMessage("Why?")}
	result, err := bough.Collect(client.Run(t.Context(), request))
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// methods returns the methods of every service of the schema that Bough's servers have: tool servers serve ToolService.
func methods(t *testing.T) (of []protoreflect.MethodDescriptor) {
	t.Helper()
	protoregistry.GlobalFiles.RangeFilesByPackage("bough.v1", func(file protoreflect.FileDescriptor) bool {
		for at := range file.Services().Len() {
			if file.Services().Get(at).Name() == "ToolService" {
				continue
			}
			declared := file.Services().Get(at).Methods()
			for index := range declared.Len() {
				of = append(of, declared.Get(index))
			}
		}
		return true
	})
	if len(of) < 30 {
		t.Fatalf("%d methods", len(of))
	}
	return of
}

// called calls a method with an empty request.
func called(t *testing.T, client *bough.Client, method protoreflect.MethodDescriptor) error {
	t.Helper()
	messageOf := func(described protoreflect.MessageDescriptor) proto.Message {
		kind, err := protoregistry.GlobalTypes.FindMessageByName(described.FullName())
		if err != nil {
			t.Fatal(err)
		}
		return kind.New().Interface()
	}
	desc := grpc.StreamDesc{ClientStreams: method.IsStreamingClient(), ServerStreams: method.IsStreamingServer()}
	name := "/" + string(method.Parent().FullName()) + "/" + string(method.Name())
	stream, err := client.Conn().NewStream(t.Context(), &desc, name)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(messageOf(method.Input())); err != nil && err != io.EOF {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	return stream.RecvMsg(messageOf(method.Output()))
}

func TestAMethodThatIsNotScriptedSaysHowToScriptIt(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Answer("yes"))
	client := server.Client(t)
	for _, method := range methods(t) {
		err := called(t, client, method)
		constant := "boughv1." + string(method.Parent().Name()) + "_" + string(method.Name()) + "_FullMethodName"
		text := status.Convert(err).Message()
		switch status.Code(err) {
		case codes.NotFound: // of no run, no agent or no evaluation: the server has the method
		case codes.Unimplemented:
			if !strings.Contains(text, constant) && !strings.Contains(text, "call Server.") {
				t.Errorf("%s: %v", method.FullName(), err)
			}
		default:
			t.Errorf("%s: %v", method.FullName(), err)
		}
	}
	id := completed(t, client, "lead").RunID
	_, ofTree := client.Tree(t.Context(), id)
	_, ofFork := client.Fork(t.Context(), &boughv1.ForkRunRequest{RunId: id, AfterSequence: 1}).Started()
	for text, err := range map[string]error{"call Server.Tree": ofTree, "call Server.Fork": ofFork} {
		if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, not %q", err, text)
		}
	}
}

func TestAMethodIsAnsweredByItsHandler(t *testing.T) {
	server := boughtest.NewServer(t)
	boughtest.Handle(server, boughv1.SessionService_GetSession_FullMethodName,
		func(_ context.Context, request *boughv1.GetSessionRequest) (*boughv1.GetSessionResponse, error) {
			return &boughv1.GetSessionResponse{Session: &boughv1.Session{SessionId: request.GetSessionId()}}, nil
		})
	server.HandleStream(boughv1.SessionService_ReadBlob_FullMethodName, func(stream grpc.ServerStream) error {
		request := &boughv1.ReadBlobRequest{}
		if err := stream.RecvMsg(request); err != nil {
			return err
		}
		return stream.SendMsg(&boughv1.ReadBlobResponse{Data: []byte(request.GetSha256())})
	})
	client := server.Client(t)
	got, err := client.Sessions().GetSession(t.Context(), &boughv1.GetSessionRequest{SessionId: "s"})
	if err != nil || got.GetSession().GetSessionId() != "s" {
		t.Errorf("%v, %v", got, err)
	}
	stream, err := client.Sessions().ReadBlob(t.Context(), &boughv1.ReadBlobRequest{Sha256: "abc"})
	if err != nil {
		t.Fatal(err)
	}
	piece, err := stream.Recv()
	if err != nil || string(piece.GetData()) != "abc" {
		t.Errorf("%v, %v", piece, err)
	}
	if received := server.Requests(); len(received) != 2 {
		t.Errorf("requests %v", received)
	}
}

func TestARunIsReturnedAsItsLogShowsIt(t *testing.T) {
	request := &boughv1.InputRequest{InputId: "ask"}
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Ask(request), boughtest.Answer("yes"))
	client := server.Client(t)
	run := func(id string) *boughv1.GetRunResponse {
		response, err := client.Agents().GetRun(t.Context(), &boughv1.GetRunRequest{RunId: id})
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	waiting := completed(t, client, "lead")
	want := &boughv1.GetRunResponse{Run: &boughv1.Run{
		RunId: "run-1", SessionId: "session-of-run-1", Agent: "lead", LastSequence: 2,
		State: boughv1.ExecutionState_EXECUTION_STATE_INPUT_REQUIRED, OpenRequests: []*boughv1.InputRequest{request},
	}}
	if got := run(waiting.RunID); !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	answers := []*boughv1.InputAnswer{bough.Approve(request, "")}
	resumed := client.Resume(t.Context(), &boughv1.ResumeRunRequest{RunId: waiting.RunID, Answers: answers})
	if _, err := bough.Collect(resumed); err != nil {
		t.Fatal(err)
	}
	ended := run(waiting.RunID)
	if text := bough.MessageText(ended.GetFinalAnswer()); text != "yes" || len(ended.GetRun().GetOpenRequests()) != 0 {
		t.Errorf("%v", ended)
	}
}

func TestAForkSharesTheBeginningAndPlaysItsOwnScript(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Answer("first"))
	server.Fork("lead", boughtest.Drop(), boughtest.Answer("second"))
	server.Tree("lead", &boughv1.Invocation{Agents: []*boughv1.AgentInvocation{{Name: "lead"}}})
	client := server.Client(t)
	origin := completed(t, client, "lead")
	stream := client.Fork(t.Context(), &boughv1.ForkRunRequest{RunId: origin.RunID, AfterSequence: 2})
	var names []string
	for event, err := range stream.Events() {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, bough.PayloadName(event))
	}
	if got := strings.Join(names, " "); got != "run_forked run_completed" {
		t.Errorf("events %s", got)
	}
	whole, err := bough.Collect(client.Watch(t.Context(), &boughv1.WatchRunRequest{RunId: stream.ID()}))
	if err != nil || whole.Text() != "second" || whole.ThroughSequence != 4 || whole.SessionID == origin.SessionID {
		t.Errorf("%+v, %v", whole, err)
	}
	tree, err := client.Tree(t.Context(), stream.ID())
	if err != nil || tree.Root().GetName() != "lead" || bough.MessageText(tree.Invocation.GetFinalResponse()) != "second" {
		t.Errorf("%v, %v", tree, err)
	}
	_, err = client.Fork(t.Context(), &boughv1.ForkRunRequest{RunId: origin.RunID, AfterSequence: 9}).Started()
	if status.Code(err) != codes.OutOfRange {
		t.Errorf("%v", err)
	}
}

func TestAnEvaluationIsReturnedAsItsLogShowsIt(t *testing.T) {
	totals := &boughv1.EvalTotals{Cases: 3}
	passed, succeeded := boughv1.Verdict_VERDICT_PASSED, boughv1.ExecutionState_EXECUTION_STATE_SUCCEEDED
	server := boughtest.NewServer(t)
	server.Evaluation("desk", boughtest.Totaled(&boughv1.EvaluationTotaled{Totals: totals}), boughtest.Verdict(passed))
	client := server.Client(t)
	evaluate := &boughv1.EvaluateRequest{EvalSet: &boughv1.EvalSet{Name: "desk", Agent: "lead"}}
	collected, err := bough.CollectEvaluation(client.Evaluate(t.Context(), evaluate))
	if err != nil {
		t.Fatal(err)
	}
	got, err := client.Evals().GetEvaluation(t.Context(), &boughv1.GetEvaluationRequest{EvaluationId: collected.EvaluationID})
	if err != nil {
		t.Fatal(err)
	}
	want := &boughv1.GetEvaluationResponse{
		Evaluation: &boughv1.Evaluation{
			EvaluationId: "evaluation-1", EvalSetName: "desk", Agent: "lead", State: succeeded, Verdict: passed, Totals: totals,
			LastSequence: 3,
		},
		Result: &boughv1.EvalResult{
			EvaluationId: "evaluation-1", EvalSetName: "desk", State: succeeded, Verdict: passed, Totals: totals,
		},
	}
	if !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestTheCasesOfAnEvaluationAreListedInPages(t *testing.T) {
	failed := boughv1.Verdict_VERDICT_FAILED
	server := boughtest.NewServer(t)
	server.Evaluation("desk", boughtest.Verdict(failed))
	server.Cases("desk",
		&boughv1.CaseResult{CaseId: "a", Verdict: failed, Labels: map[string]string{"team": "red"}},
		&boughv1.CaseResult{CaseId: "b", Labels: map[string]string{"team": "red"}}, &boughv1.CaseResult{CaseId: "c", Verdict: failed},
	)
	client := server.Client(t)
	id, err := client.Evaluate(t.Context(), &boughv1.EvaluateRequest{EvalSet: &boughv1.EvalSet{Name: "desk"}}).Started()
	if err != nil {
		t.Fatal(err)
	}
	listed := func(filter *boughv1.CaseResultFilter) string {
		var ids []string
		request := &boughv1.ListCaseResultsRequest{EvaluationId: id, PageSize: 2, Filter: filter}
		for {
			response, err := client.Evals().ListCaseResults(t.Context(), request)
			if err != nil {
				t.Fatal(err)
			}
			for _, found := range response.GetCases() {
				ids = append(ids, found.GetCaseId())
			}
			if request.PageToken = response.GetNextPageToken(); request.PageToken == "" {
				return strings.Join(ids, " ")
			}
		}
	}
	for want, filter := range map[string]*boughv1.CaseResultFilter{
		"a b c": nil,
		"a c":   {Verdicts: []boughv1.Verdict{failed}},
		"a b":   {Labels: map[string]string{"team": "red"}},
		"b c":   {CaseIds: []string{"c", "b", "d"}},
	} {
		if got := listed(filter); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	_, err = client.Evals().ListCaseResults(t.Context(), &boughv1.ListCaseResultsRequest{EvaluationId: id, PageToken: "none"})
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("%v", err)
	}
}
