package bough

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
)

// Rejoining says how streams survive dropped connections and restarted servers; see [WithRejoining]. A field that is zero has
// its default.
//
// Before each attempt a stream waits for a random time between 0 and a bound that doubles from FirstDelay to LongestDelay until
// the stream makes progress, so that the many clients of a restarted server spread out.
type Rejoining struct {
	// FirstDelay is the bound of the first delay. Default: 100 ms.
	FirstDelay time.Duration
	// LongestDelay is the bound of every delay. Default: 5 s.
	LongestDelay time.Duration
	// Timeout is how long in all the server may be unavailable, or unable to continue the run, without progress.
	// Default: 60 s.
	Timeout time.Duration
	// ConnectTimeout is the same for a client that has never reached its server, whose address is probably wrong.
	// Default: 500 ms.
	ConnectTimeout time.Duration
	// OnDrop is called with the error when a stream begins to rejoin, once in each outage. Default: not called.
	OnDrop func(*Error)
}

func (r Rejoining) withDefaults() Rejoining {
	set := func(field *time.Duration, value time.Duration) {
		if *field == 0 {
			*field = value
		}
	}
	set(&r.FirstDelay, 100*time.Millisecond)
	set(&r.LongestDelay, 5*time.Second)
	set(&r.Timeout, 60*time.Second)
	set(&r.ConnectTimeout, 500*time.Millisecond)
	return r
}

// never is the Rejoining of streams that fail at the first drop.
var never = Rejoining{FirstDelay: 1, LongestDelay: 1, Timeout: -1, ConnectTimeout: -1}

// bound returns the longest delay before an attempt, counted from 0.
func (r Rejoining) bound(attempt int) time.Duration {
	bound := r.FirstDelay
	for ; attempt > 0 && bound < r.LongestDelay; attempt-- {
		bound *= 2
	}
	return min(bound, r.LongestDelay)
}

// timing is what a backoff asks the world for; tests have another one.
type timing struct {
	now    func() time.Time
	random func() float64 // from 0 to 1
	sleep  func(context.Context, time.Duration) error
}

var realTiming = timing{now: time.Now, random: rand.Float64, sleep: sleep}

func sleep(ctx context.Context, delay time.Duration) error {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return callErrorOf(ctx)
	}
}

// callErrorOf describes the end of the caller's context between two calls.
func callErrorOf(ctx context.Context) *Error {
	if ctx.Err() == context.DeadlineExceeded {
		return deadlineExceeded("The time for following is over; what was followed may still be in progress.")
	}
	return &Error{Code: codes.Canceled, Message: "The caller stopped following.", cause: ctx.Err()}
}

func deadlineExceeded(message string) *Error {
	return &Error{
		Code: codes.DeadlineExceeded, Message: message, Reason: "DEADLINE_EXCEEDED", cause: context.DeadlineExceeded,
	}
}

// backoff counts the drops of one stream: attempts without progress, and since when its server is unavailable.
type backoff struct {
	rejoining   Rejoining
	timing      timing
	hasContact  *contact
	deadline    time.Time // of the caller; zero for none
	attempt     int
	unavailable time.Time // since when; zero while the server is available
	isStuck     bool      // the server is reachable and cannot continue the run
	isKnown     bool      // the server has accepted the token of a call since it last refused one
	outages     int
}

// answered records that the server accepted a call; ignored while it cannot continue the run.
func (b *backoff) answered() {
	b.isKnown = true
	if !b.isStuck {
		b.unavailable = time.Time{}
	}
}

// progressed records that the stream received a response.
func (b *backoff) progressed() {
	b.attempt, b.unavailable, b.isStuck, b.isKnown = 0, time.Time{}, false, true
}

// delayAfter returns how long to wait before the next attempt, or the error if it ends the stream.
//
// Only UNAVAILABLE is retried, and UNAUTHENTICATED of a call that the server has accepted before: its token has expired, and the next
// call has the present one. The server's retry delay is a lower bound, itself bounded by LongestDelay.
func (b *backoff) delayAfter(failed *Error) (time.Duration, *Error) {
	if failed.Code == codes.Unauthenticated && b.isKnown && b.timeout() > 0 {
		b.isKnown = false
		return 0, nil
	}
	if failed.Code != codes.Unavailable {
		return 0, failed
	}
	// Until another server takes such a run over, a reachable server is no better than an unreachable one.
	b.isStuck = failed.Reason == "STORAGE_FAILED" || failed.Reason == "RUN_PARKED"
	now := b.timing.now()
	isNew := b.unavailable.IsZero()
	if isNew {
		b.unavailable = now
	}
	delay := time.Duration(b.timing.random() * float64(b.rejoining.bound(b.attempt)))
	delay = max(delay, min(failed.RetryDelay, b.rejoining.LongestDelay))
	b.attempt++
	if now.Add(delay).Sub(b.unavailable) >= b.timeout() {
		return 0, failed
	}
	if !b.deadline.IsZero() && !now.Add(delay).Before(b.deadline) {
		return 0, deadlineExceeded(fmt.Sprintf("The server did not become available in time: %s", failed.Message))
	}
	if isNew {
		b.outages++
		if b.rejoining.OnDrop != nil {
			b.rejoining.OnDrop(failed)
		}
	}
	return delay, nil
}

func (b *backoff) timeout() time.Duration {
	if b.hasContact.isMade.Load() {
		return b.rejoining.Timeout
	}
	return min(b.rejoining.Timeout, b.rejoining.ConnectTimeout)
}

// contact is whether a client has ever reached its server: the first call that is sent on a connection shows it.
type contact struct{ isMade atomic.Bool }

func (c *contact) HandleRPC(_ context.Context, event stats.RPCStats) {
	if _, isSent := event.(*stats.OutHeader); isSent {
		c.isMade.Store(true)
	}
}

func (c *contact) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (c *contact) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (c *contact) HandleConn(context.Context, stats.ConnStats)                       {}
