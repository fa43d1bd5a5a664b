import { randomUUID } from "node:crypto";
import { create, type DescService, type MessageInitShape } from "@bufbuild/protobuf";
import { type CallOptions, type Client, createClient, makeAnyClient, type Transport } from "@connectrpc/connect";
import {
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
  WatchEvaluationRequestSchema,
  WatchRunRequestSchema,
} from "./bough/v1/index.js";
import { aborted, boughError } from "./errors.js";
import { Health, type HealthCheckResponse_ServingStatus as ServingStatus } from "./grpc/health/v1/health_pb.js";
import { type UserInput, userMessage } from "./messages.js";
import { EvaluationPosition, type Position, RunPosition, type RunStart } from "./position.js";
import { Backoff, type Contact, type Rejoining } from "./rejoining.js";
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
    this.agents = this.#client(AgentService, transport);
    this.evals = this.#client(EvalService, transport);
    this.catalog = this.#client(CatalogService, transport);
    this.sessions = this.#client(SessionService, transport);
    this.#health = this.#client(Health, transport);
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

  /** Follow a run, live or ended, after a sequence. */
  watch(request: MessageInitShape<typeof WatchRunRequestSchema>, options: StreamOptions = {}): EventStream<AgentEvent> {
    return this.#follow({ method: "watchRun", request: create(WatchRunRequestSchema, request) }, options);
  }

  /** Start an evaluation and follow it to its end. Default: a new request id. */
  evaluate(request: MessageInitShape<typeof EvaluateRequestSchema>, options: StreamOptions = {}): EventStream<EvaluationEvent> {
    const message = create(EvaluateRequestSchema, withRequestId(request));
    const position = new EvaluationPosition(this.evals, { method: "evaluate", request: message });
    return this.#stream(position, message.requestId, { timeoutMs: 0, ...options });
  }

  /** Follow an evaluation, live or ended, after a sequence. */
  watchEvaluation(
    request: MessageInitShape<typeof WatchEvaluationRequestSchema>,
    options: StreamOptions = {},
  ): EventStream<EvaluationEvent> {
    const message = create(WatchEvaluationRequestSchema, request);
    const position = new EvaluationPosition(this.evals, { method: "watchEvaluation", request: message });
    return this.#stream(position, "", { timeoutMs: 0, ...options });
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
    const backoff = () => new Backoff({ ...this.options.rejoining, ...rejoining }, this.#contact, timeoutMs);
    return new EventStream(position, backoff, requestId, signal);
  }

  /** Return the generated client of a service, which throws BoughErrors and has the default timeouts. */
  #client<Service extends DescService>(service: Service, transport: Transport): Client<Service> {
    const generated = createClient(service, transport) as Record<string, (...call: unknown[]) => unknown>;
    const { callTimeoutMs = 10_000, timeoutMs = 600_000 } = this.options;
    return makeAnyClient(service, (method) => {
      const isUnary = method.methodKind === "unary";
      const call = (request: unknown, options?: CallOptions) =>
        generated[method.localName]?.(request, { timeoutMs: isUnary ? callTimeoutMs : timeoutMs, ...options });
      return method.methodKind === "server_streaming"
        ? (request: unknown, options?: CallOptions) =>
            this.#responses((signal) => call(request, { ...options, signal }), options?.signal)
        : (request: unknown, options?: CallOptions) => this.#answer(call(request, options), options?.signal);
    }) as Client<Service>;
  }

  async #answer(response: unknown, signal: AbortSignal | undefined): Promise<unknown> {
    try {
      const answer = await response;
      this.#contact.isMade = true;
      return answer;
    } catch (error) {
      throw signal?.aborted ? aborted(signal.reason) : boughError(error);
    }
  }

  async *#responses(call: (signal: AbortSignal) => unknown, signal?: AbortSignal): AsyncGenerator<unknown> {
    const leaving = new AbortController();
    const either = signal ? AbortSignal.any([signal, leaving.signal]) : leaving.signal;
    const responses = (call(either) as AsyncIterable<unknown>)[Symbol.asyncIterator]();
    try {
      for (let next = await responses.next(); !next.done; next = await responses.next()) {
        this.#contact.isMade = true;
        yield next.value;
      }
    } catch (error) {
      throw signal?.aborted ? aborted(signal.reason) : boughError(error);
    } finally {
      // Connect ends a call that is left, and clears the timer of its deadline, when a read after the abort fails.
      leaving.abort();
      await responses.next().catch(() => {});
    }
  }
}

/** Return a request that has a request id, under which a repeated call has no second effect. */
function withRequestId<Request extends { requestId?: string | undefined }>(request: Request): Request {
  return { ...request, requestId: request.requestId || randomUUID() };
}
