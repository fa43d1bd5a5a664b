/**
 * Evaluate a set and exit as CI expects: node eval.js REQUEST.json [ADDRESS].
 *
 * The file is an EvaluateRequest as JSON, such as examples/eval/request.json. The exit code is 0 if it passed, 1 if it
 * failed, 2 if it could not be scored or not be run.
 */
import { readFile } from "node:fs/promises";
import { fromJsonString } from "@bufbuild/protobuf";
import { BoughClient, BoughError } from "@bough-dev/bough";
import { EvaluateRequestSchema, Verdict } from "@bough-dev/bough/v1";

const EXIT_CODES = new Map([
  [Verdict.PASSED, 0],
  [Verdict.FAILED, 1],
]);

async function main(file: string, address?: string): Promise<number> {
  using client = new BoughClient(address);
  const request = fromJsonString(EvaluateRequestSchema, await readFile(file, "utf8"));
  let verdict = Verdict.UNSPECIFIED;
  for await (const { payload } of client.evaluate(request)) {
    switch (payload.case) {
      case "caseTrialScored": {
        const { caseId, trial, reason, verdict: scored = Verdict.UNSPECIFIED } = payload.value.result ?? {};
        console.log(`${caseId} #${trial}: ${(Verdict[scored] ?? "unknown").toLowerCase()} ${reason}`.trimEnd());
        break;
      }
      case "evaluationTotaled": {
        const { trials, trialsPassed } = payload.value.totals ?? {};
        console.log(`${request.evalSet?.name}: ${trialsPassed} of ${trials} trials passed`);
        break;
      }
      case "evaluationCompleted":
        verdict = payload.value.verdict;
        break;
      case "evaluationFailed":
      case "evaluationCancelled":
        console.error(payload.value.error?.message);
        break;
      default:
    }
  }
  return EXIT_CODES.get(verdict) ?? 2;
}

const [file = "examples/eval/request.json", address] = process.argv.slice(2);
try {
  process.exitCode = await main(file, address);
} catch (error) {
  console.error(error instanceof BoughError ? error.message : error);
  process.exitCode = 2;
}
