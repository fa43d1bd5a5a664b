"""Files in messages: kept by the server, named by their hashes in logs and histories, and sent whole to models."""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from bough.v1 import agent_service_pb2, event_pb2, input_pb2, message_pb2
from bough_server import Context, Message, file_part, tool
from bough_server.agents.function import agent
from bough_server.engine.event_writer import is_same_event
from bough_server.engine.files import FileCache, SessionFiles
from bough_server.errors import AlreadyAnswered, InvalidRequest, NotFound, RunError
from bough_server.identity import Principal
from bough_server.log.blobs import blobs_anywhere
from bough_server.models.model import ModelRequest
from bough_server.observability.tracing import Parent
from bough_server.store.ports.sessions import BlobPiece
from bough_server.tools.tool import Tool
from tests.support.run_harness import ME, RunHarness
from tests.support.teams import call, calls, llm, open_team, script

PHOTO = bytes(range(256)) * 4_000
OTHER = b"\x89PNG other"


def sha(data: bytes) -> str:
    """The hash that names a file."""
    return hashlib.sha256(data).hexdigest()


def kept(data: bytes = PHOTO, media_type: str = "image/png", filename: str = "") -> message_pb2.Part:
    """A file as events name it."""
    blob = message_pb2.Blob(sha256=sha(data), media_type=media_type, size_bytes=len(data), filename=filename)
    return message_pb2.Part(blob=blob)


def asked(*parts: message_pb2.Part, **fields: object) -> agent_service_pb2.RunRequest:
    """A request for a run of `lead`."""
    message = message_pb2.Message(parts=[message_pb2.Part(text="See."), *parts])
    return agent_service_pb2.RunRequest(agent="lead", input=message, **fields)  # type: ignore[arg-type]


async def turn(harness: RunHarness, request: agent_service_pb2.RunRequest) -> list[event_pb2.AgentEvent]:
    """The log of a run."""
    record = await harness.runs.start(ME, request, deadline_time_ns=None, trace=Parent.current())
    return await harness.log(record.run)


def data_in(log: Sequence[event_pb2.AgentEvent]) -> list[bytes]:
    """The bytes of files that a log holds itself."""
    return [blob.data for event in log for blob in blobs_anywhere(event) if blob.data]


def seen(request: ModelRequest) -> list[bytes]:
    """The bytes of the files that a model was sent, in their order."""
    return [blob.data for message in request.messages for blob in blobs_anywhere(message)]


def snapping(*parts: message_pb2.Part) -> Tool:
    """A tool that returns files."""

    @tool
    def snap() -> list[message_pb2.Part]:
        """Takes a photo."""
        return list(parts)

    return snap


async def test_a_photo_goes_to_the_model_and_only_its_hash_into_the_log(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, script(lead=["A tree.", "Still."]), llm("lead"), heard=heard) as harness:
        log = await turn(harness, asked(file_part(PHOTO, "image/png", filename="a.png")))
        assert list(log[0].run_started.input.parts) == [message_pb2.Part(text="See."), kept(filename="a.png")]
        assert data_in(log) == []
        assert seen(heard[0]) == [PHOTO]
        assert (await harness.replay(log)).divergence == ""
        second = await turn(harness, asked(session_id=log[0].session_id))
        assert seen(heard[1]) == [PHOTO]
        assert (await harness.replay(second)).divergence == ""
        messages = await harness.messages(log[0].session_id)
        assert list(messages[0].message.parts) == [message_pb2.Part(text="See."), kept(filename="a.png")]
        read = await harness.store.blobs.read(ME, log[0].session_id, sha(PHOTO))
        assert read == BlobPiece(data=PHOTO, size=len(PHOTO), media_type="image/png")


