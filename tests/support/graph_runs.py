"""Runs of graphs: their nodes, and what their logs say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bough.v1 import event_pb2
from bough_server import RunError, node
from bough_server.functions import Function
from tests.support.graphs import graph
from tests.support.log_readings import check_replay, having
from tests.support.teams import open_team, script


def giving(name: str, value: object) -> Function:
    """A node function that gives a value."""

    @node(name=name)
    def give(_: Any) -> Any:
        return value

    return give


@node
def join_all(value: dict[str, Any]) -> str:
    """Gives what it gets, in its order."""
    return json.dumps(value)


@node
def echo(value: Any) -> Any:
    """Gives its input."""
    return value


@node
def fail(value: Any) -> Any:
    """Fails."""
    raise ValueError("no")


async def run_of(
    folder: Path, text: str, *functions: Function, turns: str = "", said: str = "Go.", **team: Any
) -> list[event_pb2.AgentEvent]:
    """The log of one run of a graph, which replays from itself."""
    definitions = team.pop("definitions", ())
    async with open_team(
        folder, turns or script(), graph(text), *definitions, functions=[*functions, echo, fail, join_all], **team
    ) as harness:
        log = await harness.turn("lead", said)
        await check_replay(harness, log)
    return log


def visits(log: Sequence[event_pb2.AgentEvent]) -> list[tuple[str, int, list[str]]]:
    """The visits that started, with their supersteps and what made them run."""
    return [
        (event.node_started.node, event.node_started.superstep, list(event.node_started.triggered_by))
        for event in having(log, "node_started")
        if not event.node_started.HasField("item")
    ]


def error_of(log: Sequence[event_pb2.AgentEvent]) -> tuple[str, str]:
    """The reason and the message of a failed run."""
    error = log[-1].run_failed.error
    return RunError.of(error).reason_name, error.message
