import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import * as net from "node:net";
import { test } from "node:test";
import { create } from "@bufbuild/protobuf";
import { ConnectError, type HandlerContext } from "@connectrpc/connect";
import {
  AgentErrorSchema,
  AgentService,
  EvalService,
  EvalTotalsSchema,
  ExecutionState,
  GateResultSchema,
  InvocationSchema,
  MessageSchema,
  Verdict,
  SessionService,
} from "../src/bough/v1/index.js";
import { BoughClient } from "../src/client.js";
import { collect, collectEvaluation } from "../src/collect.js";
import { BoughError } from "../src/errors.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "../src/google/rpc/error_details_pb.js";
import { approve, Code, refuse, reply, ServingStatus, textOf, toolOutcome } from "../src/index.js";
import { answered, type EvaluationStep, FakeBough } from "../src/testing.js";
import { openSocket } from "../src/transport.js";
import { AgentTree } from "../src/tree.js";

test("an error has the code, the reason and the details that the server sent", async () => {
  const fake = await FakeBough.start({
    routes: (router) =>
      router.rpc(AgentService.method.getRun, () => {
        throw new ConnectError("The session is busy.", Code.Aborted, undefined, [
          { desc: ErrorInfoSchema, value: { reason: "SESSION_BUSY", metadata: { run_id: "run-7" } } },
          { desc: BadRequestSchema, value: { fieldViolations: [{ field: "run_id", description: "is busy", reason: "SESSION_BUSY" }] } },
          { desc: RetryInfoSchema, value: { retryDelay: { seconds: 1n, nanos: 500_000_000 } } },
        ]);
      }),
  });
  const client = new BoughClient(fake.address);
  await assert.rejects(client.agents.getRun({ runId: "run-7" }), (error) => {
    assert.ok(error instanceof BoughError);
    assert.deepEqual(
      { ...error, codeName: error.codeName, message: error.message },
      {
        name: "BoughError",
        message: "The session is busy.",
        code: Code.Aborted,
        codeName: "ABORTED",
        reason: "SESSION_BUSY",
        metadata: { run_id: "run-7" },
        violations: [{ field: "run_id", description: "is busy", reason: "SESSION_BUSY" }],
        retryDelayMs: 1500,
      },
    );
    return true;
  });
  client.close();
  await fake.close();
});

test("every code has the name that gRPC gives it", () => {
  const codes = [Code.Canceled, Code.InvalidArgument, Code.OutOfRange, Code.Internal];
  const codeNames = codes.map((code) => new BoughError("", code).codeName);
  assert.deepEqual(codeNames, ["CANCELLED", "INVALID_ARGUMENT", "OUT_OF_RANGE", "INTERNAL"]);
});

test("a token is sent with every call, and to no other machine in plaintext", async () => {
  const fake = (await FakeBough.start()).runs("lead", answered("yes"));
  let issued = 0;
  const client = new BoughClient(fake.address, { token: async () => `token-${(issued += 1)}` });
  await client.health();
  await collect(client.run({ agent: "lead", input: "?" }));
  assert.equal(fake.received[0]?.header.get("authorization"), "Bearer token-2");
  client.close();
  await fake.close();
  for (const address of ["bough.example:50051", "10.0.0.1:50051", "127.0.0.1.example:50051"]) {
    assert.throws(() => new BoughClient(address, { token: "secret" }), /plaintext/);
    new BoughClient(address, { token: "secret", tls: true }).close();
  }
  for (const address of ["localhost:1", "127.1.2.3:1", "[::1]:1"]) {
    new BoughClient(address, { token: "secret" }).close();
  }
});

const certificate = process.env["BOUGH_TEST_CERTIFICATE"];

test("a token that no header may have is refused, and not shown", async () => {
  const fake = await FakeBough.start();
  for (const token of ["sec\nret", ""]) {
    const client = new BoughClient(fake.address, { token });
    await assert.rejects(client.health(), ({ code, message }: BoughError) => {
      assert.deepEqual([code, message], [Code.Unauthenticated, "The token is empty or has characters that no bearer token has."]);
      return true;
    });
    client.close();
  }
  await fake.close();
});

test("TLS trusts the authorities that it is given, and no others", { skip: certificate === undefined }, async () => {
  const pem = readFileSync(certificate ?? "");
  const fake = await FakeBough.start({ tls: { cert: pem, key: pem } });
  const client = new BoughClient(fake.address, { tls: { ca: pem }, token: "secret" });
  assert.equal(await client.health(), ServingStatus.SERVING);
  client.close();
  const strict = new BoughClient(fake.address, { tls: true });
  await assert.rejects(collect(strict.run({ agent: "lead", input: "?" })), /cannot be reached: .*certificate/);
  strict.close();
  await fake.close();
});

test("an address without a port, or with a scheme, is refused", () => {
  for (const address of ["localhost", "http://localhost:50051", "", "a b:1"]) {
    assert.throws(() => new BoughClient(address), /HOST:PORT/);
  }
});

