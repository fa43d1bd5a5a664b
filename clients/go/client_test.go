package bough_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http/httptest"
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
	"github.com/bough-dev/bough/clients/go/boughtest"
)

func TestErrorsHaveWhatTheServerSays(t *testing.T) {
	described, err := status.New(codes.InvalidArgument, "Two fields are wrong.").WithDetails(
		&errdetails.ErrorInfo{Reason: "INVALID_REQUEST", Domain: "bough", Metadata: map[string]string{"run_id": "r"}},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
			{Field: "agent", Description: "is empty", Reason: "INVALID_REQUEST"}, {Field: "input", Description: "is missing"},
		}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(3 * time.Second)},
	)
	if err != nil {
		t.Fatal(err)
	}
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Fail(described.Err()))
	boughtest.Handle(server, boughv1.AgentService_GetRun_FullMethodName,
		func(context.Context, *boughv1.GetRunRequest) (*boughv1.GetRunResponse, error) {
			return nil, described.Err()
		})
	client := server.Client(t)
	_, ofStream := bough.Collect(client.Run(t.Context(), lead("Why?")))
	_, ofStub := client.Agents().GetRun(t.Context(), &boughv1.GetRunRequest{RunId: "r"})
	for _, err := range []error{ofStream, ofStub} {
		failed := wantError(t, err, codes.InvalidArgument, "INVALID_REQUEST")
		want := []bough.Violation{
			{Field: "agent", Description: "is empty", Reason: "INVALID_REQUEST"}, {Field: "input", Description: "is missing"},
		}
		if !reflect.DeepEqual(failed.Violations, want) || failed.Metadata["run_id"] != "r" || failed.RetryDelay != 3*time.Second {
			t.Errorf("%+v", failed)
		}
		if text := "bough: InvalidArgument (INVALID_REQUEST): Two fields are wrong.; agent is empty; input is missing"; err.Error() != text {
			t.Errorf("%s", err)
		}
		if details := status.Convert(err).Details(); len(details) != 3 {
			t.Errorf("the status has %d details", len(details))
		}
	}
}

func TestAskReturnsTheAnswerOrWhyThereIsNone(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("Bec"), boughtest.Drop(), boughtest.Answer("Because."))
	server.Run("broken", boughtest.Failure(boughv1.ErrorReason_ERROR_REASON_DEADLINE_EXCEEDED, "It took too long."))
	client := server.Client(t)
	answer, err := client.Ask(t.Context(), "lead", "Why?")
	if answer != "Because." || err != nil {
		t.Errorf("%q, %v", answer, err)
	}
	_, err = client.Ask(t.Context(), "broken", "Why?")
	var failed *bough.RunError
	if !errors.As(err, &failed) || failed.Failure.GetReason() != boughv1.ErrorReason_ERROR_REASON_DEADLINE_EXCEEDED {
		t.Fatalf("error %v", err)
	}
	if text := "bough: run run-2 failed: It took too long."; err.Error() != text {
		t.Errorf("%q", err.Error())
	}
}

func TestACollectedRunSaysHowFarItHadComeWhenItsStreamFailed(t *testing.T) {
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Text("a"), boughtest.Fail(boughtest.Error(codes.Internal, "INTERNAL", "No.")))
	result, err := bough.Collect(server.Client(t).Run(t.Context(), lead("Why?")))
	wantError(t, err, codes.Internal, "INTERNAL")
	if result.RunID != "run-1" || result.ThroughSequence != 2 || result.State != boughv1.ExecutionState_EXECUTION_STATE_RUNNING {
		t.Errorf("%+v", result)
	}
}

func TestACollectedEvaluationHasItsVerdictItsNumbersAndItsGates(t *testing.T) {
	totaled := &boughv1.EvaluationTotaled{
		Verdict: boughv1.Verdict_VERDICT_FAILED, Totals: &boughv1.EvalTotals{Cases: 2, CasesPassed: 1},
		Gates: []*boughv1.GateResult{{Gate: "pass_rate >= 0.9"}}, Reason: "A case is gone.",
	}
	server := boughtest.NewServer(t)
	server.Evaluation("desk", boughtest.Drop(), boughtest.Totaled(totaled), boughtest.Verdict(boughv1.Verdict_VERDICT_FAILED))
	stream := server.Client(t).Evaluate(t.Context(), &boughv1.EvaluateRequest{EvalSet: &boughv1.EvalSet{Name: "desk"}})
	result, err := bough.CollectEvaluation(stream)
	if err != nil || result.Err() != nil {
		t.Fatalf("%v, %v", err, result.Err())
	}
	if !proto.Equal(result.Totals, totaled.GetTotals()) || len(result.Gates) != 1 || !proto.Equal(result.Gates[0], totaled.GetGates()[0]) {
		t.Errorf("totals %v, gates %v", result.Totals, result.Gates)
	}
	result.Totals, result.Gates = nil, nil
	want := &bough.EvaluationResult{
		EvaluationID: "evaluation-1", State: boughv1.ExecutionState_EXECUTION_STATE_SUCCEEDED,
		Verdict: boughv1.Verdict_VERDICT_FAILED, Reason: "A case is gone.", ThroughSequence: 3,
	}
	if !reflect.DeepEqual(result, want) {
		t.Errorf("%+v, want %+v", result, want)
	}
}

