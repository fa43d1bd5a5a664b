/**
 * Runs the desk and shows its tree while it grows.
 *
 *     node run.js 127.0.0.1:50051 "Why do leaves turn red?"
 */
import { BoughClient, BoughError, collect, textOf } from "@bough-dev/bough";
import { type AgentEvent, EventView, ExecutionState } from "@bough-dev/bough/v1";

async function main(address = "127.0.0.1:50051", question = "Why do leaves turn red?"): Promise<number> {
  using client = new BoughClient(address);
  const stream = client.run({ agent: "lead", input: question, follow: { view: EventView.SUMMARY } });
  const run = await collect(shown(stream));
  console.log(`\n${run.text || run.error?.message}`);

  const tree = await client.tree({ runId: run.runId });
  for (const agent of tree) {
    const { inputTokens = 0n, outputTokens = 0n } = agent.usage ?? {};
    console.log(`${"  ".repeat(agent.depth)}${agent.name}: ${inputTokens + outputTokens} tokens`);
  }
  return run.state === ExecutionState.SUCCEEDED ? 0 : 1;
}

/** Print events as they pass. */
async function* shown(events: AsyncIterable<AgentEvent>): AsyncGenerator<AgentEvent> {
  for await (const event of events) {
    const line = lineOf(event);
    if (line) {
      console.log(`${"  ".repeat(event.depth)}${event.agent}${line}`);
    }
    yield event;
  }
}

function lineOf({ payload }: AgentEvent): string {
  switch (payload.case) {
    case "runStarted":
    case "subAgentStarted":
      return ` <- ${textOf(payload.value.input)}`;
    case "toolStarted":
      return ` calls ${payload.value.call?.name}`;
    case "subAgentCompleted":
      return ` -> ${textOf(payload.value.output)}`;
    case "subAgentFailed":
      return ` failed: ${payload.value.error?.message}`;
    case "toolFailed":
      return ` -> ${payload.value.result?.call?.name} failed: ${payload.value.result?.error?.message}`;
    default:
      // Also a payload that this version of the schema does not know.
      return "";
  }
}

try {
  process.exitCode = await main(...process.argv.slice(2));
} catch (error) {
  if (!(error instanceof BoughError)) {
    throw error;
  }
  console.error(error.message);
  process.exitCode = 2;
}
