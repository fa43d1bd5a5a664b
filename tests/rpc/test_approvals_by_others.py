"""Approvals by others than the user of the run: groups, four eyes, lists of what a caller may answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio

from bough import approve, refuse, v1
from bough_server.tools.tool import tool
from tests.rpc.agents import GATES
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, said, served, settings
from tests.support.callers import CallerStubs, KeyRing, bearer, stubs
from tests.support.databases import in_each_database

pytestmark = in_each_database

FINANCE = "callers of the group 'finance' do"


class Callers:
    """The callers of some servers: each call goes to the one that is told, by default the last."""

    def __init__(self, servers: list[Served], ring: KeyRing) -> None:
        self._servers, self._ring = servers, ring

    def at(self, name: str, *metadata: tuple[str, str], server: int = -1) -> CallerStubs:
        """Return the stubs of a caller."""
        return stubs(self._servers[server].channel, bearer(self._ring.key(name)), *metadata)

    async def ask(self, agent: str, text: str, *, name: str = "anne") -> tuple[str, v1.InputRequest]:
        """Start a run that asks, at the first server; return it and its request."""
        call = self.at(name, server=0).agents.Run(v1.RunRequest(agent=agent, input=said(text)))
        turn = await Turn(call=call).until("input_requested")
        (request,) = [each.input_requested.request for each in turn.events if each.HasField("input_requested")]
        return await turn.run_id(), request


@pytest.fixture
async def callers(tmp_path: Path) -> AsyncIterator[Callers]:
    """Callers of one server on SQLite, and of two on PostgreSQL."""
    GATES.clear()
    ring = KeyRing(tmp_path / "keys.yaml")
    ring.add("anne", groups=["finance"])
    ring.add("bert", groups=["finance", "legal"])
    ring.add("carl")
    ring.add("rita", roles=["READ", "RUN"])
    ring.add("ada", roles=["ADMIN"])
    ring.add("backend", groups=["finance"], acts_for="users")
    ring.add("beta", tenant="beta", groups=["finance"], roles=["ADMIN", "RUN"])
    made = settings(tmp_path, auth=ring.auth, python=["tests.rpc.agents", "tests.rpc.approval_agents"])
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(served(made))]
        if made.storage.url.startswith("postgresql"):
            servers.append(await stack.enter_async_context(served(made)))
        yield Callers(servers, ring)


async def refusal(call: object) -> tuple[str, str, str]:
    """Return the code, the reason and the text that a call fails with."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    (info, *_) = status_details(caught.value)
    assert isinstance(info, ErrorInfo)
    return caught.value.code().name, info.reason, str(caught.value.details())


def answer(run_id: str, *answers: v1.InputAnswer, request_id: str = "") -> v1.AnswerInputRequest:
    """Return the request that answers a run."""
    return v1.AnswerInputRequest(run_id=run_id, answers=answers, request_id=request_id)


def resume(run_id: str, *answers: v1.InputAnswer) -> v1.ResumeRunRequest:
    """Return the request that answers a run and follows it."""
    return v1.ResumeRunRequest(run_id=run_id, answers=answers)


async def listed(caller: CallerStubs) -> list[str]:
    """Return the ids of the requests that a caller may answer."""
    found = await caller.agents.ListInputRequests(v1.ListInputRequestsRequest())
    return [each.request.input_id for each in found.requests]


