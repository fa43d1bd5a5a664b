"""Session state, read and changed by the client and by `bough sessions state` and `set`."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bough import AsyncClient, InvalidRequest, NotFound, SessionBusy
from bough.v1 import session_service_pb2 as pb
from tests.clients.cli_process import Finished, bough
from tests.rpc.run_server import Served, begin, served, settings
from tests.rpc.state_agents import DOORS


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server whose agents read and write session state."""
    async with served(settings(tmp_path, python=["tests.rpc.state_agents"])) as serving:
        yield serving


async def _session(server: Served) -> str:
    return str((await server.sessions.CreateSession(pb.CreateSessionRequest())).session.session_id)


async def _command(server: Served, *arguments: str) -> Finished:
    return await bough("sessions", *arguments, port=int(server.app.address.rpartition(":")[2]))


async def test_the_client_reads_and_changes_values(server: Served) -> None:
    session_id = await _session(server)
    async with AsyncClient(server.app.address) as client:
        assert await client.sessions.get_state(session_id) == "{}"
        assert await client.sessions.update_state(session_id, state_json={"a": "1.0"}) == '{"a":1.0}'
        assert await client.sessions.update_state(session_id, {"b": "x"}) == '{"a":1.0,"b":"x"}'
        assert await client.sessions.update_state(session_id, {"a": None}) == '{"b":"x"}'
        assert await client.sessions.get_state(session_id) == '{"b":"x"}'
        with pytest.raises(InvalidRequest):
            await client.sessions.update_state(session_id, state_json={"b": "x"})
        with pytest.raises(ValueError, match="'b' is in values and in state_json"):
            await client.sessions.update_state(session_id, {"b": 1}, state_json={"b": "2"})
        with pytest.raises(NotFound):
            await client.sessions.get_state("absent")


async def test_values_are_printed_by_name_and_as_json(server: Served) -> None:
    session_id = await _session(server)
    empty = await _command(server, "state", session_id)
    assert (empty.code, empty.out, empty.err) == (0, "", "")
    changed = await _command(server, "set", session_id, "b=[1.50]", 'a="é"')
    assert (changed.code, changed.out) == (0, 'a="é"\nb=[1.50]\n')
    assert (await _command(server, "state", session_id)).out == changed.out
    assert (await _command(server, "state", session_id, "--json")).out == '{"a":"é","b":[1.50]}\n'
    deleted = await _command(server, "set", session_id, "--delete", "a", "c=null", "--json")
    assert (deleted.code, deleted.out) == (0, '{"b":[1.50],"c":null}\n')


async def test_a_value_is_one_line_and_steers_no_terminal(server: Served) -> None:
    session_id = await _session(server)
    await _command(server, "set", session_id, 'a={\n\t"b":  "x  y\x9b2J"\r\n}')
    assert (await _command(server, "state", session_id)).out == 'a={  "b":  "x  y2J"  }\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a"], "'a' has no value: write KEY=JSON, or --delete a.\n"),
        (["a=x"], "The value of 'a' is not JSON"),
        (["a=1", "--delete", "a"], "The value 'a' is changed twice"),
        ([], "There is nothing to change"),
        (["1a=1"], "state_changes[0].key"),
    ],
)
async def test_what_is_no_change_is_a_sentence(server: Served, arguments: list[str], said: str) -> None:
    session_id = await _session(server)
    refused = await _command(server, "set", session_id, *arguments)
    assert (refused.code, refused.out, said in refused.err) == (2, "", True)
    assert "Traceback" not in refused.err


async def test_the_state_of_a_session_that_a_run_holds_is_shown_and_not_changed(server: Served) -> None:
    told = json.dumps({"keep": {"a": 1}, "door": "command"})
    turn = await begin(server, "keeper", told).until("value_recorded")
    session_id = turn.events[0].session_id
    assert (await _command(server, "state", session_id)).out == "a=1\n"
    refused = await _command(server, "set", session_id, "a=2")
    assert (refused.code, refused.out, await turn.run_id() in refused.err) == (2, "", True)
    async with AsyncClient(server.app.address) as client:
        with pytest.raises(SessionBusy):
            await client.sessions.update_state(session_id, {"a": 2})
    DOORS["command"].set()
    await turn.to_the_end()
