package bough

import (
	"context"
	"crypto/rand"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"

	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// Client calls a Bough server. It is safe for use by many goroutines; a program needs one for each server.
type Client struct {
	conn      *grpc.ClientConn
	rejoining Rejoining
	timing    timing
	contact   contact
}

// NewClient returns a client of the server at an address such as "127.0.0.1:50051" or "dns:///bough.example.com:443". It connects
// with the first call. Without [WithTLS] the connection is not encrypted.
func NewClient(address string, options ...Option) (*Client, error) {
	client := &Client{rejoining: Rejoining{}.withDefaults(), timing: realTiming}
	settings := settings{}
	for _, option := range options {
		option(&settings)
	}
	if settings.rejoining != nil {
		client.rejoining = *settings.rejoining
	}
	dial, err := settings.dialOptions(address, &client.contact)
	if err != nil {
		return nil, err
	}
	client.conn, err = grpc.NewClient(address, dial...)
	if err != nil {
		return nil, err
	}
	return client, nil
}

// Close closes the connection. Streams in progress end with an error.
func (c *Client) Close() error { return c.conn.Close() }

// Conn returns the connection, for stubs of other services.
func (c *Client) Conn() *grpc.ClientConn { return c.conn }

// Agents returns the stub that starts, answers, cancels, returns and lists runs. For streams use [Client.Run], [Client.Watch],
// [Client.Resume] and [Client.Fork], which survive drops.
func (c *Client) Agents() boughv1.AgentServiceClient { return boughv1.NewAgentServiceClient(c.conn) }

// Evals returns the stub that reads runs as trees and scores them. For streams use [Client.Evaluate] and
// [Client.WatchEvaluation], which survive drops.
func (c *Client) Evals() boughv1.EvalServiceClient { return boughv1.NewEvalServiceClient(c.conn) }

// Sessions returns the stub for conversations, their values and their files.
func (c *Client) Sessions() boughv1.SessionServiceClient {
	return boughv1.NewSessionServiceClient(c.conn)
}

// Catalog returns the stub for agents, tools and models.
func (c *Client) Catalog() boughv1.CatalogServiceClient {
	return boughv1.NewCatalogServiceClient(c.conn)
}

// Usage returns the stub for what was used and charged, and for accounts.
func (c *Client) Usage() boughv1.UsageServiceClient { return boughv1.NewUsageServiceClient(c.conn) }

// Access returns the stub that says who calls.
func (c *Client) Access() boughv1.AccessServiceClient { return boughv1.NewAccessServiceClient(c.conn) }

// Health returns the stub of the standard health service.
func (c *Client) Health() healthv1.HealthClient { return healthv1.NewHealthClient(c.conn) }

// Check returns nil if the server serves, and an [*Error] if it does not or cannot be reached.
func (c *Client) Check(ctx context.Context) error {
	response, err := c.Health().Check(ctx, &healthv1.HealthCheckRequest{})
	if err == nil && response.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		return &Error{Code: codes.Unavailable, Message: "The server is " + response.GetStatus().String() + "."}
	}
	return err
}

// Run starts a run and follows it to its end, or to its first interruption. A deadline of the context is the run's too, unless the
// run is a background run.
//
// If the request has no RequestId it gets one, so that no repeated call starts a second run.
func (c *Client) Run(ctx context.Context, request *boughv1.RunRequest) *RunStream {
	request = proto.CloneOf(request)
	setRequestID(&request.RequestId)
	return newStream(ctx, c, newRunPosition(c.Agents(), request), request.GetRequestId())
}

// Watch follows a run, in progress or ended, from any sequence to the end that Until names; default: to the run's last event.
//
// With WATCH_UNTIL_INTERRUPTED it ends at the interruption at which the run waits. It passes those that were answered before it was
// called, such as the ones that a fork shares with its origin, at which the server's stream would end. If AfterSequence is the
// interruption at which the run waits, it ends at once, where the server's stream would wait for the next one.
func (c *Client) Watch(ctx context.Context, request *boughv1.WatchRunRequest) *RunStream {
	return newStream(ctx, c, newRunPosition(c.Agents(), proto.CloneOf(request)), "")
}

// Resume answers what a run asks for, and follows it to its end or its next interruption. [Approve], [Refuse], [Reply] and
// [ToolText] make answers. If the request has no RequestId it gets one.
func (c *Client) Resume(ctx context.Context, request *boughv1.ResumeRunRequest) *RunStream {
	request = proto.CloneOf(request)
	setRequestID(&request.RequestId)
	return newStream(ctx, c, newRunPosition(c.Agents(), request), request.GetRequestId())
}

// Fork starts a run that shares the beginning of another run's log, and follows it from there as [Client.Run] does. If the request
// has no RequestId it gets one.
func (c *Client) Fork(ctx context.Context, request *boughv1.ForkRunRequest) *RunStream {
	request = proto.CloneOf(request)
	setRequestID(&request.RequestId)
	return newStream(ctx, c, newRunPosition(c.Agents(), request), request.GetRequestId())
}

// Evaluate starts an evaluation and follows it to its end. A deadline of the context bounds following it, not the evaluation. If
// the request has no RequestId it gets one, so that no repeated call starts a second evaluation.
func (c *Client) Evaluate(ctx context.Context, request *boughv1.EvaluateRequest) *EvaluationStream {
	request = proto.CloneOf(request)
	setRequestID(&request.RequestId)
	return newStream(ctx, c, newEvaluationPosition(c.Evals(), request), request.GetRequestId())
}

// WatchEvaluation follows an evaluation, in progress or ended, from any sequence.
func (c *Client) WatchEvaluation(ctx context.Context, request *boughv1.WatchEvaluationRequest) *EvaluationStream {
	return newStream(ctx, c, newEvaluationPosition(c.Evals(), proto.CloneOf(request)), "")
}

// Ask starts a run, follows it to its end and returns its answer as text; the error is a [*RunError] if it has none.
func (c *Client) Ask(ctx context.Context, agent, input string) (string, error) {
	result, err := Collect(c.Run(ctx, &boughv1.RunRequest{Agent: agent, Input: UserMessage(input)}))
	if err != nil {
		return "", err
	}
	return result.Text(), result.Err()
}

// Tree returns the agents of a run, as far as it has come.
func (c *Client) Tree(ctx context.Context, runID string) (*Tree, error) {
	response, err := c.Evals().GetInvocation(ctx, &boughv1.GetInvocationRequest{RunId: runID})
	if err != nil {
		return nil, err
	}
	return NewTree(response.GetInvocation()), nil
}

func setRequestID(id *string) {
	if *id == "" {
		*id = rand.Text()
	}
}
