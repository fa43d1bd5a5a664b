"""Mocks of tools in trpc-agent-go, which hold for a turn, as mocks of a case."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from bough.v1.eval_set_pb2 import ToolMock, ToolMocks
from bough_server.evals.importers.metrics import NoCounterpart
from bough_server.evals.importers.trpc_criteria import equal_matcher, refuse_unknown
from bough_server.evals.importers.values import JsonObject, as_json

_LONGEST_NAME: Final = 256


@dataclass(slots=True, kw_only=True)
class ImportedMocks:
    """The mocks of a case; None for none, and why they cannot be all that the file has."""

    mocks: ToolMocks | None = None
    problems: list[str] = field(default_factory=list)
    are_wider: bool = False
    """Whether a turn has mocks that another one lacks: here they hold for both."""


def read_mocks(turns: Sequence[JsonObject]) -> ImportedMocks:
    """Return the mocks of a case's turns. Raises ConfigurationError.

    A call of a tool that has mocks, none of which matches, fails; one of any other tool runs it.
    """
    found = ImportedMocks()
    by_turn = [_read_turn(turn, found.problems) for turn in turns]
    names = dict.fromkeys(chain.from_iterable(by_turn))
    if not names:
        return found
    found.mocks = ToolMocks(strict=False)
    for name in names:
        rules = [mocks[name] for mocks in by_turn if name in mocks]
        if any(other != rules[0] for other in rules):
            found.problems.append(f"its turns mock the tool {name!r} in different ways, and mocks hold for a case")
        found.are_wider |= len(rules) < len(turns)
        found.mocks.tools.extend(rules[0])
        if rules[0][-1].HasField("arguments_match"):
            found.mocks.tools.append(_build_refusal(name))
    return found


def _read_turn(turn: JsonObject, problems: list[str]) -> dict[str, list[ToolMock]]:
    """Return the mocks of a turn by the names of their tools, in the order in which they are tried."""
    by_tool: dict[str, list[ToolMock]] = {}
    source = turn.child("toolMock")
    for item in source.children("actual") if source is not None else ():
        name = item.require_text("name")
        if len(name) > _LONGEST_NAME:
            raise item.wrong("name", f"has more than {_LONGEST_NAME} characters")
        by_tool.setdefault(name, []).extend(_read_mock(name, item, problems))
    return by_tool


def _read_mock(name: str, item: JsonObject, problems: list[str]) -> Iterator[ToolMock]:
    mock = ToolMock(name=name)
    try:
        _set_arguments(mock, item.child("arguments"))
        if item.has("llmGenerator"):
            raise NoCounterpart("a model answers the calls")
    except NoCounterpart as reason:
        problems.append(f"a mock of the tool {name!r} has no counterpart: {reason}")
        yield _build_refusal(name)
        return
    if not item.has("result"):
        raise item.wrong("result", "is required, or llmGenerator")
    mock.result_json = as_json(item.raw("result"))
    yield mock


def _set_arguments(mock: ToolMock, arguments: JsonObject | None) -> None:
    if arguments is None:
        return
    refuse_unknown(arguments, "ignore", "expected", "onlyTree", "ignoreTree", "numberTolerance")
    if arguments.flag("ignore"):
        return
    if not arguments.has("expected"):
        raise arguments.wrong("expected", "is required unless ignore is true")
    mock.arguments_match.CopyFrom(equal_matcher(arguments, arguments.raw("expected"), 0.0))


def _build_refusal(name: str) -> ToolMock:
    mock = ToolMock(name=name)
    mock.outcome.failure.message = f"The tool {name!r} is mocked, and no mock matches the call."
    return mock
