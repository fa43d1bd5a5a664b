// Eval evaluates a set and exits as CI expects: go run ./examples/eval REQUEST.json [ADDRESS].
//
// The file is an EvaluateRequest as JSON, such as examples/eval/request.json of the repository. The exit code is 0 if the set
// passed, 1 if it failed, 2 if it could not be scored or not be run.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if len(os.Args) < 2 {
		log.Print("usage: eval REQUEST.json [ADDRESS]")
		os.Exit(2)
	}
	address := "127.0.0.1:50051"
	if len(os.Args) > 2 {
		address = os.Args[2]
	}
	verdict, err := evaluate(ctx, address, os.Args[1])
	switch {
	case err != nil:
		log.Print(err)
		os.Exit(2)
	case verdict == boughv1.Verdict_VERDICT_FAILED:
		os.Exit(1)
	case verdict != boughv1.Verdict_VERDICT_PASSED:
		os.Exit(2)
	}
}

func evaluate(ctx context.Context, address, path string) (verdict boughv1.Verdict, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return verdict, err
	}
	request := &boughv1.EvaluateRequest{}
	if err := protojson.Unmarshal(text, request); err != nil {
		return verdict, err
	}
	client, err := bough.NewClient(address)
	if err != nil {
		return verdict, err
	}
	defer client.Close()
	result := &bough.EvaluationResult{}
	for event, err := range client.Evaluate(ctx, request).Events() {
		if err != nil {
			return verdict, err
		}
		result.Add(event)
		if scored := event.GetCaseTrialScored(); scored != nil {
			trial := scored.GetResult()
			fmt.Printf("%s #%d: %s %s\n", trial.GetCaseId(), trial.GetTrial(), word(trial.GetVerdict()), trial.GetReason())
		}
	}
	if err := result.Err(); err != nil {
		return verdict, err
	}
	fmt.Printf("%d of %d trials passed\n", result.Totals.GetTrialsPassed(), result.Totals.GetTrials())
	fmt.Println(request.GetEvalSet().GetName(), word(result.Verdict))
	return result.Verdict, nil
}

func word(verdict boughv1.Verdict) string {
	return strings.ToLower(strings.TrimPrefix(verdict.String(), "VERDICT_"))
}
