"""What callers can make a server hold: bare frames, large requests, streams; measured as the process's memory."""

import asyncio
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import follow_pb2, message_pb2
from bough_server.log.blobs import file_part
from tests.rpc.interceptor_server import status_details
from tests.support.processes import Serving, serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import standing_gate
from tests.support.wire_client import Remote, connected

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process's memory is read as Linux tells it")

MIB = 1024 * 1024
LARGE: Sequence[tuple[str, int]] = (("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0))


def project(folder: Path, **server: int) -> Path:
    """A project with one agent, which greets."""
    more = {"server": server} if server else {}
    return write_project(folder, llm("greeter"), script={"greeter": ["Hello."]}, **more)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


HEADERS = b"".join(
    b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/bough.v1.AgentService/Run"),
        (b":authority", b"a"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
CANCEL = b"\0\0\0\x08"


async def flood(address: str, *, count: int, resets: bool) -> None:
    """Send the headers of many calls, and no request of any."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    listening = asyncio.create_task(reader.read(-1))
    writer.write(PREFACE)
    try:
        for stream in range(1, 2 * count, 2):
            writer.write(frame(1, 4, stream, HEADERS) + (frame(3, 0, stream, CANCEL) if resets else b""))
            await writer.drain()
        # What has been sent is read before this is answered.
        writer.write(frame(6, 0, 0, b"bounded!"))
        await asyncio.wait({listening}, timeout=1)
    except ConnectionError:
        pass  # the server has ended it
    finally:
        listening.cancel()
        writer.close()


@pytest.mark.parametrize("resets", [False, True], ids=["left open", "reset"])
async def test_headers_without_requests_take_little_memory_and_do_not_hold_up_health(
    tmp_path: Path, resets: bool
) -> None:
    async with serving(project(tmp_path)) as server:
        before = server.resident_bytes()
        await asyncio.gather(*(flood(server.address, count=20_000, resets=resets) for _ in range(5)))
        async with connected(server.address) as remote:
            answer = await HealthStub(remote.channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        grown = server.peak_bytes() - before
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert grown < 320 * MIB


async def sent(server: Serving, number: int) -> str:
    """What becomes of a run with a file of 15 MB, on a separate connection."""
    data = number.to_bytes(4, "big") * (15 * MIB // 4)
    parts = [message_pb2.Part(text="hi"), file_part(data, "image/png")]
    async with connected(server.address, options=(*LARGE, ("number", number))) as remote:
        request = pb.RunRequest(agent="greeter", input=message_pb2.Message(parts=parts))
        try:
            responses = [response async for response in remote.agents.Run(request)]
        except aio.AioRpcError as error:
            return str(status_details(error)[0].reason)
    return str(responses[-1].batch.events[-1].WhichOneof("payload"))


async def test_large_requests_wait_for_room_and_are_all_answered(tmp_path: Path) -> None:
    async with serving(project(tmp_path, max_request_bytes=64 * MIB)) as server:
        before = server.resident_bytes()
        outcomes = Counter(await asyncio.gather(*(sent(server, number) for number in range(24))))
        grown = server.peak_bytes() - before
    # On a slow disk some wait for longer than they may.
    assert outcomes["run_completed"] > 8
    assert outcomes.keys() <= {"run_completed", "REQUEST_BYTES_EXHAUSTED", "STORAGE_FAILED"}
    # Read all at once they would take 4.6 bytes for each sent.
    assert grown < 3 * 24 * 15 * MIB


async def watching(remote: Remote, run_id: str) -> Any:
    """Begin to follow a run; return the call once the server has accepted it, or the error."""
    call = remote.agents.WatchRun(pb.WatchRunRequest(run_id=run_id, until=follow_pb2.WATCH_UNTIL_TERMINAL))
    metadata = await call.initial_metadata()
    return call if metadata else await refusal(call)


async def refusal(call: Any) -> aio.AioRpcError:
    """The error of a call."""
    with pytest.raises(aio.AioRpcError) as refused:
        await call.read()
    return refused.value


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"max_streams": 4, "max_streams_of_caller": 100}, "server.max_streams)"),
        ({"max_streams": 100, "max_streams_of_caller": 4}, "server.max_streams_of_caller)"),
    ],
)
async def test_streams_beyond_their_bound_are_refused_until_one_has_ended(
    tmp_path: Path, bounds: dict[str, int], named: str
) -> None:
    async with standing_gate() as gate, AsyncExitStack() as calls:
        script = {"waiter": [{"calls": [{"name": "wait_at", "arguments": {"port": gate.port}}]}, "Done."]}
        config = write_project(tmp_path, llm("waiter", tools=["wait_at"]), script=script, server=bounds)
        server = await calls.enter_async_context(serving(config))
        remote = await calls.enter_async_context(connected(server.address))
        turn = await remote.begin("waiter").until("tool_started")
        run_id = turn.events[0].run_id
        followers = [await watching(remote, run_id) for _ in range(3)]
        refused = await watching(remote, run_id)
        info, retry = status_details(refused)
        unary = await remote.run(run_id)
        followers.pop().cancel()
        followers.append(await until_accepted(remote, run_id))
        gate.open()
        await turn.to_the_end()
    assert (refused.code(), info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STREAMS_EXHAUSTED")
    assert isinstance(info, ErrorInfo)
    assert isinstance(retry, RetryInfo)
    assert named in refused.details()
    assert unary.run_id == run_id


async def until_accepted(remote: Remote, run_id: str) -> Any:
    """Begin to follow a run, again until the server has noticed that another stream has ended."""
    while isinstance(call := await watching(remote, run_id), aio.AioRpcError):
        pass
    return call
