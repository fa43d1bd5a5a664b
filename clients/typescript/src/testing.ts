/** A fake of Bough for tests of programs that use the client: it plays scripts, and no Bough is needed. */
import { once } from "node:events";
import * as http2 from "node:http2";
import type { AddressInfo } from "node:net";
import { create, type DescMethod, type DescService, type MessageInitShape } from "@bufbuild/protobuf";
import {
  Code,
  type ConnectRouter,
  createContextKey,
  createContextValues,
  type HandlerContext,
  type ServiceImpl,
} from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import {
  AccessService,
  type AgentEvent,
  AgentService,
  type CaseResult,
  type CaseResultFilter,
  CaseResultSchema,
  CatalogService,
  ErrorReason,
  EvalService,
  type EvaluationEvent,
  type InvocationSchema,
  SessionService,
  UsageService,
  WatchUntil,
} from "./bough/v1/index.js";
import { collect, collectEvaluation } from "./collect.js";
import { Health, HealthCheckResponse_ServingStatus as ServingStatus } from "./grpc/health/v1/health_pb.js";
import { type EvaluationStep, failure, type Kind, Log, type Step } from "./script.js";

export type { Drop, EvaluationStep, Failure, Step, Through } from "./script.js";

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
  /** Answers methods that have no script, or in place of their scripts. */
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

/** The implementation of a method, of any kind. */
type Answer = (request: unknown, context: HandlerContext) => unknown;

/** The HTTP/2 stream of a call. */
const HTTP2_STREAM = createContextKey<http2.ServerHttp2Stream | undefined>(undefined);

/**
 * A fake server on a free port of this machine.
 *
 * `server.runs("lead", script)` says what every run of an agent does. A run follows its script, and stops at each
 * `runInterrupted` until `resumeRun` is called; all streams of the run see the same log, and `getRun` returns what it
 * shows. `evaluations` does the same for evaluations. What is not scripted is UNIMPLEMENTED, and the error says how to
 * script it.
 */
export class FakeBough implements AsyncDisposable {
  /** Every request so far, in order. */
  readonly received: Received[] = [];
  readonly #agents = new Map<string, Step[]>();
  readonly #trees = new Map<string, MessageInitShape<typeof InvocationSchema>>();
  readonly #cases = new Map<string, MessageInitShape<typeof CaseResultSchema>[]>();
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

  /**
   * Say what `getInvocation` returns of runs of an agent, forks included: the agents in preorder and their tool calls.
   *
   * The fake sets the run, its session, its agent, its state and its answer.
   */
  trees(agent: string, tree: MessageInitShape<typeof InvocationSchema>): this {
    this.#trees.set(agent, tree);
    return this;
  }

  /** Say what evaluations of a set do, by its name. */
  evaluations(set: string, script: EvaluationStep[]): this {
    this.#sets.set(set, script);
    return this;
  }

  /** Say which cases `listCaseResults` returns of evaluations of a set. */
  cases(set: string, cases: MessageInitShape<typeof CaseResultSchema>[]): this {
    this.#cases.set(set, cases);
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
    this.#service(router, AgentService, this.#agentMethods());
    this.#service(router, EvalService, this.#evalMethods());
    this.#service(router, CatalogService, {});
    this.#service(router, SessionService, {});
    this.#service(router, AccessService, {});
    this.#service(router, UsageService, {});
  }

