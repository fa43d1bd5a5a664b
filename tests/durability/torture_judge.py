"""Judges what a tortured server left behind: its logs, against what clients saw and what was done to the world."""

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bough.v1 import event_pb2
from bough_server import events
from bough_server.cli.definitions import registry_of
from bough_server.clock import SystemClock
from bough_server.interceptors.auth import LOCAL
from bough_server.runs.replay import offline_resolver, replay
from bough_server.settings import Settings
from bough_server.store.opening import Store, open_store
from bough_server.telemetry import Tracing, make_provider
from tests.durability.torture_clients import Events, Faults, Seen
from tests.durability.torture_team import Asked
from tests.support.log_laws import check_laws

Lines = Mapping[str, Sequence[Mapping[str, object]]]
"""By idempotency key, what was said before and after touching the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What torture leaves behind: the servers' folder, what clients saw, and what was done to the world."""

    config: Path
    turns: Sequence[Seen]
    asked: Counter[Asked]
    effects: Path


async def judge(evidence: Evidence, faults: Faults) -> int:
    """Adds what is wrong to the faults; gives how many runs there are. No server may be running."""
    settings, database = Settings.load(evidence.config), evidence.config.parent / "bough.db"
    with closing(sqlite3.connect(database)) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            faults.add("lost", "the database is damaged")
        rows = connection.execute("SELECT run_id, session_id FROM runs ORDER BY run_id").fetchall()
    by_run = {turn.events[0].run_id: turn for turn in evidence.turns if turn.events}
    for run_id, _ in rows:
        if run_id not in by_run:
            faults.add("duplicates", f"{run_id}: no client asked for this run")
    lines = _lines(evidence.effects)
    resolver_here, tracing = registry_of(settings).resolver, Tracing(make_provider(export=False))
    async with open_store(str(database)) as store:
        for run_id, session_id in rows:
            log = await _log(store, run_id, session_id)
            if run_id in by_run:
                _compare(by_run[run_id].events, log, faults)
            _check(log, lines, evidence.asked, faults)
            cut = log[0].run_started.session_cut
            session = await store.sessions.messages(LOCAL, session_id, through=cut) if cut else ()
            resolver = offline_resolver(log, resolver_here, is_forced=False)
            replayed = await replay(log, resolver=resolver, tracing=tracing, clock=SystemClock(), session=session)
            if replayed.divergence:
                faults.add("lost", f"{run_id}: it does not re-execute: {replayed.divergence}")
    return len(rows)


async def _log(store: Store, run_id: str, session_id: str) -> Events:
    stamp, found, after = events.stamp(run_id, session_id), [], 0
    while page := await store.log.read(run_id, after=after):
        found.extend(events.parse(stamp + stored.data) for stored in page)
        after = page[-1].sequence
    return found


def _compare(seen: Events, log: Events, faults: Faults) -> None:
    """A client has seen every sequence of a log once and in order."""
    run_id, sequences = log[0].run_id, [event.sequence for event in seen]
    if len({*sequences}) != len(sequences):
        faults.add("duplicates", f"{run_id}: a client saw sequences twice")
    if seen != log:
        faults.add("lost", f"{run_id}: a client saw {len(seen)} of {len(log)} events, or others, or in another order")


def _check(log: Events, lines: Lines, asked: Counter[Asked], faults: Faults) -> None:
    run_id = log[0].run_id
    try:
        check_laws(log)
    except AssertionError as broken:
        faults.add("lost", f"{run_id}: a law is broken: {broken}")
    for what in [*_tools_run_again(log, lines), *_steps_run_again(log, lines), *_models_asked_again(log, asked)]:
        faults.add("duplicates", f"{run_id}: {what}")
    for what in _tools_not_run(log, lines):
        faults.add("lost", f"{run_id}: {what}")


def _began(lines: Lines, key: str) -> Counter[object]:
    """How often each process began something."""
    return Counter(line["pid"] for line in lines.get(key, ()) if line["phase"] == "began")


def _tool_keys(log: Events) -> dict[str, list[event_pb2.AgentEvent]]:
    """By idempotency key, the starts of a call that touches the world."""
    starts: dict[str, list[event_pb2.AgentEvent]] = defaultdict(list)
    for event in log:
        if event.HasField("tool_started") and not event.tool_started.call.name.startswith("call_"):
            starts[event.tool_started.idempotency_key].append(event)
    return starts


def _tools_run_again(log: Events, lines: Lines) -> list[str]:
    """Calls that ran more often than the log has attempts, or that began again after their end."""
    found = []
    ends = {event.effect_key: event.sequence for event in log if event.HasField("tool_completed")}
    for key, starts in _tool_keys(log).items():
        began, effect = _began(lines, key), starts[0].effect_key
        if began.total() > len(starts) or max(began.values(), default=0) > 1:
            found.append(f"{effect} ran {began.total()} times in {len(starts)} attempts")
        if effect in ends and starts[-1].sequence > ends[effect]:
            found.append(f"{effect} began again after its end")
        if not _is_resumed_between(log, [start.sequence for start in starts]):
            found.append(f"{effect} began again although its server lived")
    return found


def _is_resumed_between(log: Events, starts: Sequence[int]) -> bool:
    resumed = [event.sequence for event in log if event.HasField("run_resumed")]
    return all(any(first < sequence < second for sequence in resumed) for first, second in pairwise(starts))


def _tools_not_run(log: Events, lines: Lines) -> list[str]:
    """Calls that have a result although they never ran to their end."""
    completed = {event.effect_key for event in log if event.HasField("tool_completed")}
    return [
        f"{starts[0].effect_key} has a result and did not run"
        for key, starts in _tool_keys(log).items()
        if starts[0].effect_key in completed and not any(line["phase"] == "ended" for line in lines.get(key, ()))
    ]


def _steps_run_again(log: Events, lines: Lines) -> list[str]:
    """Work of an agent's code that one process did twice, or that was done although no process had been lost."""
    began = _began(lines, f"{log[0].run_id}/note")
    lives = 1 + sum(event.HasField("run_resumed") for event in log)
    return (
        [f"the note was taken {began.total()} times"]
        if began.total() > lives or max(began.values(), default=0) > 1
        else []
    )


def _models_asked_again(log: Events, asked: Counter[Asked]) -> list[str]:
    """Model calls that were made more often than the log has attempts."""
    told = {event.invocation_id: _told(event) for event in log if _told(event)}
    attempts: dict[Asked, int] = {}
    for event in log:
        if event.HasField("llm_started") or event.HasField("llm_retrying"):
            attempts[event.agent, told[event.invocation_id], event.step_index] = event.attempt
    return [
        f"{call} was asked {asked[call]} times in {most} attempts"
        for call, most in attempts.items()
        if asked[call] > most
    ]


def _told(event: event_pb2.AgentEvent) -> str:
    """What an invocation was told, if this is its first event."""
    started = event.run_started if event.HasField("run_started") else event.sub_agent_started
    return "".join(part.text for part in started.input.parts)


def _lines(effects: Path) -> Lines:
    found: dict[str, list[Mapping[str, object]]] = defaultdict(list)
    for line in effects.read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        found[said["key"]].append(said)
    return found
