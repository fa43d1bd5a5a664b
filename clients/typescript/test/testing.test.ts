import assert from "node:assert/strict";
import { test } from "node:test";
import { create, equals, type MessageInitShape } from "@bufbuild/protobuf";
import {
  AgentService,
  type CaseResultFilterSchema,
  CatalogService,
  EvalService,
  ExecutionState,
  GetEvaluationResponseSchema,
  GetRunResponseSchema,
  SessionService,
  Verdict,
} from "../src/bough/v1/index.js";
import { BoughClient } from "../src/client.js";
import { collect, collectEvaluation } from "../src/collect.js";
import { approve, BoughError, Code } from "../src/index.js";
import { answered, FakeBough, type Step } from "../src/testing.js";

const STARTED: Step = { payload: { case: "runStarted", value: {} } };
const INTERRUPTED: Step = { payload: { case: "runInterrupted", value: { requests: [{ inputId: "input-1" }] } } };

async function withFake(use: (fake: FakeBough, client: BoughClient) => Promise<void>): Promise<void> {
  const fake = await FakeBough.start();
  const client = new BoughClient(fake.address, { rejoining: { firstDelayMs: 1 } });
  try {
    await use(fake, client);
  } finally {
    client.close();
    await fake.close();
  }
}

/** Return the error of a call of any method with an empty request. */
async function failure(client: object, localName: string): Promise<BoughError> {
  const call = (client as Record<string, (request: unknown) => unknown>)[localName];
  const request = localName === "aggregateEvents" ? each({}) : {};
  try {
    const answer = call?.(request);
    if (answer && Symbol.asyncIterator in (answer as object)) {
      for await (const _ of answer as AsyncIterable<unknown>);
    }
    await answer;
  } catch (error) {
    assert.ok(error instanceof BoughError, String(error));
    return error;
  }
  throw new Error(`${localName} did not fail`);
}

async function* each<Item>(...items: Item[]): AsyncGenerator<Item> {
  yield* items;
}

test("a method that is not scripted says how to script it", async () => {
  await withFake(async (fake, client) => {
    const clients = [client.agents, client.catalog, client.evals, client.sessions];
    const services = [AgentService, CatalogService, EvalService, SessionService];
    for (const [index, { name, methods }] of services.entries()) {
      for (const { localName } of methods) {
        const { code, message } = await failure(clients[index] ?? {}, localName);
        // NOT_FOUND is of no run, no agent and no evaluation: the fake has the method.
        const isSaid = message.includes(`router.rpc(${name}.method.${localName},`) || /: call \w+\.$/.test(message);
        assert.ok(code === Code.NotFound || (code === Code.Unimplemented && isSaid), `${name}.${localName}: ${message}`);
      }
    }
    fake.runs("lead", answered("yes"));
    const { runId } = await collect(client.run({ agent: "lead", input: "?" }));
    await assert.rejects(client.tree({ runId }), { code: Code.Unimplemented, message: /call trees/ });
  });
});

test("a run is returned as its log shows it", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, INTERRUPTED, ...answered("yes").slice(2)]);
    const { runId } = await collect(client.run({ agent: "lead", input: "?" }));
    const waiting = await client.agents.getRun({ runId });
    const run = { runId, sessionId: "session-1", agent: "lead", state: ExecutionState.INPUT_REQUIRED, lastSequence: 2n };
    const want = create(GetRunResponseSchema, { run: { ...run, openRequests: [{ inputId: "input-1" }] } });
    assert.ok(equals(GetRunResponseSchema, waiting, want), JSON.stringify(waiting.run?.state));
    await collect(client.resume({ runId, answers: [approve("input-1")] }));
    const ended = await client.agents.getRun({ runId });
    assert.deepEqual([ended.run?.state, ended.finalAnswer?.parts[0]?.content.value], [ExecutionState.SUCCEEDED, "yes"]);
  });
});

