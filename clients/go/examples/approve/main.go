// Approve starts an agent and answers in the terminal what it waits for: go run ./examples/approve AGENT TEXT [ADDRESS].
package main

import (
	"bufio"
	"context"
	"encoding/json"
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
		log.Fatal("usage: approve AGENT TEXT [ADDRESS]")
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
	lines := bufio.NewScanner(os.Stdin)
	stream := client.Run(ctx, &boughv1.RunRequest{Agent: agent, Input: bough.UserMessage(text)})
	for {
		result, err := bough.Collect(stream)
		if err != nil {
			return err
		}
		if !result.Interrupted() {
			fmt.Println(result.Text())
			return result.Err()
		}
		resume := &boughv1.ResumeRunRequest{RunId: result.RunID}
		for _, request := range result.OpenRequests {
			answer, err := ask(lines, request)
			if err != nil {
				return err
			}
			resume.Answers = append(resume.Answers, answer)
		}
		stream = client.Resume(ctx, resume)
	}
}

func ask(lines *bufio.Scanner, request *boughv1.InputRequest) (*boughv1.InputAnswer, error) {
	path, call := request.GetAgentPath(), request.GetCall()
	fmt.Printf("%s: %s %s %s\n> ", path[len(path)-1], request.GetPrompt(), call.GetName(), call.GetArgumentsJson())
	if !lines.Scan() {
		return nil, fmt.Errorf("no answer: the run still waits for it")
	}
	text := lines.Text()
	switch request.GetKind() {
	case boughv1.InputKind_INPUT_KIND_CLIENT_TOOL:
		return bough.ToolText(request, text), nil
	case boughv1.InputKind_INPUT_KIND_QUESTION:
		if json.Valid([]byte(text)) {
			return bough.Reply(request, json.RawMessage(text))
		}
		return bough.Reply(request, text)
	}
	if text == "y" {
		return bough.Approve(request, ""), nil
	}
	return bough.Refuse(request, "The user said no."), nil
}
