"""A view changes nothing but what is shown: one script followed in FULL and in SUMMARY."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from google.protobuf import json_format
from google.protobuf.message import Message

from bough.v1 import event_pb2, follow_pb2, policy_pb2
from bough_server.log.views import Selection
from tests.rpc.run_server import Turn
from tests.support.log_laws import check_laws
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.wire_client import Remote, connected

Json: TypeAlias = "bool | float | str | list[Json] | dict[str, Json] | None"

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16}|[0-9a-f]{32}")
_TIMES = ("time", "Time", "latency", "duration")

SCRIPT: Mapping[str, Sequence[object]] = {
    "lead": [
        {"chunks": ["Let me ", "ask."], "calls": [{"name": "call_researcher", "arguments": {"message": "Find it."}}]},
        {"calls": [{"name": "call_writer", "arguments": {"message": "Write it."}}]},
        {"chunks": ["It is ", "one."], "usage": {"input_tokens": 30, "output_tokens": 3}},
    ],
    "researcher": [
        {"reasoning": "Where is it?", "calls": [{"name": "look_up", "arguments": {"topic": "it"}}]},
        {"calls": [{"name": "call_clerk", "arguments": {"message": "Count it."}}]},
        {"chunks": ["There is ", "one of it."], "usage": {"input_tokens": 20, "output_tokens": 5}},
    ],
    "clerk": [{"chunks": ["O", "ne."]}],
    "writer": [{"chunks": ["One ", "is it."], "error": {"reason": "UNAVAILABLE", "after_chunks": 1}}],
}
TEAM = (
    llm("lead", calls=["researcher", "writer"]),
    llm("researcher", calls=["clerk"], tools=["look_up"]),
    llm("clerk"),
    llm("writer"),
)


class Mask:
    """Replaces ids by the order of their appearance and omits times."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def of(self, messages: Iterable[Message]) -> list[Json]:
        """The messages as JSON, masked."""
        return [self._masked(json.loads(json_format.MessageToJson(message))) for message in messages]

    def _masked(self, value: Json) -> Json:
        if isinstance(value, str):
            return self._names.setdefault(value, f"id {len(self._names)}") if _ID.fullmatch(value) else value
        if isinstance(value, list):
            return [self._masked(item) for item in value]
        if isinstance(value, dict):
            return {key: self._masked(item) for key, item in value.items() if not key.endswith(_TIMES)}
        return value


async def _followed(remote: Remote, view: follow_pb2.EventView.ValueType) -> Turn:
    # One by one, since how deltas are joined depends on time.
    policy = policy_pb2.RunPolicy(deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()))
    return await remote.begin(
        "lead", "What is it?", policy=policy, follow=follow_pb2.FollowOptions(view=view)
    ).to_the_end()


async def _record(remote: Remote, run_id: str) -> tuple[list[event_pb2.AgentEvent], list[Json]]:
    """A run's log, and log and tree masked together."""
    log = await remote.log(run_id)
    return log, Mask().of([*log, await remote.tree(run_id)])


async def test_the_log_and_the_tree_are_the_same_whatever_view_was_followed(tmp_path: Path) -> None:
    config = write_project(tmp_path, *TEAM, script=SCRIPT)
    async with serving(config) as server, connected(server.address) as remote:
        full = await _followed(remote, follow_pb2.EVENT_VIEW_FULL)
        summary = await _followed(remote, follow_pb2.EVENT_VIEW_SUMMARY)
        log, record = await _record(remote, await full.run_id())
        other_log, other_record = await _record(remote, await summary.run_id())
    assert record == other_record
    check_laws(log)
    assert full.events == log
    selection = Selection(follow_pb2.EVENT_VIEW_SUMMARY)
    assert summary.events == [shown for event in other_log if (shown := selection.apply(event)) is not None]
    assert summary.through == full.through == len(log)
    partials = [event for event in summary.events if event.HasField("sub_agent_partial")]
    assert [(event.agent, event.sub_agent_partial.text) for event in partials] == [
        ("clerk", "O"),
        ("clerk", "ne."),
        ("researcher", "There is "),
        ("researcher", "one of it."),
        ("writer", "One "),
    ]
