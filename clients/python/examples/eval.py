"""Evaluate a set and exit as CI expects: python eval.py REQUEST.json [ADDRESS].

The file is an EvaluateRequest as JSON, such as examples/eval/request.json. The exit code is 0 if it passed, 1 if it
failed, 2 if it could not be scored or not be run.
"""

import asyncio
import sys
from pathlib import Path

from google.protobuf import json_format

from bough import AsyncClient, BoughError
from bough.channel import DEFAULT_ADDRESS
from bough.v1 import VERDICT_FAILED, VERDICT_PASSED, EvaluateRequest, Verdict

EXIT_CODES = {VERDICT_PASSED: 0, VERDICT_FAILED: 1}


async def main(request: EvaluateRequest, address: str = DEFAULT_ADDRESS) -> int:
    async with AsyncClient(address) as client:
        trials = request.trials if request.HasField("trials") else None
        stream = client.evaluations.run(request.eval_set, gates=request.gates, trials=trials)
        async for event in stream:
            if event.HasField("case_trial_scored"):
                trial = event.case_trial_scored.result
                verdict = Verdict.Name(trial.verdict).removeprefix("VERDICT_").lower()
                print(f"{trial.case_id} #{trial.trial}: {verdict} {trial.reason}".rstrip(), flush=True)
        result = await stream.result()
    print(f"{result.eval_set_name}: {result.totals.trials_passed} of {result.totals.trials} trials passed")
    return EXIT_CODES.get(result.verdict, 2)


if __name__ == "__main__":
    wanted = json_format.Parse(Path(sys.argv[1]).read_text(encoding="utf-8"), EvaluateRequest())
    try:
        code = asyncio.run(main(wanted, *sys.argv[2:]))
    except BoughError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)
