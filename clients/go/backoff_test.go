package bough

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

// world is a clock that stands still, and random numbers that are always the same.
type world struct {
	time   time.Time
	random float64
}

func (w *world) backoff(rejoining Rejoining) *backoff {
	b := &backoff{rejoining: rejoining.withDefaults(), hasContact: &contact{}}
	b.timing = timing{
		now: func() time.Time { return w.time }, random: func() float64 { return w.random },
	}
	b.hasContact.isMade.Store(true)
	return b
}

var gone = &Error{Code: codes.Unavailable, Message: "gone"}

func TestDelaysAreRandomBelowABoundThatDoubles(t *testing.T) {
	for _, random := range []float64{0, 0.5, 0.999} {
		w := &world{time: time.Unix(1e9, 0), random: random}
		b := w.backoff(Rejoining{Timeout: time.Hour})
		for attempt, bound := range []int{100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000} {
			delay, err := b.delayAfter(gone)
			want := time.Duration(random * float64(bound) * float64(time.Millisecond))
			if err != nil || delay != want {
				t.Errorf("delay %d is %s (%v), want %s", attempt, delay, err, want)
			}
			w.time = w.time.Add(delay)
		}
		b.progressed()
		if delay, _ := b.delayAfter(gone); delay > 100*time.Millisecond {
			t.Errorf("after progress the delay is %s", delay)
		}
	}
}

func TestTheTimeWithoutProgressIsBounded(t *testing.T) {
	for _, of := range []struct {
		isMade bool
		answer func(*backoff)
		reason string
		want   time.Duration
	}{
		{isMade: true, want: 60 * time.Second},
		{isMade: false, want: 500 * time.Millisecond},
		{isMade: true, reason: "RUN_PARKED", answer: (*backoff).answered, want: 60 * time.Second},
		{isMade: true, reason: "STORAGE_FAILED", answer: (*backoff).answered, want: 60 * time.Second},
		{isMade: true, answer: (*backoff).answered, want: time.Hour},
		{isMade: true, reason: "RUN_PARKED", answer: (*backoff).progressed, want: time.Hour},
	} {
		w := &world{time: time.Unix(1e9, 0), random: 0.9}
		b := w.backoff(Rejoining{})
		b.hasContact.isMade.Store(of.isMade)
		begin := w.time
		for w.time.Sub(begin) < time.Hour {
			delay, err := b.delayAfter(&Error{Code: codes.Unavailable, Reason: of.reason})
			if err != nil {
				break
			}
			w.time = w.time.Add(delay)
			if of.answer != nil {
				of.answer(b)
			}
		}
		if took := w.time.Sub(begin); took > of.want+5*time.Second || took < of.want-5*time.Second {
			t.Errorf("%+v: it gave up after %s", of, took)
		}
	}
}

func TestTheServersRetryDelayIsALowerBound(t *testing.T) {
	w := &world{time: time.Unix(1e9, 0)}
	b := w.backoff(Rejoining{})
	for asked, want := range map[time.Duration]time.Duration{time.Second: time.Second, time.Minute: 5 * time.Second} {
		delay, err := b.delayAfter(&Error{Code: codes.Unavailable, RetryDelay: asked})
		if err != nil || delay != want {
			t.Errorf("asked for %s: %s (%v), want %s", asked, delay, err, want)
		}
	}
}

func TestOnlyUnavailableIsRetried(t *testing.T) {
	w := &world{time: time.Unix(1e9, 0)}
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		failed := &Error{Code: code}
		_, err := w.backoff(Rejoining{}).delayAfter(failed)
		if isRetried := err == nil; isRetried != (code == codes.Unavailable) {
			t.Errorf("%s: retried %t", code, isRetried)
		}
	}
}

func TestAStreamWhoseTokenHasExpiredRejoinsOnceWithTheNextToken(t *testing.T) {
	refused := &Error{Code: codes.Unauthenticated}
	b := (&world{time: time.Unix(1e9, 0)}).backoff(Rejoining{})
	for range 2 {
		b.progressed()
		if delay, err := b.delayAfter(refused); delay != 0 || err != nil {
			t.Errorf("delay %s, error %v", delay, err)
		}
		if _, err := b.delayAfter(refused); err != refused {
			t.Errorf("error %v", err)
		}
	}
}

func TestADeadlineBeforeTheNextAttemptEndsTheStreamAtOnce(t *testing.T) {
	w := &world{time: time.Unix(1e9, 0), random: 0.5}
	b := w.backoff(Rejoining{})
	b.deadline = w.time.Add(50 * time.Millisecond)
	_, err := b.delayAfter(gone)
	if err == nil || err.Code != codes.DeadlineExceeded || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if b.outages != 0 {
		t.Error("it began to rejoin")
	}
}

func TestADropIsReportedOnceInEachOutage(t *testing.T) {
	w := &world{time: time.Unix(1e9, 0)}
	var reported []string
	b := w.backoff(Rejoining{OnDrop: func(failed *Error) { reported = append(reported, failed.Message) }})
	for _, message := range []string{"first", "again", "again"} {
		b.delayAfter(&Error{Code: codes.Unavailable, Message: message})
	}
	b.answered()
	b.delayAfter(&Error{Code: codes.Unavailable, Message: "second"})
	b.delayAfter(&Error{Code: codes.NotFound, Message: "final"})
	if len(reported) != 2 || reported[0] != "first" || reported[1] != "second" || b.outages != 2 {
		t.Errorf("reported %q, %d outages", reported, b.outages)
	}
}

func TestWithoutRejoiningTheFirstDropIsFinal(t *testing.T) {
	b := (&world{time: time.Unix(1e9, 0)}).backoff(never)
	if _, err := b.delayAfter(gone); err != gone {
		t.Errorf("error %v", err)
	}
}

func TestATokenIsRefusedWithoutTLSUnlessTheAddressIsOfThisMachine(t *testing.T) {
	for address, isSent := range map[string]bool{
		"127.0.0.1:50051": true, "localhost:50051": true, "[::1]:50051": true, "dns:///localhost:1": true, "unix:/tmp/b": true,
		"unix:///tmp/b": true, "127.8.8.8:1": true,
		"example.com:50051": false, "dns:///example.com:1": false, "10.0.0.1:50051": false, "localhost.example.com:1": false,
		"127.0.0.1.example.com:1": false, "dns://127.0.0.1/example.com:1": false, "0.0.0.0:1": false, "": false,
	} {
		_, err := NewClient(address, WithToken("secret"))
		if (err == nil) != isSent {
			t.Errorf("%q: %v", address, err)
		}
		if client, err := NewClient("example.com:1", WithToken("secret"), WithTLS(nil)); err != nil {
			t.Error(err)
		} else {
			client.Close()
		}
	}
	if _, err := NewClient("127.0.0.1:1", WithToken("a\nb")); err == nil {
		t.Error("a token with a line break was accepted")
	}
}
