/** The driver of tests/contract: performs the calls that it reads, and prints what the client got. See README.md there. */
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import {
  createRegistry,
  type DescEnum,
  type DescMessage,
  type DescMethod,
  fromBinary,
  fromJson,
  type JsonObject,
  type JsonValue,
  type Message,
  type Registry,
  toBinary,
  toJson,
} from "@bufbuild/protobuf";
import type { CallOptions } from "@connectrpc/connect";
import { BoughClient, BoughError, type ClientOptions, collect, collectEvaluation, type EventStream, type RunInit, type StreamOptions } from "@bough-dev/bough";
import * as v1 from "@bough-dev/bough/v1";

interface Line {
  call?: string;
  request?: JsonObject;
  timeoutSeconds?: number;
  cancelAfterEvents?: number;
  rejoin?: boolean;
  collect?: boolean;
  tree?: string;
  transcode?: string;
  binary?: string;
  json?: JsonObject;
}

type AnyStream = EventStream<v1.AgentEvent> | EventStream<v1.EvaluationEvent>;

const services = [v1.AccessService, v1.AgentService, v1.EvalService, v1.CatalogService, v1.SessionService, v1.UsageService];
const files = Object.entries(v1).flatMap(([name, value]) => (name.startsWith("file_bough_v1_") ? [value] : []));
const registry: Registry = createRegistry(...(files as Parameters<typeof createRegistry>));

async function main(): Promise<number> {
  const address = process.argv[2];
  if (address === undefined) {
    return misuse("usage: driver ADDRESS");
  }
  using client = new BoughClient(address, connectionOptions());
  for await (const text of createInterface({ input: process.stdin })) {
    try {
      await perform(client, JSON.parse(text) as Line);
    } catch (error) {
      return misuse(`cannot perform ${text}: ${String(error)}`);
    }
  }
  return 0;
}

/** Return what the environment says of TLS and of a token. */
function connectionOptions(): ClientOptions {
  const { DRIVER_CA_FILE: authorities, DRIVER_CERT_FILE: cert, DRIVER_KEY_FILE: key, DRIVER_TOKEN: fixed, DRIVER_TOKEN_FILE: file } = process.env;
  const token = file === undefined ? fixed : () => readFileSync(file, "utf8");
  const own = cert === undefined || key === undefined ? {} : { cert: readFileSync(cert), key: readFileSync(key) };
  return {
    ...(authorities !== undefined && { tls: { ca: readFileSync(authorities), ...own } }),
    ...(token !== undefined && { token }),
  };
}

async function perform(client: BoughClient, line: Line): Promise<void> {
  if (line.transcode !== undefined) {
    print({ transcoded: transcoded(line, messageType(line.transcode)) });
    return;
  }
  const abort = new AbortController();
  const timeout = line.timeoutSeconds === undefined ? {} : { timeoutMs: line.timeoutSeconds * 1000 };
  const options: StreamOptions = {
    ...timeout,
    signal: abort.signal,
    ...(line.rejoin === false && { rejoining: { timeoutMs: 0 } }),
  };
  const stream = line.tree === undefined ? startStream(client, line, options) : undefined;
  try {
    if (line.tree !== undefined) {
      print({ answer: { agents: await treeOf(client, line.tree, timeout) } });
    } else if (stream && line.collect) {
      print({ answer: await collected(stream, line.call) });
    } else if (stream) {
      await printEvents(stream, () => abort.abort(), line.cancelAfterEvents);
    } else {
      await printAnswers(client, line, { ...timeout, signal: abort.signal });
    }
    print({ end: { code: "OK", rejoins: stream?.rejoins ?? 0 } });
  } catch (error) {
    if (!(error instanceof BoughError)) {
      throw error;
    }
    const { codeName: code, message, reason, metadata, violations } = error;
    const details = { message, reason, metadata, violations: violations.map((violation) => ({ ...violation })) };
    print({ end: { code, rejoins: stream?.rejoins ?? 0, ...details } });
  }
}

function startStream(client: BoughClient, { call, request }: Line, options: StreamOptions): AnyStream | undefined {
  const read = <Schema extends DescMessage>(schema: Schema) => fromJson(schema, request ?? {});
  switch (call) {
    case "AgentService.Run": {
      // A request without an input is for the server to refuse.
      return client.run(read(v1.RunRequestSchema) as RunInit, options);
    }
    case "AgentService.WatchRun":
      return client.watch(read(v1.WatchRunRequestSchema), options);
    case "AgentService.ResumeRun":
      return client.resume(read(v1.ResumeRunRequestSchema), options);
    case "AgentService.ForkRun":
      return client.fork(read(v1.ForkRunRequestSchema), options);
    case "EvalService.Evaluate":
      return client.evaluate(read(v1.EvaluateRequestSchema), options);
    case "EvalService.WatchEvaluation":
      return client.watchEvaluation(read(v1.WatchEvaluationRequestSchema), options);
    default:
      return undefined;
  }
}

