"""Answers by callers: who may answer what a run asks, and the requests that a caller may answer."""

from collections.abc import Collection, Sequence

from bough.v1 import agent_service_pb2, execution_pb2, input_pb2
from bough_server.errors import NotFound, PermissionDenied
from bough_server.identity import ADMIN, Caller, Principal, Scope, WholeTenant, includes, may_answer
from bough_server.runs.dependencies import RunDependencies
from bough_server.runs.resume import Check, RunResumer
from bough_server.store.ports.runs import Page, RunRow


def check_of(caller: Caller) -> Check:
    """Return what judges the answers of a caller.

    It raises PermissionDenied for a request of a run that the caller sees. One of another run does not exist for it.
    """

    def check(run_row: RunRow, asked: Sequence[input_pb2.InputRequest]) -> Collection[str]:
        denied = [each for each in asked if not may_answer(caller, run_row.principal, each)]
        if denied and includes(caller.visible, run_row.principal):
            raise PermissionDenied(_explain(denied[0]))
        return {each.input_id for each in denied}

    return check


def _explain(request: input_pb2.InputRequest) -> str:
    if request.approver_group:
        who = f"callers of the group {request.approver_group!r} do"
    else:
        who = "the run's user and callers with the role ADMIN do"
    but = ", but not the run's user (four_eyes)" if request.four_eyes else ""
    return f"The caller may not answer the request {request.input_id!r}: {who}{but}."


class Approvals:
    """Requests of many runs, as callers answer them who need not see the runs."""

    def __init__(self, dependencies: RunDependencies, resumer: RunResumer) -> None:
        self._dependencies, self._resumer = dependencies, resumer

    async def list(self, caller: Caller, page: Page) -> tuple[Sequence[input_pb2.OpenInput], str]:
        """Return a page of the open requests that a caller may answer, and the token of the next page."""

        def takes(owner: Principal, request: input_pb2.InputRequest) -> bool:
            return may_answer(caller, owner, request)

        filters = [caller.principal.user_id, sorted(caller.groups), sorted(caller.roles)]
        runs = self._dependencies.store.runs
        return await runs.list_open_inputs(_scope_to_search(caller), takes, page, filters=filters)

    async def answer(
        self, caller: Caller, request: agent_service_pb2.AnswerInputRequest
    ) -> execution_pb2.ExecutionState.ValueType:
        """Answer a run's requests, continue it, and return its state. See RunResumer.resume.

        Raises NotFound too for a run that the caller neither sees nor may answer.
        """
        whole, runs = WholeTenant(tenant_id=caller.principal.tenant_id), self._dependencies.store.runs
        scope = _scope_to_search(caller)
        # Read before the run is looked for, and also for a run that does not exist: that must cost the same.
        asked = () if scope == caller.visible else await runs.list_input_requests(request.run_id)
        owner = (await runs.get(scope, request.run_id)).principal
        # Also by requests that are answered: who comes too late is told so.
        if not includes(caller.visible, owner) and not any(may_answer(caller, owner, each) for each in asked):
            raise NotFound("run", request.run_id)
        resumed = agent_service_pb2.ResumeRunRequest(
            run_id=request.run_id, answers=request.answers, request_id=request.request_id
        )
        await self._resumer.resume(
            whole, resumed, user_id=caller.principal.user_id, deadline_time_ns=None, check=check_of(caller)
        )
        return (await runs.get(whole, request.run_id)).run.state


def _scope_to_search(caller: Caller) -> Scope:
    """Return whose runs may ask what a caller may answer: without a group and the role ADMIN only its own."""
    if caller.groups or ADMIN in caller.roles:
        return WholeTenant(tenant_id=caller.principal.tenant_id)
    return caller.visible
