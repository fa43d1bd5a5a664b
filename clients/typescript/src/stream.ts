import { setTimeout as sleep } from "node:timers/promises";
import { Code } from "@connectrpc/connect";
import { aborted, BoughError } from "./errors.js";
import type { Position } from "./position.js";
import type { Backoff } from "./rejoining.js";

/** The longest deadline that gRPC can send in milliseconds, which it writes with at most 8 digits: 27 hours. */
const LONGEST_TIMEOUT_MS = 99_999_999;

/**
 * Events of a run or of an evaluation, as they arrive: every sequence of the view once and in order.
 *
 * Use it once, with `for await`. The call is sent when the first event is awaited, or by {@link started}. If the
 * connection drops, the stream rejoins after the last event, within the original timeout; a call that was not accepted
 * yet is repeated under the same request id. The stream ends at the event at which the first call would have ended.
 * Leaving the loop ends the call, not the run: use `client.agents.cancelRun` for that.
 *
 * Errors are {@link BoughError}s. An event whose payload this version does not know has `payload.case === undefined`. If a
 * call ends with OK after such an event, the stream ends too: what it follows has not ended then, but was paused, say.
 */
export class EventStream<Event extends { sequence: bigint }> implements AsyncIterableIterator<Event>, AsyncDisposable {
  readonly #events: AsyncGenerator<Event, undefined>;
  readonly #closing = new AbortController();
  readonly #accepted: Promise<void>;
  #resolveAccepted: () => void = () => {};
  #rejectAccepted: (error: unknown) => void = () => {};
  #first: Promise<IteratorResult<Event, undefined>> | undefined;
  // What `started` has read ahead is not the caller's yet.
  #isRead = false;
  readonly #start: bigint;
  #through: bigint;
  #backoff: Backoff | undefined;

  /** @internal */
  constructor(
    private readonly position: Position<Event>,
    private readonly newBackoff: () => Backoff,
    /** Request id of the call; a repeated call has no second effect. Empty for a watch, which needs none. */
    readonly requestId: string,
    private readonly signal: AbortSignal | undefined,
  ) {
    this.#start = this.#through = position.received;
    this.#accepted = new Promise((resolve, reject) => {
      this.#resolveAccepted = resolve;
      this.#rejectAccepted = reject;
    });
    // Not every caller asks for it; the loop throws the same error.
    this.#accepted.catch(() => {});
    this.#events = this.#follow();
  }

  /** Id of the run or the evaluation; empty until the server has accepted the call, unless the caller named it. */
  get id(): string {
    return this.position.id;
  }

  /** Sequence to continue after, with `client.watch`: the caller has every event of its view up to here. */
  get throughSequence(): bigint {
    return this.#isRead ? this.#through : this.#start;
  }

  /** How often the stream has lost its server, and rejoined or tried to. */
  get rejoins(): number {
    return this.#backoff?.outages ?? 0;
  }

  /** Wait until the run or evaluation, or the answers to a run, are accepted and durable; return the id. Loses no event. */
  async started(): Promise<string> {
    if (!this.#isRead) {
      this.#first ??= this.#events.next();
      this.#first.catch(() => {});
    }
    await this.#accepted;
    return this.id;
  }

  async next(): Promise<IteratorResult<Event, undefined>> {
    const first = this.#first;
    this.#isRead = true;
    this.#first = undefined;
    return first ?? this.#events.next();
  }

  /** End the call, as `break` does in a loop. What it follows continues. */
  async return(): Promise<IteratorResult<Event, undefined>> {
    await this.close();
    return { done: true, value: undefined };
  }

  /** End the call. A pending `next` is done; what the stream follows continues. */
  async close(): Promise<void> {
    this.#closing.abort();
    this.#resolveAccepted();
    this.#first = undefined;
    await this.#events.return(undefined);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async *#follow(): AsyncGenerator<Event, undefined> {
    const onAbort = () => this.#closing.abort();
    this.signal?.addEventListener("abort", onAbort);
    try {
      this.#throwIfAborted();
      const backoff = (this.#backoff = this.newBackoff());
      for (;;) {
        const error = yield* this.#call(backoff);
        if (error === undefined || this.position.isOver) {
          return undefined;
        }
        await sleep(backoff.delayAfter(error), undefined, { signal: this.#closing.signal });
      }
    } catch (error) {
      const raised = this.signal?.aborted ? aborted(this.signal.reason) : error;
      this.#rejectAccepted(raised);
      if (this.#isClosed()) {
        return undefined;
      }
      throw raised;
    } finally {
      this.signal?.removeEventListener("abort", onAbort);
      this.#closing.abort();
      this.#resolveAccepted();
    }
  }

  /** Yield the events of one call. Return undefined if it reached its end, else the error that ended it. */
  async *#call(backoff: Backoff): AsyncGenerator<Event, BoughError | undefined> {
    const timeoutMs = Math.min(Math.ceil(backoff.remainingMs()), LONGEST_TIMEOUT_MS);
    const onHeader = (header: Headers) => {
      if (this.position.accept(header)) {
        backoff.answered();
        this.#resolveAccepted();
      }
    };
    try {
      for await (const response of this.position.call({ timeoutMs, onHeader, signal: this.#closing.signal })) {
        backoff.progressed();
        const events = this.position.take(response);
        this.#resolveAccepted();
        for (const [index, event] of events.entries()) {
          this.#through = index === events.length - 1 ? this.position.received : event.sequence;
          yield event;
          this.#throwIfAborted();
        }
        this.#through = this.position.received;
      }
    } catch (error) {
      this.#throwIfAborted();
      if (error instanceof BoughError) {
        return error;
      }
      throw error;
    }
    if (this.position.isComplete) {
      return undefined;
    }
    if (this.position.proceed()) {
      return yield* this.#call(backoff);
    }
    return new BoughError("The stream ended without an end event.", Code.Unavailable);
  }

  #throwIfAborted(): void {
    this.signal?.throwIfAborted();
    this.#closing.signal.throwIfAborted();
  }

  #isClosed(): boolean {
    return this.#closing.signal.aborted && !this.signal?.aborted;
  }
}
