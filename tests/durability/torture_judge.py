"""Judges what tortured servers left behind: their logs, against what clients saw and what was done to the world."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Final

from bough.v1 import event_pb2
from bough_server.cli.definitions import registry_of
from bough_server.clock import SystemClock
from bough_server.identity import LOCAL
from bough_server.log import events
from bough_server.observability.tracing import Tracing, make_provider
from bough_server.runs.replay import build_offline_resolver, replay
from bough_server.settings import Settings
from bough_server.store.opening import open_store, rebuild_projections
from bough_server.store.sqlite.database_path import is_postgres
from tests.durability.torture_charges import check_balance, check_charges
from tests.durability.torture_clients import Events, Faults, Seen
from tests.durability.torture_evaluations import Progress
from tests.durability.torture_team import Asked
from tests.store.sql import execute
from tests.support.log_laws import check_laws

_RUNS: Final = (
    "SELECT run_id, session_id, evaluation_id, epoch, last_sequence, ended FROM runs WHERE kind = 0 ORDER BY run_id"
)

_DERIVED: Final = ("runs", "sessions", "messages", "calls", "usage_entries", "run_definitions")
"""Tables that can be made again from the logs."""

Lines = Mapping[str, Sequence[Mapping[str, object]]]
"""By idempotency key, what was said before and after touching the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What torture leaves behind: the servers' folder, what clients saw, and what was done to the world."""

    config: Path
    turns: Sequence[Seen]
    evaluations: Sequence[Sequence[Progress]] = ()
    """What each of its clients saw of each evaluation."""
    asked: Counter[Asked]
    effects: Path
    restarts: int = 0
    """How often the database was restarted."""

    @property
    def url(self) -> str:
        """The storage URL."""
        return Settings.load(self.config).storage.url


async def judge(evidence: Evidence, faults: Faults) -> int:
    """Adds what is wrong to the faults; gives how many runs there are. No server may be running."""
    settings, url = Settings.load(evidence.config), evidence.url
    if not is_postgres(url) and execute(url, "PRAGMA integrity_check") != [("ok",)]:
        faults.add("lost", "the database is damaged")
    rows = execute(url, _RUNS)
    by_run = {turn.events[0].run_id: turn for turn in evidence.turns if turn.events}
    lines, logs = _lines(evidence.effects), _logs(url, {run_id: session_id for run_id, session_id, *_ in rows})
    evaluated = {seen[0].events[0].evaluation_id for seen in evidence.evaluations if seen[0].events}
    resolver_here, tracing = registry_of(settings).resolver, Tracing(make_provider(export=False))
    async with open_store(url) as store:
        for run_id, session_id, evaluation_id, *state in rows:
            log = logs[run_id]
            if not log:
                faults.add("lost", f"{run_id}: it has no log")
                continue
            if run_id in by_run:
                for seen in (by_run[run_id].events, *by_run[run_id].watched):
                    _compare(seen, log, faults)
            elif evaluation_id not in evaluated:
                faults.add("duplicates", f"{run_id}: no client asked for this run")
            if tuple(state) != (expected := _state(log)):
                faults.add("lost", f"{run_id}: epoch, last sequence and end are {state}, not {expected} as in the log")
            _check(log, lines, evidence, faults)
            await check_charges(store, run_id, log, faults)
            cut = log[0].run_started.session_cut
            session = await store.sessions.messages(LOCAL.principal, session_id, through=cut) if cut else ()
            resolver = build_offline_resolver(log, resolver_here, is_forced=False)
            replayed = await replay(log, resolver=resolver, tracing=tracing, clock=SystemClock(), session=session)
            if replayed.divergence:
                faults.add("lost", f"{run_id}: it does not re-execute: {replayed.divergence}")
        await check_balance(store, faults)
    if not faults.said:
        _check_derived(url, faults)
    return len(rows)


