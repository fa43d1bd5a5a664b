import assert from "node:assert/strict";
import { once } from "node:events";
import * as net from "node:net";
import { test } from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { type AgentEvent, AgentEventSchema, AgentService, ExecutionState, WatchUntil } from "../src/bough/v1/index.js";
import { BoughClient, type ClientOptions } from "../src/client.js";
import { collect } from "../src/collect.js";
import { BoughError } from "../src/errors.js";
import { approve, Code } from "../src/index.js";
import { answered, FakeBough, type Step } from "../src/testing.js";

const QUICK = { firstDelayMs: 1, longestDelayMs: 5 };

function delta(text: string): Step {
  return { payload: { case: "llmOutputTextDelta", value: { text } } };
}

const STARTED: Step = { payload: { case: "runStarted", value: {} } };
const COMPLETED: Step = { payload: { case: "runCompleted", value: {} } };
const INTERRUPTED: Step = { payload: { case: "runInterrupted", value: { requests: [{ inputId: "input-1" }] } } };

function response(sequence: bigint, payload: MessageInitShape<typeof AgentEventSchema>["payload"]) {
  return { batch: { events: [{ runId: "run-1", sequence, payload }], throughSequence: sequence } };
}

async function withFake(
  use: (fake: FakeBough, client: BoughClient) => Promise<void>,
  options: ClientOptions = { rejoining: QUICK },
): Promise<void> {
  const fake = await FakeBough.start();
  const client = new BoughClient(fake.address, options);
  try {
    await use(fake, client);
  } finally {
    client.close();
    await fake.close();
  }
}

async function sequences(stream: AsyncIterable<AgentEvent>): Promise<bigint[]> {
  const seen = [];
  for await (const event of stream) {
    seen.push(event.sequence);
  }
  return seen;
}

function methods(fake: FakeBough): string[] {
  return fake.received.map(({ method }) => method);
}

async function failure(events: AsyncIterable<unknown>): Promise<BoughError> {
  try {
    for await (const _ of events);
  } catch (error) {
    assert.ok(error instanceof BoughError, String(error));
    return error;
  }
  throw new Error("the stream did not fail");
}

test("a stream has every sequence once, over every drop", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, delta("a"), { drop: true }, delta("b"), { drop: true }, { drop: true }, COMPLETED]);
    const stream = client.run({ agent: "lead", input: "?" });
    assert.deepEqual(await sequences(stream), [1n, 2n, 3n, 4n]);
    // The second and the third drop are one outage: nothing was received between them.
    assert.equal(stream.rejoins, 2);
    assert.equal(stream.throughSequence, 4n);
    assert.deepEqual(methods(fake), ["Run", "WatchRun", "WatchRun", "WatchRun"]);
  });
});

test("a stream rejoins after the last through_sequence, not after the events that it counted", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, { ...delta("a"), sequence: 10n }, { through: 25n }, { drop: true }, COMPLETED]);
    assert.deepEqual(await sequences(client.run({ agent: "lead", input: "?" })), [1n, 10n, 26n]);
    const again = fake.received[1]?.request;
    assert.deepEqual(
      again && "afterSequence" in (again as object) && (again as { afterSequence: bigint }).afterSequence,
      25n,
    );
  });
});

test("a call that was dropped before it was accepted is repeated under its request id", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [{ drop: true }, STARTED, COMPLETED]);
    const stream = client.run({ agent: "lead", input: "?" });
    assert.deepEqual(await sequences(stream), [1n, 2n]);
    const ids = fake.received.map(({ request }) => (request as { requestId?: string }).requestId);
    assert.equal(ids[0], stream.requestId);
  });
});

test("a server that stops is rejoined, a run that is gone is not", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, { fail: Code.Unavailable, reason: "SERVER_STOPPED" }, COMPLETED]);
    assert.deepEqual(await sequences(client.run({ agent: "lead", input: "?" })), [1n, 2n]);
    for (const [code, reason] of [
      [Code.NotFound, "NOT_FOUND"],
      [Code.OutOfRange, "SEQUENCE_OUT_OF_RANGE"],
      [Code.Aborted, "SESSION_BUSY"],
    ] as const) {
      fake.runs("lead", [STARTED, { fail: code, reason }, COMPLETED]);
      const stream = client.run({ agent: "lead", input: "?" });
      const error = await failure(stream);
      assert.deepEqual([error.code, error.reason, stream.rejoins], [code, reason, 0]);
    }
  });
});

