// Starts a run that asks for answers, leaves every stream after some events and rejoins, answers, prints the tree, and reads an
// error.
//
// Written from clients/README.md and the documentation of Connect, in the folder in which the page was followed.
import { randomUUID } from "node:crypto";
import { type CallOptions, ConnectError, createClient } from "@connectrpc/connect";
import { Http2SessionManager, createGrpcTransport } from "@connectrpc/connect-node";
import { type MessageInitShape, create } from "@bufbuild/protobuf";
import { AgentService, type WatchRunResponse } from "./gen/bough/v1/agent_service_pb.js";
import { EvalService } from "./gen/bough/v1/eval_service_pb.js";
import type { AgentEvent } from "./gen/bough/v1/event_pb.js";
import { ExecutionState } from "./gen/bough/v1/execution_pb.js";
import { WatchUntil } from "./gen/bough/v1/follow_pb.js";
import { InputAnswerSchema, InputKind, type InputRequest } from "./gen/bough/v1/input_pb.js";
import { MessageSchema } from "./gen/bough/v1/message_pb.js";
import { BadRequestSchema, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";

/** How many events are read before a stream is left. */
const PATIENCE = 7;

/** Makes a call that ends when the signal aborts. */
type Call = (options: CallOptions) => AsyncIterable<Pick<WatchRunResponse, "batch">>;

const baseUrl = `http://${process.argv[2]}`;
const sessionManager = new Http2SessionManager(baseUrl);
const transport = createGrpcTransport({ baseUrl, sessionManager });
const agents = createClient(AgentService, transport);

let runId = "";
let through = 0n;
let open: InputRequest[] = [];
let ended = false;

function text(words: string) {
  return create(MessageSchema, { parts: [{ content: { case: "text", value: words } }] });
}

function take(event: AgentEvent): void {
  console.log("event", String(event.sequence));
  runId = event.runId;
  const { case: kind, value } = event.payload;
  if (kind === "runInterrupted") open = value.requests;
  if (kind === "runCompleted" || kind === "runFailed" || kind === "runCancelled") ended = true;
}

/** Reads until the stream ends, or until it is left; tells which. */
async function read(call: Call): Promise<boolean> {
  const leave = new AbortController();
  let count = 0;
  try {
    for await (const { batch } of call({ signal: leave.signal })) {
      for (const event of batch?.events ?? []) {
        count++;
        take(event);
      }
      if (batch && batch.throughSequence > through) through = batch.throughSequence;
      if (count >= PATIENCE) return true;
    }
    return false;
  } finally {
    leave.abort(); // leaving the loop alone does not end the call
  }
}

/** Reads a stream, and rejoins by the last sequence whenever it was left, up to the next interruption or the end. */
async function follow(call: Call): Promise<void> {
  while ((await read(call)) && !ended && open.length === 0) {
    call = (options) => agents.watchRun({ runId, afterSequence: through, until: WatchUntil.INTERRUPTED }, options);
  }
}

function answerTo(request: InputRequest): MessageInitShape<typeof InputAnswerSchema> {
  const inputId = request.inputId;
  console.log("answered", InputKind[request.kind]?.toLowerCase());
  switch (request.kind) {
    case InputKind.APPROVAL:
      return { inputId, answer: { case: "approval", value: { approved: true } } };
    case InputKind.QUESTION:
      return { inputId, answer: { case: "valueJson", value: JSON.stringify("it does not fit") } };
    case InputKind.CLIENT_TOOL:
      return { inputId, answer: { case: "toolOutcome", value: { parts: text("4711").parts } } };
    default:
      throw new Error(`no answer to ${InputKind[request.kind]}`);
  }
}

const request = {
  requestId: randomUUID(),
  agent: "lead",
  input: text("Orders 1001 and 1002 come back."),
  policy: { background: true },
};
await follow((options) => agents.run(request, options));
while (!ended) {
  const names = (request: InputRequest) => InputKind[request.kind] ?? "";
  const answers = open.sort((a, b) => names(a).localeCompare(names(b))).map(answerTo);
  open = [];
  const answering = { runId, requestId: randomUUID(), answers, afterSequence: through };
  await follow((options) => agents.resumeRun(answering, options));
}

const { invocation } = await createClient(EvalService, transport).getInvocation({ runId });
for (const agent of invocation?.agents ?? []) {
  console.log(`agent ${"  ".repeat(agent.depth)}${agent.name} ${ExecutionState[agent.state]}`);
}

try {
  await read((options) => agents.run({ input: text("hi") }, options));
} catch (error) {
  const failure = ConnectError.from(error);
  const [info] = failure.findDetails(ErrorInfoSchema);
  const [refused] = failure.findDetails(BadRequestSchema);
  console.log("error", info?.reason, refused?.fieldViolations[0]?.field);
}
sessionManager.abort(); // else the connection of an aborted call can keep the process alive
