import { Code } from "@connectrpc/connect";
import { BoughError, deadlineExceeded, isUnreachable } from "./errors.js";

/**
 * How a stream rejoins after a dropped connection.
 *
 * A delay is random between 0 and a bound that doubles from `firstDelayMs` to `longestDelayMs` until the stream makes
 * progress: many clients of one restarted server spread out.
 */
export interface Rejoining {
  /** Default: 100. */
  firstDelayMs?: number;
  /** Default: 5,000. */
  longestDelayMs?: number;
  /** How long in all the server may be unavailable, or unable to continue the run. Default: 60,000; 0 never rejoins. */
  timeoutMs?: number;
  /** The same for a client that has never reached its server, whose address is probably wrong. Default: 500. */
  connectTimeoutMs?: number;
  /** Called with the error when a stream begins to rejoin, once in each outage. */
  onDrop?: (error: BoughError) => void;
}

/** Whether a client has ever reached its server. */
export interface Contact {
  isMade: boolean;
}

/** Sources of time and chance; tests replace them. */
export interface Environment {
  /** Milliseconds of a clock that never goes back. */
  now: () => number;
  /** A number from 0 to 1. */
  random: () => number;
}

const SYSTEM: Environment = { now: () => performance.now(), random: Math.random };

/** Reasons why a reachable server cannot continue a run: no better than an unreachable one. */
const OF_THE_RUN = new Set(["STORAGE_FAILED", "RUN_PARKED"]);

/** Return options without those that are undefined, which would hide their defaults. */
export function given<Options extends object>(options: Options): Options {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined)) as Options;
}

/** Drops of one stream: attempts without progress, since when the server is unavailable, and the deadline. */
export class Backoff {
  readonly #options: Required<Omit<Rejoining, "onDrop">> & Pick<Rejoining, "onDrop">;
  readonly #deadline: number;
  #attempt = 0;
  #goneSince: number | undefined;
  #isAuthenticated = false;
  #isStuck = false;
  #outages = 0;

  /** `timeoutMs` bounds the stream; 0 does not. */
  constructor(
    rejoining: Rejoining,
    private readonly contact: Contact,
    timeoutMs: number,
    private readonly environment: Environment = SYSTEM,
  ) {
    const defaults = { firstDelayMs: 100, longestDelayMs: 5_000, timeoutMs: 60_000, connectTimeoutMs: 500 };
    this.#options = { ...defaults, ...given(rejoining) };
    this.#deadline = timeoutMs > 0 ? environment.now() + timeoutMs : Infinity;
  }

  /** How often the stream has lost its server, and rejoined or tried to. */
  get outages(): number {
    return this.#outages;
  }

  /** Return the milliseconds left until the caller's deadline, 0 without one; throw DeadlineExceeded after it. */
  remainingMs(): number {
    if (this.#deadline === Infinity) {
      return 0;
    }
    const left = this.#deadline - this.environment.now();
    if (left <= 0) {
      throw deadlineExceeded("The time for following the stream is over; what it follows may still be running.");
    }
    return left;
  }

  /** Record that the server accepted a call; ignored while it cannot continue the run. */
  answered(): void {
    this.contact.isMade = true;
    this.#isAuthenticated = true;
    if (!this.#isStuck) {
      this.#goneSince = undefined;
    }
  }

  /** Record that the stream received a response. */
  progressed(): void {
    this.#isStuck = false;
    this.#attempt = 0;
    this.answered();
  }

  /** Return the milliseconds to wait before the next attempt; throw the error if it ends the stream. */
  delayAfter(error: BoughError): number {
    this.contact.isMade ||= !isUnreachable(error);
    if (error.code === Code.Unauthenticated && this.#isAuthenticated && this.#options.timeoutMs > 0) {
      // The token has expired under the stream; the next call has the present one.
      this.#isAuthenticated = false;
      return 0;
    }
    if (error.code !== Code.Unavailable) {
      throw error;
    }
    this.#isStuck = OF_THE_RUN.has(error.reason);
    const now = this.environment.now();
    const isNew = this.#goneSince === undefined;
    this.#goneSince ??= now;
    const { firstDelayMs, longestDelayMs, onDrop } = this.#options;
    const bound = Math.min(longestDelayMs, firstDelayMs * 2 ** this.#attempt);
    this.#attempt += 1;
    // The server's delay is a lower bound, within the longest delay.
    const delay = Math.max(this.environment.random() * bound, Math.min(error.retryDelayMs ?? 0, longestDelayMs));
    if (now + delay - this.#goneSince >= this.#timeoutMs()) {
      throw error;
    }
    if (now + delay >= this.#deadline) {
      throw deadlineExceeded(`The server did not become available in time: ${error.message}`, error);
    }
    if (isNew) {
      this.#outages += 1;
      onDrop?.(error);
    }
    return delay;
  }

  #timeoutMs(): number {
    const { timeoutMs, connectTimeoutMs } = this.#options;
    return this.contact.isMade ? timeoutMs : Math.min(timeoutMs, connectTimeoutMs);
  }
}
