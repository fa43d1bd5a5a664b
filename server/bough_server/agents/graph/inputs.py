"""Inputs of a graph's nodes: START's value, mappings, and templates of prompts."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bough.v1 import agent_pb2, error_pb2, message_pb2
from bough_server.agents.graph.topology import START
from bough_server.agents.graph.values import (
    CHANNELS,
    HISTORY,
    MISSING,
    STATE,
    Path,
    check_size,
    from_message,
    parse_path,
    read_state,
    walk,
)
from bough_server.errors import RunError
from bough_server.functions import Values
from bough_server.log.session_state import json_text
from bough_server.matching.schemas import schema_mistakes
from bough_server.messages import text_of
from bough_server.runtime.lane import Lane
from bough_server.templates import render
from bough_server.truncation import size_of


def read_start(definition: agent_pb2.AgentDefinition, message: message_pb2.Message) -> Any:
    """Return START's value: the input as the definition's type, else its text. Raises RunError BAD_ARGUMENTS."""
    schema = definition.input_schema_json
    if not schema:
        return text_of(message)
    given = [part.data_json for part in message.parts if part.data_json]
    text = given[0] if len(given) == 1 else text_of(message)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_arguments(f"The input of {definition.name!r} must be JSON of its input type: {error}.") from None
    if mistakes := schema_mistakes(value, schema):
        raise _bad_arguments(f"The input of {definition.name!r} does not fit its type: {'; '.join(mistakes[:5])}.")
    return value


class Sources:
    """What the paths of a graph's mappings lead to, as of the last barrier."""

    def __init__(self, lane: Lane, *, start: Any, outputs: Mapping[str, Any], channels: Callable[[], Values]) -> None:
        self._lane, self._start, self._outputs, self._channels = lane, start, outputs, channels

    def build(self, mappings: Sequence[agent_pb2.FieldMapping]) -> Any:
        """Return the value of mappings.

        Raises RunError BAD_ARGUMENTS if something that they need is not there, and OUTPUT_TOO_LARGE.
        """
        built: dict[str, Any] = {}
        size = 0
        for mapping in mappings:
            value = self._read(mapping)
            if not mapping.field:
                return None if value is MISSING else value
            if value is not MISSING:
                built[mapping.field] = value
                # Each may be the same large value: what is too large is not put together first.
                size += size_of(value if isinstance(value, str) else json_text(value))
                check_size(size, "What the mappings make")
        return built

    def _read(self, mapping: agent_pb2.FieldMapping) -> Any:
        if not mapping.path:
            return json.loads(mapping.value_json)
        path = parse_path(mapping.path)
        value = self._find(path)
        if value is MISSING and not path.is_optional:
            raise _bad_arguments(f"There is nothing at {mapping.path}. Write {mapping.path}? if it may be missing.")
        return value

    def _find(self, path: Path) -> Any:
        if path.root == HISTORY:
            return [from_message(message) for message in self._lane.visible_history.messages()]
        if path.root.startswith(f"{STATE}."):
            return read_state(Values(self._lane.lane_state.values), path)
        if path.root.startswith(f"{CHANNELS}."):
            return walk(self._channels().get(path.root.partition(".")[2], MISSING), path.names)
        value = self._start if path.root == START else self._outputs.get(path.root, MISSING)
        return value if value is MISSING else walk(value, path.names)


class InputNames(Mapping[str, Callable[[], str]]):
    """The placeholders of a node's templates: `input`, and fields of it such as `input.question`."""

    def __init__(self, value: Any = None, what: str = "") -> None:
        self._value, self._what = value, what

    def __getitem__(self, name: str) -> Callable[[], str]:
        root, *names = name.split(".")
        if root != "input" or not all(names):
            raise KeyError(name)
        return partial(self._render, name, names)

    def __iter__(self) -> Iterator[str]:
        yield "input"

    def __len__(self) -> int:
        return 1

    def _render(self, name: str, names: Sequence[str]) -> str:
        value = walk(self._value, names)
        if value is MISSING:
            raise _bad_arguments(f"{self._what} names {{{{{name}}}}}, and there is nothing in the input.")
        return value if isinstance(value, str) else json_text(value)


def fill_prompt(template: str, value: Any, lane: Lane, *, what: str) -> str:
    """Return a node's template filled in from its input and the session state. Raises RunError BAD_ARGUMENTS."""
    return render(template, InputNames(value, what), Values(lane.lane_state.values), what=what)


def _bad_arguments(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)
