"""Files over a real socket: sent with a run, kept, and read back in pieces; refused beyond their bound."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from grpc import aio

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import fork_pb2, input_pb2, message_pb2, session_service_pb2
from bough_server.log.blobs import MAX_FILES_BYTES, file_part
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, served, settings
from tests.runtime.test_files import kept, sha
from tests.support.databases import in_each_database

pytestmark = in_each_database


MIB = 1024 * 1024
PHOTO = bytes(range(256)) * (5 * MIB // 256)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose models are scripted."""
    script = tmp_path / "script.yaml"
    script.write_text("agents: {'*': [{text: A tree.}]}\n")
    agents = tmp_path / "eye.yaml"
    agents.write_text("name: eye\ndescription: Sees.\nllm: {instruction: Look.}\n")
    models = {"default": {"provider": "scripted", "script": str(script)}}
    async with served(settings(tmp_path, base=tmp_path, python=[], agents=["eye.yaml"], models=models)) as opened:
        yield opened


def asking(*parts: message_pb2.Part, **fields: Any) -> pb.RunRequest:
    """A request for a run."""
    message = message_pb2.Message(parts=[message_pb2.Part(text="See."), *parts])
    return pb.RunRequest(agent="eye", input=message, **fields)


async def read(server: Served, session_id: str, sha256: str) -> list[session_service_pb2.ReadBlobResponse]:
    """The pieces of a file."""
    request = session_service_pb2.ReadBlobRequest(session_id=session_id, sha256=sha256)
    return [piece async for piece in server.sessions.ReadBlob(request)]


async def refusal(call: Any) -> tuple[grpc.StatusCode, list[tuple[str, str]]]:
    """The code of a call that fails, and the fields that it names."""
    with pytest.raises(aio.AioRpcError) as refused:
        await Turn(call=call).to_the_end()
    details = status_details(refused.value)
    fields = [one for each in details if isinstance(each, BadRequest) for one in each.field_violations]
    return refused.value.code(), [(one.field, one.description) for one in fields]


async def test_a_photo_of_five_megabytes_is_kept_and_read_back_in_pieces(server: Served) -> None:
    turn = await Turn(call=server.agents.Run(asking(file_part(PHOTO, "image/png", filename="a.png")))).to_the_end()
    assert turn.events[0].run_started.input.parts[1] == kept(PHOTO, filename="a.png")
    assert turn.events[-1].run_completed.final_answer.parts[0].text == "A tree."
    session_id = turn.events[0].session_id
    pieces = await read(server, session_id, sha(PHOTO))
    assert [len(piece.data) for piece in pieces] == [MIB] * 5
    assert b"".join(piece.data for piece in pieces) == PHOTO
    assert [(piece.size_bytes, piece.media_type) for piece in pieces] == [(5 * MIB, "image/png")] + [(0, "")] * 4
    assert [piece.HasField("size_bytes") for piece in pieces] == [True] + [False] * 4
    listed = await server.sessions.ListMessages(session_service_pb2.ListMessagesRequest(session_id=session_id))
    assert listed.messages[-1].parts[1] == kept(PHOTO, filename="a.png")


