/** Run an agent and show its tree while it grows: node run.js AGENT TEXT [ADDRESS]. */
import { BoughClient, BoughError, textOf } from "@bough-dev/bough";

async function main(agent: string, text: string, address?: string): Promise<number> {
  using client = new BoughClient(address);
  const stream = client.run({ agent, input: text });
  for await (const event of stream) {
    const indent = "  ".repeat(event.depth);
    const { payload } = event;
    switch (payload.case) {
      case "runStarted":
      case "subAgentStarted":
        console.log(`${indent}${event.agent}`);
        break;
      case "toolStarted":
        console.log(`${indent}  ${payload.value.call?.name} ${payload.value.call?.argumentsJson}`);
        break;
      case "runCompleted":
        console.log(`\n${textOf(payload.value.finalAnswer)}\n`);
        break;
      case "runFailed":
        console.error(`failed: ${payload.value.error?.message}`);
        return 1;
      default:
      // Whatever else happened, and payloads that this version of the schema does not know.
    }
  }
  const tree = await client.tree({ runId: stream.id });
  for (const each of tree) {
    console.log(`${each.branch}: ${each.treeUsage?.modelCalls} model calls, ${tree.tools(each).length} tool calls`);
  }
  return 0;
}

const [agent = "lead", text = "Why do leaves turn red?", address] = process.argv.slice(2);
try {
  process.exitCode = await main(agent, text, address);
} catch (error) {
  console.error(error instanceof BoughError ? error.message : error);
  process.exitCode = 2;
}
