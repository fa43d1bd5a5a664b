import type { CallOptions, Client } from "@connectrpc/connect";
import {
  type AgentEvent,
  type AgentService,
  type EvalService,
  type EvaluateRequest,
  type EvaluationEvent,
  type ForkRunRequest,
  type InputAnswer,
  type ResumeRunRequest,
  type RunRequest,
  type WatchEvaluationRequest,
  type WatchRunRequest,
  WatchUntil,
} from "./bough/v1/index.js";

/** A response of any stream: some events, and how far they go. */
export interface Response<Event> {
  batch?: { events: Event[]; throughSequence: bigint } | undefined;
}

/** Position of a stream in a log, over as many calls as it takes: the next call, and which events are new. */
export interface Position<Event> {
  /** Id of the run or the evaluation; empty until the server has accepted the call, unless the caller named it. */
  readonly id: string;
  /** Every event up to here was received. */
  readonly received: bigint;
  /** True if the last event ends the stream: an error after it is ignored. */
  readonly isOver: boolean;
  /** Make the call that continues from this position. */
  call(options: CallOptions): AsyncIterable<Response<Event>>;
  /** Read the id in a call's initial metadata; return whether there is one: then the server accepted the call. */
  accept(header: Headers): boolean;
  /** Return the events of a response that are new, in order. */
  take(response: Response<Event>): Event[];
  /** True if a call that ended with OK has reached the end that it promised. */
  readonly isComplete: boolean;
  /** Return whether another call follows at once one that ended with OK and is not complete, and prepare that call. */
  proceed(): boolean;
}

/** The request of a run's stream, by the method that sends it. */
export type RunStart =
  | { method: "run"; request: RunRequest }
  | { method: "resumeRun"; request: ResumeRunRequest }
  | { method: "forkRun"; request: ForkRunRequest }
  | { method: "watchRun"; request: WatchRunRequest };

const ENDS = new Set<AgentEvent["payload"]["case"]>(["runCompleted", "runFailed", "runCancelled"]);

/**
 * Position in a run's log.
 *
 * The first call is repeated under its request id until the position is known. From then on the run is watched from the
 * position to the event at which the first call would have ended.
 */
export class RunPosition implements Position<AgentEvent> {
  id = "";
  received = 0n;
  isOver = false;
  #last: AgentEvent | undefined;
  // Input ids that a resumeRun answers: those that may still be open here, and those that an interruption has named.
  readonly #open = new Set<string>();
  readonly #asked = new Set<string>();
  #interruption = -1n;
  // A watch until an interruption has every event that was recorded when it began. An interruption among those ends it
  // only if it is the last one, for then it is not answered.
  #isLive = false;
  // The last event of the last response was a runInterrupted, also one that was known.
  #isInterrupted = false;

  constructor(
    private readonly agents: Client<typeof AgentService>,
    private readonly start: RunStart,
  ) {
    if (start.method === "watchRun" || start.method === "resumeRun") {
      this.id = start.request.runId;
      this.received = start.request.afterSequence ?? 0n;
    }
    if (start.method === "resumeRun") {
      start.request.answers.forEach((answer: InputAnswer) => this.#open.add(answer.inputId));
    }
  }

  call(options: CallOptions): AsyncIterable<Response<AgentEvent>> {
    const { method, request } = this.start;
    if (method === "watchRun") {
      if (this.#isReplaying) {
        // The last event that is known may be the interruption at which the run waits: it is asked for again.
        return this.#watch(WatchUntil.CURRENT, options, this.received && this.received - 1n);
      }
      return this.#watch(request.until, options);
    }
    if (method === "run" && !this.id) {
      return this.agents.run(request, options);
    }
    // The stream of a fork begins at the fork, whose sequence only its events show.
    if (method === "forkRun" && !this.received) {
      return this.agents.forkRun(request, options);
    }
    if (method === "resumeRun" && this.#open.size) {
      return this.agents.resumeRun(this.#repeated(request), options);
    }
    return this.#watch(WatchUntil.INTERRUPTED, options);
  }

  accept(header: Headers): boolean {
    const id = header.get("bough-run-id");
    this.id = id ?? this.id;
    return id !== null;
  }

  take({ batch }: Response<AgentEvent>): AgentEvent[] {
    if (!batch) {
      return [];
    }
    if (batch.events.length || batch.throughSequence) {
      this.#settle();
    }
    const fresh: AgentEvent[] = [];
    for (const event of batch.events) {
      this.#isInterrupted = event.payload.case === "runInterrupted";
      if (event.sequence > this.received) {
        this.received = event.sequence;
        this.id ||= event.runId;
        this.#last = event;
        this.isOver = this.#ends(event);
        fresh.push(event);
      }
    }
    this.received = batch.throughSequence > this.received ? batch.throughSequence : this.received;
    return fresh;
  }

  proceed(): boolean {
    const isReplaying = this.#isReplaying;
    this.#isLive ||= isReplaying;
    return isReplaying;
  }

  get isComplete(): boolean {
    const { method, request } = this.start;
    if (this.#isReplaying) {
      return this.isOver || this.#isInterrupted;
    }
    if (this.isOver || (method === "watchRun" && request.until === WatchUntil.CURRENT)) {
      return true;
    }
    if (this.#last === undefined) {
      // A run that had ended sends no event, and answers may have been received although no event showed it.
      return method === "watchRun" || method === "resumeRun";
    }
    const last = this.#last.payload.case;
    // A later version may end streams at events that are not known yet, such as a pause. The server knows best which
    // interruption follows the answers.
    return last === undefined || (method === "resumeRun" && last === "runInterrupted");
  }

  /** True for a watch until an interruption that has still to read what was recorded when it began. */
  get #isReplaying(): boolean {
    const { method, request } = this.start;
    return method === "watchRun" && request.until === WatchUntil.INTERRUPTED && !this.#isLive;
  }

  #watch(
    until: WatchUntil,
    options: CallOptions,
    afterSequence = this.received,
  ): AsyncIterable<Response<AgentEvent>> {
    const { follow } = this.start.request;
    return this.agents.watchRun({ runId: this.id, afterSequence, until, follow }, options);
  }