test("a stream that ends with OK before its end is rejoined", async () => {
  let calls = 0;
  const fake = await FakeBough.start({
    routes: (router) =>
      router.rpc(AgentService.method.run, async function* () {
        calls += 1;
        yield { batch: { events: [{ runId: "run-1", sequence: 1n, payload: { case: "runStarted", value: {} } }], throughSequence: 1n } };
      }),
  });
  const client = new BoughClient(fake.address, { rejoining: QUICK });
  const error = await failure(client.run({ agent: "lead", input: "?" }));
  // The rejoin reached the fake, which knows no such run.
  assert.deepEqual([error.code, calls, methods(fake)], [Code.NotFound, 1, ["WatchRun"]]);
  client.close();
  await fake.close();
});

test("a rejoin that ends with OK and has no event is a drop too", async () => {
  let watches = 0;
  const fake = await FakeBough.start({
    routes: (router) => {
      router.rpc(AgentService.method.run, async function* () {
        yield response(1n, { case: "runStarted", value: {} });
      });
      router.rpc(AgentService.method.watchRun, async function* () {
        watches += 1;
        yield watches < 3 ? { batch: { throughSequence: 1n } } : response(2n, { case: "runCompleted", value: {} });
      });
    },
  });
  const client = new BoughClient(fake.address, { rejoining: QUICK });
  const stream = client.run({ agent: "lead", input: "?" });
  assert.deepEqual([await sequences(stream), watches, stream.rejoins], [[1n, 2n], 3, 3]);
  client.close();
  await fake.close();
});

test("a stream that ends with OK at an unknown payload has ended, and its run has not", async () => {
  const payload = { no: 1015, wireType: 2, data: new Uint8Array(1) };
  const unknown = Object.assign(create(AgentEventSchema, { runId: "run-1", sequence: 2n }), { $unknown: [payload] });
  const paused = async function* () {
    yield response(1n, { case: "runStarted", value: {} });
    yield { batch: { events: [unknown], throughSequence: 2n } };
  };
  const fake = await FakeBough.start({
    routes: (router) => {
      router.rpc(AgentService.method.run, paused);
      router.rpc(AgentService.method.resumeRun, paused);
      router.rpc(AgentService.method.watchRun, paused);
    },
  });
  const client = new BoughClient(fake.address, { rejoining: QUICK });
  const answers = [approve("input-1")];
  for (const stream of [
    client.run({ agent: "lead", input: "?" }),
    client.resume({ runId: "run-1", answers }),
    client.watch({ runId: "run-1" }),
    client.watch({ runId: "run-1", until: WatchUntil.INTERRUPTED }),
  ]) {
    const { state, interrupted, text, throughSequence } = await collect(stream);
    assert.deepEqual([state, interrupted, text, throughSequence], [ExecutionState.RUNNING, false, "", 2n]);
    assert.equal(stream.rejoins, 0);
  }
  client.close();
  await fake.close();
});

test("an error after an unknown payload is rejoined", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, {}, { drop: true }, COMPLETED]);
    const stream = client.run({ agent: "lead", input: "?" });
    assert.deepEqual([await sequences(stream), stream.rejoins], [[1n, 2n, 3n], 1]);
  });
});

test("a stream of a run that had ended is empty", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", answered("yes"));
    const { id } = await drained(client.run({ agent: "lead", input: "?" }));
    const stream = client.watch({ runId: id, afterSequence: 3n });
    assert.deepEqual([await sequences(stream), stream.rejoins], [[], 0]);
    assert.deepEqual(await sequences(client.watch({ runId: id, afterSequence: 1n })), [2n, 3n]);
  });
});

test("a run ends its stream at a question, and resume continues behind it", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, INTERRUPTED, delta("a"), { drop: true }, COMPLETED]);
    const run = await drained(client.run({ agent: "lead", input: "?" }));
    assert.equal(run.throughSequence, 2n);
    const current = client.watch({ runId: run.id, until: WatchUntil.CURRENT });
    assert.deepEqual(await sequences(current), [1n, 2n]);
    const answers = [{ inputId: "input-1", answer: { case: "valueJson" as const, value: "1" } }];
    assert.deepEqual(await sequences(client.resume({ runId: run.id, answers })), [3n, 4n]);
    assert.deepEqual(await sequences(client.resume({ runId: run.id, answers, afterSequence: 0n })), [1n, 2n]);
  });
});