test("the health of a server is a call", async () => {
  const fake = await FakeBough.start();
  const client = new BoughClient(fake.address);
  assert.equal(await client.health(), ServingStatus.SERVING);
  client.close();
  await fake.close();
});

test("calls that do no harm twice are repeated while the server is unavailable, others are not", async () => {
  const calls: string[] = [];
  const unavailable = (name: string, until: number) => () => {
    calls.push(name);
    if (calls.filter((call) => call === name).length <= until) {
      throw new ConnectError("Not now.", Code.Unavailable);
    }
    return {};
  };
  const fake = await FakeBough.start({
    routes: (router) => {
      router.rpc(AgentService.method.getRun, unavailable("getRun", 2));
      router.rpc(AgentService.method.listRuns, unavailable("listRuns", 9));
      router.rpc(SessionService.method.createSession, unavailable("createSession", 1));
    },
  });
  const client = new BoughClient(fake.address);
  await client.agents.getRun({ runId: "run-1" });
  await assert.rejects(client.agents.listRuns({}), { code: Code.Unavailable });
  await assert.rejects(client.sessions.createSession({}), { code: Code.Unavailable });
  assert.deepEqual(calls, [..."gggllllc"].map((letter) => ({ g: "getRun", l: "listRuns", c: "createSession" })[letter]));
  client.close();
  await fake.close();
});

test("a signal ends a call that waits to be repeated", async () => {
  const controller = new AbortController();
  const fake = await FakeBough.start({
    routes: (router) =>
      router.rpc(AgentService.method.getRun, () => {
        setImmediate(() => controller.abort());
        throw new ConnectError("Not now.", Code.Unavailable);
      }),
  });
  const client = new BoughClient(fake.address);
  const call = client.agents.getRun({ runId: "run-1" }, { signal: controller.signal });
  await assert.rejects(call, { name: "BoughError", code: Code.Canceled });
  client.close();
  await fake.close();
});

test("an option that is undefined has its default", async () => {
  const seconds: (number | undefined)[] = [];
  const note = (context: HandlerContext) => {
    const left = context.timeoutMs();
    seconds.push(left === undefined ? left : Math.ceil(left / 1_000));
    return {};
  };
  const fake = await FakeBough.start({
    routes: (router) => {
      router.rpc(AgentService.method.getRun, (_, context) => note(context));
      router.rpc(AgentService.method.watchRun, async function* (_, context) {
        yield note(context);
      });
      router.rpc(EvalService.method.watchEvaluation, async function* (_, context) {
        yield note(context);
      });
    },
  });
  const client = new BoughClient(fake.address);
  const unset = { timeoutMs: undefined } as object;
  await client.agents.getRun({}, unset);
  await client.watch({ runId: "run-1" }, unset).next();
  await client.watchEvaluation({ evaluationId: "evaluation-1" }, unset).next();
  assert.deepEqual(seconds, [10, 600, undefined]);
  client.close();
  await fake.close();
});

test("a connection that nothing answers is given up", async () => {
  const silent = net.createServer().listen(0, "127.0.0.1");
  await once(silent, "listening");
  const { port } = silent.address() as net.AddressInfo;
  const socket = openSocket(new URL(`https://127.0.0.1:${port}`), {}, 20);
  await assert.rejects(once(socket, "connect").then(() => once(socket, "secureConnect")), { code: "ETIMEDOUT" });
  silent.close();
});

test("a signal ends any call", async () => {
  const fake = await FakeBough.start({
    routes: (router) =>
      router.rpc(AgentService.method.getRun, async (_, { signal }) => {
        await once(signal, "abort");
        return {};
      }),
  });
  const client = new BoughClient(fake.address);
  const controller = new AbortController();
  const call = client.agents.getRun({ runId: "run-1" }, { signal: controller.signal });
  setImmediate(() => controller.abort());
  await assert.rejects(call, { name: "BoughError", code: Code.Canceled });
  await assert.rejects(client.agents.getRun({ runId: "run-1" }, { timeoutMs: 20 }), { code: Code.DeadlineExceeded });
  client.close();
  await fake.close();
});

test("collect returns the run, whatever its state", async () => {
  const fake = await FakeBough.start();
  const client = new BoughClient(fake.address);
  fake.runs("lead", answered("yes"));
  const { runId, text, state, interrupted, throughSequence } = await collect(client.run({ agent: "lead", input: "?" }));
  assert.deepEqual(
    { runId, text, state, interrupted, throughSequence },
    { runId: "run-1", text: "yes", state: ExecutionState.SUCCEEDED, interrupted: false, throughSequence: 3n },
  );
  fake.runs("shop", [
    { payload: { case: "runStarted", value: {} } },
    { payload: { case: "inputRequested", value: { request: { inputId: "a" } } } },
    { payload: { case: "runInterrupted", value: { requests: [{ inputId: "a" }, { inputId: "b" }] } } },
    { payload: { case: "inputReceived", value: { answer: { inputId: "a" } } } },
    { payload: { case: "runFailed", value: { error: { message: "no" } } } },
  ]);
  const asked = await collect(client.run({ agent: "shop", input: "?" }));
  assert.deepEqual([asked.interrupted, asked.openRequests.map(({ inputId }) => inputId)], [true, ["a", "b"]]);
  const ended = await collect(client.resume({ runId: asked.runId, answers: [approve("a")] }), asked);
  assert.deepEqual([ended.state, ended.error?.message, ended.openRequests], [ExecutionState.FAILED, "no", []]);
  client.close();
  await fake.close();
});

