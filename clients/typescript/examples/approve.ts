/**
 * Starts the shop's desk (examples/approvals) and answers all that its run asks for, until it ends.
 *
 *     node approve.js 127.0.0.1:50051
 */
import { approve, BoughClient, BoughError, type CollectedRun, collect, refuse, reply, toolOutcome } from "@bough-dev/bough";
import { ExecutionState, type InputAnswer, InputKind, type InputRequest } from "@bough-dev/bough/v1";

/** The largest refund that this program approves, in EUR. */
const LARGEST = 200;

async function main(address = "127.0.0.1:50051"): Promise<number> {
  using client = new BoughClient(address);
  let run: CollectedRun = await collect(client.run({ agent: "lead", input: "Orders 1001 and 1002 come back." }));
  while (run.interrupted) {
    const answers = run.openRequests.map(answerTo);
    // The answers are durable once resume has started: a minute or a month later, the run continues.
    run = await collect(client.resume({ runId: run.runId, answers }), run);
  }
  console.log(run.text || run.error?.message);
  return run.state === ExecutionState.SUCCEEDED ? 0 : 1;
}

function answerTo(request: InputRequest): InputAnswer {
  console.log(`${request.agentPath.join("/")}: ${request.prompt || request.call?.name}`);
  switch (request.kind) {
    case InputKind.CLIENT_TOOL:
      return toolOutcome(request, request.call?.name === "read_card" ? "4711" : new Error("This program has no such tool."));
    case InputKind.QUESTION:
      return reply(request, "it does not fit");
    case InputKind.APPROVAL: {
      const { amount } = JSON.parse(request.call?.argumentsJson ?? "{}") as { amount?: number };
      return amount !== undefined && amount <= LARGEST ? approve(request) : refuse(request, "That is too much.");
    }
    default:
      return refuse(request);
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
