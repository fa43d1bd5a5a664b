"""`bough.tools`: programs that serve tools, called by a team and by hand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio

from bough.tools import Call, ToolFailed, Tools
from bough.v1 import message_pb2, tool_pb2, tool_service_pb2, tool_service_pb2_grpc
from tests.support.log_readings import having
from tests.support.payment_agents import whole
from tests.support.teams import call, calls
from tests.support.tool_servers import describe, team

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}


class Desk:
    """Tools, and how often they were called."""

    def __init__(self) -> None:
        self.tools = Tools(kept_outcomes=2)
        self.count = 0
        self.began, self.may_end, self.was_cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        @self.tools.tool(schema=SCHEMA, hints=tool_pb2.ToolHints(read_only=True), timeout=5)
        async def words(call: Call) -> object:
            """Counts words."""
            self.count += 1
            await call.output("counting\n")
            return {"words": len(call.arguments["text"].split()), "time": self.count}

        @self.tools.tool(schema=SCHEMA)
        async def fail(call: Call) -> object:
            """Fails."""
            if call.arguments.get("text") == "code":
                raise ValueError("no\nink")
            raise ToolFailed("There is no ink.", retryable=True, details={"left": 0})

        @self.tools.tool(schema=SCHEMA, name="wait", description="Waits.")
        async def wait_for_end(call: Call) -> object:
            self.count += 1
            self.began.set()
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.was_cancelled.set()
                raise
            return message_pb2.Part(text=f"waited {self.count}")


@asynccontextmanager
async def by_hand(desk: Desk, *, token: str = "") -> AsyncIterator[tool_service_pb2_grpc.ToolServiceStub]:
    """A stub of a program that serves these tools."""
    async with desk.tools.open("127.0.0.1:0", token=token) as address, aio.insecure_channel(address) as channel:
        yield tool_service_pb2_grpc.ToolServiceStub(channel)


def request(name: str, text: str = "", *, key: str = "") -> tool_service_pb2.CallToolRequest:
    """A call."""
    called = message_pb2.ToolCall(name=name, arguments_json=json.dumps({"text": text}))
    return tool_service_pb2.CallToolRequest(call=called, idempotency_key=key)


async def outcome(
    stub: tool_service_pb2_grpc.ToolServiceStub, *arguments: str, key: str = ""
) -> message_pb2.ToolOutcome:
    """The outcome of a call."""
    *_, last = [response async for response in stub.CallTool(request(*arguments, key=key))]  # type: ignore[attr-defined]
    assert isinstance(last, tool_service_pb2.CallToolResponse)
    return last.outcome


async def test_a_team_calls_the_functions_of_a_program(tmp_path: Path) -> None:
    desk = Desk()
    turns = [calls(call("desk_words", text="one two"), call("desk_fail")), "Done."]
    async with desk.tools.open("127.0.0.1:0", token="secret") as address:
        settings = {"grpc": {"address": address, "token_env": "NOTES_TOKEN"}}
        async with team(tmp_path, turns, "desk_words", "desk_fail", desk=settings) as it:
            log = await whole(it, await it.start("p"))
    assert describe(sorted(log, key=lambda event: event.effect_key)) == ['{"words": 2, "time": 1}', "TOOL_FAILED"]
    assert [event.tool_output.text for event in having(log, "tool_output")] == ["counting\n"]


async def test_definitions_come_in_pages() -> None:
    async with by_hand(Desk()) as stub:
        pages, token = [], ""
        while not pages or token:
            page = await stub.DescribeTools(tool_service_pb2.DescribeToolsRequest(page_size=2, page_token=token))
            pages.append([tool.name for tool in page.tools])
            token = page.next_page_token
    assert pages == [["words", "fail"], ["wait"]]


async def test_calls_with_one_key_have_one_outcome() -> None:
    desk = Desk()
    async with by_hand(desk) as stub:
        both = [asyncio.create_task(outcome(stub, "wait", key="k")) for _ in range(2)]
        await desk.began.wait()
        desk.may_end.set()
        assert [one.parts[0].text for one in await asyncio.gather(*both)] == ["waited 1", "waited 1"]
        assert (await outcome(stub, "wait", key="k")).parts[0].text == "waited 1"
        for other in ("a", "b", "c"):
            await outcome(stub, "wait", key=other)
        assert (await outcome(stub, "wait", key="k")).parts[0].text == "waited 5"  # the oldest was forgotten
        assert (await outcome(stub, "wait")).parts[0].text == "waited 6"


async def test_a_call_is_cancelled_when_no_caller_waits_for_it() -> None:
    desk = Desk()
    async with by_hand(desk) as stub:
        calling = asyncio.create_task(outcome(stub, "wait", key="k"))
        await desk.began.wait()
        calling.cancel()
        await asyncio.wait_for(desk.was_cancelled.wait(), 10)


async def test_a_failure_says_what_the_tool_says() -> None:
    async with by_hand(Desk()) as stub:
        said, raised = await outcome(stub, "fail"), await outcome(stub, "fail", "code")
    assert said.failure == message_pb2.ToolFailure(
        message="There is no ink.", retryable=True, details_json='{"left": 0}'
    )
    assert raised.failure == message_pb2.ToolFailure(message="ValueError: no ink")


@pytest.mark.parametrize(
    ("name", "metadata", "code"),
    [
        ("words", (), grpc.StatusCode.UNAUTHENTICATED),
        ("words", (("authorization", "Bearer other"),), grpc.StatusCode.UNAUTHENTICATED),
        ("none", (("authorization", "Bearer secret"),), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_a_call_that_cannot_be_made_has_a_status(
    name: str, metadata: tuple[tuple[str, str], ...], code: grpc.StatusCode
) -> None:
    async with by_hand(Desk(), token="secret") as stub:
        with pytest.raises(aio.AioRpcError) as refused:
            await anext(aiter(stub.CallTool(request(name), metadata=metadata)))
    assert refused.value.code() is code


def test_tools_need_a_description_and_different_names() -> None:
    tools = Tools()

    async def silent(call: Call) -> object:
        return ""

    with pytest.raises(ValueError, match="needs a description"):
        tools.tool(schema=SCHEMA)(silent)
    tools.tool(schema=SCHEMA, description="Says nothing.")(silent)
    with pytest.raises(ValueError, match="two tools named 'silent'"):
        tools.tool(schema=SCHEMA, description="Says nothing.")(silent)
