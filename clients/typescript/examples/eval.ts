/**
 * Evaluate a set and exit as CI expects: node eval.js REQUEST.json [ADDRESS].
 *
 * The file is an EvaluateRequest as JSON, such as examples/eval/request.json. The exit code is 0 if it passed, 1 if it
 * failed, 2 if it could not be judged or not be run.
 */
import { readFile } from "node:fs/promises";
import { fromJsonString } from "@bufbuild/protobuf";
import { BoughClient, BoughError } from "@bough-dev/bough";
import { EvaluateRequestSchema, MetricStatus } from "@bough-dev/bough/v1";

const EXIT_CODES = {
  [MetricStatus.PASSED]: 0,
  [MetricStatus.FAILED]: 1,
  [MetricStatus.NOT_EVALUATED]: 2,
  [MetricStatus.UNSPECIFIED]: 2,
};

async function main(file: string, address?: string): Promise<number> {
  using client = new BoughClient(address);
  const request = fromJsonString(EvaluateRequestSchema, await readFile(file, "utf8"));
  let status = MetricStatus.UNSPECIFIED;
  for await (const { payload } of client.evaluate(request)) {
    switch (payload.case) {
      case "caseRunScored": {
        const { caseId, index, reason, status: verdict = MetricStatus.UNSPECIFIED } = payload.value.result ?? {};
        console.log(`${caseId} #${index}: ${MetricStatus[verdict].toLowerCase()} ${reason}`.trimEnd());
        break;
      }
      case "evaluationTotaled": {
        const { runs, runsPassed } = payload.value.totals ?? {};
        console.log(`${request.set?.name}: ${runsPassed} of ${runs} runs passed`);
        break;
      }
      case "evaluationCompleted":
        status = payload.value.status;
        break;
      case "evaluationFailed":
      case "evaluationCancelled":
        console.error(payload.value.error?.message);
        break;
      default:
    }
  }
  return EXIT_CODES[status];
}

const [file = "examples/eval/request.json", address] = process.argv.slice(2);
try {
  process.exitCode = await main(file, address);
} catch (error) {
  console.error(error instanceof BoughError ? error.message : error);
  process.exitCode = 2;
}
