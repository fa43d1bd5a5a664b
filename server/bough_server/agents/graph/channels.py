"""Channels of a graph invocation: their values, and how the writes of a superstep change them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from bough.v1 import agent_pb2, error_pb2, event_pb2
from bough_server.agents.graph.values import check_type, mismatch, to_text
from bough_server.errors import RunError
from bough_server.functions import Function, Reducer, Values
from bough_server.matching.json_types import is_any
from bough_server.truncation import size_of

MAX_CHANNELS_BYTES: Final = 256 * 1024
"""The most bytes of all channels of a graph invocation as JSON."""

REPLACE: Final = agent_pb2.CHANNEL_REDUCER_REPLACE
APPEND: Final = agent_pb2.CHANNEL_REDUCER_APPEND
EXTEND: Final = agent_pb2.CHANNEL_REDUCER_EXTEND
SUM: Final = agent_pb2.CHANNEL_REDUCER_SUM
MERGE: Final = agent_pb2.CHANNEL_REDUCER_MERGE

INITIAL: Final[Mapping[int, str]] = {APPEND: "[]", EXTEND: "[]", SUM: "0", MERGE: "{}"}
"""What a channel begins with if its definition does not say, by its reducer; others begin without a value."""

_WANTED: Final[Mapping[int, tuple[type | tuple[type, ...], str]]] = {
    EXTEND: (list, "a list"),
    SUM: ((int, float), "a number"),
    MERGE: (dict, "an object"),
}


class Channels:
    """The channels of one graph invocation."""

    def __init__(self, definitions: Iterable[agent_pb2.GraphChannel], functions: Mapping[str, Function]) -> None:
        self._definitions = {each.name: each for each in definitions}
        self._functions = functions
        initial = {each.name: each.initial_json or INITIAL.get(reducer_of(each), "") for each in definitions}
        self._texts = {name: text for name, text in initial.items() if text}

    @property
    def values(self) -> Values:
        """The values as of the last barrier, by name; those without a value are left out."""
        return Values(self._texts)

    def build_update(self, channel: str, value: Any) -> event_pb2.ChannelUpdate:
        """Return the write of a value. Raises RunError: TYPE_MISMATCH if the channel's reducer cannot take it."""
        found = self._definitions.get(channel)
        if found is None:
            raise RunError(f"There is no channel {channel!r}.", reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)
        wanted = None if found.reducer_function else _WANTED.get(reducer_of(found))
        if wanted is not None and (not isinstance(value, wanted[0]) or isinstance(value, bool)):
            name = agent_pb2.ChannelReducer.Name(reducer_of(found)).removeprefix("CHANNEL_REDUCER_")
            raise mismatch(f"The channel {channel!r} is written by {name}, which takes {wanted[1]}: {str(value)[:80]}.")
        text = to_text(value, f"What is written to the channel {channel!r}", error_pb2.ERROR_REASON_BAD_ARGUMENTS)
        return event_pb2.ChannelUpdate(channel=channel, value_json=text)

    def apply(self, writes: Sequence[tuple[str, Sequence[event_pb2.ChannelUpdate]]]) -> None:
        """Apply the writes of the visits of a superstep, each with its node, in merge order; all of them or none.

        Raises RunError: CHANNEL_CONFLICT, TYPE_MISMATCH, OUTPUT_TOO_LARGE, or what a reducer raises.
        """
        self._check_conflicts(writes)
        changed: dict[str, Any] = {}
        for _, updates in writes:
            for update in updates:
                current = changed[update.channel] if update.channel in changed else self._read(update.channel)
                changed[update.channel] = self._reduce(update.channel, current, json.loads(update.value_json))
        if not changed:
            return
        after = dict(self._texts)
        for name, value in changed.items():
            after[name] = to_text(value, f"The channel {name!r}")
            schema = self._definitions[name].schema_json
            if not is_any(schema):
                check_type(value, schema, f"The channel {name!r} does not fit its type")
        if sum(map(size_of, after.values())) > MAX_CHANNELS_BYTES:
            raise _build_size_error()
        self._texts = after

    def _check_conflicts(self, writes: Sequence[tuple[str, Sequence[event_pb2.ChannelUpdate]]]) -> None:
        writers: dict[str, list[str]] = {}
        for node, updates in writes:
            for channel in {update.channel for update in updates}:
                writers.setdefault(channel, []).append(node)
        for channel, nodes in sorted(writers.items()):
            definition = self._definitions[channel]
            if len(nodes) > 1 and reducer_of(definition) == REPLACE and not definition.reducer_function:
                raise RunError(
                    f"The nodes {', '.join(map(repr, nodes))} replaced the value of the channel {channel!r} in one "
                    "superstep. Give the channel another reducer, or let them run one after another.",
                    reason=error_pb2.ERROR_REASON_CHANNEL_CONFLICT,
                )

    def _read(self, channel: str) -> Any:
        return json.loads(self._texts[channel]) if channel in self._texts else None

    def _reduce(self, channel: str, current: Any, update: Any) -> Any:
        definition = self._definitions[channel]
        if definition.reducer_function:
            function = self._functions[definition.reducer_function]
            assert isinstance(function, Reducer)  # checked when the run started
            return function.reduce(current, update)
        match reducer_of(definition):
            case agent_pb2.CHANNEL_REDUCER_APPEND:
                return [*current, update]
            case agent_pb2.CHANNEL_REDUCER_EXTEND:
                return [*current, *update]
            case agent_pb2.CHANNEL_REDUCER_SUM:
                return current + update
            case agent_pb2.CHANNEL_REDUCER_MERGE:
                return {**current, **update}
        return update


def check_updates(updates: Iterable[event_pb2.ChannelUpdate]) -> None:
    """Raise RunError OUTPUT_TOO_LARGE if a visit writes more than all channels may hold."""
    if sum(size_of(update.value_json) for update in updates) > MAX_CHANNELS_BYTES:
        raise _build_size_error()


def _build_size_error() -> RunError:
    return RunError(
        f"The channels are larger than {MAX_CHANNELS_BYTES // 1024} KiB together. Keep large values elsewhere and put "
        "references to them into channels.",
        reason=error_pb2.ERROR_REASON_OUTPUT_TOO_LARGE,
    )


def reducer_of(channel: agent_pb2.GraphChannel) -> agent_pb2.ChannelReducer.ValueType:
    """Return how writes change a channel that has no reducer of the operator's."""
    return channel.reducer or agent_pb2.CHANNEL_REDUCER_REPLACE
