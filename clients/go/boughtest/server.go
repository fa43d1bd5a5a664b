// Package boughtest has a server for tests of programs that call Bough: it is in memory, and plays scripts.
//
//	server := boughtest.NewServer(t)
//	server.Run("lead", boughtest.Text("Because "), boughtest.Drop(), boughtest.Answer("Because of anthocyanins."))
//	client := server.Client(t)
//
// Every run of the agent plays the steps of its script once. What happened is a log, as in a real server: streams that rejoin,
// or that other clients open, read it from any sequence.
package boughtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	bough "github.com/bough-dev/bough/clients/go"
	boughv1 "github.com/bough-dev/bough/clients/go/bough/v1"
)

// Server is a Bough server in memory. It is safe for use by many goroutines.
type Server struct {
	mu          sync.Mutex
	listener    *bufconn.Listener // nil while the server is stopped
	grpc        *grpc.Server
	scripts     map[string][]Step // by agent
	forks       map[string][]Step // by agent
	trees       map[string]*boughv1.Invocation
	evaluations map[string][]Step // by the name of the set
	cases       map[string][]*boughv1.CaseResult
	runs        map[string]*log[*boughv1.AgentEvent]
	evals       map[string]*log[*boughv1.EvaluationEvent]
	byRequest   map[string]string // ids by request id
	handlers    map[string]func(context.Context, proto.Message) (proto.Message, error)
	streams     map[string]func(grpc.ServerStream) error
	requests    []proto.Message
	count       int
}

// NewServer starts a server that stops when the test ends.
func NewServer(t testing.TB) *Server {
	t.Helper()
	server := &Server{
		scripts: map[string][]Step{}, forks: map[string][]Step{}, trees: map[string]*boughv1.Invocation{},
		evaluations: map[string][]Step{}, cases: map[string][]*boughv1.CaseResult{},
		runs: map[string]*log[*boughv1.AgentEvent]{}, evals: map[string]*log[*boughv1.EvaluationEvent]{},
		byRequest: map[string]string{},
		handlers:  map[string]func(context.Context, proto.Message) (proto.Message, error){},
		streams:   map[string]func(grpc.ServerStream) error{},
	}
	server.Start()
	t.Cleanup(server.Stop)
	return server
}

// Run says what every run of an agent does. A script that does not end the run leaves it in progress.
func (s *Server) Run(agent string, steps ...Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scripts[agent] = steps
}

// Fork says what every fork of a run of an agent does after its run_forked, as [Server.Run] does for runs.
func (s *Server) Fork(agent string, steps ...Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forks[agent] = steps
}

// Tree says what GetInvocation returns of every run of an agent, forks included. The server sets the run, its session, its agent, its
// state and its answer; set the agents in preorder, with their depths, and their tool calls.
func (s *Server) Tree(agent string, tree *boughv1.Invocation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trees[agent] = tree
}

// Evaluation says what every evaluation of a set of that name does.
func (s *Server) Evaluation(set string, steps ...Step) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.evaluations[set] = steps
}

// Cases says which cases ListCaseResults returns of every evaluation of a set of that name.
func (s *Server) Cases(set string, cases ...*boughv1.CaseResult) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cases[set] = cases
}

// Handle answers the calls of a method that has one request and one response, by its full name such as
// [boughv1.SessionService_GetSession_FullMethodName], also of one that the server answers itself. A method that is neither scripted
// nor handled is UNIMPLEMENTED.
func Handle[Request, Response proto.Message](
	s *Server, method string, handle func(context.Context, Request) (Response, error),
) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handlers[method] = func(ctx context.Context, request proto.Message) (proto.Message, error) {
		return handle(ctx, request.(Request))
	}
}

// HandleStream answers the calls of a method that streams requests or responses, as [Handle] does for the others. The handler receives
// its requests by RecvMsg and sends its responses by SendMsg.
func (s *Server) HandleStream(method string, handle func(grpc.ServerStream) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.streams[method] = handle
}

// Requests returns the requests that were received, in order.
func (s *Server) Requests() []proto.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]proto.Message(nil), s.requests...)
}

