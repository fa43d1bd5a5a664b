/**
 * Follows a run over drops and restarts of the server: every sequence once, whatever happens to the connection.
 *
 *     node rejoin.js 127.0.0.1:50051 lead "Why do leaves turn red?"
 *
 * Stop the server meanwhile, and start it again.
 */
import { BoughClient, BoughError } from "@bough-dev/bough";

async function main(address = "127.0.0.1:50051", agent = "lead", input = "Why do leaves turn red?"): Promise<number> {
  using client = new BoughClient(address, {
    rejoining: { onDrop: (error) => console.log(`dropped: ${error.codeName}; rejoining`) },
  });
  // Ctrl-C ends the stream, not the run.
  const interrupt = new AbortController();
  process.once("SIGINT", () => interrupt.abort());
  const stream = client.run({ agent, input, policy: { background: true } }, { signal: interrupt.signal });
  console.log(`run ${await stream.started()}`);

  let next = 1n;
  for await (const { sequence, payload } of stream) {
    // The default view shows every event, so a gap would be a lost one.
    if (sequence !== next) {
      throw new Error(`expected sequence ${next}, got ${sequence}`);
    }
    next += 1n;
    console.log(`${sequence} ${payload.case ?? "unknown"}`);
  }
  console.log(`complete: ${stream.throughSequence} events, ${stream.rejoins} rejoins`);
  return 0;
}

try {
  process.exitCode = await main(...process.argv.slice(2));
} catch (error) {
  if (!(error instanceof BoughError)) {
    throw error;
  }
  console.error(`${error.codeName}: ${error.message}`);
  process.exitCode = 2;
}
