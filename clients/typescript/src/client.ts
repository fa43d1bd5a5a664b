import { randomUUID } from "node:crypto";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import type { CallOptions, Client } from "@connectrpc/connect";
import {
  AccessService,
  type AgentEvent,
  AgentService,
  CatalogService,
  EvalService,
  EvaluateRequestSchema,
  type EvaluationEvent,
  ForkRunRequestSchema,
  type GetInvocationRequestSchema,
  InvocationSchema,
  ResumeRunRequestSchema,
  RunRequestSchema,
  SessionService,
  UsageService,
  WatchEvaluationRequestSchema,
  WatchRunRequestSchema,
} from "./bough/v1/index.js";
import { serviceClient } from "./calls.js";
import { Health, type HealthCheckResponse_ServingStatus as ServingStatus } from "./grpc/health/v1/health_pb.js";
import { type UserInput, userMessage } from "./messages.js";
import { EvaluationPosition, type Position, RunPosition, type RunStart } from "./position.js";
import { Backoff, type Contact, given, type Rejoining } from "./rejoining.js";
import { EventStream } from "./stream.js";
import { type ConnectionOptions, connect } from "./transport.js";
import { AgentTree } from "./tree.js";

/** Options of a client. */
export interface ClientOptions extends ConnectionOptions {
  /** Default of a stream's `timeoutMs`: 600,000; 0 for none. Evaluations have none by default. */
  timeoutMs?: number;
  /** Default of any other call's `timeoutMs`: 10,000; 0 for none. */
  callTimeoutMs?: number;
  /** How streams rejoin after a dropped connection. */
  rejoining?: Rejoining;
}

/** Options of a stream. */
export interface StreamOptions {
  /** Ends the stream with a {@link BoughError} of the code Canceled. What it follows continues. */
  signal?: AbortSignal;
  /** Bounds the whole stream, over all rejoins. The run of `client.run` ends then too, unless its policy says `background`. */
  timeoutMs?: number;
  /** How this stream rejoins; what is not set is taken from the client. */
  rejoining?: Rejoining;
}

/** Request of `client.run`: the agent, the user's input, and what else a RunRequest has. */
export type RunInit = Omit<MessageInitShape<typeof RunRequestSchema>, "$typeName" | "agent" | "input"> & {
  agent: string;
  input: UserInput;
};

/**
 * A client of one Bough server.
 *
 * `run`, `watch`, `resume`, `fork`, `evaluate` and `watchEvaluation` return streams that rejoin. Every other call is a
 * method of the generated clients; they throw {@link BoughError}s as well. The connection is opened by the first call.
 */
export class BoughClient implements Disposable {
  /** AgentService: runs. Its own streams do not rejoin. */
  readonly agents: Client<typeof AgentService>;
  /** EvalService: trees and evaluations. Its own streams do not rejoin. */
  readonly evals: Client<typeof EvalService>;
  /** CatalogService: agents, tools and models. */
  readonly catalog: Client<typeof CatalogService>;
  /** SessionService: conversations, their state and their files. */
  readonly sessions: Client<typeof SessionService>;
  /** AccessService: who calls. */
  readonly access: Client<typeof AccessService>;
  /** UsageService: what was used and charged, and accounts. */
  readonly usage: Client<typeof UsageService>;

  readonly #health: Client<typeof Health>;
  readonly #contact: Contact = { isMade: false };
  readonly #close: () => void;

