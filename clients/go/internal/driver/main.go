// Driver performs the calls of the contract's scenarios and prints what it got; tests/contract/README.md of the repository says how
// it talks.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// line is one line of the input.
type line struct {
	Call              string          `json:"call"`
	Request           json.RawMessage `json:"request"`
	TimeoutSeconds    float64         `json:"timeoutSeconds"`
	CancelAfterEvents int             `json:"cancelAfterEvents"`
	Rejoin            *bool           `json:"rejoin"`
	Collect           bool            `json:"collect"`
	Tree              string          `json:"tree"`
	Transcode         string          `json:"transcode"`
	Binary            []byte          `json:"binary"`
	JSON              json.RawMessage `json:"json"`
}

// misunderstood is an error of the line, not of its call.
type misunderstood struct{ error }

func main() {
	if err := drive(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
}

func drive(arguments []string, input io.Reader, output io.Writer) error {
	if len(arguments) != 1 {
		return errors.New("usage: driver ADDRESS")
	}
	options, err := connection()
	if err != nil {
		return err
	}
	rejoining, err := bough.NewClient(arguments[0], options...)
	if err != nil {
		return err
	}
	defer rejoining.Close()
	plain, err := bough.NewClient(arguments[0], append(options, bough.WithoutRejoining())...)
	if err != nil {
		return err
	}
	defer plain.Close()
	lines := bufio.NewScanner(input)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var wanted line
		decoder := json.NewDecoder(strings.NewReader(lines.Text()))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&wanted); err != nil {
			return fmt.Errorf("%q: %w", lines.Text(), err)
		}
		client := rejoining
		if wanted.Rejoin != nil && !*wanted.Rejoin {
			client = plain
		}
		if err := perform(wanted, client, &printer{output}); err != nil {
			return fmt.Errorf("%q: %w", lines.Text(), err)
		}
	}
	return lines.Err()
}