test("collectEvaluation returns the evaluation, whatever became of it", async () => {
  const fake = await FakeBough.start();
  const client = new BoughClient(fake.address, { rejoining: { firstDelayMs: 1 } });
  const totals = create(EvalTotalsSchema, { cases: 2, casesPassed: 1 });
  const gates = [create(GateResultSchema, { gate: "pass_rate >= 0.9", verdict: Verdict.FAILED })];
  const error = create(AgentErrorSchema, { message: "The disk is full." });
  const planned: EvaluationStep = { payload: { case: "evaluationPlanned", value: {} } };
  fake.evaluations("desk", [
    planned,
    { drop: true },
    { payload: { case: "evaluationTotaled", value: { verdict: Verdict.FAILED, totals, gates, reason: "A case is gone." } } },
    { payload: { case: "evaluationCompleted", value: { verdict: Verdict.FAILED } } },
  ]);
  assert.deepEqual(await collectEvaluation(client.evaluate({ evalSet: { name: "desk" } })), {
    evaluationId: "evaluation-1",
    state: ExecutionState.SUCCEEDED,
    verdict: Verdict.FAILED,
    reason: "A case is gone.",
    totals,
    gates,
    error: undefined,
    throughSequence: 3n,
  });
  fake.evaluations("full", [planned, { payload: { case: "evaluationFailed", value: { error } } }]);
  const failed = await collectEvaluation(client.evaluate({ evalSet: { name: "full" } }));
  assert.deepEqual([failed.state, failed.verdict, failed.error], [ExecutionState.FAILED, Verdict.UNSPECIFIED, error]);
  fake.evaluations("left", [planned, { payload: { case: "evaluationCancelled", value: { error, totals } } }]);
  const cancelled = await collectEvaluation(client.evaluate({ evalSet: { name: "left" } }));
  assert.deepEqual([cancelled.state, cancelled.error, cancelled.totals], [ExecutionState.CANCELLED, error, totals]);
  client.close();
  await fake.close();
});

test("a tree is walked in preorder", () => {
  const tree = new AgentTree(
    create(InvocationSchema, {
      tools: [
        { invocationId: "1", name: "call_researcher" },
        { invocationId: "3", name: "spell" },
      ],
      agents: [
        { invocationId: "1", name: "lead" },
        { invocationId: "2", parentInvocationId: "1", name: "researcher", depth: 1 },
        { invocationId: "3", parentInvocationId: "2", name: "writer", depth: 2 },
        { invocationId: "4", parentInvocationId: "1", name: "writer", depth: 1 },
      ],
    }),
  );
  const lead = tree.root;
  assert.ok(lead);
  assert.equal(names(tree), "lead researcher writer writer");
  assert.equal(names(tree.children(lead)), "researcher writer");
  assert.equal(names(tree.tools(lead)), "call_researcher");
  const [writer, other] = tree.find("writer");
  assert.deepEqual([writer?.invocationId, other?.invocationId], ["3", "4"]);
  assert.equal(writer && names(tree.path(writer)), "lead researcher writer");
  assert.equal(tree.get("4"), other);
  assert.deepEqual([tree.get("5"), tree.find("nobody")], [undefined, []]);
  assert.deepEqual([tree.parent(lead), new AgentTree(create(InvocationSchema)).root], [undefined, undefined]);
});

test("answers are made of plain values", () => {
  const answers = [
    approve("a", { note: "fine" }),
    refuse("a", "no"),
    reply("a", { size: 1 }),
    toolOutcome("a", "4711"),
    toolOutcome("a", new Error("broken")),
  ].map(({ inputId, answer }) => [inputId, answer.case]);
  assert.deepEqual(answers, [
    ["a", "approval"],
    ["a", "approval"],
    ["a", "valueJson"],
    ["a", "toolOutcome"],
    ["a", "toolOutcome"],
  ]);
  assert.throws(() => reply("a", undefined), TypeError);
});

test("the text of a message leaves out what is not text", () => {
  const message = create(MessageSchema, {
    parts: [
      { content: { case: "text", value: "a" } },
      { content: { case: "reasoning", value: { text: "b" } } },
      { content: { case: "dataJson", value: "{}" } },
    ],
  });
  assert.deepEqual([textOf(message), textOf(undefined)], ["a{}", ""]);
});

function names(agents: Iterable<{ name: string }>): string {
  return Array.from(agents, ({ name }) => name).join(" ");
}
