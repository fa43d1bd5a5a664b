package bough_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log"
	"os"
	"testing"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
	"github.com/bough-dev/bough/clients/go/boughtest"
)

func ExampleClient_Run() {
	ctx := context.Background()
	client, err := bough.NewClient("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	stream := client.Run(ctx, &boughv1.RunRequest{Agent: "lead", Input: bough.UserMessage("Why do leaves turn red?")})
	for event, err := range stream.Events() {
		if err != nil {
			log.Fatal(err)
		}
		switch payload := event.GetPayload().(type) {
		case *boughv1.AgentEvent_LlmOutputTextDelta:
			fmt.Print(payload.LlmOutputTextDelta.GetText())
		case *boughv1.AgentEvent_ToolStarted:
			fmt.Println(event.GetBranch(), "calls", payload.ToolStarted.GetCall().GetName())
		case *boughv1.AgentEvent_RunFailed:
			fmt.Println("failed:", payload.RunFailed.GetError().GetMessage())
		}
	}
}

func ExampleClient_Ask() {
	ctx := context.Background()
	client, err := bough.NewClient("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	answer, err := client.Ask(ctx, "lead", "Why do leaves turn red?")
	var failed *bough.Error
	switch {
	case errors.As(err, &failed) && failed.Reason == "UNKNOWN_AGENT":
		fmt.Println("There is no such agent.")
	case err != nil:
		log.Fatal(err)
	}
	fmt.Println(answer)
}

func ExampleClient_Resume() {
	ctx := context.Background()
	client, err := bough.NewClient("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	input := bough.UserMessage("Orders 1001 and 1002 come back.")
	result, err := bough.Collect(client.Run(ctx, &boughv1.RunRequest{Agent: "lead", Input: input}))
	for err == nil && result.Interrupted() {
		resume := &boughv1.ResumeRunRequest{RunId: result.RunID}
		for _, request := range result.OpenRequests {
			resume.Answers = append(resume.Answers, bough.Approve(request, ""))
		}
		result, err = bough.Collect(client.Resume(ctx, resume))
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Text())
}

func ExampleClient_Tree() {
	ctx := context.Background()
	client, err := bough.NewClient("127.0.0.1:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	tree, err := client.Tree(ctx, "0193d6b4-0000-7000-8000-000000000001")
	if err != nil {
		log.Fatal(err)
	}
	for node := range tree.Walk() {
		fmt.Println(node.Path(), node.GetTreeUsage().GetModelCalls(), len(node.Tools()))
	}
}

func ExampleNewClient_tls() {
	pem, err := os.ReadFile("authority.pem")
	if err != nil {
		log.Fatal(err)
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(pem)
	client, err := bough.NewClient(
		"bough.example.com:443",
		bough.WithTLS(&tls.Config{RootCAs: authorities}),
		bough.WithToken(os.Getenv("BOUGH_TOKEN")),
	)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
}

// Programs that call Bough are tested with the server of package boughtest.
func Example_test() {
	_ = func(t *testing.T) {
		server := boughtest.NewServer(t)
		server.Run("lead", boughtest.Text("Because "), boughtest.Drop(), boughtest.Answer("Because of anthocyanins."))
		answer, err := server.Client(t).Ask(t.Context(), "lead", "Why do leaves turn red?")
		if err != nil || answer != "Because of anthocyanins." {
			t.Errorf("%q, %v", answer, err)
		}
	}
}
