package bough

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

// Option configures a [Client].
type Option func(*settings)

type settings struct {
	tls       *tls.Config
	token     TokenSource
	fixed     string
	rejoining *Rejoining
	dial      []grpc.DialOption
}

// WithTLS encrypts the connection and verifies the server. A nil config has the certificate authorities of the system; for others
// set RootCAs, and for a client certificate set Certificates.
func WithTLS(config *tls.Config) Option {
	return func(s *settings) {
		if config == nil {
			config = &tls.Config{}
		}
		s.tls = config
	}
}

// WithToken sends a bearer token with every call. Without [WithTLS] that is an error, unless the address is of this machine.
func WithToken(token string) Option {
	return func(s *settings) {
		s.fixed, s.token = token, nil
		if token != "" {
			s.token = func(context.Context) (string, error) { return token, nil }
		}
	}
}

// TokenSource returns the present bearer token. It is called for each call, and when a stream rejoins because its token has expired.
type TokenSource func(context.Context) (string, error)

// WithTokenSource sends the token that a function returns, as [WithToken] does. A call whose token cannot be had fails with
// UNAUTHENTICATED.
func WithTokenSource(source TokenSource) Option {
	return func(s *settings) { s.fixed, s.token = "", source }
}

// WithRejoining says how streams survive drops.
func WithRejoining(rejoining Rejoining) Option {
	rejoining = rejoining.withDefaults()
	return func(s *settings) { s.rejoining = &rejoining }
}

// WithoutRejoining makes streams fail at the first drop, for programs that rejoin by themselves.
func WithoutRejoining() Option {
	return func(s *settings) { s.rejoining = &never }
}

// WithDialOptions adds options to the connection. They come after those of this package and win over them.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *settings) { s.dial = append(s.dial, options...) }
}

// retried are the methods that may be repeated without harm and are no streams that rejoin.
const retried = `{"methodConfig": [{
	"name": [
		{"service": "bough.v1.AgentService", "method": "CancelRun"},
		{"service": "bough.v1.AgentService", "method": "GetRun"},
		{"service": "bough.v1.AgentService", "method": "ListRuns"},
		{"service": "bough.v1.EvalService", "method": "GetInvocation"},
		{"service": "bough.v1.EvalService", "method": "CancelEvaluation"},
		{"service": "bough.v1.EvalService", "method": "GetEvaluation"},
		{"service": "bough.v1.EvalService", "method": "ListCaseResults"},
		{"service": "bough.v1.EvalService", "method": "ListEvaluations"},
		{"service": "bough.v1.EvalService", "method": "CompareEvaluations"},
		{"service": "bough.v1.EvalService", "method": "ScoreInvocations"},
		{"service": "bough.v1.EvalService", "method": "DiffInvocations"},
		{"service": "bough.v1.CatalogService", "method": "GetAgent"},
		{"service": "bough.v1.CatalogService", "method": "ListAgents"},
		{"service": "bough.v1.CatalogService", "method": "ValidateAgents"},
		{"service": "bough.v1.CatalogService", "method": "ListTools"},
		{"service": "bough.v1.CatalogService", "method": "ListToolServers"},
		{"service": "bough.v1.CatalogService", "method": "ListModels"},
		{"service": "bough.v1.SessionService", "method": "GetSession"},
		{"service": "bough.v1.SessionService", "method": "ListSessions"},
		{"service": "bough.v1.SessionService", "method": "ListMessages"},
		{"service": "bough.v1.SessionService", "method": "GetSessionState"},
		{"service": "bough.v1.SessionService", "method": "ReadBlob"},
		{"service": "bough.v1.UsageService", "method": "GetUsage"},
		{"service": "bough.v1.UsageService", "method": "ListUsageEntries"},
		{"service": "bough.v1.UsageService", "method": "GetAccount"},
		{"service": "bough.v1.UsageService", "method": "AdjustBalance"},
		{"service": "bough.v1.UsageService", "method": "ListAdjustments"}
	],
	"retryPolicy": {
		"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2,
		"retryableStatusCodes": ["UNAVAILABLE"]
	}
}]}`

func (s *settings) dialOptions(address string, contact *contact) ([]grpc.DialOption, error) {
	transport := insecure.NewCredentials()
	if s.tls != nil {
		transport = credentials.NewTLS(s.tls)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		// Bounded, as streams that wait to rejoin would run out of patience although the server is back.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithDefaultServiceConfig(retried),
		grpc.WithStatsHandler(contact),
		grpc.WithChainUnaryInterceptor(describeUnary),
		grpc.WithChainStreamInterceptor(describeStream),
	}
	if s.token != nil {
		if s.tls == nil && !isLoopback(address) {
			return nil, fmt.Errorf("bough: a token is not sent to %s without TLS: use WithTLS", address)
		}
		if s.fixed != "" && !isToken(s.fixed) {
			return nil, errNoToken
		}
		options = append(options, grpc.WithPerRPCCredentials(bearer{token: s.token, isSecure: s.tls != nil}))
	}
	return append(options, s.dial...), nil
}

// bearer sends a token with every call.
type bearer struct {
	token    TokenSource
	isSecure bool
}

func (b bearer) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	token, err := b.token(ctx)
	if err != nil {
		return nil, err
	}
	if !isToken(token) {
		return nil, errNoToken
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// errNoToken does not show the token, which may be right but for a line break.
var errNoToken = errors.New("bough: the token is empty or has characters that no bearer token has")

func isToken(token string) bool {
	return token != "" && !strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' })
}

func (b bearer) RequireTransportSecurity() bool { return b.isSecure }

// isLoopback reports whether an address is of this machine for certain.
func isLoopback(address string) bool {
	if scheme, rest, found := strings.Cut(address, ":///"); found {
		address = rest
		if scheme == "unix" {
			return true
		}
	}
	if strings.HasPrefix(address, "unix:") {
		return true
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