  /** Make a client of the server at HOST:PORT. */
  constructor(
    readonly address = "127.0.0.1:50051",
    private readonly options: ClientOptions = {},
  ) {
    const { transport, close } = connect(address, options);
    this.#close = close;
    const { callTimeoutMs = 10_000, timeoutMs = 600_000 } = options;
    const defaults = { callTimeoutMs, timeoutMs, contact: this.#contact };
    this.agents = serviceClient(AgentService, transport, defaults);
    this.evals = serviceClient(EvalService, transport, defaults);
    this.catalog = serviceClient(CatalogService, transport, defaults);
    this.sessions = serviceClient(SessionService, transport, defaults);
    this.access = serviceClient(AccessService, transport, defaults);
    this.usage = serviceClient(UsageService, transport, defaults);
    this.#health = serviceClient(Health, transport, defaults);
  }

  /** Close the connection; calls in flight end. */
  close(): void {
    this.#close();
  }

  [Symbol.dispose](): void {
    this.close();
  }

  /** Start a run and follow it to its end or to its first interruption. Default: a new request id. */
  run(request: RunInit, options: StreamOptions = {}): EventStream<AgentEvent> {
    const message = create(RunRequestSchema, { ...withRequestId(request), input: request.input === undefined ? request.input : userMessage(request.input) });
    return this.#follow({ method: "run", request: message }, options);
  }

  /** Answer input requests of a run and follow it to its end or to its next interruption. Default: a new request id. */
  resume(request: MessageInitShape<typeof ResumeRunRequestSchema>, options: StreamOptions = {}): EventStream<AgentEvent> {
    return this.#follow({ method: "resumeRun", request: create(ResumeRunRequestSchema, withRequestId(request)) }, options);
  }

  /** Start a run that shares another run's log up to a sequence, and follow it from there. Default: a new request id. */
  fork(request: MessageInitShape<typeof ForkRunRequestSchema>, options: StreamOptions = {}): EventStream<AgentEvent> {
    return this.#follow({ method: "forkRun", request: create(ForkRunRequestSchema, withRequestId(request)) }, options);
  }

  /**
   * Follow a run, live or ended, after a sequence, to the end that `until` names. Default: to the run's last event.
   *
   * With `WatchUntil.INTERRUPTED` it ends at the interruption at which the run waits. It passes those that were answered
   * before it was called, such as the ones that a fork shares with its origin, at which the server's stream would end. If
   * `afterSequence` is the interruption at which the run waits, it ends at once, where the server's stream would wait for
   * the next one.
   */
  watch(request: MessageInitShape<typeof WatchRunRequestSchema>, options: StreamOptions = {}): EventStream<AgentEvent> {
    return this.#follow({ method: "watchRun", request: create(WatchRunRequestSchema, request) }, options);
  }

  /** Start an evaluation and follow it to its end. Default: a new request id. */
  evaluate(request: MessageInitShape<typeof EvaluateRequestSchema>, options: StreamOptions = {}): EventStream<EvaluationEvent> {
    const message = create(EvaluateRequestSchema, withRequestId(request));
    const position = new EvaluationPosition(this.evals, { method: "evaluate", request: message });
    return this.#stream(position, message.requestId, { ...options, timeoutMs: options.timeoutMs ?? 0 });
  }

  /** Follow an evaluation, live or ended, after a sequence. */
  watchEvaluation(
    request: MessageInitShape<typeof WatchEvaluationRequestSchema>,
    options: StreamOptions = {},
  ): EventStream<EvaluationEvent> {
    const message = create(WatchEvaluationRequestSchema, request);
    const position = new EvaluationPosition(this.evals, { method: "watchEvaluation", request: message });
    return this.#stream(position, "", { ...options, timeoutMs: options.timeoutMs ?? 0 });
  }

  /** Return the tree of a run's agents, with its whole record: of the log up to a sequence if one is given. */
  async tree(request: MessageInitShape<typeof GetInvocationRequestSchema>, options?: CallOptions): Promise<AgentTree> {
    const { invocation } = await this.evals.getInvocation(request, options);
    return new AgentTree(invocation ?? create(InvocationSchema));
  }

  /** Return the health of a service, such as `bough.v1.AgentService`; default: of the whole server. */
  async health(service = "", options?: CallOptions): Promise<ServingStatus> {
    return (await this.#health.check({ service }, options)).status;
  }

  #follow(start: RunStart, options: StreamOptions): EventStream<AgentEvent> {
    const requestId = start.method === "watchRun" ? "" : start.request.requestId;
    return this.#stream(new RunPosition(this.agents, start), requestId, options);
  }

  #stream<Event extends { sequence: bigint }>(
    position: Position<Event>,
    requestId: string,
    { signal, timeoutMs = this.options.timeoutMs ?? 600_000, rejoining }: StreamOptions,
  ): EventStream<Event> {
    const backoff = () => new Backoff({ ...this.options.rejoining, ...given(rejoining ?? {}) }, this.#contact, timeoutMs);
    return new EventStream(position, backoff, requestId, signal);
  }
}

/** Return a request that has a request id, under which a repeated call has no second effect. */
function withRequestId<Request extends { requestId?: string | undefined }>(request: Request): Request {
  return { ...request, requestId: request.requestId || randomUUID() };
}