async def test_a_file_that_is_not_there_is_not_found(server: Served) -> None:
    turn = await Turn(call=server.agents.Run(asking(file_part(b"x", "image/png")))).to_the_end()
    mine = turn.events[0].session_id
    other = await Turn(call=server.agents.Run(asking())).to_the_end()
    assert [piece.data for piece in await read(server, mine, sha(b"x"))] == [b"x"]
    for session_id, sha256 in ((mine, sha(b"y")), (other.events[0].session_id, sha(b"x")), ("none", sha(b"x"))):
        with pytest.raises(aio.AioRpcError) as refused:
            await read(server, session_id, sha256)
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    with pytest.raises(aio.AioRpcError) as refused:
        await read(server, mine, "nonsense")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    await server.sessions.DeleteSession(session_service_pb2.DeleteSessionRequest(session_id=mine))
    with pytest.raises(aio.AioRpcError) as refused:
        await read(server, mine, sha(b"x"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_the_most_that_is_allowed_is_taken_and_one_byte_more_is_refused(server: Served) -> None:
    most = file_part(bytes(MAX_FILES_BYTES - 1), "image/png")
    text = message_pb2.Part(text="x" * 200_000)
    turn = await Turn(call=server.agents.Run(asking(most, file_part(b"1", "image/png"), text))).to_the_end()
    assert turn.kinds[-1] == "run_completed"
    said = "has 16,777,217 bytes of files; a message may have 16,777,216 (server.max_files_bytes)."
    too_much = [most, file_part(b"12", "image/png")]
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert await refusal(server.agents.Run(asking(*too_much))) == (invalid, [("input.parts", said)])
    outcome = message_pb2.ToolOutcome(parts=too_much)
    answers = [input_pb2.InputAnswer(input_id="i", tool_outcome=outcome)]
    resuming = pb.ResumeRunRequest(run_id="r", answers=answers)
    assert await refusal(server.agents.ResumeRun(resuming)) == (invalid, [("answers", said)])
    edited = [fork_pb2.EditedResult(call_id="c", outcome=outcome)]
    forking = pb.ForkRunRequest(run_id="r", after_sequence=1, changes=fork_pb2.ForkChanges(tool_results=edited))
    assert await refusal(server.agents.ForkRun(forking)) == (invalid, [("changes", said)])


async def test_a_text_has_the_bound_that_it_had(server: Served) -> None:
    photo = file_part(PHOTO, "image/png")
    code, fields = await refusal(server.agents.Run(asking(photo, message_pb2.Part(text="x" * 256 * 1024))))
    assert (code, [field for field, _ in fields]) == (grpc.StatusCode.INVALID_ARGUMENT, ["input.parts"])
    assert fields[0][1].endswith("an input may have 262144. Send large content as a file (a blob).")
    code, fields = await refusal(server.agents.Run(asking(photo, message_pb2.Part(text="x" * 2 * MIB))))
    assert fields[0][1].endswith("and may be 1,024 KiB. Send large content as a file (a blob).")


async def test_a_request_that_carries_no_input_has_the_bound_that_it_had(server: Served) -> None:
    code, fields = await refusal(server.agents.WatchRun(pb.WatchRunRequest(run_id="x" * 5 * MIB)))
    assert (code, fields[0][1]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "WatchRunRequest is 5,242,885 bytes and may be 1,024 KiB.",
    )


async def test_a_request_with_millions_of_items_beside_a_file_is_refused_without_being_parsed(server: Served) -> None:
    request = asking(file_part(PHOTO, "image/png")).SerializeToString() + b"\x2a\x02\x2a\x00" * 2_000_000
    call: Any = server.channel.unary_stream(
        "/bough.v1.AgentService/Run", response_deserializer=pb.RunResponse.FromString
    )
    begun = time.process_time()
    code, fields = await refusal(call(request))
    assert (code, fields[0][0]) == (grpc.StatusCode.INVALID_ARGUMENT, "input.parts")
    assert "RunRequest is" in fields[0][1]
    assert time.process_time() - begun < 5  # the server is in this process


async def test_the_operator_sets_the_bound(tmp_path: Path) -> None:
    script = tmp_path / "script.yaml"
    script.write_text("agents: {'*': [{text: A tree.}]}\n")
    (tmp_path / "eye.yaml").write_text("name: eye\ndescription: Sees.\nllm: {instruction: Look.}\n")
    models = {"default": {"provider": "scripted", "script": str(script)}}
    made = settings(
        tmp_path, base=tmp_path, python=[], agents=["eye.yaml"], models=models, server={"max_files_bytes": 3}
    )
    async with served(made) as server:
        turn = await Turn(call=server.agents.Run(asking(file_part(b"123", "image/png")))).to_the_end()
        assert turn.kinds[-1] == "run_completed"
        _, fields = await refusal(server.agents.Run(asking(file_part(b"1234", "image/png"))))
        assert fields == [("input.parts", "has 4 bytes of files; a message may have 3 (server.max_files_bytes).")]
        _, fields = await refusal(server.agents.Run(asking(file_part(bytes(2 * MIB), "image/png"))))
        assert fields == [
            ("input.parts", "has 2,097,152 bytes of files; a message may have 3 (server.max_files_bytes).")
        ]


async def test_other_calls_are_served_while_large_files_arrive(server: Served) -> None:
    most = asking(file_part(bytes(MAX_FILES_BYTES), "image/png"))
    turns = [asyncio.ensure_future(Turn(call=server.agents.Run(most)).to_the_end()) for _ in range(4)]
    answered = 0
    while not all(turn.done() for turn in turns):
        await server.agents.ListRuns(pb.ListRunsRequest(page_size=1))
        answered += 1
    await asyncio.gather(*turns)
    assert [turn.result().kinds[-1] for turn in turns] == ["run_completed"] * 4
    print(f"{answered} calls were answered meanwhile")
    # A server that reads or stores a file in its event loop answers as many calls as there are files, or fewer.
    assert answered > 2 * len(turns)
