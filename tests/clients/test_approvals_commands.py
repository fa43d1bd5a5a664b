"""The commands of examples/approvals: questions, answers, forks and replays."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from google.protobuf import json_format

from bough.v1 import event_pb2, execution_pb2, input_pb2, run_pb2
from tests.clients.cli_process import Finished, bough, server_of, started
from tests.support.log_readings import failures, text_of

SHOP = Path(__file__).parents[2] / "examples" / "approvals" / "bough.yaml"
SAID = "Orders 1001 and 1002 come back."
ANSWER = "Thank you. Whatever was approved is on its way to your card.\n"


Shop = Callable[..., Awaitable[Finished]]
"""Runs a command of the shop."""


@pytest.fixture(scope="module")
async def port(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[int]:
    """The shop's server, for the commands of all tests; the newest run is that of the test."""
    database = tmp_path_factory.mktemp("shop") / "bough.db"
    environment = {"BOUGH_DATABASE": str(database), "BOUGH_DEFAULT_MODEL": "scripted"}
    async with server_of(SHOP, environment=environment) as port:
        yield port


@pytest.fixture
def shop(port: int) -> Shop:
    """The shop with its commands connected to the server."""

    async def command(*arguments: str) -> Finished:
        return await bough("--config", str(SHOP), *arguments, port=port)

    return command


@pytest.fixture
def embedded_shop(tmp_path: Path) -> Shop:
    """The shop with a server embedded in each command, on a database of this test."""
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}

    async def command(*arguments: str) -> Finished:
        return await bough("--config", str(SHOP), "--embedded", *arguments, environment=environment)

    return command


async def open_requests(shop: Shop) -> dict[str, input_pb2.InputRequest]:
    """The open requests of the newest run, by agent path."""
    listed = await shop("runs", "--limit", "1", "--json")
    run = json_format.Parse(listed.out, run_pb2.Run())
    return {"/".join(request.agent_path): request for request in run.open_requests}


async def waiting_for_approval(shop: Shop) -> None:
    """A turn whose card is read and whose customer has said why, up to the refund that waits."""
    ran = await shop("run", "lead", SAID, "--output", "answer")
    assert (ran.code, ran.out) == (3, "")
    asked = await open_requests(shop)
    assert {name: request.kind for name, request in asked.items()} == {
        "lead": input_pb2.INPUT_KIND_CLIENT_TOOL,
        "lead/interviewer": input_pb2.INPUT_KIND_QUESTION,
    }
    card, why = asked["lead"].input_id, asked["lead/interviewer"].input_id
    answers = ("--answer", f'{card[:13]}="4242"', "--answer", f'{why[-13:]}="it is broken"')
    resumed = await shop("resume", "last", *answers, "--output", "answer")
    assert (resumed.code, resumed.out) == (3, "")


async def approval(shop: Shop) -> input_pb2.InputRequest:
    return (await open_requests(shop))["lead/refunds"]


def kinds(events: Sequence[event_pb2.AgentEvent]) -> list[str]:
    return [event.WhichOneof("payload") or "" for event in events]


async def test_a_run_is_answered_piece_by_piece_over_restarts_and_ends(embedded_shop: Shop) -> None:
    shop = embedded_shop
    await waiting_for_approval(shop)
    request = await approval(shop)
    answer = f'{request.input_id}={{"approved": true, "arguments": {{"order_id": "1002", "amount": 90}}}}'
    resumed = await shop("resume", "last", "--answer", answer, "--output", "json")
    events = [json_format.Parse(line, event_pb2.AgentEvent()) for line in resumed.out.splitlines()]
    assert (resumed.code, kinds(events)[:2]) == (0, ["run_resumed", "input_received"])
    paid = [event.tool_completed.result.parts[0].text for event in events if event.HasField("tool_completed")]
    assert paid[0].startswith("90 EUR are paid back for order 1002")
    again = await shop("resume", "last", "--answer", answer, "--output", "answer")
    assert (again.code, again.out) == (0, ANSWER)
    changed = f"{request.input_id}=false"
    other = await shop("resume", "last", "--answer", changed)
    assert (other.code, other.out) == (2, "")
    replayed = await shop("replay", "last")
    assert (replayed.code, "replays to its end: " in replayed.out) == (0, True), replayed.out
    seen = await shop("events", "last", "--json")
    log = [json_format.Parse(line, event_pb2.AgentEvent()) for line in seen.out.splitlines()]
    assert failures(log) == []
    results = [event.tool_completed.result for event in log if event.HasField("tool_completed")]
    assert [text_of(result) for result in results if result.call.name == "read_card"] == ["4242"]


async def test_a_run_that_waits_replays_to_where_it_waits(shop: Shop) -> None:
    await waiting_for_approval(shop)
    replayed = await shop("replay", "last")
    assert (replayed.code, "replays to where it waits for input: " in replayed.out) == (0, True), replayed.out


