"""An argument of a wrong type is refused by its name, before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest

from bough import AsyncClient, Client, approve, reply, run_source, user_message
from bough.v1 import AgentDefinition, EvalCase, EvalSet, Limits

SET = EvalSet(name="trips", cases=[EvalCase(id="oslo")])

WRONG: list[tuple[Callable[[Any], object], str]] = [
    (lambda client: client.run(5, "hi"), "agent must be a str, not int"),
    (lambda client: client.run(None, "hi"), "agent must be a str, not None"),
    (lambda client: client.run("lead", 5), "input must be a str or a Message, not int"),
    (lambda client: client.run("lead", "hi", policy=Limits()), "policy must be a RunPolicy, not Limits"),
    (lambda client: client.run("lead", "hi", labels=["a"]), "labels must be a mapping of str to str, not list"),
    (lambda client: client.run("lead", "hi", labels={"a": 1}), r"labels\['a'\] must be a str, not int"),
    (lambda client: client.run("lead", "hi", labels={1: "a"}), "labels must be a mapping of str to str, not dict"),
    (lambda client: client.run("lead", "hi", event_names="agent.llm.*"), "event_names must be a list of str, not str"),
    (
        lambda client: client.run("lead", "hi", definitions=AgentDefinition()),
        "definitions must be a list of AgentDefinition, not AgentDefinition",
    ),
    (
        lambda client: client.run("lead", "hi", definitions=iter([AgentDefinition(), "lead"])),
        r"definitions\[1\] must be an AgentDefinition, not str",
    ),
    (lambda client: client.run("lead", "hi", heartbeat="1"), "heartbeat must be a number of seconds, not str"),
    (lambda client: client.run("lead", "hi", timeout="1"), "timeout must be a number of seconds or None, not str"),
    (lambda client: client.resume("r1", reply("ask", 1)), "answers must be a list of InputAnswer, not InputAnswer"),
    (lambda client: client.fork("r1", "7"), "after_sequence must be an int, not str"),
    (lambda client: client.fork("r1", 7, allow_open_effects="no"), "allow_open_effects must be a bool, not str"),
    (lambda client: client.list_runs(page_size=2.5), "page_size must be an int, not float"),
    (lambda client: client.list_runs(create_time_from="today"), "create_time_from must be a datetime, not str"),
    (lambda client: client.evaluations.run(SET, gates="pass_rate >= 1"), "gates must be a list of str, not str"),
    (
        lambda client: client.evaluations.run(SET, baseline=7),
        "baseline must be an EvalResult or the id of an evaluation, not int",
    ),
    (lambda client: user_message(5), "input must be a str or a Message, not int"),
    (lambda client: approve(5), "request must be an InputRequest or its input_id, not int"),
    (lambda client: approve("ask", note=5), "note must be a str, not int"),
    (lambda client: run_source(5), "run_id must be a str, not int"),
    (lambda client: type(client)(50051), "address must be a str, not int"),
]

AWAITED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda client: client.ask("lead", 5), "input must be a str or a Message, not int"),
    (lambda client: client.get_run(5), "run_id must be a str, not int"),
    (lambda client: client.get_run("r1", timeout="1"), "timeout must be a number of seconds or None, not str"),
    (lambda client: client.is_serving(5), "service must be a str, not int"),
    (lambda client: client.sessions.get(5), "session_id must be a str, not int"),
    (lambda client: client.sessions.update_state("s1", "a"), "values must be a mapping, not str"),
    (
        lambda client: client.sessions.update_state("s1", state_json={"a": 1}),
        r"state_json\['a'\] must be a str or None, not int",
    ),
    (
        lambda client: client.catalog.update_agent(AgentDefinition(), revision="r1", fields="llm"),
        "fields must be a list of str, not str",
    ),
    (lambda client: client.evaluations.score("r1"), "invocations must be a list of InvocationSource, not str"),
]


@pytest.fixture
def client() -> Client:
    return Client("127.0.0.1:1")


@pytest.mark.parametrize(("call", "said"), [*WRONG, *AWAITED])
def test_a_wrong_type_is_refused_by_name(call: Callable[[Any], object], said: str, client: Client) -> None:
    with client, pytest.raises(TypeError, match=f"^{said}$"):
        call(client)


@pytest.mark.parametrize(("call", "said"), WRONG)
async def test_the_asynchronous_client_refuses_the_same(call: Callable[[Any], object], said: str) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=f"^{said}$"):
            call(client)


@pytest.mark.parametrize(("call", "said"), AWAITED)
async def test_the_asynchronous_client_refuses_the_same_of_calls(call: Callable[[Any], Any], said: str) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=f"^{said}$"):
            await call(client)


def test_a_value_that_a_field_cannot_have_is_refused_by_name(client: Client) -> None:
    with client:
        with pytest.raises(ValueError, match=r"^page_size: Value out of range"):
            client.list_runs(page_size=2**40)
        with pytest.raises(ValueError, match=r"^agent: 'utf-8' codec can't encode"):
            client.run("\ud800", "hi")
        with pytest.raises(TypeError, match="not JSON serializable"):
            client.sessions.update_state("s1", {"a": {1, 2}})


def test_what_can_be_a_list_or_a_value_may_be_one(client: Client) -> None:
    with client:
        client.run("lead", "hi", definitions=(each for each in [AgentDefinition()]), labels=None).close()
        client.run("lead", "hi", event_names={"agent.llm.*"}, timeout=5, heartbeat=1).close()
