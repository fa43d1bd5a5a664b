/** Run an agent and answer in the terminal what it waits for: node approve.js AGENT TEXT [ADDRESS]. */
import { createInterface } from "node:readline";
import { approve, BoughClient, BoughError, collect, refuse, reply, toolOutcome } from "@bough-dev/bough";
import { type InputAnswer, InputKind, type InputRequest } from "@bough-dev/bough/v1";

const lines = createInterface({ input: process.stdin });
const typed = lines[Symbol.asyncIterator]();

async function ask(question: string): Promise<string> {
  process.stdout.write(question);
  return (await typed.next()).value ?? "";
}

async function answer(request: InputRequest): Promise<InputAnswer> {
  const who = request.agentPath.at(-1);
  const call = `${request.call?.name} ${request.call?.argumentsJson}`;
  switch (request.kind) {
    case InputKind.APPROVAL: {
      const decision = await ask(`${who} wants to call ${call}. Approve? [y/n] `);
      return decision === "y" ? approve(request) : refuse(request, "The user said no.");
    }
    case InputKind.CLIENT_TOOL:
      return toolOutcome(request, await ask(`${who} calls ${call}: `));
    default:
      return reply(request, jsonOrText(await ask(`${who} asks: ${request.prompt} `)));
  }
}

function jsonOrText(answered: string): unknown {
  try {
    return JSON.parse(answered);
  } catch {
    return answered;
  }
}

async function main(agent: string, text: string, address?: string): Promise<number> {
  using client = new BoughClient(address);
  let run = await collect(client.run({ agent, input: text }));
  // An interrupted run waits on the server, for a month if need be: another program could answer it as well.
  while (run.interrupted) {
    const answers: InputAnswer[] = [];
    for (const request of run.openRequests) {
      answers.push(await answer(request));
    }
    run = await collect(client.resume({ runId: run.runId, answers }));
  }
  console.log(run.text || (run.error?.message ?? "no answer"));
  return run.message ? 0 : 1;
}

const [agent = "lead", text = "Orders 1001 and 1002 come back.", address] = process.argv.slice(2);
try {
  process.exitCode = await main(agent, text, address);
} catch (error) {
  console.error(error instanceof BoughError ? error.message : error);
  process.exitCode = 2;
} finally {
  lines.close();
}
