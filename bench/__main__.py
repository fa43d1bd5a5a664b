"""python -m bench [CASE ...]: runs cases, prints a table, writes var/bench.json.

Exits 0 unless a turn failed. `--profile` runs the desk's server under cProfile and writes var/bench.prof; `--kills` is
how many servers the case replicas kills; `--docs` measures nothing and puts the last report into
docs/explanation/benchmarks.md.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

from rich.console import Console

from bench import table
from bench.figures import CaseResult, Report
from bench.machine import machine, versions

CASES: Final = {
    "desk": "desk",
    "desk-postgres": "desk_postgres",
    "first-piece": "first_piece",
    "catch-up": "catch_up",
    "append": "append",
    "append-postgres": "append_postgres",
    "starts": "starts",
    "usage": "usage",
    "accounts": "accounts",
    "fold": "fold",
    "recover": "recover",
    "waiting": "waiting",
    "growth": "growth",
    "followers": "followers",
    "streams": "streams",
    "clients": "clients",
    "score": "score",
    "evaluate": "evaluate",
    "compare": "compare",
    "replicas": "replicas",
    "callers": "callers",
}
REPORT: Final = Path("var/bench.json")
PROFILE: Final = Path("var/bench.prof")
PAGE: Final = Path("docs/explanation/benchmarks.md")

Measure = Callable[[Path], Awaitable[CaseResult]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line names, everything where it names nothing; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--kills", type=int, metavar="N")
    parser.add_argument("--docs", action="store_true")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if arguments.docs:
        if not REPORT.exists():
            print(f"There is no {REPORT}: its table stays as it is. Run make bench first.", file=sys.stderr)
            return 0
        report: Report = json.loads(REPORT.read_text(encoding="utf-8"))
        PAGE.write_text(table.rewritten(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
        if missing := CASES.keys() - report["seconds"].keys():
            print(f"The last make bench did not run {', '.join(sorted(missing))}: no rows of them.", file=sys.stderr)
        return 0
    REPORT.parent.mkdir(exist_ok=True)
    options: dict[str, dict[str, object]] = {}
    if arguments.profile:
        options["desk"] = {"profile": PROFILE.absolute()}
    if arguments.kills:
        options["replicas"] = {"kills": arguments.kills}
    report = asyncio.run(_measured(arguments.cases or list(CASES), options))
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    table.show(report, Console(width=None if sys.stdout.isatty() else 160))
    return 1 if report["failures"] else 0


async def _measured(cases: Sequence[str], options: Mapping[str, Mapping[str, object]]) -> Report:
    report = Report(
        date=datetime.now(UTC).date().isoformat(),
        machine=machine(),
        versions=versions(),
        figures=[],
        failures=[],
        seconds={},
    )
    for case in cases:
        print(f"{case} ...", file=sys.stderr, flush=True)
        measure: Measure = partial(import_module(f"bench.{CASES[case]}").measure, **options.get(case, {}))
        start = time.monotonic()
        # Beside the report, on a disk: where temporary files are kept in memory, a durable commit costs nothing.
        with tempfile.TemporaryDirectory(prefix="bench-", dir=REPORT.parent.absolute()) as folder:
            result = await measure(Path(folder))
        report["seconds"][case] = round(time.monotonic() - start, 1)
        report["figures"] += [figure.written() for figure in result.figures]
        report["failures"] += result.failures
    return report


if __name__ == "__main__":
    sys.exit(main())