  /** Add a service whose other methods say how they are scripted, and note what it receives. */
  #service<Service extends DescService>(
    router: ConnectRouter,
    service: Service,
    scripted: Partial<ServiceImpl<Service>>,
  ): void {
    const answers = scripted as Record<string, Answer | undefined>;
    const methods = service.methods.map((method) => {
      const answer = answers[method.localName] ?? (() => unscripted(method));
      const noting: Answer = (request, context) => {
        this.received.push({ method: method.name, request, header: context.requestHeader });
        return answer(request, context);
      };
      return [method.localName, noting];
    });
    router.service(service, Object.fromEntries(methods) as Partial<ServiceImpl<Service>>);
  }

  #agentMethods(): Partial<ServiceImpl<typeof AgentService>> {
    return {
      run: ({ agent, requestId }, context) => {
        const log = this.#started(requestId) ?? this.#begin("run", agent, requestId, this.#scriptOf(agent));
        return this.#follow<AgentEvent>(log, 0n, WatchUntil.INTERRUPTED, context);
      },
      watchRun: ({ runId, afterSequence, until }, context) =>
        this.#follow<AgentEvent>(this.#log(runId), afterSequence, until, context),
      resumeRun: ({ runId, requestId, afterSequence }, context) => {
        const log = this.#log(runId);
        const from = log.resume(requestId);
        return this.#follow<AgentEvent>(log, afterSequence ?? from, WatchUntil.INTERRUPTED, context);
      },
      forkRun: ({ runId, requestId, afterSequence }, context) => {
        const { name, script } = this.#log(runId);
        const log = this.#started(requestId) ?? this.#begin("run", name, requestId, script, afterSequence);
        return this.#follow<AgentEvent>(log, afterSequence, WatchUntil.INTERRUPTED, context);
      },
      cancelRun: async ({ runId }) => {
        const error = { reason: ErrorReason.CANCELLED, message: "The run was cancelled." };
        this.#log(runId).end({ payload: { case: "runCancelled", value: { error } } });
        return { run: (await this.#run(runId)).run };
      },
      getRun: ({ runId }) => this.#run(runId),
    };
  }

  #evalMethods(): Partial<ServiceImpl<typeof EvalService>> {
    return {
      getInvocation: async ({ runId, asOfSequence }) => {
        const { run, finalAnswer } = await this.#run(runId);
        const tree =
          this.#trees.get(run.agent) ?? missing(`No tree of runs of "${run.agent}" is scripted: call trees.`);
        const { sessionId, agent, state, error, lastSequence } = run;
        const covered = { state, error, finalResponse: finalAnswer, asOfSequence: asOfSequence || lastSequence };
        return { invocation: { ...tree, runId, sessionId, agent, ...covered } };
      },
      evaluate: ({ evalSet, requestId }, context) => {
        const name = evalSet?.name ?? "";
        const script = this.#sets.get(name) ?? missing(`No evaluation of "${name}" is scripted: call evaluations.`);
        const log = this.#started(requestId) ?? this.#begin("evaluation", name, requestId, script);
        return this.#follow<EvaluationEvent>(log, 0n, WatchUntil.TERMINAL, context);
      },
      watchEvaluation: ({ evaluationId, afterSequence }, context) =>
        this.#follow<EvaluationEvent>(this.#log(evaluationId), afterSequence, WatchUntil.TERMINAL, context),
      getEvaluation: ({ evaluationId }) => this.#evaluation(evaluationId),
      listCaseResults: ({ evaluationId, pageSize, pageToken, filter }) => {
        const scripted = this.#cases.get(this.#log(evaluationId).name) ?? [];
        const cases = scripted.map((init) => create(CaseResultSchema, init)).filter((result) => matches(result, filter));
        const begin = Number(pageToken);
        const end = pageSize ? begin + pageSize : cases.length;
        return { cases: cases.slice(begin, end), nextPageToken: end < cases.length ? String(end) : "" };
      },
      cancelEvaluation: async ({ evaluationId, note }) => {
        const error = { reason: ErrorReason.CANCELLED, message: "The evaluation was cancelled." };
        const requested = { payload: { case: "evaluationCancelRequested", value: { note } } };
        this.#log(evaluationId).end(requested, { payload: { case: "evaluationCancelled", value: { error } } });
        return { evaluation: (await this.#evaluation(evaluationId)).evaluation };
      },
    };
  }

  /** Return a run as its log shows it. */
  async #run(id: string) {
    const { name, events } = this.#log(id);
    const { runId, sessionId, state, error, message, openRequests, throughSequence } = await collect(
      each(events as AgentEvent[]),
    );
    return {
      run: { runId, sessionId, agent: name, state, error, openRequests, lastSequence: throughSequence },
      finalAnswer: message,
    };
  }

  /** Return an evaluation as its log shows it, and its result without cases. */
  async #evaluation(id: string) {
    const { name, events } = this.#log(id);
    const { evaluationId, state, verdict, reason, totals, gates, error, throughSequence } = await collectEvaluation(
      each(events as EvaluationEvent[]),
    );
    return {
      evaluation: { evaluationId, evalSetName: name, state, error, verdict, totals, lastSequence: throughSequence },
      result: { evaluationId, evalSetName: name, state, error, verdict, totals, gates, reason },
    };
  }

  #scriptOf(agent: string): Step[] {
    const script = this.#agents.get(agent);
    if (script === undefined) {
      const message = `There is no agent "${agent}": script it with runs.`;
      throw failure({ fail: Code.NotFound, reason: "UNKNOWN_AGENT", message });
    }
    return script;
  }

  /** Return the log that a request id began. */
  #started(requestId: string): Log | undefined {
    return [...this.#logs.values()].find((log) => requestId && log.requestId === requestId);
  }

  #begin(kind: Kind, name: string, requestId: string, script: readonly object[], shared?: bigint): Log {
    const log = new Log(`${kind}-${this.#logs.size + 1}`, kind, name, requestId, script, shared);
    this.#logs.set(log.id, log);
    return log;
  }

  #log(id: string): Log {
    const log = this.#logs.get(id);
    if (log === undefined) {
      throw failure({ fail: Code.NotFound, reason: "NOT_FOUND", message: `The fake has no ${JSON.stringify(id)}.` });
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

function matches({ caseId, verdict, labels }: CaseResult, filter?: CaseResultFilter): boolean {
  const { verdicts = [], caseIds = [], labels: wanted = {} } = filter ?? {};
  return (
    (!verdicts.length || verdicts.includes(verdict)) &&
    (!caseIds.length || caseIds.includes(caseId)) &&
    Object.entries(wanted).every(([key, value]) => labels[key] === value)
  );
}

async function* each<Item>(items: readonly Item[]): AsyncGenerator<Item> {
  yield* items;
}

function unscripted(method: DescMethod): never {
  const { name: service } = method.parent;
  const answer = `router.rpc(${service}.method.${method.localName}, ...)`;
  return missing(`${service}.${method.name} is not scripted: answer it in routes, by ${answer}.`);
}

function missing(message: string): never {
  throw failure({ fail: Code.Unimplemented, message });
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
