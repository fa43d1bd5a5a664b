/**
 * Follow a run over dropped connections and restarts of its server: node rejoin.js AGENT TEXT [ADDRESS].
 *
 * Restart the server while it follows: the stream goes on after its last sequence.
 */
import { BoughClient, BoughError, textOf } from "@bough-dev/bough";

async function main(agent: string, text: string, address?: string): Promise<number> {
  using client = new BoughClient(address, {
    rejoining: { onDrop: (error) => console.error(`dropped, rejoining: ${error.message}`) },
  });
  // Ctrl-C ends the stream and then this program; the run goes on for as long as its policy allows.
  const interrupt = new AbortController();
  process.once("SIGINT", () => interrupt.abort());
  const stream = client.run({ agent, input: text }, { signal: interrupt.signal });
  for await (const { sequence, branch, payload } of stream) {
    console.log(`${sequence} ${branch} ${payload.case}`);
    if (payload.case === "runCompleted") {
      console.log(textOf(payload.value.finalAnswer));
      return 0;
    }
  }
  console.error(`run ${stream.id} has no answer`);
  return 1;
}

const [agent = "lead", text = "Why do leaves turn red?", address] = process.argv.slice(2);
try {
  process.exitCode = await main(agent, text, address);
} catch (error) {
  console.error(error instanceof BoughError ? error.message : error);
  process.exitCode = 2;
}