func TestACollectedEvaluationWithoutAVerdictSaysWhy(t *testing.T) {
	failure := &boughv1.EvaluationFailed{Error: &boughv1.AgentError{Message: "The disk is full."}}
	server := boughtest.NewServer(t)
	server.Evaluation("full", boughtest.EvaluationEvent(&boughv1.EvaluationEvent{
		Payload: &boughv1.EvaluationEvent_EvaluationFailed{EvaluationFailed: failure},
	}))
	server.Evaluation("long")
	server.Evaluation("cut", boughtest.Fail(boughtest.Error(codes.Internal, "INTERNAL", "No.")))
	client := server.Client(t)
	evaluate := func(set string) *bough.EvaluationStream {
		return client.Evaluate(t.Context(), &boughv1.EvaluateRequest{EvalSet: &boughv1.EvalSet{Name: set}})
	}
	result, err := bough.CollectEvaluation(evaluate("full"))
	if text := "bough: evaluation evaluation-1 failed: The disk is full."; err != nil || result.Err().Error() != text {
		t.Errorf("%v, %v", err, result.Err())
	}
	stream := evaluate("long")
	id, err := stream.Started()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Evals().CancelEvaluation(t.Context(), &boughv1.CancelEvaluationRequest{EvaluationId: id}); err != nil {
		t.Fatal(err)
	}
	result, err = bough.CollectEvaluation(stream)
	var failed *bough.EvaluationError
	if err != nil || !errors.As(result.Err(), &failed) || failed.State != boughv1.ExecutionState_EXECUTION_STATE_CANCELLED {
		t.Errorf("%v, %v", err, result.Err())
	}
	result, err = bough.CollectEvaluation(evaluate("cut"))
	wantError(t, err, codes.Internal, "INTERNAL")
	if text := "bough: evaluation evaluation-3 has no verdict: running"; result.Err().Error() != text || result.ThroughSequence != 1 {
		t.Errorf("%v, %+v", result.Err(), result)
	}
}