// connection returns what the environment says of TLS and of a token.
func connection() ([]bough.Option, error) {
	var options []bough.Option
	if token := os.Getenv("DRIVER_TOKEN"); token != "" {
		options = append(options, bough.WithToken(token))
	}
	if file := os.Getenv("DRIVER_TOKEN_FILE"); file != "" {
		options = append(options, bough.WithTokenSource(func(context.Context) (string, error) {
			token, err := os.ReadFile(file)
			return string(token), err
		}))
	}
	file := os.Getenv("DRIVER_CA_FILE")
	if file == "" {
		return options, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	config.RootCAs.AppendCertsFromPEM(pem)
	if own := os.Getenv("DRIVER_CERT_FILE"); own != "" {
		certificate, err := tls.LoadX509KeyPair(own, os.Getenv("DRIVER_KEY_FILE"))
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	return append(options, bough.WithTLS(config)), nil
}

func perform(wanted line, client *bough.Client, out *printer) error {
	if wanted.Transcode != "" {
		return transcode(wanted, out)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if wanted.TimeoutSeconds > 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(wanted.TimeoutSeconds*float64(time.Second)))
		defer cancel()
	}
	rejoins, err := dispatch(ctx, cancel, wanted, client, out)
	var wrong misunderstood
	if errors.As(err, &wrong) {
		return wrong
	}
	return out.end(err, rejoins)
}

func dispatch(
	ctx context.Context, cancel context.CancelFunc, wanted line, client *bough.Client, out *printer,
) (rejoins int, err error) {
	if wanted.Tree != "" {
		return 0, printTree(ctx, wanted.Tree, client, out)
	}
	switch wanted.Call {
	case "AgentService.Run":
		return follow(wanted, cancel, out, &boughv1.RunRequest{}, func(r *boughv1.RunRequest) *bough.RunStream { return client.Run(ctx, r) })
	case "AgentService.WatchRun":
		return follow(wanted, cancel, out, &boughv1.WatchRunRequest{}, func(r *boughv1.WatchRunRequest) *bough.RunStream { return client.Watch(ctx, r) })
	case "AgentService.ResumeRun":
		return follow(wanted, cancel, out, &boughv1.ResumeRunRequest{}, func(r *boughv1.ResumeRunRequest) *bough.RunStream { return client.Resume(ctx, r) })
	case "AgentService.ForkRun":
		return follow(wanted, cancel, out, &boughv1.ForkRunRequest{}, func(r *boughv1.ForkRunRequest) *bough.RunStream { return client.Fork(ctx, r) })
	case "EvalService.Evaluate":
		return follow(wanted, cancel, out, &boughv1.EvaluateRequest{}, func(r *boughv1.EvaluateRequest) *bough.EvaluationStream { return client.Evaluate(ctx, r) })
	case "EvalService.WatchEvaluation":
		return follow(wanted, cancel, out, &boughv1.WatchEvaluationRequest{}, func(r *boughv1.WatchEvaluationRequest) *bough.EvaluationStream { return client.WatchEvaluation(ctx, r) })
	}
	return 0, call(ctx, wanted, client, out)
}

// follow performs a call whose events a stream delivers.
func follow[R proto.Message, E bough.Event](
	wanted line, cancel context.CancelFunc, out *printer, request R, open func(R) *bough.Stream[E],
) (rejoins int, err error) {
	if err := parse(wanted.Request, request); err != nil {
		return 0, err
	}
	stream := open(request)
	if wanted.Collect {
		answer, err := collect(stream)
		if err != nil {
			return stream.Rejoins(), err
		}
		return stream.Rejoins(), out.print(map[string]any{"answer": answer})
	}
	count := 0
	for event, err := range stream.Events() {
		if err != nil {
			return stream.Rejoins(), err
		}
		if err := out.message("event", event); err != nil {
			return stream.Rejoins(), err
		}
		if count++; count == wanted.CancelAfterEvents {
			cancel()
		}
	}
	return stream.Rejoins(), nil
}

func collect(stream any) (map[string]any, error) {
	switch stream := stream.(type) {
	case *bough.RunStream:
		result, err := bough.Collect(stream)
		return map[string]any{
			"text": result.Text(), "state": result.State.String(), "interrupted": result.Interrupted(),
			"runId": result.RunID, "throughSequence": fmt.Sprint(result.ThroughSequence),
		}, err
	case *bough.EvaluationStream:
		result, err := bough.CollectEvaluation(stream)
		return map[string]any{
			"evaluationId": result.EvaluationID, "state": result.State.String(), "verdict": result.Verdict.String(),
			"cases": result.Totals.GetCases(), "gates": len(result.Gates), "throughSequence": fmt.Sprint(result.ThroughSequence),
		}, err
	}
	return nil, misunderstood{fmt.Errorf("nothing collects a %T", stream)}
}

func printTree(ctx context.Context, runID string, client *bough.Client, out *printer) error {
	tree, err := client.Tree(ctx, runID)
	if err != nil {
		return err
	}
	agents := []map[string]any{}
	for node := range tree.Walk() {
		agents = append(agents, map[string]any{
			"agent": node.GetName(), "path": strings.Join(node.Path(), "/"), "depth": node.GetDepth(),
			"state": node.GetState().String(),
		})
	}
	return out.print(map[string]any{"answer": map[string]any{"agents": agents}})
}

// call performs any other call, and prints each response.
func call(ctx context.Context, wanted line, client *bough.Client, out *printer) error {
	method, err := methodOf(wanted.Call)
	if err != nil {
		return err
	}
	request, response := messageOf(method.Input()), messageOf(method.Output())
	if err := parse(wanted.Request, request); err != nil {
		return err
	}
	name := fmt.Sprintf("/%s/%s", method.Parent().FullName(), method.Name())
	if !method.IsStreamingClient() && !method.IsStreamingServer() {
		if err := client.Conn().Invoke(ctx, name, request, response); err != nil {
			return err
		}
		return out.message("answer", response)
	}
	desc := streamDesc(method)
	stream, err := client.Conn().NewStream(ctx, &desc, name)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(request); err != nil && err != io.EOF {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for {
		response := messageOf(method.Output())
		if err := stream.RecvMsg(response); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := out.message("answer", response); err != nil {
			return err
		}
	}
}

func transcode(wanted line, out *printer) error {
	kind, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(wanted.Transcode))
	if err != nil {
		return misunderstood{err}
	}
	message := kind.New().Interface()
	if wanted.JSON != nil {
		err = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(wanted.JSON, message)
	} else {
		err = proto.Unmarshal(wanted.Binary, message)
	}
	if err != nil {
		return misunderstood{err}
	}
	binary, err := proto.MarshalOptions{Deterministic: true}.Marshal(message)
	if err != nil {
		return misunderstood{err}
	}
	text, err := protojson.Marshal(message)
	if err != nil {
		return misunderstood{err}
	}
	return out.print(map[string]any{"transcoded": map[string]any{"binary": binary, "json": json.RawMessage(text)}})
}

func parse(text json.RawMessage, request proto.Message) error {
	if len(text) == 0 {
		return nil
	}
	if err := protojson.Unmarshal(text, request); err != nil {
		return misunderstood{err}
	}
	return nil
}

// printer writes one JSON object a line.
type printer struct{ output io.Writer }

func (p *printer) print(object map[string]any) error {
	text, err := json.Marshal(object)
	if err != nil {
		return err
	}
	if _, err = p.output.Write(append(text, '\n')); err != nil {
		return misunderstood{err}
	}
	return nil
}

func (p *printer) message(name string, message proto.Message) error {
	text, err := protojson.Marshal(message)
	if err != nil {
		return err
	}
	return p.print(map[string]any{name: json.RawMessage(text)})
}

func (p *printer) end(err error, rejoins int) error {
	end := map[string]any{"code": "OK", "rejoins": rejoins}
	if err != nil {
		var failed *bough.Error
		if !errors.As(err, &failed) {
			return err
		}
		violations := []map[string]string{}
		for _, violation := range failed.Violations {
			violations = append(violations, map[string]string{"field": violation.Field, "description": violation.Description})
		}
		end["code"], end["message"], end["reason"] = nameOf(failed.Code), failed.Message, failed.Reason
		end["metadata"], end["violations"] = failed.Metadata, violations
		if failed.Metadata == nil {
			end["metadata"] = map[string]string{}
		}
	}
	return p.print(map[string]any{"end": end})
}

// nameOf returns the name of a code in capitals, such as NOT_FOUND.
func nameOf(code codes.Code) string {
	names := [...]string{
		"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
		"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
		"INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
	}
	if int(code) >= len(names) {
		return fmt.Sprintf("CODE_%d", code)
	}
	return names[code]
}
