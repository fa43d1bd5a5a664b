"""Which server a command uses: the one that has its database, also with --embedded; a wrong address fails at once."""

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bough import NO_REJOINING, Rejoining, collect
from bough_server.cli.connection import Connection
from bough_server.cli.follow import ConnectionLost, PlainLines, explain_connection_loss, follow
from bough_server.store.sqlite.file_lock import find_serving_owner
from tests.clients.cli_process import Finished, bough, started
from tests.clients.run_events import RUN_ID, desk
from tests.clients.stream_server import Call, LoopbackService, client_of, listening
from tests.support.processes import serving
from tests.support.projects import llm, write_project

EXAMPLES = Path(__file__).parents[2] / "examples"

READING = (
    ("runs",),
    ("agents", "list"),
    ("models", "list"),
    ("sessions", "list"),
    ("tree", "last"),
    ("events", "last"),
    ("watch", "last"),
    ("replay", "last"),
    ("cancel", "last"),
    ("resume", "last"),
    ("fork", "last", "--after", "1"),
    ("doctor",),
    ("db", "status"),
)


def project(folder: Path, answer: str = "Hm.") -> Path:
    folder.mkdir(exist_ok=True)
    return write_project(folder, llm("alone"), script={"alone": [answer] * 9})


@asynccontextmanager
async def held_socket() -> AsyncIterator[int]:
    """A port at which connections are made and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("flags", [("--embedded",), ()])
async def test_a_command_uses_the_server_that_has_its_database(tmp_path: Path, flags: tuple[str, ...]) -> None:
    config = project(tmp_path)
    async with serving(config) as server:
        ran = await bough("--config", str(config), *flags, "run", "alone", "hi", "--output", "answer")
        listed = await bough("--address", server.address, "runs", "--json")
    assert (ran.code, ran.out) == (0, "Hm.\n")
    note = [f"The server at {server.address} has this database open: using it."] if flags else []
    assert ran.err.splitlines()[1:] == note
    assert listed.out.count('"runId"') == 1


async def test_a_command_finds_the_server_at_the_configured_port(tmp_path: Path) -> None:
    config = project(tmp_path / "served")
    async with serving(config) as server:
        port = int(server.address.rpartition(":")[2])
        (tmp_path / "other").mkdir()
        other = write_project(tmp_path / "other", llm("alone"), script={}, server={"port": port})
        ran = await bough("--config", str(other), "run", "alone", "hi", "--output", "answer")
        found = await bough("--config", str(other), "doctor")
        server.send(signal.SIGTERM)
        await server.end()
    gone = await bough("--config", str(other), "doctor")
    assert (ran.code, ran.out) == (0, "Hm.\n")
    assert f"server: {server.address} answers" in found.out
    assert f"server: no server of Bough answers at {server.address}; commands use an embedded one" in gone.out


async def test_a_second_command_uses_the_server_in_the_first_which_waits_for_its_run(tmp_path: Path) -> None:
    script = {"alone": ["Hm."], "slow": [{"text": "Slowly said at last.", "delay_ms": 300}]}
    config = write_project(tmp_path, llm("alone"), llm("slow"), script=script)
    given, typing = os.pipe()
    first = await started("--config", str(config), "--embedded", "chat", "alone", "--output", "answer", stdin=given)
    os.close(given)
    assert first.stdout is not None
    os.write(typing, b"hi\n")
    assert await first.stdout.readline() == b"Hm.\n"
    second = await started("--config", str(config), "run", "slow", "hi", "--output", "json")
    assert second.stdout is not None
    assert b"runStarted" in await second.stdout.readline()
    os.close(typing)
    _, told = await first.communicate()
    out, _ = await second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert "Another command uses the server in this one: waiting for its run to end." in told.decode()
    assert b"Slowly said at last." in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("example", "command", "code"),
    [
        ("desk", ("lead", "Why do leaves turn red?"), 0),
        ("kinds", ("haiku", "A garden in autumn."), 0),
        ("approvals", ("lead", "Orders 1001 and 1002 come back."), 3),
    ],
)
async def test_every_example_works_while_the_desk_is_served(
    tmp_path: Path, example: str, command: tuple[str, ...], code: int
) -> None:
    shutil.copytree(EXAMPLES, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("var", "__pycache__"))
    async with serving(tmp_path / "desk" / "bough.yaml"):
        ran = await bough("--config", str(tmp_path / example / "bough.yaml"), "--embedded", "run", *command)
    assert (ran.code, "✗" in ran.out) == (code, False)


async def test_a_server_of_another_project_is_left_alone(tmp_path: Path) -> None:
    mine, other = project(tmp_path / "mine", "Mine."), project(tmp_path / "other", "Other.")
    async with serving(other):
        ran = await bough("--config", str(mine), "--embedded", "run", "alone", "hi", "--output", "answer")
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (0, "Mine.\n", 1)


async def test_the_address_of_a_killed_server_is_not_used_although_another_server_is_there(tmp_path: Path) -> None:
    mine, other = project(tmp_path / "mine", "Mine."), project(tmp_path / "other", "Other.")
    async with serving(mine) as server:
        port = server.address.rpartition(":")[2]
        await server.kill()
    assert server.address in (tmp_path / "mine" / "bough.db.lock").read_text()
    async with serving(other, arguments=("--port", port)):
        ran = await bough("--config", str(mine), "--embedded", "run", "alone", "hi", "--output", "answer")
    assert (ran.code, ran.out) == (0, "Mine.\n")


async def test_the_lock_names_the_address_while_it_is_served_and_no_longer(tmp_path: Path) -> None:
    config = project(tmp_path)
    database = tmp_path / "bough.db"
    assert find_serving_owner(database) is None
    async with serving(config) as server:
        owner = find_serving_owner(database)
        assert owner is not None
        assert (owner.process, owner.address) == (str(server.pid), server.address)
        server.send(signal.SIGTERM)
        await server.end()
    assert find_serving_owner(database) is None
    assert server.address not in (tmp_path / "bough.db.lock").read_text()


async def test_a_default_model_is_refused_by_the_server_that_has_the_database(tmp_path: Path) -> None:
    config = project(tmp_path)
    async with serving(config) as server:
        flags = ("--config", str(config), "--embedded")
        ran = await bough(*flags, "run", "alone", "hi", "--default-model", "default")
    assert ran == Finished(
        code=2,
        out="",
        err="--default-model applies only to an embedded server, and a server runs at "
        f"{server.address}: stop it first, or pass it to `bough serve`.\n",
    )


@pytest.mark.parametrize("command", READING, ids=" ".join)
async def test_no_command_that_reads_makes_a_database(tmp_path: Path, command: tuple[str, ...]) -> None:
    config = write_project(tmp_path, llm("alone"), script={}, storage={"url": "var/bough.db"})
    ended = await bough("--config", str(config), "--embedded", *command)
    assert "Traceback" not in ended.err
    if "last" in command:
        assert (ended.code, ended.err) == (2, "There is no run yet: start one with `bough run`.\n")
    assert not (tmp_path / "var").exists()


async def test_a_run_is_watched_and_cancelled_in_the_server_of_the_command_that_started_it(tmp_path: Path) -> None:
    slow = {"alone": [{"text": "Never said.", "delay_ms": 600000}]}
    config = write_project(tmp_path, llm("alone"), script=slow)
    flags = ("--config", str(config), "--embedded")
    running = await started(*flags, "run", "alone", "hi", "--output", "json")
    assert running.stdout is not None
    assert b"runStarted" in await running.stdout.readline()
    listed = await bough(*flags, "runs", "--json")
    cancelled = await bough(*flags, "cancel", "last")
    await running.communicate()
    assert (listed.code, listed.out.count('"runId"')) == (0, 1)
    assert (cancelled.code, running.returncode) == (0, 4)


async def test_a_wrong_address_fails_long_before_a_dropped_stream_would_be_given_up() -> None:
    async with held_socket() as port, asyncio.timeout(Rejoining().timeout / 2):
        silent = await bough("--address", f"127.0.0.1:{port}", "runs")
    free = await bough("--address", "127.0.0.1:1", "run", "lead", "hi")
    unknown = await bough("--address", "no-such-host.invalid:50051", "runs")
    neither = await bough("runs", environment={"BOUGH_ADDRESS": "127.0.0.1:1,localhost:2"})
    assert (neither.code, neither.err) == (
        2,
        "No server answers at any of 127.0.0.1:1,localhost:2: start one there, or omit the address.\n",
    )
    url = await bough("--address", "http://127.0.0.1:1", "runs")
    assert (url.code, url.out, url.err.startswith("The address 'http://127.0.0.1:1' is a URL")) == (2, "", True)
    hint = " Something listens there: for a server with TLS, set client.tls or client.ca_file in bough.yaml."
    for ended, address, further in (
        (silent, f"127.0.0.1:{port}", hint),
        (free, "127.0.0.1:1", ""),
        (unknown, "no-such-host.invalid:50051", ""),
    ):
        sentence = f"No server answers at {address}: start one there, or omit the address.{further}\n"
        assert ended == Finished(code=2, out="", err=sentence)


async def test_a_drop_is_reported_once_and_the_run_is_rejoined() -> None:
    drops: list[str] = []
    service = LoopbackService(desk(), [Call(events=2), Call(silent=True), Call(silent=True)])
    rejoining = Rejoining(
        first_delay=0.0, longest_delay=0.0, timeout=20.0, on_drop=lambda error: drops.append(error.message)
    )
    async with listening(service) as port, client_of(port, rejoining) as client:
        assert (await collect(client.run("lead", "hi"))).events == tuple(desk())
    assert len(drops) == 1


async def test_a_connection_that_stays_lost_names_the_run_and_the_command_that_rejoins_it() -> None:
    service = LoopbackService(desk(), [Call(events=2)])
    async with listening(service) as port, client_of(port, NO_REJOINING) as client:
        connection = Connection(client=client, command=f"bough --address 127.0.0.1:{port}")
        stream = client.run("lead", "hi")
        with pytest.raises(ConnectionLost) as lost, explain_connection_loss(connection, stream):
            await follow(stream, PlainLines())
    assert lost.value.message.splitlines() == [
        "The connection to the server was lost, and it did not come back.",
        f"  run: {RUN_ID}",
        f"The run may continue there. To rejoin it: bough --address 127.0.0.1:{port} watch {RUN_ID} --after 2",
    ]


async def test_a_command_says_that_its_server_is_gone_and_goes_on_with_the_next_one(tmp_path: Path) -> None:
    script = {"alone": [{"text": "Slowly said.", "delay_ms": 1500}]}
    config = write_project(tmp_path, llm("alone"), script=script)
    async with serving(config) as server:
        port = server.address.rpartition(":")[2]
        running = await started("run", "alone", "hi", "--output", "plain", port=int(port))
        assert running.stdout is not None
        while b"llm.started" not in (line := await running.stdout.readline()):
            assert line
        await server.kill()
    async with serving(config, arguments=("--port", port)):
        out, err = await running.communicate()
    assert (running.returncode, out.decode().count("run.completed")) == (0, 1)
    assert err.decode().splitlines()[1:] == ["The connection to the server was lost. Rejoining the run for up to 60 s."]


async def test_an_error_is_said_once_where_output_and_errors_are_one_pipe(tmp_path: Path) -> None:
    words = "The drawer is stuck, as a sentence that is much longer than eighty cells, and nothing of it may be cut."
    (tmp_path / "drawers.py").write_text(
        "from bough_server import Context, RunError, agent\n\n\n"
        '@agent(description="Opens drawers.")\n'
        "async def drawer(ctx: Context, input: str) -> str:\n"
        f"    raise RunError({words!r})\n"
    )
    link = {"agent": "drawer", "on_failure": "ABORT"}
    definition = {**llm("lead"), "sub_agents": [link]}
    script = {"lead": [{"calls": [{"name": "call_drawer", "arguments": {"message": "Open."}}]}]}
    config = write_project(tmp_path, definition, script=script, python=["team_tools", "drawers"])
    read, write = os.pipe()
    running = await started("--config", str(config), "--embedded", "run", "lead", "hi", stdout=write, stderr=write)
    os.close(write)
    await running.wait()
    with os.fdopen(read) as pipe:
        merged = pipe.read()
    assert (running.returncode, merged.count(words), merged.count("The run failed: SUB_AGENT_FAILED\n")) == (1, 1, 1)
    apart = await bough("--config", str(config), "--embedded", "run", "lead", "hi")
    assert (apart.out.count(words), apart.err.count(words)) == (1, 1)
