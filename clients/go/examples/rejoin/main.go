// Rejoin follows a run over dropped connections and restarts of its server: go run ./examples/rejoin AGENT TEXT [ADDRESS].
//
// Restart the server while it follows: the stream goes on after its last sequence.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if len(os.Args) < 3 {
		log.Fatal("usage: rejoin AGENT TEXT [ADDRESS]")
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
	client, err := bough.NewClient(address, bough.WithRejoining(bough.Rejoining{
		OnDrop: func(failed *bough.Error) { log.Printf("dropped, rejoining: %s", failed.Message) },
	}))
	if err != nil {
		return err
	}
	defer client.Close()
	// A background run has no deadline and needs no client.
	policy := &boughv1.RunPolicy{Background: true}
	stream := client.Run(ctx, &boughv1.RunRequest{Agent: agent, Input: bough.UserMessage(text), Policy: policy})
	for event, err := range stream.Events() {
		if err != nil {
			return err
		}
		fmt.Println(event.GetSequence(), event.GetBranch(), bough.PayloadName(event))
		if completed := event.GetRunCompleted(); completed != nil {
			fmt.Println(bough.MessageText(completed.GetFinalAnswer()))
			return nil
		}
	}
	return fmt.Errorf("run %s has no answer", stream.ID())
}