async def test_an_answer_that_the_question_does_not_take_is_refused_and_the_run_waits_on(
    shop: Shop,
) -> None:
    await shop("run", "lead", SAID, "--output", "answer")
    why = (await open_requests(shop))["lead/interviewer"].input_id
    resumed = await shop("resume", "last", "--answer", f'{why}="boredom"')
    assert (resumed.code, resumed.out, "Traceback" in resumed.err) == (2, "", False)
    assert set(await open_requests(shop)) == {"lead", "lead/interviewer"}


async def test_one_answer_of_two_has_the_run_ask_again_for_the_other(shop: Shop) -> None:
    await shop("run", "lead", SAID, "--output", "answer")
    asked = await open_requests(shop)
    answer = f'{asked["lead"].input_id}={{"error": "no reader"}}'
    resumed = await shop("resume", "last", "--answer", answer, "--output", "answer")
    assert (resumed.code, "The run waits for 1 answer." in resumed.err) == (3, True)
    assert await open_requests(shop) == {"lead/interviewer": asked["lead/interviewer"]}


async def test_a_fork_with_an_edited_result_waits_and_ends_by_itself(shop: Shop) -> None:
    await waiting_for_approval(shop)
    seen = await shop("events", "last", "--json", "--types", "tool.completed")
    results = [json_format.Parse(line, event_pb2.AgentEvent()) for line in seen.out.splitlines()]
    (refund,) = [event for event in results if event.tool_completed.result.call.name == "refund"]
    call = f"{refund.invocation_id}/{refund.tool_completed.result.call.call_id}"
    edited = f'{call}={{"error": "The bank is closed."}}'
    forked = await shop("fork", "last", "--after", str(refund.sequence), "--tool-result", edited)
    assert forked.code == 3, forked.err
    assert "✗ refund  TOOL_FAILED: The bank is closed." in forked.out
    assert [line for line in forked.out.splitlines() if line.startswith(("origin ", "fork 0"))] != []
    answer = f"{(await approval(shop)).input_id}=false"
    resumed = await shop("resume", "last", "--answer", answer, "--output", "answer")
    assert (resumed.code, resumed.out) == (0, ANSWER)
    replayed = await shop("replay", "last")
    assert (replayed.code, "replays to its end: " in replayed.out) == (0, True), replayed.out


async def test_cancelling_a_run_that_waits_says_that_it_is_cancelled_and_the_second_time_that_it_was(
    shop: Shop,
) -> None:
    ran = await shop("run", "lead", SAID, "--output", "answer")
    run_id = ran.err.splitlines()[0].removeprefix("run ")
    cancelled = await shop("cancel", "last")
    assert cancelled == Finished(code=0, out=f"{run_id} is cancelled\n", err="")
    again = await shop("cancel", "last")
    assert again == Finished(code=0, out=f"{run_id} had already ended: cancelled\n", err="")


async def test_a_turn_of_a_busy_session_is_refused_or_waits_until_it_is_free(port: int) -> None:
    ran = await bough("run", "lead", SAID, "--output", "json", port=port)
    first = json_format.Parse(ran.out.splitlines()[0], event_pb2.AgentEvent())
    turn = ("run", "lead", SAID, "--session", first.session_id, "--output", "plain")
    refused = await bough(*turn, port=port)
    assert (refused.code, refused.out, first.run_id in refused.err) == (2, "", True)
    waiting = await started(*turn, "--on-busy", "queue", port=port)
    assert waiting.stdout is not None
    lines = [(await waiting.stdout.readline()).decode() for _ in range(2)]
    assert lines[1].endswith(f" lead agent.run.queued waits for its session, behind run {first.run_id}\n")
    listed = await bough("runs", "--session", first.session_id, "--state", "pending", "--json", port=port)
    assert [json_format.Parse(line, run_pb2.Run()).state for line in listed.out.splitlines()] == [
        execution_pb2.EXECUTION_STATE_PENDING
    ]
    await bough("cancel", first.run_id, port=port)
    out, _ = await waiting.communicate()
    names = [line.split()[3] for line in out.decode().splitlines()]
    assert (waiting.returncode, names[0], names[-1]) == (3, "agent.run.dequeued", "agent.run.interrupted")
    replacing = await bough(*turn, "--on-busy", "cancel-interrupted", port=port)
    states = await bough("runs", "--session", first.session_id, "--json", port=port)
    assert replacing.code == 3
    assert [json_format.Parse(line, run_pb2.Run()).state for line in states.out.splitlines()] == [
        execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
        execution_pb2.EXECUTION_STATE_CANCELLED,
        execution_pb2.EXECUTION_STATE_CANCELLED,
    ]