def _logs(url: str, sessions: Mapping[str, str]) -> Mapping[str, Events]:
    """Return the log of each run, as its rows are: the sequence of an event is that of its row."""
    logs: dict[str, Events] = {run_id: [] for run_id in sessions}
    known = "WHERE run_id IN (SELECT run_id FROM runs WHERE kind = 0)"
    rows = execute(url, f"SELECT run_id, sequence, data FROM events {known} ORDER BY run_id, sequence")
    for run_id, of_run in groupby(rows, itemgetter(0)):
        stamp = events.stamp(run_id, sessions[run_id])
        for _, sequence, data in of_run:
            event = events.parse(stamp + data)
            event.sequence = sequence
            logs[run_id].append(event)
    return logs


def _state(log: Events) -> tuple[int, int, bool]:
    """Return the epoch, the last sequence and whether there is an end, as the row of a run has them."""
    epoch = max((event.run_resumed.epoch for event in log if event.HasField("run_resumed")), default=1)
    return epoch, len(log), events.kind_of(log[-1]) in events.TERMINAL_KINDS


def _check_derived(url: str, faults: Faults) -> None:
    """What is derived from the logs is what they say, in every column."""
    found = [sorted(execute(url, f"SELECT * FROM {table}"), key=repr) for table in _DERIVED]
    rebuild_projections(url)
    for table, rows in zip(_DERIVED, found, strict=True):
        made = sorted(execute(url, f"SELECT * FROM {table}"), key=repr)
        for row, again in zip(rows, made, strict=False):
            if row != again:
                faults.add("lost", f"{table} has {row}, and the logs make {again}")
        if len(rows) != len(made):
            faults.add("lost", f"{table} has {len(rows)} rows, and the logs make {len(made)}")


def _compare(seen: Events, log: Events, faults: Faults) -> None:
    """A client has seen every sequence of a log once and in order."""
    run_id, sequences = log[0].run_id, [event.sequence for event in seen]
    if len({*sequences}) != len(sequences):
        faults.add("duplicates", f"{run_id}: a client saw sequences twice")
    if list(map(_bytes, seen)) != list(map(_bytes, log)):
        faults.add("lost", f"{run_id}: a client saw {len(seen)} of {len(log)} events, or others, or in another order")


def _bytes(event: event_pb2.AgentEvent) -> bytes:
    return event.SerializeToString(deterministic=True)


def _check(log: Events, lines: Lines, evidence: Evidence, faults: Faults) -> None:
    run_id, most = log[0].run_id, _most_begun(log, evidence)
    try:
        check_laws(log)
    except AssertionError as broken:
        faults.add("lost", f"{run_id}: a law is broken: {broken}")
    again = *_tools_run_again(log, lines, most), *_steps_run_again(log, lines, most)
    for what in (*again, *_models_asked_again(log, evidence.asked)):
        faults.add("duplicates", f"{run_id}: {what}")
    for what in _tools_not_run(log, lines):
        faults.add("lost", f"{run_id}: {what}")


def _most_begun(log: Events, evidence: Evidence) -> int:
    """How often one process may begin the same: once; where it may lose a run and take it again, in each epoch."""
    return _state(log)[0] if is_postgres(evidence.url) else 1


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


def _tools_run_again(log: Events, lines: Lines, most: int) -> list[str]:
    """Calls that ran more often than the log has attempts, or that began again after their end."""
    found = []
    ends = {event.effect_key: event.sequence for event in log if event.HasField("tool_completed")}
    for key, starts in _tool_keys(log).items():
        began, effect = _began(lines, key), starts[0].effect_key
        if began.total() > len(starts) or max(began.values(), default=0) > most:
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


def _steps_run_again(log: Events, lines: Lines, most: int) -> list[str]:
    """Work of an agent's code that one process did twice, or that was done although no process had been lost."""
    began = _began(lines, f"{log[0].run_id}/note")
    lives = 1 + sum(event.HasField("run_resumed") for event in log)
    return (
        [f"the note was taken {began.total()} times"]
        if began.total() > lives or max(began.values(), default=0) > most
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