async def test_who_starts_a_run_fails_four_eyes_by_every_way(callers: Callers) -> None:
    run_id, request = await callers.ask("clerk", "pay")
    assert (request.approver_group, request.four_eyes) == ("finance", True)
    expected = (
        "PERMISSION_DENIED",
        "PERMISSION_DENIED",
        f"The caller may not answer the request {request.input_id!r}: {FINANCE}, but not the run's user (four_eyes).",
    )
    given = approve(request)
    named = callers.at("backend", ("bough-user-id", "anne"))
    for each in (callers.at("anne", server=0), callers.at("anne"), named):
        assert await refusal(each.agents.ResumeRun(resume(run_id, given)).read()) == expected
        assert await refusal(each.agents.AnswerInput(answer(run_id, given))) == expected
        assert not await listed(each)
    # Nor does an administrator without the group; who sees nothing of it does not know it.
    code, _, text = await refusal(callers.at("ada").agents.AnswerInput(answer(run_id, given)))
    assert (code, FINANCE in text) == ("PERMISSION_DENIED", True)
    absent = ("NOT_FOUND", "NOT_FOUND", f"There is no run {run_id!r}.")
    for name in ("carl", "beta"):
        assert await refusal(callers.at(name).agents.AnswerInput(answer(run_id, given))) == absent
        assert await refusal(callers.at(name).agents.ResumeRun(resume(run_id, given)).read()) == absent
    answered = await callers.at("bert").agents.AnswerInput(answer(run_id, given))
    assert answered.run_id == run_id
    watching = Turn(call=callers.at("anne").agents.WatchRun(v1.WatchRunRequest(run_id=run_id)))
    events = (await watching.to_the_end()).events
    assert events[-1].run_completed.final_answer.parts[0].text == "paid 5"
    (received,) = [each.input_received.answer for each in events if each.HasField("input_received")]
    assert received.answered_by == "bert"


async def test_an_approval_by_others_holds_for_no_fork(callers: Callers) -> None:
    run_id, request = await callers.ask("clerk", "pay")
    await callers.at("bert").agents.AnswerInput(answer(run_id, approve(request)))
    anne = callers.at("anne").agents
    log = (await Turn(call=anne.WatchRun(v1.WatchRunRequest(run_id=run_id))).to_the_end()).events
    received, ended = (
        next(event.sequence for event in log if event.HasField(kind)) for kind in ("input_received", "tool_completed")
    )
    for after in range(1, log[-1].sequence):
        fork = anne.ForkRun(v1.ForkRunRequest(run_id=run_id, after_sequence=after, allow_open_effects=True))
        if received <= after < ended:
            assert await refusal(fork.read()) == (
                "FAILED_PRECONDITION",
                "FORK_REFUSED",
                "The call of 'pay' had been approved by others at this point, for the run alone. "
                f"Fork before sequence {received}, where the fork asks for itself, or edit the call's result.",
            )
        else:
            expected = "run_interrupted" if after < received else "run_completed"
            assert (await Turn(call=fork).to_the_end()).kinds[-1] == expected


async def test_approvers_of_one_run_may_use_the_same_request_id(callers: Callers) -> None:
    run_id, first = await callers.ask("cashier", "both")
    anne, dora = callers.at("anne").agents, callers.at("backend", ("bough-user-id", "dora")).agents
    watching = v1.WatchRunRequest(run_id=run_id, until=v1.WATCH_UNTIL_INTERRUPTED)
    watching.after_sequence = (await Turn(call=anne.WatchRun(watching)).to_the_end()).through
    await callers.at("bert").agents.AnswerInput(answer(run_id, approve(first), request_id="1"))
    (second,) = (await Turn(call=anne.WatchRun(watching)).to_the_end()).events[-1].run_interrupted.requests
    await dora.AnswerInput(answer(run_id, approve(second), request_id="1"))
    other = answer(run_id, refuse(second), request_id="1")
    assert (await refusal(dora.AnswerInput(other)))[1] == "REQUEST_ID_REUSED"


async def test_a_caller_lists_what_it_may_answer(callers: Callers) -> None:
    paid, pay = await callers.ask("clerk", "pay")
    _, book = await callers.ask("clerk", "book")
    _, drop = await callers.ask("clerk", "drop", name="carl")
    _, working = await callers.ask("busy_clerk", "works on", name="carl")
    ids = [each.input_id for each in (pay, book, drop, working)]
    assert await listed(callers.at("bert")) == [ids[0], ids[1], ids[3]]
    assert await listed(callers.at("anne")) == [ids[1], ids[3]]
    assert await listed(callers.at("ada")) == [ids[2]]
    for name in ("carl", "rita", "beta"):
        assert await listed(callers.at(name)) == []
    found = (await callers.at("bert").agents.ListInputRequests(v1.ListInputRequestsRequest())).requests[0]
    expected = v1.OpenInput(run_id=paid, agent="clerk", user_id="anne", input_excerpt="pay", request=pay)
    assert found.request_time.seconds > 0
    found.ClearField("request_time")
    found.ClearField("session_id")
    assert found == expected
    pages, token = [], ""
    while token or not pages:
        request = v1.ListInputRequestsRequest(page_size=1, page_token=token)
        page = await callers.at("bert").agents.ListInputRequests(request)
        pages.append([each.request.input_id for each in page.requests])
        token = page.next_page_token
    assert pages == [[ids[0]], [ids[1]], [ids[3]]]
    first = await callers.at("bert").agents.ListInputRequests(v1.ListInputRequestsRequest(page_size=1))
    request = v1.ListInputRequestsRequest(page_token=first.next_page_token)
    code, reason, _ = await refusal(callers.at("anne").agents.ListInputRequests(request))
    assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_PAGE_TOKEN")
    await callers.at("bert").agents.AnswerInput(answer(paid, approve(pay)))
    assert await listed(callers.at("bert")) == [ids[1], ids[3]]
    GATES["works on"].set()


