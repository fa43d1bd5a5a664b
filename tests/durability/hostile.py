"""python -m tests.durability.hostile --minutes 5: a server that runs hostile code while its health is watched.

Turns with every agent and tool of hostile_code run at once, again and again, beside calls that are no protobuf, calls
by the thousand and cancellations. The server has to live and to answer its health all the time, every run has to end as
it should and keep the laws of a log, and the server's memory and open files may not grow. The last line
counts what went wrong; the exit code is 1 if anything did.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import event_pb2
from tests.durability.hostile_code import KINDS, TOOLS
from tests.support.log_laws import check_laws
from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project
from tests.support.wire_client import Remote, connected

_AT_ONCE: Final = 8
_HEALTH_SECONDS: Final = 10.0
"""How long the health of a server may take, whose loop is blocked now and then for a second and a half."""

_BOUND_FILES: Final = 16
"""How many more files and connections it may have open then."""

_BOUND_BYTES: Final = 96 * 1024 * 1024
"""How much the server's memory may grow after the first tenth of the time."""

AGENTS: Final = {
    "raiser": "run_failed",
    "survivor": "run_completed",
    "unspeakable": "run_failed",
    "looping": "run_failed",
    "building": "run_failed",
    "rewriting": "run_failed",
    "blocking": "run_completed",
    "immortal": "run_cancelled",
    "waiting": "run_interrupted",
    "talker": "run_completed",
    **{f"uses_{name}": "run_completed" for name in TOOLS},
}
"""How the runs of each agent have to end."""


@dataclass(slots=True, kw_only=True)
class Report:
    """How it went."""

    ended: Counter[str] = field(default_factory=Counter)
    health: int = 0
    slowest: float = 0.0
    grown: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"runs={sum(self.ended.values())} health={self.health} slowest_health={self.slowest:.1f}s "
            f"grown={self.grown // 1024} KiB faults={len(self.faults)}"
        )


def write_hostile(folder: Path) -> Path:
    """Write the configuration of the hostile team into a folder; return its path."""
    users = [llm(f"uses_{name}", tools=[name]) for name in TOOLS]
    rewriting = llm("rewriter")
    rewriting["llm"] = {"instruction": "Answer.", "history_rewriter": "hostile_rewriter"}
    flows: list[dict[str, object]] = [
        _flow("looping", {"loop": {"max_iterations": 2, "until": {"predicate": "hostile_condition"}}}, "talker"),
        _flow("building", {"sequence": {}}, {"agent": "talker", "input": {"function": "hostile_builder"}}),
        _flow("rewriting", {"sequence": {}}, "talker", "rewriter"),
    ]
    others = [llm("talker"), rewriting, llm("blocking", tools=["block"]), llm("waiting", tools=["undecided"])]
    script = {
        **{f"uses_{name}": _turns(name) for name in TOOLS},
        "blocking": [{"calls": [{"name": "block", "arguments": {"kind": "once"}}]}, "Done."],
        "waiting": _turns("undecided"),
        "talker": ["Hello."] * 4,
        "rewriter": ["Never."],
    }
    python = ["tests.durability.hostile_code"]
    return write_project(
        folder, *users, *others, *flows, script=script, python=python, telemetry={"prometheus_port": 0}
    )


def _flow(name: str, kind: dict[str, object], *links: object) -> dict[str, object]:
    made = [{"agent": link} if isinstance(link, str) else link for link in links]
    return {"name": name, "description": f"Does what {name} does.", **kind, "sub_agents": made}


def _turns(tool: str) -> Sequence[object]:
    return [{"calls": [{"name": tool, "arguments": {"kind": kind}} for kind in sorted(KINDS)]}, "Done."]


async def torment(folder: Path, *, seconds: float, seed: int) -> Report:
    """Run hostile code for a time, and report what was wrong."""
    report, chance = Report(), random.Random(seed)
    async with serving(write_hostile(folder)) as server, connected(server.address) as remote:
        until = time.monotonic() + seconds
        watching = asyncio.create_task(_watch_health(remote, report))
        settled, opened = await _rounds(remote, report, chance, server, until)
        watching.cancel()
        await asyncio.wait({watching})
        if not watching.cancelled() and watching.exception() is not None:
            report.faults.append(f"health failed: {watching.exception()!r}")
        report.grown = max(0, server.resident_bytes() - settled)
        if (left := _open_files(server) - opened) > _BOUND_FILES:
            report.faults.append(f"{left} more files are open")
        await _look_back(remote, report)
        code = await _stopped(server)
    if report.grown > _BOUND_BYTES:
        report.faults.append(f"memory grew by {report.grown} bytes")
    if code != 0:
        report.faults.append(f"the server ended with {code}: {server.said[-2000:]}")
    return report