func TestATreeIsWalkedInPreorder(t *testing.T) {
	agent := func(id, name string, depth int32) *boughv1.AgentInvocation {
		return &boughv1.AgentInvocation{InvocationId: id, Name: name, Depth: depth}
	}
	server := boughtest.NewServer(t)
	server.Run("lead", boughtest.Answer("yes"))
	server.Tree("lead", &boughv1.Invocation{
		Agents: []*boughv1.AgentInvocation{
			agent("1", "lead", 0), agent("2", "researcher", 1), agent("3", "reader", 2), agent("4", "writer", 1),
			agent("5", "researcher", 1), agent("6", "other", 0),
		},
		Tools: []*boughv1.ToolInvocation{{CallId: "c", InvocationId: "3"}, {CallId: "d", InvocationId: "1"}},
	})
	client := server.Client(t)
	id, err := client.Run(t.Context(), lead("Why?")).Started()
	if err != nil {
		t.Fatal(err)
	}
	tree, err := client.Tree(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for node := range tree.Walk() {
		ids = append(ids, node.GetInvocationId())
	}
	if !slices.Equal(ids, []string{"1", "2", "3", "4", "5", "6"}) || tree.Invocation.GetRunId() != id {
		t.Errorf("walked %v", ids)
	}
	root := tree.Root()
	if len(root.Children()) != 3 || root.Children()[2].GetInvocationId() != "5" || root.Parent() != nil {
		t.Errorf("children of the root: %v", root.Children())
	}
	reader := tree.Node("3")
	if !slices.Equal(reader.Path(), []string{"lead", "researcher", "reader"}) || reader.Parent() != tree.Node("2") {
		t.Errorf("path %v", reader.Path())
	}
	if found := tree.Find("researcher"); !slices.Equal(found, []*bough.Node{tree.Node("2"), tree.Node("5")}) {
		t.Errorf("researchers %v", found)
	}
	if tools := reader.Tools(); len(tools) != 1 || tools[0].GetCallId() != "c" {
		t.Errorf("tools %v", tools)
	}
	var below []string
	for node := range root.Walk() {
		if below = append(below, node.GetName()); node == reader {
			break
		}
	}
	if !slices.Equal(below, []string{"lead", "researcher", "reader"}) {
		t.Errorf("below the root %v", below)
	}
	if tree.Find("absent") != nil || tree.Node("7") != nil {
		t.Error("found what is not there")
	}
	if empty := bough.NewTree(nil); empty.Root() != nil || empty.Find("lead") != nil {
		t.Error("an empty tree has agents")
	}
}

func TestAnswersFitTheirRequests(t *testing.T) {
	request := &boughv1.InputRequest{InputId: "i"}
	replied, err := bough.Reply(request, map[string]int{"count": 3})
	if err != nil || replied.GetInputId() != "i" || replied.GetValueJson() != `{"count":3}` {
		t.Errorf("%v, %v", replied, err)
	}
	if _, err := bough.Reply(request, func() {}); err == nil {
		t.Error("a function was encoded")
	}
	if answer := bough.Refuse(request, "no"); answer.GetApproval().GetApproved() || answer.GetApproval().GetNote() != "no" {
		t.Errorf("%v", answer)
	}
	if answer := bough.ApproveWith(request, "{}", ""); !answer.GetApproval().GetApproved() || answer.GetApproval().GetArgumentsJson() != "{}" {
		t.Errorf("%v", answer)
	}
	if answer := bough.ToolText(request, "4711"); answer.GetToolOutcome().GetParts()[0].GetText() != "4711" {
		t.Errorf("%v", answer)
	}
	if answer := bough.ToolFailed(request, "broken"); answer.GetToolOutcome().GetFailure().GetMessage() != "broken" {
		t.Errorf("%v", answer)
	}
	message := bough.UserMessage("See ", bough.FilePart([]byte{1}, "image/png"), &boughv1.Part{Content: &boughv1.Part_DataJson{DataJson: "{}"}})
	if text := bough.MessageText(message); text != "See {}" {
		t.Errorf("%q", text)
	}
}

// secureServer serves health over TLS; it returns its address, its authority, and the tokens that it receives.
func secureServer(t *testing.T) (address string, authorities *x509.CertPool, tokens chan []string) {
	t.Helper()
	withCertificate := httptest.NewTLSServer(nil)
	t.Cleanup(withCertificate.Close)
	authorities, tokens = x509.NewCertPool(), make(chan []string, 1)
	authorities.AddCert(withCertificate.Certificate())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(
		grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: withCertificate.TLS.Certificates})),
		grpc.UnaryInterceptor(func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			received, _ := metadata.FromIncomingContext(ctx)
			tokens <- received.Get("authorization")
			return handle(ctx, request)
		}),
	)
	healthv1.RegisterHealthServer(server, health.NewServer())
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return listener.Addr().String(), authorities, tokens
}

func TestATokenIsSentOverTLS(t *testing.T) {
	address, authorities, tokens := secureServer(t)
	client, err := bough.NewClient(address, bough.WithTLS(&tls.Config{RootCAs: authorities}), bough.WithToken("secret"))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	if received := <-tokens; !slices.Equal(received, []string{"Bearer secret"}) {
		t.Errorf("authorization %q", received)
	}
}

func TestATokenOfASourceIsAskedForWithEachCall(t *testing.T) {
	address, authorities, tokens := secureServer(t)
	issued := []string{"first", "second", "not one"}
	client, err := bough.NewClient(address, bough.WithTLS(&tls.Config{RootCAs: authorities}),
		bough.WithTokenSource(func(context.Context) (string, error) {
			token := issued[0]
			issued = issued[1:]
			return token, nil
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for _, wanted := range []string{"Bearer first", "Bearer second"} {
		if err := client.Check(t.Context()); err != nil {
			t.Fatal(err)
		}
		if received := <-tokens; !slices.Equal(received, []string{wanted}) {
			t.Errorf("authorization %q", received)
		}
	}
	wantError(t, client.Check(t.Context()), codes.Unauthenticated, "")
}

func TestAServerWithAnUnknownAuthorityIsNotTrusted(t *testing.T) {
	address, _, _ := secureServer(t)
	client, err := bough.NewClient(address, bough.WithTLS(nil))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	wantError(t, client.Check(t.Context()), codes.Unavailable, "")
}

func TestCheckSaysWhetherTheServerServes(t *testing.T) {
	server := boughtest.NewServer(t)
	client := server.Client(t)
	if err := client.Check(t.Context()); err != nil {
		t.Error(err)
	}
	boughtest.Handle(server, healthv1.Health_Check_FullMethodName,
		func(context.Context, *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
			return &healthv1.HealthCheckResponse{Status: healthv1.HealthCheckResponse_NOT_SERVING}, nil
		})
	wantError(t, client.Check(t.Context()), codes.Unavailable, "")
	server.Stop()
	wantError(t, client.Check(t.Context()), codes.Unavailable, "")
}
