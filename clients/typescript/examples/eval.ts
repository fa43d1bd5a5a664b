/**
 * Evaluate a set and exit as CI expects: node eval.js REQUEST.json [ADDRESS].
 *
 * The file is an EvaluateRequest as JSON, such as examples/eval/request.json. The exit code is 0 if it passed, 1 if it
 * failed, 2 if it could not be scored or not be run.
 */
import { readFile } from "node:fs/promises";
import { fromJsonString } from "@bufbuild/protobuf";
import { BoughClient, BoughError, collectEvaluation } from "@bough-dev/bough";
import { EvaluateRequestSchema, type EvaluationEvent, Verdict } from "@bough-dev/bough/v1";

const EXIT_CODES = new Map([
  [Verdict.PASSED, 0],
  [Verdict.FAILED, 1],
]);

async function main(file: string, address?: string): Promise<number> {
  using client = new BoughClient(address);
  const request = fromJsonString(EvaluateRequestSchema, await readFile(file, "utf8"));
  const { verdict, totals, error } = await collectEvaluation(printed(client.evaluate(request)));
  if (totals) {
    console.log(`${request.evalSet?.name}: ${totals.trialsPassed} of ${totals.trials} trials passed`);
  }
  if (error) {
    console.error(error.message);
  }
  return EXIT_CODES.get(verdict) ?? 2;
}

/** Print the verdicts as they come. */
async function* printed(events: AsyncIterable<EvaluationEvent>): AsyncGenerator<EvaluationEvent> {
  for await (const event of events) {
    if (event.payload.case === "caseTrialScored" && event.payload.value.result) {
      const { caseId, trial, reason, verdict } = event.payload.value.result;
      console.log(`${caseId} #${trial}: ${(Verdict[verdict] ?? "unknown").toLowerCase()} ${reason}`.trimEnd());
    }
    yield event;
  }
}

const [file = "examples/eval/request.json", address] = process.argv.slice(2);
try {
  process.exitCode = await main(file, address);
} catch (error) {
  console.error(error instanceof BoughError ? error.message : error);
  process.exitCode = 2;
}
