/** Scripts of the fake of Bough, and the logs that they become. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { type Code, ConnectError } from "@connectrpc/connect";
import {
  type AgentEvent,
  AgentEventSchema,
  type EvaluationEvent,
  EvaluationEventSchema,
  WatchUntil,
} from "./bough/v1/index.js";
import { ErrorInfoSchema } from "./google/rpc/error_details_pb.js";

/** Cuts the connection, once: the stream that rejoins continues behind it. */
export interface Drop {
  drop: true;
}

/** Ends the stream with an error, once. */
export interface Failure {
  fail: Code;
  reason?: string;
  message?: string;
}

/** Sends a response without events, as a view does that shows nothing up to this sequence. */
export interface Through {
  through: bigint;
}

/** A step of a script: an event, or what happens to the stream. An event without a sequence has the one that follows. */
export type Step<Init = MessageInitShape<typeof AgentEventSchema>> = Init | Drop | Failure | Through;

/** A step of the script of an evaluation. */
export type EvaluationStep = Step<MessageInitShape<typeof EvaluationEventSchema>>;

export type Kind = "run" | "evaluation";

type Recorded = Drop | Failure | Through | { event: AgentEvent | EvaluationEvent };

const ENDS = new Set<string>([
  "runCompleted",
  "runFailed",
  "runCancelled",
  "evaluationCompleted",
  "evaluationFailed",
  "evaluationCancelled",
]);

/** The log of a run or of an evaluation: its script, how far it may go, and which drops are behind it. */
export class Log {
  readonly #steps: Recorded[] = [];
  readonly #spent = new Set<Recorded>();
  readonly #interruptions: bigint[] = [];
  readonly #resumes: string[] = [];
  #resumed: () => void = () => {};
  #change = this.#nextResume();

  constructor(
    readonly id: string,
    readonly kind: Kind,
    /** Under which it is scripted: the agent of a run, the set of an evaluation. */
    readonly name: string,
    readonly requestId: string,
    readonly script: readonly object[],
    /** The last sequence that a fork shares with its origin, which was resumed up to there; 0 for none. */
    shared = 0n,
  ) {
    let sequence = 0n;
    for (const step of script as Step[]) {
      if ("drop" in step || "fail" in step) {
        this.#steps.push(step);
      } else if ("through" in step) {
        sequence = step.through;
        this.#steps.push(step);
      } else {
        const event = this.#event(step, sequence + 1n);
        sequence = event.sequence;
        this.#steps.push({ event });
        if (event.payload.case === "runInterrupted") {
          this.#interruptions.push(sequence);
          if (sequence <= shared) {
            this.#resumes.push("");
          }
        }
      }
    }
  }

  /** The events so far: those up to the interruption that it waits at, else all. */
  get events(): (AgentEvent | EvaluationEvent)[] {
    const events = this.#steps.flatMap((step) => ("event" in step ? [step.event] : []));
    const waitsAt = this.#interruptions[this.#resumes.length];
    return waitsAt === undefined ? events : events.filter(({ sequence }) => sequence <= waitsAt);
  }

  /** End a log that has not ended with these events; what was to come does not happen. */
  end(...inits: object[]): void {
    const last = this.events.at(-1);
    if (last && ENDS.has(last.payload.case ?? "")) {
      return;
    }
    this.#steps.splice(this.#steps.findLastIndex((step) => "event" in step && step.event === last) + 1);
    for (const [index, init] of inits.entries()) {
      this.#steps.push({ event: this.#event(init, (last?.sequence ?? 0n) + BigInt(index + 1)) });
    }
    this.#resumes.push("");
    this.#resumed();
  }

  /** Continue behind the interruption that the run waits at, once for each request id; return its sequence. */
  resume(requestId: string): bigint {
    if (!this.#resumes.includes(requestId)) {
      this.#resumes.push(requestId);
      this.#resumed();
      this.#change = this.#nextResume();
    }
    return this.#interruptions[this.#resumes.indexOf(requestId)] ?? 0n;
  }

  /**
   * Yield the steps after a sequence; an interruption that nothing has resumed ends them, or is waited for, until the
   * caller has left.
   */
  async *follow(after: bigint, until: WatchUntil, left: Promise<unknown>): AsyncGenerator<Recorded> {
    let isLeft = false;
    void left.then(() => (isLeft = true));
    let sequence = 0n;
    for (const step of this.#steps) {
      if ("drop" in step || "fail" in step) {
        if (sequence >= after && !this.#spent.has(step)) {
          this.#spent.add(step);
          yield step;
          return;
        }
        continue;
      }
      sequence = "through" in step ? step.through : step.event.sequence;
      if (sequence > after) {
        yield step;
      }
      const interruption = this.#interruptions.indexOf(sequence);
      if (interruption < 0) {
        continue;
      }
      if (until === WatchUntil.INTERRUPTED && sequence > after) {
        return;
      }
      while (interruption >= this.#resumes.length) {
        if (until === WatchUntil.CURRENT) {
          return;
        }
        // A heartbeat: Connect sends the initial metadata with the first response.
        yield { through: sequence };
        await Promise.race([this.#change, left]);
        if (isLeft) {
          return;
        }
      }
    }
  }

  #nextResume(): Promise<void> {
    return new Promise((resolve) => {
      this.#resumed = resolve;
    });
  }

  #event(init: object, sequence: bigint): AgentEvent | EvaluationEvent {
    return this.kind === "run"
      ? create(AgentEventSchema, { runId: this.id, sessionId: "session-1", sequence, ...init })
      : create(EvaluationEventSchema, { evaluationId: this.id, sequence, ...init });
  }
}

/** Return the error that a script says. */
export function failure({ fail, reason = "", message = "The script says so." }: Failure): ConnectError {
  const details = reason ? [{ desc: ErrorInfoSchema, value: { reason, domain: "bough.dev" } }] : [];
  return new ConnectError(message, fail, undefined, details);
}
