"""Ask models for an evaluation, in ordinary runs: recorded, charged, and found again by their request ids."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from google.protobuf.duration_pb2 import Duration

from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    error_pb2,
    evaluation_ref_pb2,
    follow_pb2,
    policy_pb2,
    run_pb2,
)
from bough_server import messages
from bough_server.clock import Clock
from bough_server.errors import RunError
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.identity import Principal
from bough_server.observability.tracing import Parent
from bough_server.quotas import QuotaExceeded
from bough_server.runs.admission import EvaluationRun
from bough_server.store.ports.runs import RunRow

OF_SERVER: Final = "bough/"
"""What the ids of requests and sessions begin with that the server chooses; callers cannot choose such ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """What the run of a model ended with: the text of its answer, or a sentence that says why there is none."""

    run: run_pb2.Run
    text: str = ""
    problem: str = ""


class ModelRuns:
    """Starts the runs of models for one evaluation, and waits for them."""

    def __init__(
        self,
        dependencies: EvaluationDependencies,
        principal: Principal,
        *,
        is_cancelled: Callable[[], bool],
        trace: Parent,
    ) -> None:
        self._dependencies, self._principal = dependencies, principal
        self._is_cancelled, self._trace = is_cancelled, trace

    async def find_or_start(
        self, request: agent_service_pb2.RunRequest, ref: evaluation_ref_pb2.EvaluationRef
    ) -> tuple[run_pb2.Run, bool]:
        """Return the run of a request, in a session that only it has, and whether it was started before.

        Raises RunError (CANCELLED) if the evaluation was cancelled, and CallError if the run cannot be started.
        """
        found = await self._dependencies.store.runs.find_request(self._principal, request.request_id)
        if found is not None:
            return found.run, True
        record = await start_within_quotas(
            lambda: self._shield_start(request, ref),
            clock=self._dependencies.clock,
            is_cancelled=self._is_cancelled,
        )
        return record.run, False

    async def _shield_start(
        self, request: agent_service_pb2.RunRequest, ref: evaluation_ref_pb2.EvaluationRef
    ) -> RunRow:
        # Shielded: whatever stops the caller meanwhile must not leave a run of an evaluation that is cancelled.
        starting = asyncio.create_task(self._start(request, ref))
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(starting)

    async def _start(self, request: agent_service_pb2.RunRequest, ref: evaluation_ref_pb2.EvaluationRef) -> RunRow:
        if self._is_cancelled():
            raise RunError("The evaluation was cancelled.", reason=error_pb2.ERROR_REASON_CANCELLED)
        named = messages.copy_of(request)
        name = hashlib.sha256(f"{self._principal.user_id}\0{request.request_id}".encode()).hexdigest()
        named.session_id = f"{OF_SERVER}{name[:32]}"
        record = await self._dependencies.runs.start(
            self._principal,
            named,
            deadline_time_ns=None,
            trace=self._trace,
            evaluation=EvaluationRun(ref=ref),
        )
        if self._is_cancelled():  # while the run was created, unseen by what cancels the runs of the evaluation
            await self._dependencies.runs.cancel(self._principal, record.run.run_id)
        return record

    async def wait_for_answer(self, run_id: str) -> ModelAnswer:
        """Wait until a run has ended and return its answer."""
        runs = self._dependencies.runs
        pages = runs.follow(self._principal, run_id, until=follow_pb2.WATCH_UNTIL_TERMINAL)
        async with aclosing(pages):
            async for _ in pages:
                pass
        ended = (await runs.get(self._principal, run_id)).run
        answer = await runs.final_answer(ended)
        if answer is None:
            return ModelAnswer(run=ended, problem=ended.error.message or "its run has no answer.")
        return ModelAnswer(run=ended, text=messages.text_of(answer))


_CHECK_SECONDS: Final = 1.0
"""How soon an evaluation that waits for a quota notices that it was cancelled."""


async def start_within_quotas(
    start: Callable[[], Awaitable[RunRow]], *, clock: Clock, is_cancelled: Callable[[], bool]
) -> RunRow:
    """Start a run as soon as the quotas on runs at the same time and on runs a minute allow it.

    Raises what `start` raises: QuotaExceeded for these two only if the evaluation is cancelled meanwhile.
    """
    while True:
        try:
            return await start()
        except QuotaExceeded as error:
            if not error.is_on_starts:
                raise
            again = clock.monotonic() + (error.retry_delay or 0.0)
            while (left := again - clock.monotonic()) > 0:
                if is_cancelled():
                    raise
                await clock.sleep(min(left, _CHECK_SECONDS))


def build_request(
    definition: agent_pb2.AgentDefinition, prompt: str, *, timeout: Duration
) -> agent_service_pb2.RunRequest:
    """Return the request of a run of a model, without its request id."""
    return agent_service_pb2.RunRequest(
        agent=definition.name,
        definitions=[definition],
        input=messages.user(prompt),
        policy=build_policy(timeout),
        on_missing_session=agent_service_pb2.MISSING_SESSION_POLICY_CREATE,
    )


def build_policy(timeout: Duration) -> policy_pb2.RunPolicy:
    """Return the policy of a run of an evaluation."""
    # No client follows these runs: neither a lost stream nor a caller's deadline may end them.
    policy = policy_pb2.RunPolicy(background=True, on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE)
    policy.limits.wall_duration.CopyFrom(timeout)
    return policy
