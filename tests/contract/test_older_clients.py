"""Clients with an older schema than the server's: they read what they know, and every sequence."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import pytest
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.message import Message
from grpc import aio

from tests.contract.matching import differences
from tests.contract.newer_schema import SCHEMA, pool_of
from tests.contract.scenario_files import FOLDER, read_group
from tests.contract.stage import staged
from tests.support.toolchains import ROOT

BASELINE: Final = (ROOT / "proto" / "baseline.binpb").read_bytes()

REMOVED: Final = frozenset({"tool_started", "llm_completed", "run_completed"})
"""Payloads that the oldest of these clients does not know."""


def without_payloads(schema: bytes) -> bytes:
    """Return a schema without some payloads of events."""
    files = descriptor_pb2.FileDescriptorSet.FromString(schema)
    file = next(file for file in files.file if file.name == "bough/v1/event.proto")
    event = next(message for message in file.message_type if message.name == "AgentEvent")
    kept = [field for field in event.field if field.name not in REMOVED]
    assert len(kept) == len(event.field) - len(REMOVED)
    del event.field[:]
    event.field.extend(kept)
    return files.SerializeToString()


class SchemaClient:
    """Makes calls with the messages of any schema."""

    def __init__(self, channel: aio.Channel, schema: bytes) -> None:
        self._channel, self._pool = channel, pool_of(schema)

    async def answer(self, call: str, request: dict[str, Any]) -> Any:
        """Make a unary call."""
        return await self._made(self._channel.unary_unary, call, request)

    async def events(self, call: str, request: dict[str, Any]) -> Sequence[Any]:
        """Make a call that streams events."""
        stream = self._made(self._channel.unary_stream, call, request)
        return [event async for response in stream for event in response.batch.events]

    def _made(self, kind: Any, call: str, request: dict[str, Any]) -> Any:
        service, _, name = call.partition(".")
        method = self._pool.FindServiceByName(f"bough.v1.{service}").methods_by_name[name]
        response = message_factory.GetMessageClass(method.output_type)
        sent = json_format.ParseDict(request, message_factory.GetMessageClass(method.input_type)())
        path = f"/bough.v1.{service}/{name}"
        multicallable = kind(
            path, request_serializer=type(sent).SerializeToString, response_deserializer=response.FromString
        )
        return multicallable(sent, timeout=20)


@pytest.fixture(scope="module")
async def channel(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[aio.Channel]:
    """A channel to a server with the agents of runs.yaml."""
    group = read_group(FOLDER / "runs.yaml")
    async with (
        staged(group.server, tmp_path_factory.mktemp("older")) as stage,
        aio.insecure_channel(stage.server.address) as channel,
    ):
        yield channel


@pytest.mark.parametrize(
    ("schema", "unknown"),
    [pytest.param(BASELINE, frozenset(), id="baseline"), pytest.param(without_payloads(BASELINE), REMOVED, id="older")],
)
async def test_an_older_client_reads_what_it_knows_of_each_event(
    channel: aio.Channel, schema: bytes, unknown: frozenset[str]
) -> None:
    older, present = SchemaClient(channel, schema), SchemaClient(channel, SCHEMA.read_bytes())
    request = {"agent": "lead", "input": {"parts": [{"text": "Why red?"}]}}
    events = await older.events("AgentService.Run", request)
    run_id = events[0].run_id
    held = await present.events("AgentService.WatchRun", {"runId": run_id})
    assert [event.sequence for event in events] == list(range(1, len(held) + 1))
    for event, other in zip(events, held, strict=True):
        assert list(differences(document(event), document(other))) == []
        is_unknown = other.WhichOneof("payload") in unknown
        assert event.WhichOneof("payload") == (None if is_unknown else other.WhichOneof("payload"))
        # What it does not know it passes on.
        assert type(other).FromString(event.SerializeToString()) == other
    rest = await older.events("AgentService.WatchRun", {"runId": run_id, "afterSequence": 5})
    assert [event.sequence for event in rest] == list(range(6, len(held) + 1))


async def test_an_older_client_reads_runs_trees_and_sessions(channel: aio.Channel) -> None:
    older, present = SchemaClient(channel, BASELINE), SchemaClient(channel, SCHEMA.read_bytes())
    request = {"agent": "lead", "input": {"parts": [{"text": "Why red?"}]}}
    events = await older.events("AgentService.Run", request)
    run, session = {"runId": events[0].run_id}, {"sessionId": events[0].session_id}
    for call, asked in {
        "AgentService.GetRun": run,
        "AgentService.ListRuns": {"filter": session},
        "EvalService.GetInvocation": {**run, "options": {"includeSteps": True}},
        "SessionService.ListMessages": session,
        "SessionService.GetSession": session,
        "CatalogService.ListAgents": {},
    }.items():
        theirs, ours = await older.answer(call, asked), await present.answer(call, asked)
        assert document(theirs), call
        assert list(differences(document(theirs), document(ours))) == [], call


def document(message: Message) -> dict[str, Any]:
    """Return a message in JSON."""
    return json_format.MessageToDict(message)