async def test_a_tools_photo_goes_to_the_model_and_only_its_hash_into_the_log(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(lead=[calls(call("snap")), "A tree."])
    photo = file_part(PHOTO, "image/png")
    async with open_team(
        tmp_path,
        turns,
        llm("lead", tools=["snap"]),
        tools=[snapping(photo, message_pb2.Part(text="there"))],
        heard=heard,
    ) as harness:
        log = await turn(harness, asked())
        ended = next(event for event in log if event.HasField("tool_completed"))
        assert list(ended.tool_completed.result.parts) == [kept(), message_pb2.Part(text="there")]
        step = next(event for event in log if event.HasField("step_completed"))
        assert list(step.step_completed.step.tool_results[0].parts) == [kept(), message_pb2.Part(text="there")]
        assert (data_in(log), seen(heard[1])) == ([], [PHOTO])
        assert (await harness.replay(log)).divergence == ""
    assert photo.blob.data == PHOTO  # the tool's own message is as it was


async def test_files_of_code_are_kept_too_and_replayed(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []

    @agent(agents=["eye"])
    async def lead(ctx: Context, input: Message) -> Message:
        """Passes on and answers with files."""
        answer = await ctx.dispatch("eye", Message(parts=[file_part(PHOTO, "image/png"), input.parts[1]]))
        return Message(parts=[answer.parts[0], file_part(OTHER, "image/png")])

    async with open_team(tmp_path, script(eye=["Two."]), llm("eye"), code_agents=[lead], heard=heard) as harness:
        log = await turn(harness, asked(file_part(b"mine", "image/gif")))
        started = next(event for event in log if event.HasField("sub_agent_started"))
        assert list(started.sub_agent_started.input.parts) == [kept(), kept(b"mine", "image/gif")]
        assert list(log[-1].run_completed.final_answer.parts) == [message_pb2.Part(text="Two."), kept(OTHER)]
        assert (data_in(log), seen(heard[0])) == ([], [b"mine", PHOTO, b"mine"])
        assert (await harness.replay(log)).divergence == ""
        assert (await harness.store.blobs.read(ME, log[0].session_id, sha(OTHER))).data == OTHER


async def test_a_log_that_holds_the_bytes_of_files_itself_is_still_replayed(tmp_path: Path) -> None:
    """Servers of before kept no files: what code passed on and answered is compared with such events."""

    @agent(agents=["eye"])
    async def lead(ctx: Context, input: Message) -> Message:
        """Passes on and answers with files."""
        await ctx.dispatch("eye", Message(parts=[file_part(PHOTO[:1000], "image/png")]))
        return Message(parts=[file_part(OTHER, "image/png")])

    async with open_team(tmp_path, script(eye=["One."]), llm("eye"), code_agents=[lead]) as harness:
        log = await turn(harness, asked())
        for blob in (blob for event in log for blob in blobs_anywhere(event)):
            blob.data = {sha(PHOTO[:1000]): PHOTO[:1000], sha(OTHER): OTHER}[blob.sha256]
        assert (await harness.replay(log)).divergence == ""
        log[-1].run_completed.final_answer.parts[0].blob.data = b"another"
        assert "differs from the one at sequence" in (await harness.replay(log)).divergence


async def test_code_reads_the_bytes_of_a_file_in_a_replay_too(tmp_path: Path) -> None:
    @agent()
    async def lead(ctx: Context, input: Message) -> str:
        """Reads."""
        return f"{len(await ctx.read_file(input.parts[1].blob))} bytes"

    async with open_team(tmp_path, script(lead=["-"]), code_agents=[lead]) as harness:
        log = await turn(harness, asked(file_part(PHOTO, "image/png")))
        assert log[-1].run_completed.final_answer.parts[0].text == f"{len(PHOTO)} bytes"
        assert (await harness.replay(log)).divergence == ""


async def test_a_file_of_the_session_can_be_named_again_by_its_hash(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    async with open_team(tmp_path, script(lead=["A tree.", "Yes."]), llm("lead"), heard=heard) as harness:
        first = await turn(harness, asked(file_part(PHOTO, "image/png")))
        second = await turn(harness, asked(kept(), session_id=first[0].session_id))
        assert list(second[0].run_started.input.parts)[1] == kept()
        assert seen(heard[1]) == [PHOTO, PHOTO]
        with pytest.raises(InvalidRequest) as refused:
            await turn(harness, asked(kept()))
    assert [str(one) for one in refused.value.violations] == [
        "input.parts[1].blob.sha256: The session has no file with this hash. Send its bytes as `data`."
    ]


async def test_a_repeated_request_with_a_file_starts_no_second_run(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(lead=["A tree."]), llm("lead")) as harness:
        request = asked(file_part(PHOTO, "image/png"), request_id="once")
        first, again = await turn(harness, request), await turn(harness, request)
        assert first == again


async def test_an_input_may_have_as_many_bytes_of_files_as_the_operator_says(tmp_path: Path) -> None:
    async with open_team(tmp_path, script(lead=["A tree."]), llm("lead")) as harness:
        most = harness.dependencies.max_files_bytes
        half = bytes(most // 2)
        with pytest.raises(InvalidRequest) as refused:
            await turn(harness, asked(file_part(half, "image/png"), file_part(half + b"+", "image/png")))
        assert [str(one) for one in refused.value.violations] == [
            "input.parts: has 16,777,217 bytes of files; a message may have 16,777,216 (server.max_files_bytes)."
        ]
        long = message_pb2.Part(text="x" * 256 * 1024)
        with pytest.raises(InvalidRequest, match=r"an input may have 262144\. Send large content as a file"):
            await turn(harness, asked(file_part(half, "image/png"), long))
        log = await turn(harness, asked(file_part(half, "image/png"), file_part(half, "image/png")))
        assert sum(event.ByteSize() for event in log) < 16 * 1024


async def test_a_tool_that_returns_too_many_bytes_of_files_fails(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(lead=[calls(call("snap")), "Too big."])
    huge = file_part(bytes(16 * 1024 * 1024 + 1), "image/png")
    async with open_team(tmp_path, turns, llm("lead", tools=["snap"]), tools=[snapping(huge)], heard=heard) as harness:
        log = await turn(harness, asked())
        failed = next(event for event in log if event.HasField("tool_failed")).tool_failed.result
        assert failed.error.message == (
            "The files have 16,777,217 bytes, and those of one message may have 16,777,216 (server.max_files_bytes). "
            "Return the uri of a file instead of its data."
        )
        assert (list(failed.parts), seen(heard[1])) == ([], [])


@tool(execution="client")
def scan() -> str:
    """Scans at the client's."""
    raise AssertionError("the client runs it")


def scanned(request: input_pb2.InputRequest, data: bytes) -> input_pb2.InputAnswer:
    """A client's result with a file."""
    outcome = message_pb2.ToolOutcome(parts=[file_part(data, "image/png")])
    return input_pb2.InputAnswer(input_id=request.input_id, tool_outcome=outcome)


async def test_a_clients_result_carries_a_file(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(lead=[calls(call("scan")), "A tree."])
    async with open_team(tmp_path, turns, llm("lead", tools=["scan"]), tools=[scan], heard=heard) as harness:
        run = await harness.start("lead")
        await harness.until_interrupted(run)
        request = (await harness.runs.get(ME, run.run_id)).run.open_requests[0]
        await harness.resume(run, scanned(request, PHOTO))
        log = await harness.log(run)
        received = next(event.input_received for event in log if event.HasField("input_received"))
        assert list(received.answer.tool_outcome.parts) == [kept()]
        assert (data_in(log), seen(heard[1])) == ([], [PHOTO])
        assert (await harness.replay(log)).divergence == ""
        await harness.resume(run, scanned(request, PHOTO))  # the same answer again
        with pytest.raises(AlreadyAnswered):
            await harness.resume(run, scanned(request, OTHER))
        with pytest.raises(NotFound):
            await harness.store.blobs.read(ME, run.session_id, sha(OTHER))


async def test_an_answer_cannot_name_a_file_that_the_session_does_not_have(tmp_path: Path) -> None:
    turns = script(lead=[calls(call("scan")), "A tree."])
    async with open_team(tmp_path, turns, llm("lead", tools=["scan"]), tools=[scan]) as harness:
        run = await harness.start("lead")
        await harness.until_interrupted(run)
        request = (await harness.runs.get(ME, run.run_id)).run.open_requests[0]
        outcome = message_pb2.ToolOutcome(parts=[kept()])
        with pytest.raises(
            InvalidRequest, match=r"answers\[0\].tool_outcome.parts\[0\].blob.sha256: The session has no"
        ):
            await harness.resume(run, input_pb2.InputAnswer(input_id=request.input_id, tool_outcome=outcome))


async def test_a_run_with_a_photo_continues_after_its_server_is_lost(tmp_path: Path) -> None:
    reached, heard = asyncio.Event(), list[ModelRequest]()

    @tool
    async def wait() -> str:
        """Waits for the crash."""
        reached.set()
        await asyncio.Event().wait()
        return ""

    @tool(name="wait")
    async def go() -> str:
        """Waits for the crash."""
        return "Done."

    turns = script(lead=[calls(call("snap")), calls(call("wait")), "A tree."])
    team, snap = llm("lead", tools=["snap", "wait"]), snapping(file_part(OTHER, "image/png"))
    async with open_team(tmp_path, turns, team, tools=[snap, wait]) as harness:
        request = asked(file_part(PHOTO, "image/png"))
        run = (await harness.runs.start(ME, request, deadline_time_ns=None, trace=Parent.current())).run
        await reached.wait()
        await harness.crash()
    untouched = snapping()
    async with open_team(tmp_path, turns, team, tools=[untouched, go], heard=heard) as harness:
        await harness.runs.recover()
        log = await harness.log(run)
        assert log[-1].run_completed.final_answer.parts[0].text == "A tree."
        assert [seen(one) for one in heard] == [[PHOTO, OTHER]]
        assert (await harness.replay(log)).divergence == ""


async def test_forks_share_the_files_and_bring_their_own(tmp_path: Path) -> None:
    heard: list[ModelRequest] = []
    turns = script(lead=[calls(call("snap")), "A tree."])
    snap = snapping(file_part(OTHER, "image/png"))
    async with open_team(tmp_path, turns, llm("lead", tools=["snap"]), tools=[snap], heard=heard) as harness:
        log = await turn(harness, asked(file_part(PHOTO, "image/png")))
        run = (await harness.runs.get(ME, log[0].run_id)).run
        ended = next(event for event in log if event.HasField("tool_completed"))
        same = await harness.log(await harness.fork(run, ended.sequence))
        call_id = ended.tool_completed.result.call.call_id
        outcome = message_pb2.ToolOutcome(parts=[file_part(b"edited", "image/png")])
        edit = {"call_id": call_id, "outcome": outcome}
        edited = await harness.log(await harness.fork(run, ended.sequence, tool_results=[edit]))
        new = message_pb2.Message(parts=[file_part(b"new", "image/gif"), kept()])
        asked_again = await harness.log(await harness.fork(run, 1, input=new))
        assert [seen(one) for one in heard[2:]] == [
            [PHOTO, OTHER],
            [PHOTO, b"edited"],
            [b"new", PHOTO],
            [b"new", PHOTO, OTHER],
        ]
        for fork in (same, edited, asked_again):
            assert data_in(fork) == []
            assert (await harness.replay(fork)).divergence == ""
        await harness.store.sessions.delete(ME, run.session_id)
        for fork in (same, edited, asked_again):
            assert (await harness.store.blobs.read(ME, fork[-1].session_id, sha(PHOTO))).data == PHOTO
        with pytest.raises(NotFound):
            await harness.store.blobs.read(ME, edited[-1].session_id, sha(b"new"))


async def test_a_file_changes_no_digest_but_its_hash() -> None:
    def started(data: bytes) -> event_pb2.AgentEvent:
        part = file_part(data, "image/png")
        return event_pb2.AgentEvent(sub_agent_started=event_pb2.SubAgentStarted(input={"parts": [part]}))  # type: ignore[arg-type]

    assert not is_same_event(started(PHOTO), started(OTHER))


class Files:
    """A store of some files, which counts its reads."""

    def __init__(self, *files: bytes) -> None:
        self._files = {sha(data): data for data in files}
        self.reads: list[str] = []

    async def read(
        self, principal: Principal, session_id: str, sha256: str, *, offset: int = 0, count: int | None = None
    ) -> BlobPiece:
        """Return a file."""
        self.reads.append(sha256)
        return BlobPiece(self._files[sha256], len(self._files[sha256]), "image/png")

    async def find_missing(self, principal: Principal, session_id: str, sha256s: object) -> Sequence[str]:
        """All are there."""
        return ()


async def test_a_request_holds_the_newest_files_that_fit_and_says_what_it_left_out() -> None:
    files = Files(b"a" * 60, b"b" * 60, b"c" * 60, b"d" * 30)
    session = SessionFiles(files, FileCache(), ME, "s", most=80)
    messages = [
        message_pb2.Message(parts=[kept(data, filename=f"{data[:1].decode()}.png")])
        for data in (b"a" * 60, b"b" * 60, b"c" * 60, b"d" * 30)
    ]
    filled = await session.load_data(messages)
    assert [message.parts[0].blob.data or message.parts[0].text for message in filled] == [
        "[image/png 'a.png' of 60 bytes, not shown]",
        b"b" * 60,
        b"c" * 60,
        b"d" * 30,
    ]
    assert all(message.parts[0].blob.sha256 for message in messages)
    assert len(files.reads) == 3
    await session.load_data(messages)
    assert len(files.reads) == 3  # from the cache


def test_the_cache_is_bounded_and_drops_what_was_used_longest_ago() -> None:
    cache = FileCache(most=100)
    for name in "abc":
        cache.put(("t", "s", name), name.encode() * 40)
        cache.get(("t", "s", "a"))
    assert [cache.get(("t", "s", name)) is not None for name in "abc"] == [True, False, True]
    cache.put(("t", "s", "huge"), b"x" * 101)
    assert cache.get(("t", "s", "huge")) is None


async def test_the_bytes_of_a_file_at_an_address_cannot_be_read() -> None:
    session = SessionFiles(Files(), FileCache(), ME, "s")
    with pytest.raises(RunError, match="does not have the bytes of the file at"):
        await session.read(message_pb2.Blob(uri="https://example.org/a.png"))