  /**
   * Return the call with the same answers, which have no second effect.
   *
   * The run cannot be watched instead: only the server knows which interruption is the first after the answers.
   */
  #repeated(request: ResumeRunRequest): ResumeRunRequest {
    if (request.afterSequence === undefined) {
      return request;
    }
    // If the last event is an interruption, it may be the end of the stream: a mask can hide the inputReceived that would
    // show it. The server ends the call with that event, and past it would wait for the next one.
    const afterSequence = this.received === this.#interruption ? this.received - 1n : this.received;
    return { ...request, afterSequence };
  }

  /** Mark the answers as received: without `afterSequence` a resumeRun begins behind them. */
  #settle(): void {
    if (this.start.method === "resumeRun" && this.start.request.afterSequence === undefined) {
      this.#open.clear();
    }
  }

  #ends({ payload, sequence }: AgentEvent): boolean {
    if (payload.case === "inputReceived") {
      this.#open.delete(payload.value.answer?.inputId ?? "");
    }
    if (payload.case !== "runInterrupted") {
      return ENDS.has(payload.case);
    }
    if (this.start.method === "watchRun") {
      return this.start.request.until === WatchUntil.INTERRUPTED && this.#isLive;
    }
    // An interruption names every open request: one that an earlier interruption named and this one does not has been
    // answered. One that none has named may not have been made yet.
    const named = new Set(payload.value.requests.map((request) => request.inputId));
    this.#asked.forEach((id) => named.has(id) || this.#open.delete(id));
    named.forEach((id) => this.#asked.add(id));
    this.#interruption = sequence;
    return this.#open.size === 0;
  }
}

/** The request of an evaluation's stream, by the method that sends it. */
export type EvaluationStart =
  | { method: "evaluate"; request: EvaluateRequest }
  | { method: "watchEvaluation"; request: WatchEvaluationRequest };

const EVALUATION_ENDS = new Set<EvaluationEvent["payload"]["case"]>([
  "evaluationCompleted",
  "evaluationFailed",
  "evaluationCancelled",
]);

/** Position in the log of an evaluation: started under its request id until it is accepted, then watched. */
export class EvaluationPosition implements Position<EvaluationEvent> {
  id = "";
  received = 0n;
  isOver = false;
  #last: EvaluationEvent | undefined;

  constructor(
    private readonly evals: Client<typeof EvalService>,
    private readonly start: EvaluationStart,
  ) {
    if (start.method === "watchEvaluation") {
      this.id = start.request.evaluationId;
      this.received = start.request.afterSequence;
    }
  }

  call(options: CallOptions): AsyncIterable<Response<EvaluationEvent>> {
    const { method, request } = this.start;
    if (method === "evaluate" && !this.id) {
      return this.evals.evaluate(request, options);
    }
    const { follow } = request;
    return this.evals.watchEvaluation({ evaluationId: this.id, afterSequence: this.received, follow }, options);
  }

  accept(header: Headers): boolean {
    const id = header.get("bough-evaluation-id");
    this.id = id ?? this.id;
    return id !== null;
  }

  take({ batch }: Response<EvaluationEvent>): EvaluationEvent[] {
    const fresh = (batch?.events ?? []).filter((event) => event.sequence > this.received);
    for (const event of fresh) {
      this.received = event.sequence;
      this.#last = event;
      this.isOver = EVALUATION_ENDS.has(event.payload.case);
    }
    const through = batch?.throughSequence ?? 0n;
    this.received = through > this.received ? through : this.received;
    return fresh;
  }

  proceed(): boolean {
    return false;
  }

  get isComplete(): boolean {
    if (this.isOver || this.start.request.follow?.until === WatchUntil.CURRENT) {
      return true;
    }
    const isEmpty = this.#last === undefined;
    return isEmpty ? this.start.method === "watchEvaluation" : this.#last?.payload.case === undefined;
  }
}
