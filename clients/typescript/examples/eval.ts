/**
 * Evaluates an agent from a CI job: exit code 0 if it passes, 1 if it does not, 2 if that is unknown.
 *
 *     node eval.js 127.0.0.1:50051 examples/eval/request.json
 */
import { readFile } from "node:fs/promises";
import { fromJsonString } from "@bufbuild/protobuf";
import { BoughClient, BoughError } from "@bough-dev/bough";
import { EvaluateRequestSchema, type EvaluationEvent, MetricStatus } from "@bough-dev/bough/v1";

const EXIT_CODES = {
  [MetricStatus.PASSED]: 0,
  [MetricStatus.FAILED]: 1,
  [MetricStatus.NOT_EVALUATED]: 2,
  [MetricStatus.UNSPECIFIED]: 2,
};

async function main(address = "127.0.0.1:50051", file = "examples/eval/request.json"): Promise<number> {
  using client = new BoughClient(address, { timeoutMs: 0 });
  const request = fromJsonString(EvaluateRequestSchema, await readFile(file, "utf8"));
  // A CI job can be killed and started again: the same request id follows the evaluation that the first one started.
  request.requestId = process.env["EVAL_REQUEST_ID"] ?? "";

  let code = 2;
  for await (const event of client.evaluate(request, { timeoutMs: 600_000 })) {
    code = exitCode(event) ?? code;
  }
  return code;
}

/** Print an event; return the exit code if it ends the evaluation. */
function exitCode({ payload, evaluationId }: EvaluationEvent): number | undefined {
  switch (payload.case) {
    case "evaluationPlanned":
      console.log(`evaluation ${evaluationId}`);
      return undefined;
    case "caseRunScored": {
      const { caseId, index = 0, status = MetricStatus.UNSPECIFIED, scores = [] } = payload.value.result ?? {};
      console.log(`${caseId}, run ${index + 1}: ${MetricStatus[status]}`);
      for (const score of scores.filter((one) => one.status !== MetricStatus.PASSED)) {
        console.log(`  ${score.name}: ${score.reason}`);
      }
      return undefined;
    }
    case "evaluationCompleted":
      console.log(MetricStatus[payload.value.status]);
      return EXIT_CODES[payload.value.status];
    case "evaluationFailed":
    case "evaluationCancelled":
      console.error(payload.value.error?.message);
      return 2;
    default:
      return undefined;
  }
}

try {
  process.exitCode = await main(...process.argv.slice(2));
} catch (error) {
  if (!(error instanceof BoughError)) {
    throw error;
  }
  console.error(error.message, error.violations);
  process.exitCode = 2;
}
