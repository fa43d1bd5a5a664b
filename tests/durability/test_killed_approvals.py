"""Servers on one PostgreSQL: an approval that is on its way to the server of its run when that server is killed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGSTOP
from typing import Final

import psycopg
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio

from bough import approve, refuse, v1
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Turn, said
from tests.support import postgres
from tests.support.callers import CallerStubs, KeyRing, bearer, stubs
from tests.support.log_laws import check_laws
from tests.support.log_readings import having, results_of, text_of
from tests.support.processes import PATIENCE_SECONDS, Serving, serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import Gate, standing_gate
from tests.support.wire_client import NO_RETRIES

PAYMENTS: Final = '''"""A tool that others approve."""

from bough_server import ToolContext, tool


@tool(approval=True, approvers="finance", four_eyes=True)
def pay(ctx: ToolContext) -> str:
    """Pays."""
    return f"paid for {ctx.user_id} of {ctx.tenant_id}"
'''


@pytest.fixture
def database() -> Iterator[str]:
    """An empty database of PostgreSQL with its tables."""
    made = postgres.database()
    yield made
    postgres.drop(made)


@dataclass(slots=True, kw_only=True)
class Team:
    """Two servers, the gate at which the run works at the first one, and the keys of the second one's callers.

    The first does not know Bert: whether he may answer is for the second to say, and for no other.
    """

    owner: Serving
    other: Serving
    gate: Gate
    ring: KeyRing
    database: str
    stack: AsyncExitStack

    async def at(self, server: Serving, name: str) -> CallerStubs:
        """Return the stubs of a caller."""
        channel = await self.stack.enter_async_context(aio.insecure_channel(server.address, options=NO_RETRIES))
        return stubs(channel, bearer(self.ring.key(name)))

    async def until_sent(self, run_id: str) -> None:
        """Wait until a command to the run's server is in the database."""
        async with await psycopg.AsyncConnection.connect(self.database, autocommit=True) as connection:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await self._count_commands(connection, run_id):  # noqa: ASYNC110 # of another process
                    await asyncio.sleep(0.01)

    async def _count_commands(self, connection: "psycopg.AsyncConnection[tuple[int]]", run_id: str) -> int:
        found = await connection.execute("SELECT count(*) FROM run_commands WHERE run_id = %s", [run_id])
        row = await found.fetchone()
        assert row is not None
        return row[0]


@asynccontextmanager
async def team(folder: Path, database: str) -> AsyncIterator[Team]:
    """Serve an agent that pays and waits at the gate in one step."""
    ring, owners = KeyRing(folder / "keys.yaml"), KeyRing(folder / "owner" / "keys.yaml")
    owners.path.parent.mkdir()
    for each in (ring, owners):
        each.add("anne")
    ring.add("bert", groups=["finance"])
    async with standing_gate() as gate, AsyncExitStack() as stack:
        calls = [{"name": "pay", "arguments": {}}, {"name": "wait_at", "arguments": {"port": gate.port}}]
        servers = []
        for place, keys in ((folder, ring), (folder / "owner", owners)):
            (place / "payments.py").write_text(PAYMENTS, encoding="utf-8")
            config = write_project(
                place,
                llm("payer", tools=["pay", "wait_at"]),
                script={"payer": [{"calls": calls}, "Done."]},
                storage={"url": database},
                python=["team_tools", "payments"],
                auth=keys.auth,
            )
            servers.append(await stack.enter_async_context(serving(config)))
        yield Team(other=servers[0], owner=servers[1], gate=gate, ring=ring, database=database, stack=stack)


async def test_approvals_on_their_way_to_a_server_that_is_killed_stand_once(tmp_path: Path, database: str) -> None:
    async with team(tmp_path, database) as it:
        annes, bert = await it.at(it.owner, "anne"), await it.at(it.other, "bert")
        following = (await it.at(it.other, "anne")).agents
        turns, asked = [], []
        for _ in range(2):
            request = v1.RunRequest(agent="payer", input=said("pay"), policy=v1.RunPolicy(background=True))
            turn = await Turn(call=annes.agents.Run(request)).until("input_requested")
            asked += [event.input_requested.request for event in having(turn.events, "input_requested")]
            turns.append(Turn(call=following.WatchRun(v1.WatchRunRequest(run_id=await turn.run_id()))))
        ids = [await turn.run_id() for turn in turns]
        answers = [
            v1.AnswerInputRequest(run_id=run_id, answers=[approve(each)], request_id="once")
            for run_id, each in zip(ids, asked, strict=True)
        ]
        # The first is recorded when the server is killed, and the second is not: it has been sent to a stopped server.
        answering = [asyncio.ensure_future(bert.agents.AnswerInput(answers[0]))]
        await turns[0].until("input_received")
        it.owner.send(SIGSTOP)
        answering.append(asyncio.ensure_future(bert.agents.AnswerInput(answers[1])))
        await it.until_sent(ids[1])
        await it.owner.kill()
        it.gate.open()
        for ended in await asyncio.gather(*answering, return_exceptions=True):
            # Or its caller is told that it is not known whether it stands, and repeats it.
            assert isinstance(ended, v1.AnswerInputResponse | aio.AioRpcError)
        again = [await bert.agents.AnswerInput(each) for each in answers]
        with pytest.raises(aio.AioRpcError) as caught:
            await bert.agents.AnswerInput(v1.AnswerInputRequest(run_id=ids[1], answers=[refuse(asked[1])]))
        logs = [(await turn.to_the_end()).events for turn in turns]
    assert [each.run_id for each in again] == ids
    (info,) = status_details(caught.value)
    assert isinstance(info, ErrorInfo)
    assert info.reason == "ALREADY_ANSWERED"
    for log in logs:
        check_laws(log)
        (received,) = [event.input_received for event in having(log, "input_received")]
        assert (received.answer.answered_by, received.request_id) == ("bert", "once")
        assert "paid for anne of acme" in [text_of(each) for each in results_of(log)]
        assert log[-1].HasField("run_completed")