async def _stopped(server: Serving) -> int:
    await server.stop()
    return await server.end()


async def _rounds(
    remote: Remote, report: Report, chance: random.Random, server: Serving, until: float
) -> tuple[int, int]:
    """Take turns with all agents until the time is over; return memory and open files after the first tenth of it."""
    settled, opened, began = 0, 0, time.monotonic()
    while not settled or time.monotonic() < until:
        names = chance.sample(sorted(AGENTS), len(AGENTS))
        slots = asyncio.Semaphore(_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(_take(remote, report, slots, name, chance.choice(sorted(KINDS))))
            group.create_task(_misbehave(remote, report))
        if not settled and time.monotonic() - began >= (until - began) / 10:
            settled, opened = server.resident_bytes(), _open_files(server)
    return settled, opened


def _open_files(server: Serving) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


async def _take(remote: Remote, report: Report, slots: asyncio.Semaphore, name: str, kind: str) -> None:
    async with slots:
        turn = remote.begin(name, kind)
        if name == "immortal":
            await turn.until("run_started")
            await remote.agents.CancelRun(pb.CancelRunRequest(run_id=await turn.run_id()))
        await turn.to_the_end()
    _judge(report, name, turn.events)
    if name == "waiting":
        await remote.agents.CancelRun(pb.CancelRunRequest(run_id=await turn.run_id()))


def _judge(report: Report, name: str, log: Sequence[event_pb2.AgentEvent]) -> None:
    end = str(log[-1].WhichOneof("payload"))
    report.ended[end] += 1
    if end != AGENTS[name]:
        report.faults.append(f"{name} ended with {end}: {log[-1]}")
    results = Counter(str(event.WhichOneof("payload")) for event in log)
    if name.startswith("uses_") and name != "uses_stray" and results["tool_failed"] != len(KINDS):
        report.faults.append(f"{name} has {results['tool_failed']} failed calls")
    if name == "survivor" and "3 failed" not in str(log[-1]):
        report.faults.append(f"{name} said: {log[-1]}")


async def _misbehave(remote: Remote, report: Report) -> None:
    """Send bytes that are no message, metadata that is no name, and more calls at once than a server takes."""
    send = remote.channel.unary_unary("/bough.v1.AgentService/GetRun")
    try:
        await send(b"\xff\xff", metadata=[(f"bough-{number}", "x" * 100) for number in range(20)])
    except aio.AioRpcError as refused:
        if refused.code() != grpc.StatusCode.INVALID_ARGUMENT:
            report.faults.append(f"bytes that are no message: {refused!r}")
    check = HealthStub(remote.channel).Check
    await asyncio.gather(*(check(HealthCheckRequest()) for _ in range(1_500)))


async def _watch_health(remote: Remote, report: Report) -> None:
    """Ask for the health four times a second. Raises AioRpcError if one answer takes too long."""
    check = HealthStub(remote.channel).Check
    while True:
        began = time.monotonic()
        await check(HealthCheckRequest(), timeout=_HEALTH_SECONDS)
        report.health += 1
        report.slowest = max(report.slowest, time.monotonic() - began)
        await asyncio.sleep(0.25)


async def _look_back(remote: Remote, report: Report) -> None:
    """Check that nothing is running any more, and that the newest logs keep the laws."""
    if running := await remote.running():
        report.faults.append(f"still running: {running}")
    for run in (await remote.agents.ListRuns(pb.ListRunsRequest(page_size=50))).runs:
        try:
            check_laws(await remote.log(run.run_id))
        except AssertionError as broken:
            report.faults.append(f"the log of {run.agent} breaks a law: {broken}")


def main(argv: Sequence[str] | None = None) -> int:
    """Torment a server as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="of the order of turns; default: any")
    arguments = parser.parse_args(argv)
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        report = asyncio.run(torment(Path(folder), seconds=arguments.minutes * 60, seed=seed))
    for fault in report.faults:
        print(fault)
    print(report)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
