"""`bough db copy` of what a server left behind, open runs and all: from SQLite to PostgreSQL, and back."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough import AsyncClient, RunStream, file_part, user_message
from bough.v1 import (
    agent_pb2,
    event_pb2,
    execution_pb2,
    input_pb2,
    invocation_pb2,
    policy_pb2,
)
from bough_server.store.opening import upgrade_database
from bough_server.store.postgres.database import display_url
from bough_server.store.sql.tables import metadata
from tests.clients.cli_process import bough, started
from tests.store.sql import execute
from tests.support import postgres
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import standing_gate

PHOTO = bytes(range(256)) * 40
QUEUED = policy_pb2.RunPolicy(background=True, on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)
ON_ITS_OWN = policy_pb2.RunPolicy(background=True)
SET = "name: facts\nagent: alone\ncases: [{id: a, turns: [{user: Hm, expect: {answer: {exact: Hm.}}}]}]\n"


@pytest.fixture
def empty() -> Iterator[str]:
    """A database of PostgreSQL without tables."""
    made = postgres.database(is_empty=True)
    yield made
    postgres.drop(made)


def _project(folder: Path, port: int) -> Path:
    look_up = {"calls": [{"name": "look_up", "arguments": {"topic": "oslo"}}]}
    wait = {"calls": [{"name": "wait_at", "arguments": {"port": port}}]}
    asks = llm("asker") | {"llm": {"instruction": "Ask.", "tools": [{"name": "look_up", "requires_approval": True}]}}
    return write_project(
        folder,
        llm("lead", calls=["helper"]),
        llm("helper", tools=["look_up"]),
        llm("alone"),
        llm("waiter", tools=["wait_at"]),
        asks,
        script={
            "lead": [{"calls": [{"name": "helper", "arguments": {"request": "Look."}}]}, "Done."],
            "helper": [look_up, "There it is."],
            "alone": ["Hm."],
            "waiter": [wait, "So."],
            "asker": [look_up, "I was allowed to."],
        },
    )


class Work:
    """What clients had done until their server was killed; some runs have ended, some have not."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.held = self.queued = self.asking = self.session_id = self.evaluation_id = self.sha256 = ""
        self.trees: dict[str, bytes] = {}

    async def do(self, client: AsyncClient, config: Path) -> None:
        """Run, fork, evaluate, attach a file, change a state, store an agent, and leave three runs open."""
        lead = await _to_its_end(client.run("lead", "Look it up."))
        fork = await _to_its_end(client.fork(lead, after_sequence=3))
        self.ended = [lead, fork]
        photo = config.parent / "photo.png"
        photo.write_bytes(PHOTO)
        stream = client.run("alone", user_message("See.", file_part(photo)))
        self.ended.append(await _to_its_end(stream))
        self.session_id = stream.session_id
        (self.sha256,) = [
            part.blob.sha256
            async for message in client.sessions.list_messages(self.session_id)
            for part in message.parts
            if part.HasField("blob")
        ]
        await client.sessions.update_state(self.session_id, {"mood": "calm"})
        definition = agent_pb2.AgentDefinition(name="stored", description="Is stored.")
        definition.llm.instruction = "Answer."
        await client.catalog.create_agent(definition)
        (config.parent / "set.yaml").write_text(SET)
        ran = await bough("eval", "run", str(config.parent / "set.yaml"), "--address", client.address)
        assert ran.code == 0, ran
        (evaluation,) = [each async for each in client.evaluations.list()]
        self.evaluation_id = evaluation.evaluation_id
        self.asking = await client.run("asker", "Ask.", policy=ON_ITS_OWN).started()
        async for event in client.watch(self.asking):
            if event.HasField("run_interrupted"):
                break
        held = client.run("waiter", "Wait.", policy=ON_ITS_OWN)
        self.held = await held.started()
        self.queued = await client.run("alone", "Next.", session_id=held.session_id, policy=QUEUED).started()
        self.trees = {run_id: await _tree(client, run_id) for run_id in self.ended}

    async def is_whole(self, client: AsyncClient) -> None:
        """Check that all of it is there."""
        assert {run_id: await _tree(client, run_id) for run_id in self.trees} == self.trees
        assert await client.sessions.read_blob(self.session_id, self.sha256) == PHOTO
        assert await client.sessions.get_state(self.session_id) == '{"mood":"calm"}'
        assert (await client.catalog.get_agent("stored")).definition.description == "Is stored."
        result = await client.evaluations.result(self.evaluation_id)
        assert [case.case_id for case in result.cases] == ["a"]


