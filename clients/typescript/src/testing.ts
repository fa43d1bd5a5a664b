/** A fake of Bough for tests of programs that use the client: it plays scripts, and no Bough is needed. */
import { once } from "node:events";
import * as http2 from "node:http2";
import type { AddressInfo } from "node:net";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import {
  Code,
  ConnectError,
  type ConnectRouter,
  createContextKey,
  createContextValues,
  type HandlerContext,
} from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import {
  type AgentEvent,
  AgentEventSchema,
  AgentService,
  EvalService,
  type EvaluationEvent,
  EvaluationEventSchema,
  WatchUntil,
} from "./bough/v1/index.js";
import { ErrorInfoSchema } from "./google/rpc/error_details_pb.js";
import { Health, HealthCheckResponse_ServingStatus as ServingStatus } from "./grpc/health/v1/health_pb.js";

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

/** A request that the fake received. */
export interface Received {
  /** Name of the method, such as `WatchRun`. */
  method: string;
  /** The message. */
  request: unknown;
  header: Headers;
}

/** Options of a fake. */
export interface FakeOptions {
  /** Default: a free one. */
  port?: number;
  /** Certificate and key, for a fake with TLS. */
  tls?: http2.SecureServerOptions;
  /** Adds methods that scripts do not have. */
  routes?: (router: ConnectRouter) => void;
}

/** Return the script of a run that answers at once: its start, a text and its end. */
export function answered(text: string): [Step, Step, Step] {
  const finalAnswer = { parts: [{ content: { case: "text" as const, value: text } }] };
  return [
    { payload: { case: "runStarted", value: {} } },
    { payload: { case: "llmOutputTextDelta", value: { text } } },
    { payload: { case: "runCompleted", value: { finalAnswer } } },
  ];
}

/** The HTTP/2 stream of a call. */
const HTTP2_STREAM = createContextKey<http2.ServerHttp2Stream | undefined>(undefined);

/**
 * A fake server on a free port of this machine.
 *
 * `server.runs("lead", script)` says what every run of an agent does. A run follows its script, and stops at each
 * `runInterrupted` until `resumeRun` is called; all streams of the run see the same log. What is not scripted is NOT_FOUND;
 * `routes` adds any other method.
 */
export class FakeBough implements AsyncDisposable {
  /** Every request so far, in order. */
  readonly received: Received[] = [];
  readonly #agents = new Map<string, Step[]>();
  readonly #sets = new Map<string, EvaluationStep[]>();
  readonly #logs = new Map<string, Log>();
  readonly #sessions = new Set<http2.ServerHttp2Session>();
  #streams = 0;
  readonly #server: http2.Http2Server | http2.Http2SecureServer;

