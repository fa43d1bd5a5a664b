"""Evaluate a set and exit as CI expects: python eval.py REQUEST.json [ADDRESS].

The file is an EvaluateRequest as JSON, such as examples/eval/request.json. The exit code is 0 if it passed, 1 if it
failed, 2 if it could not be judged or not be run.
"""

import asyncio
import sys
from pathlib import Path

from google.protobuf import json_format

from bough import AsyncClient, BoughError
from bough.channel import DEFAULT_ADDRESS
from bough.v1 import METRIC_STATUS_FAILED, METRIC_STATUS_PASSED, EvaluateRequest, MetricStatus

EXIT_CODES = {METRIC_STATUS_PASSED: 0, METRIC_STATUS_FAILED: 1}


async def main(request: EvaluateRequest, address: str = DEFAULT_ADDRESS) -> int:
    async with AsyncClient(address) as client:
        stream = client.evaluations.run(request.set, gates=request.gates, runs=request.runs or None)
        async for event in stream:
            if event.HasField("case_run_scored"):
                case = event.case_run_scored.result
                status = MetricStatus.Name(case.status).removeprefix("METRIC_STATUS_").lower()
                print(f"{case.case_id} #{case.index}: {status} {case.reason}".rstrip(), flush=True)
        result = await stream.result()
    print(f"{result.set_name}: {result.totals.runs_passed} of {result.totals.runs} runs passed")
    return EXIT_CODES.get(result.status, 2)


if __name__ == "__main__":
    wanted = json_format.Parse(Path(sys.argv[1]).read_text(encoding="utf-8"), EvaluateRequest())
    try:
        code = asyncio.run(main(wanted, *sys.argv[2:]))
    except BoughError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)