async def _to_its_end(stream: RunStream) -> str:
    async for _ in stream:
        pass
    return stream.run_id


async def _tree(client: AsyncClient, run_id: str) -> bytes:
    tree: invocation_pb2.Invocation = await client.get_invocation(run_id)
    return tree.SerializeToString(deterministic=True)


async def _log(client: AsyncClient, run_id: str) -> list[event_pb2.AgentEvent]:
    return [event async for event in client.watch(run_id)]


def _rows(url: str) -> dict[str, list[tuple[object, ...]]]:
    return {name: sorted(execute(url, f"SELECT * FROM {name}"), key=repr) for name in metadata.tables}


async def test_a_database_goes_to_postgresql_and_back_with_all_that_is_in_it(tmp_path: Path, empty: str) -> None:
    first, last = tmp_path / "bough.db", tmp_path / "last.db"
    work = Work()
    async with standing_gate() as gate:
        config = _project(tmp_path, gate.port)
        async with serving(config) as server, AsyncClient(server.address) as client:
            await work.do(client, config)
            await gate.arrived.wait()
            busy = await bough("db", "copy", str(first), empty)
            await server.kill()
        gate.open()
        copied = await bough("db", "copy", str(first), empty)
        assert (busy.code, "is in use by process" in busy.err) == (2, True)
        assert copied.code == 0, copied
        assert copied.out.startswith(
            f"{sum(map(len, _rows(empty).values()))} rows copied to {display_url(empty)}: agents 1,"
        )
        assert "copying events: " in copied.err
        assert _rows(empty) == _rows(str(first))
        async with (
            serving(config, environment={"BOUGH_DATABASE": empty}) as server,
            AsyncClient(server.address) as client,
        ):
            await work.is_whole(client)
            held, queued = [await _log(client, run_id) for run_id in (work.held, work.queued)]
            (resumed,) = (event.run_resumed for event in held if event.HasField("run_resumed"))
            assert (resumed.epoch, resumed.cause) == (2, event_pb2.RESUME_CAUSE_RECOVERY)
            assert [log[-1].WhichOneof("payload") for log in (held, queued)] == ["run_completed"] * 2
            assert (await client.get_run(work.asking)).state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED
            for run_id in (work.held, work.queued, work.asking):
                work.trees[run_id] = await _tree(client, run_id)
    back = await bough("db", "copy", empty, f"sqlite:///{last}")
    assert back.code == 0, back
    assert _rows(str(last)) == _rows(empty)
    async with (
        serving(config, environment={"BOUGH_DATABASE": str(last)}) as server,
        AsyncClient(server.address) as client,
    ):
        await work.is_whole(client)
        (request,) = (await client.get_run(work.asking)).open_requests
        answer = input_pb2.InputAnswer(input_id=request.input_id, approval=input_pb2.ApprovalDecision(approved=True))
        answered = [event async for event in client.resume(work.asking, [answer])]
        assert answered[-1].WhichOneof("payload") == "run_completed"


async def test_a_copy_ends_at_ctrl_c_and_leaves_the_target_empty(tmp_path: Path, empty: str) -> None:
    source = str(tmp_path / "bough.db")
    upgrade_database(source)
    numbers = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 200000)"
    execute(source, f"{numbers} INSERT INTO events SELECT 'run', n, 1, zeroblob(100) FROM numbers")
    copying = await started("db", "copy", source, empty)
    assert copying.stderr is not None
    assert await copying.stderr.readline() == b"copying events: 1,000 rows so far\n"
    copying.send_signal(signal.SIGINT)
    assert await copying.communicate() == (b"", b"")
    assert copying.returncode == 130
    assert not any(_rows(empty).values())
