"""`bough serve` on PostgreSQL, by one server: turns, its crash and restart, and the operator's commands."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.v1 import event_pb2
from bough_server.store.postgres.database import display_url
from tests.clients.cli_process import bough, started
from tests.support import postgres
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import standing_gate
from tests.support.wire_client import connected


@pytest.fixture
def empty() -> Iterator[str]:
    """A database without tables."""
    made = postgres.database(is_empty=True)
    yield made
    postgres.drop(made)


def _project(folder: Path, url: str, port: int = 0, **storage: object) -> Path:
    call = {"calls": [{"name": "wait_at", "arguments": {"port": port}}]}
    return write_project(
        folder,
        llm("alone"),
        llm("waiter", tools=["wait_at"]),
        script={"alone": ["Hm."], "waiter": [call, "So."]},
        storage={"url": url, "durability": "process", **storage},
    )


async def test_a_server_that_is_killed_is_followed_by_one_that_goes_on(tmp_path: Path, empty: str) -> None:
    async with standing_gate() as gate:
        config = _project(tmp_path, empty, gate.port)
        async with serving(config) as server, connected(server.address) as remote:
            turn = await remote.begin("alone", "Hello?").to_the_end()
            held = remote.begin("waiter", "Wait.")
            run_id = await held.run_id()
            await gate.arrived.wait()
            await server.kill()
        gate.open()
        async with serving(config) as server, connected(server.address) as remote:
            log = await remote.log(run_id)
            assert [event.WhichOneof("payload") for event in log][-1] == "run_completed"
            (resumed,) = (event.run_resumed for event in log if event.HasField("run_resumed"))
            assert (resumed.epoch, resumed.cause) == (2, event_pb2.RESUME_CAUSE_RECOVERY)
            assert [event.sequence for event in log] == list(range(1, len(log) + 1))
            assert turn.through


async def test_a_command_with_several_addresses_outlives_the_server_that_it_uses(tmp_path: Path, empty: str) -> None:
    case = "{id: held, turns: [{user: Wait., expect: {answer: {exact: So.}}}]}"
    (tmp_path / "set.yaml").write_text(f"name: held\nagent: waiter\ncases: [{case}]\n", encoding="utf-8")
    async with standing_gate() as gate:
        config = _project(tmp_path, empty, gate.port)
        async with serving(config) as first, serving(config) as second:
            # The first of the addresses is down from the beginning.
            addresses = f"localhost:1,{first.address},{second.address}"
            running = await started("--address", addresses, "eval", "run", str(tmp_path / "set.yaml"))
            await gate.arrived.wait()
            await first.kill()
            gate.open()
            out, err = await running.communicate()
            found = await bough("eval", "show", "last", environment={"BOUGH_ADDRESS": addresses})
    assert (running.returncode, found.code, found.out) == (0, 0, out.decode())
    assert "Rejoining the evaluation for up to 60 s." in err.decode()


async def test_commands_tell_of_the_database_and_keep_its_password(tmp_path: Path, empty: str) -> None:
    config = _project(tmp_path, empty.replace("bough@", "bough:hunter2@"), upgrade_at_start=False)
    refused = await bough("--config", str(config), "serve", "--port", "0")
    assert refused.code == 2
    assert "has no tables yet: run `bough db upgrade`" in refused.err
    examined = await bough("--config", str(config), "doctor")
    assert examined.code == 1
    assert f"!!  database: {display_url(empty)} has no tables yet; run `bough" in examined.out
    bare = await bough("--config", str(config), "db", "status")
    assert (bare.code, "has no tables yet" in bare.out) == (1, True)
    assert (await bough("--config", str(config), "db", "upgrade")).code == 0
    status = await bough("--config", str(config), "db", "status", "--json")
    found = json.loads(status.out)
    assert (status.code, found["url"], found["revision"]) == (0, display_url(empty), found["head"])
    assert (found["servers"], found["openRuns"], found["leases"]) == (0, 0, [])
    ran = await bough("--config", str(config), "run", "alone", "Hello?")
    assert ran.code == 0, ran
    async with serving(config) as server, connected(server.address):
        used = await bough("--config", str(config), "db", "status")
        assert used.out.splitlines()[1] == "1 server, 0 open runs"
        assert [line.partition(" lease ")[2].count("-") for line in used.out.splitlines()[2:]] == [4], used.out
        busy = await bough("--config", str(config), "db", "rebuild")
        assert (busy.code, "is in use by a server" in busy.err) == (2, True)
        told = (config.parent / "serve.stderr").read_text()
    assert "1 run rebuilt" in (await bough("--config", str(config), "db", "rebuild")).out
    doctor = await bough("--config", str(config), "doctor")
    assert display_url(empty) in doctor.out
    for text in (refused.err, status.out, ran.out, ran.err, busy.err, doctor.out, told):
        assert "hunter2" not in text


async def test_a_server_without_its_database_says_so(tmp_path: Path, empty: str) -> None:
    config = _project(tmp_path, empty.replace("/test_", "/absent_"))
    refused = await bough("--config", str(config), "serve", "--port", "0")
    assert refused.code == 2
    assert "does not exist. Check the address, the user and the password" in refused.err
    assert "Traceback" not in refused.err