  private constructor({ routes, tls }: FakeOptions) {
    const handler = connectNodeAdapter({
      routes: (router) => {
        this.#routes(router);
        routes?.(router);
      },
      contextValues: (request) =>
        createContextValues().set(HTTP2_STREAM, "stream" in request ? request.stream : undefined),
    });
    this.#server = tls ? http2.createSecureServer(tls, handler) : http2.createServer(handler);
    this.#server.on("session", (session) => {
      this.#sessions.add(session);
      session.on("close", () => this.#sessions.delete(session));
      // A connection that the fake cuts, or that a client does, is no failure of the test.
      session.on("error", () => {});
    });
  }

  /** Start a fake server. */
  static async start(options: FakeOptions = {}): Promise<FakeBough> {
    const fake = new FakeBough(options);
    fake.#server.listen(options.port ?? 0, "127.0.0.1");
    await once(fake.#server, "listening");
    return fake;
  }

  /** HOST:PORT. */
  get address(): string {
    return `127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  /** How many connections are open. */
  get connections(): number {
    return this.#sessions.size;
  }

  /** How many scripted streams are open. */
  get streams(): number {
    return this.#streams;
  }

  /** Say what runs of an agent do; forks of these runs continue with their script. */
  runs(agent: string, script: Step[]): this {
    this.#agents.set(agent, script);
    return this;
  }

  /** Say what evaluations of a set do, by its name. */
  evaluations(set: string, script: EvaluationStep[]): this {
    this.#sets.set(set, script);
    return this;
  }

  /** Cut every connection and stop. */
  async close(): Promise<void> {
    const closed = once(this.#server, "close");
    this.#server.close();
    this.#sessions.forEach((session) => session.destroy());
    await closed;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #routes(router: ConnectRouter): void {
    router.service(Health, { check: () => ({ status: ServingStatus.SERVING }) });
    router.service(AgentService, {
      run: (request, context) => {
        this.#note("Run", request, context);
        const log = this.#accepted(request.requestId, "run", this.#agents.get(request.agent));
        return this.#follow<AgentEvent>(log, 0n, WatchUntil.INTERRUPTED, context);
      },
      watchRun: (request, context) => {
        this.#note("WatchRun", request, context);
        return this.#follow<AgentEvent>(this.#log(request.runId), request.afterSequence, request.until, context);
      },
      resumeRun: (request, context) => {
        this.#note("ResumeRun", request, context);
        const log = this.#log(request.runId);
        const from = log.resume(request.requestId);
        return this.#follow<AgentEvent>(log, request.afterSequence ?? from, WatchUntil.INTERRUPTED, context);
      },
      forkRun: (request, context) => {
        this.#note("ForkRun", request, context);
        const log = this.#accepted(request.requestId, "run", this.#log(request.runId).script);
        return this.#follow<AgentEvent>(log, request.afterSequence, WatchUntil.INTERRUPTED, context);
      },
    });
    router.service(EvalService, {
      evaluate: (request, context) => {
        this.#note("Evaluate", request, context);
        const script = this.#sets.get(request.evalSet?.name ?? "");
        const log = this.#accepted(request.requestId, "evaluation", script);
        return this.#follow<EvaluationEvent>(log, 0n, WatchUntil.TERMINAL, context);
      },
      watchEvaluation: (request, context) => {
        this.#note("WatchEvaluation", request, context);
        const log = this.#log(request.evaluationId);
        return this.#follow<EvaluationEvent>(log, request.afterSequence, WatchUntil.TERMINAL, context);
      },
    });
  }

  #note(method: string, request: unknown, context: HandlerContext): void {
    this.received.push({ method, request, header: context.requestHeader });
  }

  /** Return the log that a request id began, or begin one. */
  #accepted(requestId: string, kind: Kind, script: readonly object[] | undefined): Log {
    const known = [...this.#logs.values()].find((log) => requestId && log.requestId === requestId);
    if (known) {
      return known;
    }
    if (script === undefined) {
      throw notFound(`The fake has no script for this ${kind}.`);
    }
    const log = new Log(`${kind}-${this.#logs.size + 1}`, kind, requestId, script);
    this.#logs.set(log.id, log);
    return log;
  }

  #log(id: string): Log {
    const log = this.#logs.get(id);
    if (log === undefined) {
      throw notFound(`The fake has no ${JSON.stringify(id)}.`);
    }
    return log;
  }

  /** Yield the responses of a stream of these events, which are those of the log. */
  async *#follow<Event>(log: Log, after: bigint, until: WatchUntil, context: HandlerContext) {
    context.responseHeader.set(`bough-${log.kind}-id`, log.id);
    this.#streams += 1;
    const left = once(context.signal, "abort");
    void left.then(() => (this.#streams -= 1));
    for await (const step of log.follow(after, until, left)) {
      if ("drop" in step) {
        await cut(context.values.get(HTTP2_STREAM));
        return;
      }
      if ("fail" in step) {
        throw failure(step);
      }
      const events = "event" in step ? [step.event as Event] : [];
      yield { batch: { events, throughSequence: "event" in step ? step.event.sequence : step.through } };
    }
  }
}

type Kind = "run" | "evaluation";

type Recorded = Drop | Failure | Through | { event: AgentEvent | EvaluationEvent };

/** The log of a run or of an evaluation: its script, how far it may go, and which drops are behind it. */
class Log {
  readonly #steps: Recorded[] = [];
  readonly #spent = new Set<Recorded>();
  readonly #interruptions: bigint[] = [];
  readonly #resumes: string[] = [];
  #resumed: () => void = () => {};
  #change = this.#nextResume();

  constructor(
    readonly id: string,
    readonly kind: Kind,
    readonly requestId: string,
    readonly script: readonly object[],
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
        }
      }
    }
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

/** Cut the connection of a stream; what was written before is delivered. */
async function cut(stream: http2.ServerHttp2Stream | undefined): Promise<void> {
  const session = stream?.session;
  if (stream?.headersSent) {
    stream.end();
    await once(stream, "close");
  }
  session?.destroy();
}

function notFound(message: string): ConnectError {
  return failure({ fail: Code.NotFound, reason: "NOT_FOUND", message });
}

function failure({ fail, reason = "", message = "The script says so." }: Failure): ConnectError {
  const details = reason ? [{ desc: ErrorInfoSchema, value: { reason, domain: "bough.dev" } }] : [];
  return new ConnectError(message, fail, undefined, details);
}