test("a watch until an interruption passes those that are answered, also those that a fork shares", async () => {
  await withFake(async (fake, client) => {
    const again: Step = { payload: { case: "runInterrupted", value: { requests: [{ inputId: "input-2" }] } } };
    fake.runs("lead", [STARTED, INTERRUPTED, delta("a"), { drop: true }, again, { drop: true }, delta("b"), COMPLETED]);
    const until = WatchUntil.INTERRUPTED;
    const { id: runId } = await drained(client.run({ agent: "lead", input: "?" }));
    await drained(client.resume({ runId, answers: [approve("input-1")] }));
    const waiting = await collect(client.watch({ runId, until }));
    const asked = waiting.openRequests.map(({ inputId }) => inputId);
    assert.deepEqual([waiting.interrupted, asked, waiting.throughSequence], [true, ["input-2"], 4n]);
    const { id: fork } = await drained(client.fork({ runId, afterSequence: 3n }));
    const shared = await collect(client.watch({ runId: fork, until }));
    assert.deepEqual([shared.interrupted, shared.throughSequence], [true, 4n]);
    await drained(client.resume({ runId, answers: [approve("input-2")] }));
    assert.deepEqual(await sequences(client.watch({ runId, until })), [1n, 2n, 3n, 4n, 5n, 6n]);
  });
});

test("a watch after the interruption at which a run waits ends at once", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, INTERRUPTED, delta("a"), INTERRUPTED, COMPLETED]);
    const { id: runId } = await drained(client.run({ agent: "lead", input: "?" }));
    const after = { runId, afterSequence: 2n, until: WatchUntil.INTERRUPTED };
    assert.deepEqual(await sequences(client.watch(after)), []);
    await drained(client.resume({ runId, answers: [approve("input-1")] }));
    assert.deepEqual(await sequences(client.watch(after)), [3n, 4n]);
  });
});

test("a fork is followed from its first event", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, delta("a"), delta("b"), COMPLETED]);
    const run = await drained(client.run({ agent: "lead", input: "?" }));
    const fork = client.fork({ runId: run.id, afterSequence: 2n });
    assert.deepEqual(await sequences(fork), [3n, 4n]);
    assert.notEqual(fork.id, run.id);
  });
});

test("an evaluation is followed over drops", async () => {
  await withFake(async (fake, client) => {
    fake.evaluations("desk", [
      { payload: { case: "evaluationPlanned", value: {} } },
      { drop: true },
      { payload: { case: "caseTrialStarted", value: { caseId: "leaves" } } },
      { payload: { case: "evaluationCompleted", value: {} } },
    ]);
    const stream = client.evaluate({ evalSet: { name: "desk" } });
    const seen = [];
    for await (const event of stream) {
      seen.push([event.sequence, event.payload.case]);
    }
    assert.deepEqual(seen, [
      [1n, "evaluationPlanned"],
      [2n, "caseTrialStarted"],
      [3n, "evaluationCompleted"],
    ]);
    assert.deepEqual(methods(fake), ["Evaluate", "WatchEvaluation"]);
    assert.equal((await drained(client.watchEvaluation({ evaluationId: stream.id }))).throughSequence, 3n);
  });
});

test("an evaluation is followed to the end of its log if that is asked for", async () => {
  await withFake(async (fake, client) => {
    fake.evaluations("desk", [{ payload: { case: "evaluationPlanned", value: {} } }, { through: 2n }]);
    const stream = client.evaluate({ evalSet: { name: "desk" }, follow: { until: WatchUntil.CURRENT } });
    assert.equal((await drained(stream)).throughSequence, 2n);
    assert.deepEqual(methods(fake), ["Evaluate"]);
  });
});

test("an unknown payload is passed on with its sequence", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, {}, COMPLETED]);
    const seen = [];
    for await (const { sequence, payload } of client.run({ agent: "lead", input: "?" })) {
      seen.push([sequence, payload.case]);
    }
    assert.deepEqual(seen[1], [2n, undefined]);
  });
});

test("started waits for acceptance and loses no event", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", answered("yes"));
    const stream = client.run({ agent: "lead", input: "?" });
    assert.equal(stream.id, "");
    assert.equal(await stream.started(), "run-1");
    assert.deepEqual(await sequences(stream), [1n, 2n, 3n]);
    assert.equal(await stream.started(), "run-1");
    await assert.rejects(client.run({ agent: "nobody", input: "?" }).started(), { code: Code.NotFound });
  });
});

test("what was read ahead is not behind the position of the caller", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", answered("yes"));
    const stream = client.run({ agent: "lead", input: "?" });
    await stream.started();
    await client.health(); // until then the first event has arrived
    assert.equal(stream.throughSequence, 0n);
    await stream.next();
    assert.equal(stream.throughSequence, 1n);
    await stream.close();
    assert.equal(stream.throughSequence, 1n);
  });
});