test("a run that is cancelled ends its streams, and one that has ended stays as it is", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", [STARTED, INTERRUPTED, ...answered("yes").slice(1)]);
    const { runId } = await collect(client.run({ agent: "lead", input: "?" }));
    const watching = collect(client.watch({ runId }));
    assert.equal((await client.agents.cancelRun({ runId })).run?.state, ExecutionState.CANCELLED);
    const { state, throughSequence } = await watching;
    assert.deepEqual([state, throughSequence], [ExecutionState.CANCELLED, 3n]);
    assert.equal((await client.agents.cancelRun({ runId })).run?.lastSequence, 3n);
  });
});

test("a tree is scripted for the runs of an agent", async () => {
  await withFake(async (fake, client) => {
    fake.runs("lead", answered("yes"));
    fake.trees("lead", {
      agents: [
        { invocationId: "1", name: "lead" },
        { invocationId: "2", parentInvocationId: "1", name: "writer", depth: 1 },
      ],
    });
    const { runId } = await collect(client.run({ agent: "lead", input: "?" }));
    const tree = await client.tree({ runId });
    assert.deepEqual(Array.from(tree, ({ name }) => name), ["lead", "writer"]);
    const { state, asOfSequence, finalResponse } = tree.invocation;
    const answer = finalResponse?.parts[0]?.content.value;
    assert.deepEqual([tree.invocation.runId, state, asOfSequence, answer], [runId, ExecutionState.SUCCEEDED, 3n, "yes"]);
  });
});

test("an evaluation is returned as its log shows it", async () => {
  await withFake(async (fake, client) => {
    fake.evaluations("desk", [
      { payload: { case: "evaluationPlanned", value: {} } },
      { payload: { case: "evaluationTotaled", value: { totals: { cases: 3 } } } },
      { payload: { case: "evaluationCompleted", value: { verdict: Verdict.PASSED } } },
    ]);
    const { evaluationId } = await collectEvaluation(client.evaluate({ evalSet: { name: "desk" } }));
    const totals = { cases: 3 };
    const both = { evaluationId, evalSetName: "desk", state: ExecutionState.SUCCEEDED, verdict: Verdict.PASSED, totals };
    const want = create(GetEvaluationResponseSchema, { evaluation: { ...both, lastSequence: 3n }, result: both });
    assert.ok(equals(GetEvaluationResponseSchema, await client.evals.getEvaluation({ evaluationId }), want));
  });
});

test("the cases of an evaluation are listed in pages", async () => {
  await withFake(async (fake, client) => {
    fake.evaluations("desk", [
      { payload: { case: "evaluationPlanned", value: {} } },
      { payload: { case: "evaluationCompleted", value: {} } },
    ]);
    const labels = { team: "red" };
    const verdict = Verdict.FAILED;
    fake.cases("desk", [{ caseId: "a", verdict, labels }, { caseId: "b", labels }, { caseId: "c", verdict }]);
    const { evaluationId } = await collectEvaluation(client.evaluate({ evalSet: { name: "desk" } }));
    const listed = async (filter: MessageInitShape<typeof CaseResultFilterSchema>, pageSize = 2): Promise<string> => {
      const first = await client.evals.listCaseResults({ evaluationId, pageSize, filter });
      const pageToken = first.nextPageToken;
      const second = pageToken ? await client.evals.listCaseResults({ evaluationId, pageSize, pageToken, filter }) : { cases: [] };
      return [...first.cases, ...second.cases].map(({ caseId }) => caseId).join(" ");
    };
    assert.equal(await listed({}), "a b c");
    assert.equal(await listed({ verdicts: [verdict] }, 1), "a c");
    assert.equal(await listed({ labels }), "a b");
    assert.equal(await listed({ caseIds: ["c", "b", "d"] }), "b c");
  });
});

test("an evaluation that is cancelled ends with its cancellation", async () => {
  await withFake(async (fake, client) => {
    fake.evaluations("desk", [{ payload: { case: "evaluationPlanned", value: {} } }, { drop: true }]);
    const stream = client.evaluate({ evalSet: { name: "desk" } });
    const evaluationId = await stream.started();
    await client.evals.cancelEvaluation({ evaluationId, note: "Enough." });
    const { state, error } = await collectEvaluation(client.watchEvaluation({ evaluationId }));
    assert.deepEqual([state, error?.message], [ExecutionState.CANCELLED, "The evaluation was cancelled."]);
    await stream.close();
  });
});
