"""Tools of programs that serve `bough.v1.ToolService`, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from bough import approve
from bough.v1 import message_pb2, tool_pb2, tool_service_pb2, tool_service_pb2_grpc
from bough_server.tool_servers.config import ToolServerSection
from tests.support.log_readings import having, results_of
from tests.support.payment_agents import waiting, whole
from tests.support.teams import call, calls
from tests.support.tool_servers import configure, describe, free_port, lock_tools, team, until

SCHEMA = '{"type": "object", "properties": {"text": {"type": "string"}}}'
Context = aio.ServicerContext[tool_service_pb2.CallToolRequest, tool_service_pb2.CallToolResponse]


def outcome(text: str) -> tool_service_pb2.CallToolResponse:
    """The last response of a call that succeeds."""
    parts = [message_pb2.Part(text=text)]
    return tool_service_pb2.CallToolResponse(outcome=message_pb2.ToolOutcome(parts=parts))


@dataclass
class Notes(tool_service_pb2_grpc.ToolServiceServicer):
    """A tool server: `answers` are what its calls do, the last of them for all further ones."""

    answers: list[object] = field(default_factory=lambda: ["noted"])
    rules: dict[str, object] = field(default_factory=dict)
    requests: list[tool_service_pb2.CallToolRequest] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    traces: list[list[str]] = field(default_factory=list)
    times_left: list[float] = field(default_factory=list)
    cancelled: bool = False
    began: asyncio.Event = field(default_factory=asyncio.Event)

    async def DescribeTools(
        self, request: tool_service_pb2.DescribeToolsRequest, context: object
    ) -> tool_service_pb2.DescribeToolsResponse:
        """Two pages of one tool each."""
        name, following = ("read", "") if request.page_token else ("add", "2")
        rules = self.rules if name == "add" else {}
        tool = tool_pb2.ToolDefinition(
            name=name,
            description=f"Does {name}.",
            input_schema_json=SCHEMA,
            **rules,  # type: ignore[arg-type]
        )
        return tool_service_pb2.DescribeToolsResponse(tools=[tool], next_page_token=following)

    async def CallTool(
        self, request: tool_service_pb2.CallToolRequest, context: Context
    ) -> AsyncIterator[tool_service_pb2.CallToolResponse]:
        """Answer as the next of the answers says."""
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        self.requests.append(request)
        metadata = dict(context.invocation_metadata() or ())
        self.tokens.append(str(metadata.get("authorization", "")))
        self.traces.append(str(metadata.get("traceparent", "")).split("-"))
        self.times_left.append(context.time_remaining() or 0.0)
        yield tool_service_pb2.CallToolResponse(output="working\n")
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "for the test")
        if answer == "hang":
            self.began.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
        if isinstance(answer, message_pb2.ToolFailure):
            yield tool_service_pb2.CallToolResponse(outcome=message_pb2.ToolOutcome(failure=answer))
        elif answer != "nothing":
            yield outcome(str(answer))


@asynccontextmanager
async def serve(notes: Notes, port: int = 0) -> AsyncIterator[str]:
    """Serve notes, and yield the address."""
    server = aio.server(options=[("grpc.so_reuseport", 0)])
    tool_service_pb2_grpc.add_ToolServiceServicer_to_server(notes, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def at(address: str, **rules: object) -> dict[str, object]:
    """The settings of a tool server at an address, with these rules."""
    return {"grpc": {"address": address, "token_env": "NOTES_TOKEN"}, **rules}


ADD = [calls(call("notes_add", text="milk")), "Done."]


async def test_a_call_carries_its_run_its_key_its_deadline_and_the_token(
    tmp_path: Path,
) -> None:
    notes = Notes()
    async with serve(notes) as address, team(tmp_path, ADD, "notes_add", notes=at(address, timeout=20.0)) as it:
        log = await whole(it, await it.start("p"))
    (started,) = having(log, "tool_started")
    assert notes.requests == [
        tool_service_pb2.CallToolRequest(
            call=message_pb2.ToolCall(
                call_id=started.tool_started.call.call_id, name="add", arguments_json='{"text": "milk"}'
            ),
            idempotency_key=started.tool_started.idempotency_key,
            attempt=1,
            run_id=log[0].run_id,
            session_id=log[0].session_id,
            user_id="local",
            agent="p",
            invocation_id=log[0].invocation_id,
        )
    ]
    assert (describe(log), notes.tokens) == (["noted"], ["Bearer secret"])
    assert 0 < notes.times_left[0] <= 21
    assert [event.tool_output.text for event in having(log, "tool_output")] == ["working\n"]
    assert started.tool_started.server == "notes"
    assert notes.traces[0][1:3] == [started.trace_id, started.span_id]


@pytest.mark.parametrize(
    ("answers", "rules", "attempts", "expected"),
    [
        ([message_pb2.ToolFailure(message="no ink", retryable=True)], {}, 1, "TOOL_FAILED"),
        ([grpc.StatusCode.UNAVAILABLE, "noted"], {}, 2, "noted"),
        ([grpc.StatusCode.UNAVAILABLE], {}, 3, "TOOL_OUTCOME_UNKNOWN"),
        (["nothing", "noted"], {}, 2, "noted"),
        ([grpc.StatusCode.INTERNAL, "noted"], {"on_recovery": tool_pb2.TOOL_RECOVERY_FAIL}, 1, "TOOL_OUTCOME_UNKNOWN"),
        ([grpc.StatusCode.NOT_FOUND], {}, 1, "TOOL_FAILED"),
        ([grpc.StatusCode.UNAUTHENTICATED], {"timeout": Duration(seconds=1)}, 1, "TOOL_SERVER_UNAVAILABLE"),
        (["hang"], {"timeout": Duration(nanos=300_000_000)}, 1, "TOOL_TIMEOUT"),
    ],
)
async def test_a_call_ends_as_its_answer_and_its_rule_say(
    tmp_path: Path, answers: list[object], rules: dict[str, object], attempts: int, expected: str
) -> None:
    notes = Notes(answers, rules)
    async with serve(notes) as address, team(tmp_path, ADD, "notes_add", notes=at(address)) as it:
        log = await whole(it, await it.start("p"))
        if answers == ["hang"]:
            await until(lambda: notes.cancelled)
    assert describe(log) == [expected]
    assert [event.attempt for event in having(log, "tool_started")] == list(range(1, attempts + 1))
    assert len({request.idempotency_key for request in notes.requests}) == 1
    if expected not in ("TOOL_SERVER_UNAVAILABLE", "TOOL_TIMEOUT"):
        assert [request.attempt for request in notes.requests] == list(range(1, attempts + 1))
    (result,) = results_of(log)
    assert [word for word in ("secret", address) if word in result.error.message] == []


async def test_a_server_that_is_stopped_in_a_call_and_comes_back_is_called_again(tmp_path: Path) -> None:
    notes, port = Notes(["hang", "noted"]), free_port()
    settings = at(f"127.0.0.1:{port}")
    async with team(tmp_path, ADD, "notes_add", notes=settings) as it:
        async with serve(notes, port):
            run = await it.start("p")
            await notes.began.wait()
        async with serve(notes, port):
            log = await whole(it, run)
    assert describe(log) == ["noted"]
    assert [request.attempt for request in notes.requests] == [1, 2]
    assert notes.requests[0].idempotency_key == notes.requests[1].idempotency_key


async def test_a_definition_asks_for_an_approval(tmp_path: Path) -> None:
    notes = Notes(rules={"requires_approval": True})
    async with serve(notes) as address, team(tmp_path, ADD, "notes_add", notes=at(address)) as it:
        run = await it.start("p")
        request = (await waiting(it, run))["notes_add"]
        assert notes.requests == []
        await it.resume(run, approve(request))
        log = await whole(it, run)
    assert describe(log) == ["noted"]


async def test_a_lock_keeps_the_rules_of_definitions(tmp_path: Path) -> None:
    notes = Notes(rules={"on_recovery": tool_pb2.TOOL_RECOVERY_ASK, "timeout": Duration(seconds=7)})
    async with serve(notes) as address:
        section = ToolServerSection.model_validate(at(address))
        await lock_tools(tmp_path, section, "add")
    servers = configure(tmp_path, s=at("127.0.0.1:1"))({})
    (info,) = servers.offers.tools_for(None).values()
    assert (info.name, info.on_recovery, info.timeout.seconds) == ("s_add", tool_pb2.TOOL_RECOVERY_ASK, 7)
    assert info.source == tool_pb2.TOOL_SOURCE_REMOTE


async def test_a_program_that_serves_something_else_is_a_problem_of_its_server(tmp_path: Path) -> None:
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    servers = configure(tmp_path, notes=at(f"127.0.0.1:{port}"))({})
    try:
        await servers.wait_until_settled(["notes"])
        (info,) = servers.describe(None)
    finally:
        await servers.close()
        await server.stop(None)
    assert (info.kind, info.state) == ("grpc", tool_pb2.TOOL_SERVER_STATE_UNAVAILABLE)
    assert info.problem.startswith("Its tools cannot be listed: UNIMPLEMENTED")