async def test_a_run_that_works_meanwhile_is_answered_too(callers: Callers) -> None:
    run_id, request = await callers.ask("busy_clerk", "works")
    answered = await callers.at("bert").agents.AnswerInput(answer(run_id, approve(request)))
    assert answered.state == v1.EXECUTION_STATE_RUNNING
    GATES["works"].set()
    log = await Turn(call=callers.at("anne").agents.WatchRun(v1.WatchRunRequest(run_id=run_id))).to_the_end()
    assert log.events[-1].run_completed.final_answer.parts[0].text == "paid 7"


async def test_of_two_approvers_one_stands_and_a_request_of_another_run_does_not_exist(callers: Callers) -> None:
    run_id, request = await callers.ask("busy_clerk", "at once")
    other_id, own = await callers.ask("clerk", "drop")
    yes, no = answer(run_id, approve(request)), answer(run_id, refuse(request, note="no"))
    backend = callers.at("backend", ("bough-user-id", "dora"), server=0)
    ends = await asyncio.gather(
        callers.at("bert").agents.AnswerInput(yes), backend.agents.AnswerInput(no), return_exceptions=True
    )
    failed = [each for each in ends if isinstance(each, aio.AioRpcError)]
    assert [each.code() for each in failed] == [grpc.StatusCode.FAILED_PRECONDITION]
    (info,) = status_details(failed[0])
    assert info.reason == "ALREADY_ANSWERED"
    GATES["at once"].set()
    # Bert may answer one of that user's runs, but neither sees nor may answer the other.
    absent = ("NOT_FOUND", "NOT_FOUND", f"There is no run {other_id!r}.")
    assert await refusal(callers.at("bert").agents.AnswerInput(answer(other_id, approve(own)))) == absent
    assert (await callers.at("ada").agents.AnswerInput(answer(other_id, approve(own)))).run_id == other_id
    log = await Turn(call=callers.at("anne").agents.WatchRun(v1.WatchRunRequest(run_id=other_id))).to_the_end()
    assert log.events[-1].run_completed.final_answer.parts[0].text == "dropped 5 for anne of acme"
    unknown = await refusal(callers.at("bert").agents.AnswerInput(answer(run_id, approve(own))))
    assert unknown[0] in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")


async def test_the_local_caller_answers_everything(tmp_path: Path) -> None:
    python = ["tests.rpc.agents", "tests.rpc.approval_agents"]
    async with served(settings(tmp_path / "local", python=python)) as server:
        turn = await Turn(call=server.agents.Run(v1.RunRequest(agent="clerk", input=said("pay")))).to_the_end()
        (request,) = turn.events[-1].run_interrupted.requests
        found = await server.agents.ListInputRequests(v1.ListInputRequestsRequest())
        assert [each.request for each in found.requests] == [request]
        await server.agents.AnswerInput(answer(await turn.run_id(), approve(request)))


def test_approvers_are_a_group_of_a_tool_that_needs_approval() -> None:
    for rules, problem in (
        ({"approvers": "finance"}, "needs no approval, so it has no approvers"),
        ({"four_eyes": True}, "needs no approval, so it has no approvers"),
        ({"approval": True, "approvers": ""}, "must be the name of a group"),
        ({"approval": True, "approvers": ["finance"]}, "must be the name of a group"),
    ):
        with pytest.raises(TypeError, match=problem):

            @tool(**rules)  # type: ignore[call-overload,untyped-decorator]
            def pay() -> None:
                """Pays."""
