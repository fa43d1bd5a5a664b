// Run starts an agent and shows its tree while it grows: go run ./examples/run AGENT TEXT [ADDRESS].
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if len(os.Args) < 3 {
		log.Fatal("usage: run AGENT TEXT [ADDRESS]")
	}
	address := "127.0.0.1:50051"
	if len(os.Args) > 3 {
		address = os.Args[3]
	}
	if err := run(ctx, address, os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, address, agent, text string) error {
	client, err := bough.NewClient(address)
	if err != nil {
		return err
	}
	defer client.Close()
	stream := client.Run(ctx, &boughv1.RunRequest{Agent: agent, Input: bough.UserMessage(text)})
	for event, err := range stream.Events() {
		if err != nil {
			return err
		}
		indent := strings.Repeat("  ", int(event.GetDepth()))
		switch payload := event.GetPayload().(type) {
		case *boughv1.AgentEvent_RunStarted, *boughv1.AgentEvent_SubAgentStarted:
			fmt.Printf("%s%s\n", indent, event.GetAgent())
		case *boughv1.AgentEvent_ToolStarted:
			call := payload.ToolStarted.GetCall()
			fmt.Printf("%s  %s %s\n", indent, call.GetName(), call.GetArgumentsJson())
		case *boughv1.AgentEvent_RunCompleted:
			fmt.Printf("\n%s\n\n", bough.MessageText(payload.RunCompleted.GetFinalAnswer()))
		case *boughv1.AgentEvent_RunFailed:
			return fmt.Errorf("the run failed: %s", payload.RunFailed.GetError().GetMessage())
		}
	}
	tree, err := client.Tree(ctx, stream.ID())
	if err != nil {
		return err
	}
	for node := range tree.Walk() {
		fmt.Printf("%s: %d model calls, %d tool calls\n",
			strings.Join(node.Path(), "/"), node.GetTreeUsage().GetModelCalls(), len(node.Tools()))
	}
	return nil
}
