package boughtest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
)

// log is what happened in a run or an evaluation, and the steps that are still to be played.
type log[E any] struct {
	id     string
	script string         // the name under which it is scripted: the agent of runs, the set of evaluations
	number func(E, int64) // sets the ids and the sequence of an event
	pauses func(E) bool   // whether the script waits after an event

	mu       sync.Mutex
	steps    []Step
	events   []E
	isPaused bool
	changed  chan struct{} // closed when something changes
}

func newLog[E any](id, script string, first []E, steps []Step, number func(E, int64), pauses func(E) bool) *log[E] {
	l := &log[E]{id: id, script: script, number: number, pauses: pauses, steps: steps, changed: make(chan struct{})}
	for _, event := range first {
		l.append(event)
	}
	return l
}

// append records an event; the caller holds the lock, or is the only one that knows the log.
func (l *log[E]) append(event E) {
	l.number(event, int64(len(l.events))+1)
	l.events = append(l.events, event)
	l.wake()
}

func (l *log[E]) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// refusal returns the error of a call that is refused before anything is sent, once.
func (l *log[E]) refusal() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.steps) == 0 || !l.steps[0].isRefusal {
		return nil
	}
	err := l.steps[0].err
	l.steps = l.steps[1:]
	return err
}

// follow sends every event after a sequence, until one ends the stream or a step does.
func (l *log[E]) follow(ctx context.Context, after int64, ends func(E) bool, send func([]E, int64) error) error {
	if last := int64(len(l.recorded())); after > last {
		return outOfRange(last)
	}
	for {
		events, step, wait := l.next(after)
		switch {
		case wait != nil:
			select {
			case <-wait:
			case <-ctx.Done():
				return ctx.Err()
			}
		case step == nil:
			isOver := false
			if end := slices.IndexFunc(events, ends); end >= 0 {
				events, isOver = events[:end+1], true
			}
			after += int64(len(events))
			if err := send(events, after); err != nil || isOver {
				return err
			}
		case step.wait > 0:
			select {
			case <-time.After(step.wait):
			case <-ctx.Done():
				return ctx.Err()
			}
		case step.heartbeat:
			if err := send(nil, after); err != nil {
				return err
			}
		default:
			return step.err
		}
	}
}

// recorded returns the events so far.
func (l *log[E]) recorded() []E {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.events)
}

// end records the last events of a log that has not ended, and drops what was still to be played.
func (l *log[E]) end(isEnd func(E) bool, events ...E) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if isEnd(l.events[len(l.events)-1]) {
		return
	}
	l.steps = nil
	for _, event := range events {
		l.append(event)
	}
}

func outOfRange(last int64) error {
	return statusOf(codes.OutOfRange, "SEQUENCE_OUT_OF_RANGE", fmt.Sprintf("The last sequence is %d.", last))
}

// next returns the events after a sequence, or a step to perform, or what to wait for.
func (l *log[E]) next(after int64) (events []E, step *Step, wait <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if after < int64(len(l.events)) {
			return slices.Clone(l.events[after:]), nil, nil
		}
		if l.isPaused || len(l.steps) == 0 {
			return nil, nil, l.changed
		}
		next := l.steps[0]
		l.steps = l.steps[1:]
		if len(next.events) == 0 {
			return nil, &next, nil
		}
		for _, recorded := range next.events {
			event, isOfThisLog := recorded.(E)
			if !isOfThisLog {
				return nil, &Step{err: fmt.Errorf("the script of %s has a %T", l.id, recorded)}, nil
			}
			l.append(event)
			l.isPaused = l.pauses(event)
		}
	}
}