async function printEvents(stream: AnyStream, cancel: () => void, cancelAfter = Infinity): Promise<void> {
  let count = 0;
  for await (const event of stream as AsyncIterable<v1.AgentEvent | v1.EvaluationEvent>) {
    print({ event: json(event) });
    count += 1;
    if (count === cancelAfter) {
      cancel();
    }
  }
}

async function collected(stream: AnyStream, call = ""): Promise<JsonObject> {
  if (call.startsWith("EvalService")) {
    const { evaluationId, state, verdict, totals, gates, throughSequence } = await collectEvaluation(
      stream as EventStream<v1.EvaluationEvent>,
    );
    const names = { state: nameOf(v1.ExecutionStateSchema, state), verdict: nameOf(v1.VerdictSchema, verdict) };
    const counts = { cases: totals?.cases ?? 0, gates: gates.length };
    return { evaluationId, ...names, ...counts, throughSequence: String(throughSequence) };
  }
  const { text, state, interrupted, runId, throughSequence } = await collect(stream as EventStream<v1.AgentEvent>);
  const name = nameOf(v1.ExecutionStateSchema, state);
  return { text, state: name, interrupted, runId, throughSequence: String(throughSequence) };
}

function nameOf(schema: DescEnum, number: number): string {
  return schema.value[number]?.name ?? "";
}

async function treeOf(client: BoughClient, runId: string, options: CallOptions): Promise<JsonValue[]> {
  const tree = await client.tree({ runId }, options);
  return Array.from(tree, (agent) => ({
    agent: agent.name,
    path: tree
      .path(agent)
      .map(({ name }) => name)
      .join("/"),
    depth: agent.depth,
    state: nameOf(v1.ExecutionStateSchema, agent.state),
  }));
}

/** Perform a call through the generated client. */
async function printAnswers(client: BoughClient, line: Line, options: CallOptions): Promise<void> {
  const [service, method] = methodOf(line.call);
  const clients: Record<string, object> = {
    AgentService: client.agents,
    EvalService: client.evals,
    CatalogService: client.catalog,
    SessionService: client.sessions,
    AccessService: client.access,
    UsageService: client.usage,
  };
  const calls = clients[service] as Record<string, (request: unknown, options: object) => unknown>;
  const message = fromJson(method.input, line.request ?? {});
  const isStreamOfRequests = method.methodKind === "client_streaming";
  const answer = calls[method.localName]?.(isStreamOfRequests ? only(message) : message, options);
  if (method.methodKind === "server_streaming") {
    for await (const response of answer as AsyncIterable<Message>) {
      print({ answer: json(response) });
    }
  } else {
    print({ answer: json((await answer) as Message) });
  }
}

async function* only(message: Message): AsyncGenerator<Message> {
  yield message;
}

function methodOf(call = ""): [string, DescMethod] {
  const [serviceName = "", methodName] = call.split(".");
  const methods = services.find(({ name }) => name === serviceName)?.methods as DescMethod[] | undefined;
  const method = methods?.find(({ name }) => name === methodName);
  if (method === undefined) {
    throw new TypeError(`there is no call ${JSON.stringify(call)}`);
  }
  return [serviceName, method];
}

function messageType(name: string): DescMessage {
  const type = registry.getMessage(name);
  if (type === undefined) {
    throw new TypeError(`there is no message ${name}`);
  }
  return type;
}

function transcoded({ binary, json: document }: Line, type: DescMessage): JsonObject {
  const message =
    binary === undefined ? fromJson(type, document ?? {}) : fromBinary(type, Buffer.from(binary, "base64"));
  return {
    binary: Buffer.from(toBinary(type, message)).toString("base64"),
    json: toJson(type, message, { registry }),
  };
}

function json(message: Message): JsonValue {
  return toJson(messageType(message.$typeName), message, { registry });
}

function print(line: JsonObject): void {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

function misuse(message: string): number {
  process.stderr.write(`${message}\n`);
  // Else the process would stay as long as its input does.
  process.stdin.destroy();
  return 2;
}

process.exitCode = await main();
