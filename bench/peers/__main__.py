"""python -m bench.peers [PEER ...]: runs Bough and peers, prints Markdown, writes var/bench-peers.json.

Exits 0 unless a turn of Bough failed, or there was no peer to run. A peer that cannot be installed is named, and the
others run. `--docs` measures nothing and puts the last report into docs/explanation/benchmarks.md.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.__main__ import PAGE
from bench.peers import environments, graphs, table
from bench.peers.contestants import ALL, PEERS, Contestant
from bench.peers.race import ROUNDS, PeersReport, race, shapes

REPORT: Final = Path("var/bench-peers.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the peers that the command line names, all if it names none; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = environments.names()
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="measure visits of graphs beside langgraph instead")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.peers) - set(names):
        parser.error(f"there is no peer {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if arguments.docs:
        return _write_page()
    if arguments.graphs:
        return graphs.main()
    return _measure(_chosen(arguments.peers or names), arguments.rounds)


def _measure(contestants: Sequence[Contestant], rounds: int) -> int:
    REPORT.parent.mkdir(exist_ok=True)
    # Beside the report, on a disk: in memory a durable commit costs nothing.
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=REPORT.parent.absolute()) as folder:
        report = asyncio.run(race(Path(folder), contestants, shapes(rounds)))
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table.markdown(report))
    return 1 if has_failed(report) else 0


def has_failed(report: PeersReport) -> bool:
    """Whether a turn of Bough or of a floor failed, or no peer ran."""
    ours = [laps for one in report["results"] if not one["is_peer"] for laps in one["laps"].values()]
    return any(laps["failed"] for laps in ours) or not any(one["is_peer"] for one in report["results"])


def _chosen(names: Sequence[str]) -> list[Contestant]:
    return [one for one in ALL if one not in PEERS or one.environment in names]


def _write_page() -> int:
    if not REPORT.exists():
        print(f"There is no {REPORT}: its tables stay as they are. Run make bench-peers first.", file=sys.stderr)
        return 0
    report: PeersReport = json.loads(REPORT.read_text(encoding="utf-8"))
    PAGE.write_text(table.rewritten(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