// Client returns a client of the server, closed when the test ends. Its streams rejoin after a few milliseconds unless the options
// say otherwise.
func (s *Server) Client(t testing.TB, options ...bough.Option) *bough.Client {
	t.Helper()
	quick := bough.WithRejoining(bough.Rejoining{FirstDelay: time.Millisecond, LongestDelay: 10 * time.Millisecond})
	dialing := bough.WithDialOptions(
		grpc.WithContextDialer(s.dial),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}), // no delay between attempts
	)
	client, err := bough.NewClient("passthrough:///localhost", append([]bough.Option{quick, dialing}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// Stop ends the server and every call, as a crash does. What was recorded is kept: see [Server.Start].
func (s *Server) Stop() {
	s.mu.Lock()
	server := s.grpc
	s.listener, s.grpc = nil, nil
	s.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

// Start starts the server again after [Server.Stop].
func (s *Server) Start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.grpc != nil {
		return
	}
	s.listener = bufconn.Listen(256 * 1024)
	s.grpc = grpc.NewServer(grpc.UnaryInterceptor(s.unary), grpc.StreamInterceptor(s.stream))
	boughv1.RegisterAgentServiceServer(s.grpc, &agentService{server: s})
	boughv1.RegisterEvalServiceServer(s.grpc, &evalService{server: s})
	boughv1.RegisterSessionServiceServer(s.grpc, boughv1.UnimplementedSessionServiceServer{})
	boughv1.RegisterAccessServiceServer(s.grpc, boughv1.UnimplementedAccessServiceServer{})
	boughv1.RegisterUsageServiceServer(s.grpc, boughv1.UnimplementedUsageServiceServer{})
	boughv1.RegisterCatalogServiceServer(s.grpc, boughv1.UnimplementedCatalogServiceServer{})
	healthv1.RegisterHealthServer(s.grpc, health.NewServer())
	go s.grpc.Serve(s.listener)
}

func (s *Server) dial(ctx context.Context, _ string) (net.Conn, error) {
	s.mu.Lock()
	listener := s.listener
	s.mu.Unlock()
	if listener == nil {
		return nil, errors.New("the server is stopped")
	}
	return listener.DialContext(ctx)
}

func (s *Server) unary(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	message, isMessage := request.(proto.Message)
	if !isMessage {
		return handle(ctx, request)
	}
	s.mu.Lock()
	s.requests = append(s.requests, message)
	handler := s.handlers[info.FullMethod]
	s.mu.Unlock()
	if handler == nil {
		response, err := handle(ctx, request)
		return response, unscripted(err, info.FullMethod, "Handle")
	}
	return handler(ctx, message)
}

func (s *Server) stream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	s.mu.Lock()
	handler := s.streams[info.FullMethod]
	s.mu.Unlock()
	if handler == nil {
		return unscripted(handle(service, recordingStream{stream, s}), info.FullMethod, "HandleStream")
	}
	return handler(recordingStream{stream, s})
}

// unscripted returns an error of the generated code, for a method that the server does not have, as one that says how to script it.
func unscripted(err error, fullMethod, handle string) error {
	service, method := path.Split(strings.TrimPrefix(fullMethod, "/bough.v1."))
	service = strings.TrimSuffix(service, "/")
	if status.Convert(err).Message() != fmt.Sprintf("method %s not implemented", method) {
		return err
	}
	return status.Errorf(codes.Unimplemented, "%s.%s is not scripted: answer it by %s with boughv1.%s_%s_FullMethodName.",
		service, method, handle, service, method)
}

// recordingStream records the requests of a stream.
type recordingStream struct {
	grpc.ServerStream
	server *Server
}

func (r recordingStream) RecvMsg(request any) error {
	err := r.ServerStream.RecvMsg(request)
	if message, isMessage := request.(proto.Message); err == nil && isMessage {
		r.server.mu.Lock()
		r.server.requests = append(r.server.requests, message)
		r.server.mu.Unlock()
	}
	return err
}

// Error returns an error of a call, as a server describes it with a reason such as "UNKNOWN_AGENT".
func Error(code codes.Code, reason, message string) error {
	return statusOf(code, reason, message)
}