test("leaving the loop ends the call and leaves nothing open", async () => {
  const before = timers();
  await withFake(async (fake, client) => {
    // The watch of an interrupted run waits for ever.
    fake.runs("lead", [STARTED, INTERRUPTED, COMPLETED]);
    const { id } = await drained(client.run({ agent: "lead", input: "?" }));
    let open = 0;
    const stream = client.watch({ runId: id });
    for await (const event of stream) {
      open += 1;
      assert.equal(event.sequence, 1n);
      break;
    }
    assert.equal(open, 1);
    assert.deepEqual(await stream.next(), { done: true, value: undefined });
    assert.equal(fake.connections, 1);
    while (fake.streams) {
      await new Promise(setImmediate);
    }
    client.close();
    while (fake.connections) {
      await new Promise(setImmediate);
    }
  });
  assert.equal(timers(), before);
});

test("closing a stream ends a pending read without an error", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, INTERRUPTED, COMPLETED]);
    const { id } = await drained(client.run({ agent: "lead", input: "?" }));
    const stream = client.watch({ runId: id, afterSequence: 2n });
    await stream.started();
    const pending = stream.next();
    await stream.close();
    assert.deepEqual(await pending, { done: true, value: undefined });
  });
});

test("an AbortSignal ends a stream with CANCELLED, at once", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, delta("a"), delta("b"), COMPLETED]);
    const controller = new AbortController();
    const seen: bigint[] = [];
    const stream = client.run({ agent: "lead", input: "?" }, { signal: controller.signal });
    await assert.rejects(
      async () => {
        for await (const event of stream) {
          seen.push(event.sequence);
          controller.abort();
        }
      },
      { code: Code.Canceled, codeName: "CANCELLED" },
    );
    assert.deepEqual(seen, [1n]);
    const late = await failure(client.run({ agent: "lead", input: "?" }, { signal: AbortSignal.abort() }));
    assert.equal(late.code, Code.Canceled);
    assert.deepEqual(methods(fake), ["Run"]);
  });
});

test("a deadline bounds the whole stream", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, INTERRUPTED, COMPLETED]);
    const { id } = await drained(client.run({ agent: "lead", input: "?" }));
    const error = await failure(client.watch({ runId: id }, { timeoutMs: 50 }));
    assert.deepEqual([error.code, error.reason], [Code.DeadlineExceeded, "DEADLINE_EXCEEDED"]);
    const signalled = await failure(client.watch({ runId: id }, { signal: AbortSignal.timeout(50) }));
    assert.equal(signalled.code, Code.DeadlineExceeded);
  });
});

test("a server that was never reached fails within the connect timeout", async () => {
  const client = new BoughClient(await freeAddress());
  const before = performance.now();
  const error = await failure(client.run({ agent: "lead", input: "?" }));
  assert.equal(error.code, Code.Unavailable);
  assert.match(error.message, /The server cannot be reached: .*ECONNREFUSED/);
  assert.ok(performance.now() - before < 2_000);
  client.close();
});

test("a server that was reached once is waited for, on the same port", async () => {
  const drops: string[] = [];
  const first = await FakeBough.start();
  const port = Number(first.address.split(":")[1]);
  const client = new BoughClient(first.address, { rejoining: { ...QUICK, onDrop: (error) => drops.push(error.codeName) } });
  await client.health();
  await first.close();
  const stream = client.run({ agent: "lead", input: "?" });
  const reading = sequences(stream);
  while (!drops.length) {
    await new Promise(setImmediate);
  }
  const second = (await FakeBough.start({ port })).runs("lead", answered("yes"));
  assert.deepEqual(await reading, [1n, 2n, 3n]);
  assert.deepEqual(drops, ["UNAVAILABLE"]);
  assert.ok(stream.rejoins >= 1);
  client.close();
  await second.close();
});

test("a stream that may not rejoin raises what dropped it", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, { drop: true }, COMPLETED]);
    const stream = client.run({ agent: "lead", input: "?" }, { rejoining: { timeoutMs: 0 } });
    const error = await failure(stream);
    assert.deepEqual([error.codeName, stream.throughSequence, methods(fake)], ["UNAVAILABLE", 1n, ["Run"]]);
  });
});

async function drained<Stream extends AsyncIterable<unknown>>(stream: Stream): Promise<Stream> {
  for await (const _ of stream);
  return stream;
}

/** How many timers keep this process from ending. */
function timers(): number {
  return process.getActiveResourcesInfo().filter((kind) => kind === "Timeout").length;
}

async function freeAddress(): Promise<string> {
  const server = net.createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as net.AddressInfo;
  server.close();
  await once(server, "close");
  return `127.0.0.1:${port}`;
}
