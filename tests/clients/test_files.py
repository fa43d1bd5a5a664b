"""Files from a shell and from a program: attached to a message, described where text is shown, and read back."""

import hashlib
import json
import os
import pty
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from bough import AsyncClient, CallFailed, Client, InvalidRequest, NotFound, collect, file_part, user_message
from bough.v1 import Blob, Message, Part
from tests.clients.cli_process import bough, server_of, started
from tests.support.projects import llm, write_project

PHOTO = b"\x89PNG" + bytes(range(256)) * 1_200
SHA256 = hashlib.sha256(PHOTO).hexdigest()
NAMED = "[image/png photo.png, 307 KB]"

TOOLS = '''
from bough_server import Context, Message, Part, agent, file_part, tool


@tool
def draw(what: str) -> list[Part]:
    """Draws."""
    return [Part(text=f"A {what}."), file_part(b"drawn " + what.encode(), "image/svg+xml", filename="d.svg")]


@agent()
async def copier(ctx: Context, input: Message) -> Message:
    """Answers with the bytes that it was sent."""
    data = await ctx.read_file(input.parts[1].blob)
    return Message(parts=[Part(text=f"{len(data)} bytes"), file_part(data[::-1], "image/png", filename="back.png")])
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with an agent that sees, one that draws and one in code."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "file_tools.py").write_text(TOOLS, encoding="utf-8")
    draws = [{"calls": [{"name": "draw", "arguments": {"what": "tree"}}]}, "Drawn."]
    return write_project(
        folder,
        llm("eye"),
        llm("hand", tools=["draw"]),
        script={"eye": ["A tree."], "hand": draws},
        models={"default": {"provider": "scripted", "script": "script.yaml"}},
        python=["file_tools"],
    )


@pytest.fixture(scope="module")
async def port(config: Path) -> AsyncIterator[int]:
    """The port of its server."""
    async with server_of(config) as port:
        yield port


@pytest.fixture
def photo(tmp_path: Path) -> str:
    """A photo in a file."""
    path = tmp_path / "photo.png"
    path.write_bytes(PHOTO)
    return str(path)


async def test_a_photo_is_attached_described_and_written_to_a_file_again(port: int, photo: str, tmp_path: Path) -> None:
    ran = await bough("run", "eye", "See.", "--file", photo, "--output", "plain", port=port)
    assert ran.code == 0
    assert [NAMED in line for line in ran.out.splitlines()].count(True) == 1
    assert f"See. {NAMED}" in ran.out
    listed = await bough("sessions", "messages", "last", port=port)
    assert f"      {NAMED} {SHA256}" in listed.out.splitlines()
    saved = tmp_path / "saved.png"
    read = await bough("sessions", "file", "last", SHA256[:8], "--output", str(saved), port=port)
    assert (read.code, read.out, read.err) == (0, "", "")
    assert saved.read_bytes() == PHOTO
    process = await started("sessions", "file", "last", SHA256, port=port)
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, PHOTO)


async def test_a_tools_file_stands_in_the_live_view_and_in_the_tree(port: int) -> None:
    ran = await bough("run", "hand", "Draw.", port=port)
    assert "← draw  A tree. [image/svg+xml d.svg, 10 bytes]" in ran.out
    tree = await bough("tree", "last", "--json", port=port)
    result = json.loads(tree.out)["tools"][0]["resultJson"]
    assert json.loads(result) == "A tree.[image/svg+xml d.svg, 10 bytes]"
    page = await bough("tree", "last", "--html", port=port)
    assert "[image/svg+xml d.svg, 10 bytes]" in page.out


async def test_an_answer_names_its_files_and_the_run_replays(config: Path, port: int, photo: str) -> None:
    ran = await bough("run", "copier", "Copy.", "--file", photo, "--output", "answer", port=port)
    assert ran.out == f"{len(PHOTO)} bytes\n[image/png back.png, 307 KB]\n"
    replayed = await bough("--config", str(config), "replay", "last", port=port)
    assert (replayed.code, "nothing diverged" in replayed.out) == (0, True)


async def test_what_cannot_be_done_with_a_file_is_a_sentence(port: int, photo: str, tmp_path: Path) -> None:
    missing = await bough("run", "eye", "See.", "--file", str(tmp_path / "none.png"), port=port)
    assert (missing.code, missing.err) == (2, f"{tmp_path / 'none.png'}: No such file or directory.\n")
    await bough("run", "eye", "See.", "--file", photo, "--output", "answer", port=port)
    unknown = await bough("sessions", "file", "last", "ffff", port=port)
    assert unknown.code == 2
    assert "have no file whose hash begins with 'ffff': `bough sessions messages` shows them" in unknown.err
    absent = await bough("sessions", "file", "last", "f" * 64, port=port)
    assert (absent.code, absent.out) == (2, "")
    assert absent.err.startswith(f"There is no file '{'f' * 64}'. The session ")


async def test_a_terminal_is_not_sent_a_file(port: int) -> None:
    ours, its = pty.openpty()
    process = await started("sessions", "file", "last", "ffff", port=port, stdout=its)
    os.close(its)
    _, err = await process.communicate()
    os.close(ours)
    assert err == b"A terminal cannot show a file: name one with --output, or redirect the output.\n"
    assert process.returncode == 2


async def test_both_clients_send_and_read_files(port: int, photo: str) -> None:
    message = user_message("See.", file_part(photo), file_part(photo, media_type="image/x-mine"))
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        async with client.run("eye", message) as stream:
            events = [event async for event in stream]
        session_id = events[0].session_id
        kept = [part.blob for part in events[0].run_started.input.parts[1:]]
        assert kept == [
            Blob(sha256=SHA256, media_type="image/png", filename="photo.png", size_bytes=len(PHOTO)),
            Blob(sha256=SHA256, media_type="image/x-mine", filename="photo.png", size_bytes=len(PHOTO)),
        ]
        assert await client.sessions.read_blob(session_id, SHA256) == PHOTO
        with pytest.raises(NotFound):
            await client.sessions.read_blob(session_id, "f" * 64)
        with pytest.raises(InvalidRequest):
            await client.sessions.read_blob(session_id, "f")
    with Client(f"127.0.0.1:{port}") as sync:
        assert sync.sessions.read_blob(session_id, SHA256) == PHOTO
        with pytest.raises(NotFound):
            sync.sessions.read_blob(session_id, "f" * 64)


def test_parts_are_added_to_a_text_or_a_message(photo: str) -> None:
    part = file_part(photo)
    assert user_message("See.", part).parts[1] == part
    said = Message(parts=[Part(text="See.")])
    assert list(user_message(said, part).parts) == [*said.parts, part]
    assert user_message(said) is said
    assert len(said.parts) == 1


def test_a_file_of_an_unknown_kind_is_bytes(tmp_path: Path) -> None:
    path = tmp_path / "thing.unknown-kind"
    path.write_bytes(b"x")
    assert file_part(path).blob.media_type == "application/octet-stream"


async def test_prune_removes_a_file_with_the_last_session_that_has_it(config: Path, port: int, photo: str) -> None:
    database = config.parent / "bough.db"

    def is_kept() -> bool:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return bool(connection.execute("SELECT 1 FROM blobs WHERE sha256 = ?", (SHA256,)).fetchall())

    async with AsyncClient(f"127.0.0.1:{port}") as client:
        async with client.run("eye", user_message("See.", file_part(photo))) as stream:
            origin = [event async for event in stream]
        async with client.fork(origin[0].run_id, 1) as stream:
            fork = [event async for event in stream]
        for session in [session async for session in client.sessions.list()]:
            if session.session_id != fork[-1].session_id:
                await client.sessions.delete(session.session_id)
        assert await client.sessions.read_blob(fork[-1].session_id, SHA256) == PHOTO
        assert is_kept()
        pruned = await bough("prune", "--older-than", "1ms", port=port)
        assert (pruned.code, pruned.out) == (0, f"{fork[-1].session_id}\n")
        assert not is_kept()
        with pytest.raises(NotFound):
            await client.sessions.read_blob(fork[-1].session_id, SHA256)


async def test_files_that_no_request_can_hold_are_answered_by_the_sizes_and_the_setting(
    port: int, tmp_path: Path
) -> None:
    (tmp_path / "large.bin").write_bytes(b"\1" * 20_000_000)
    ran = await bough("run", "eye", "See.", "--file", str(tmp_path / "large.bin"), port=port)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("The request has 20,000,")
    assert ran.err.endswith("send smaller files, or raise its setting server.max_files_bytes.\n")
    with pytest.raises(CallFailed, match=r"and the server takes 18,\d+,\d+: send smaller files") as refused:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            await collect(client.run("eye", user_message("See.", file_part(tmp_path / "large.bin"))))
    assert refused.value.code.name == "RESOURCE_EXHAUSTED"
