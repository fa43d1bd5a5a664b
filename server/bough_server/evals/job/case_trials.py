"""Run the turns of a trial: ordinary runs in a separate session, each of which is found again after a restart."""

from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Final

from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    error_pb2,
    eval_set_pb2,
    evaluation_pb2,
    execution_pb2,
    follow_pb2,
    input_pb2,
    invocation_pb2,
    session_pb2,
)
from bough_server import messages
from bough_server.errors import CallError, NotFound, ServerStopping, SessionExists, StorageFailed
from bough_server.evals.job.answers import answers_to
from bough_server.evals.job.dependencies import EvaluationDependencies
from bough_server.evals.job.mock_uses import build_remaining_mocks, count_mock_uses
from bough_server.evals.job.model_runs import ModelRuns, build_policy, start_within_quotas
from bough_server.evals.job.simulated_users import speak
from bough_server.evals.job.trial_runs import CaseTrial, NotScorable, TrialRuns
from bough_server.evals.metrics.run_outcome import find_expected_state, needs_state
from bough_server.evals.sets.cases_from_runs import mocks_of
from bough_server.evals.trees.folding import UNLIMITED, TreeBuilder, read_invocation, read_source
from bough_server.identity import Principal, Scope
from bough_server.log import events
from bough_server.log.session_state import values_of
from bough_server.observability.tracing import Parent
from bough_server.runs.admission import EvaluationRun
from bough_server.store.ports.log import StoredEvent
from bough_server.store.ports.runs import Page, RunFilter, RunRow
from bough_server.tree.fold import Tree

_SUCCEEDED: Final = execution_pb2.EXECUTION_STATE_SUCCEEDED
_ENDED: Final = frozenset(
    {
        _SUCCEEDED,
        execution_pb2.EXECUTION_STATE_FAILED,
        execution_pb2.EXECUTION_STATE_CANCELLED,
    }
)


_OPEN: Final = tuple(
    state
    for state in execution_pb2.ExecutionState.values()
    if state not in _ENDED and state != execution_pb2.EXECUTION_STATE_UNSPECIFIED
)

_PAGE_RUNS: Final = 500

_UNANSWERED: Final = "The case of an evaluation that this run belongs to does not answer what it asks."
"""The note of a cancellation; it is read again after a restart."""

_NOT_CONTINUED: Final = "The evaluation that this run belongs to could not continue it."


class TrialRunner:
    """Runs the turns of the cases of one evaluation."""

    def __init__(
        self,
        dependencies: EvaluationDependencies,
        principal: Principal,
        *,
        evaluation_id: str,
        agent: str,
        definitions: Sequence[agent_pb2.AgentDefinition],
        is_cancelled: Callable[[], bool],
        trace: Parent,
        scope: Scope,
    ) -> None:
        """`trace` is that of the evaluation's caller, whose part the runs are, except forks.

        `scope`: where the runs that cases name are looked up.
        """
        self._scope = scope
        self._trace = trace
        self._dependencies, self._principal, self._is_cancelled = dependencies, principal, is_cancelled
        self._evaluation_id, self._agent, self._definitions = evaluation_id, agent, definitions
        self._model_runs = ModelRuns(dependencies, principal, is_cancelled=is_cancelled, trace=trace)

    def build_trial(self, planned: evaluation_pb2.CasePlanned, trial: int, *, attempt: int = 0) -> CaseTrial:
        """Return the trial of a planned case that has this number."""
        case_id = planned.eval_case.id
        return CaseTrial(evaluation_id=self._evaluation_id, case_id=case_id, trial=trial, attempt=attempt)

    async def read_recorded_turns(self, case: eval_set_pb2.EvalCase) -> list[invocation_pb2.Invocation]:
        """Return the records that a case has instead of runs.

        Raises NotScorable if one is of a run that is not stored here, ServerStopping and StorageFailed.
        """
        runs, log = self._dependencies.runs, self._dependencies.store.log
        try:
            return [
                await read_source(runs, log, self._scope, turn.recorded, has_state=needs_state(case))
                for turn in case.turns
            ]
        except (ServerStopping, StorageFailed):
            raise
        except CallError as error:
            raise NotScorable(f"A recorded run cannot be read: {error.message}") from None

    async def run(self, planned: evaluation_pb2.CasePlanned, trial: int, *, attempt: int = 0) -> TrialRuns:
        """Run the turns of a case up to the first that fails, and then what its simulated user says.

        Turns and utterances that were run before, by this process or an earlier one, are not run again. Once the
        evaluation is cancelled no further turn begins. Raises NotScorable, ServerStopping and StorageFailed.
        """
        case, named = planned.eval_case, self.build_trial(planned, trial, attempt=attempt)
        mocks = await self._mocks(case)
        runs = TrialRuns.begin(case)
        session_id = ""
        while not self._is_cancelled():
            number = len(runs.invocations)
            try:
                if not await self._has_turn(runs, named):
                    break
                left = None if mocks is None else build_remaining_mocks(mocks, count_mock_uses(runs.invocations))
                if left is not None and left.faults:
                    left.fault_seed = named.fault_seed(number)
                record = await self._begin(runs.case, named, number, session_id=session_id, mocks=left)
                session_id = record.run.session_id
                invocation, refusal = await self._finish(record, case)
                runs.invocations.append(invocation)
                if refusal:
                    raise NotScorable(refusal)
            except NotScorable as error:
                raise NotScorable(error.reason, unanswered=error.unanswered, runs=runs) from None
            except (ServerStopping, StorageFailed):
                raise
            except CallError as error:
                raise NotScorable(f"Turn {number + 1} was not run: {error.message}", runs=runs) from None
            expected = find_expected_state(case.turns[number].expect.run) if number < len(case.turns) else _SUCCEEDED
            if runs.invocations[-1].state not in (_SUCCEEDED, expected):
                break
        return runs

    async def _has_turn(self, runs: TrialRuns, named: CaseTrial) -> bool:
        """Return whether a trial has a turn more, for which its simulated user may have to say something."""
        number = len(runs.invocations)
        if number < len(runs.case.turns):
            return True
        if not runs.may_speak:
            return False
        said = await speak(
            self._model_runs,
            runs.case,
            runs.invocations,
            request_id=named.user_request_id(number),
            ref=named.user_ref(number),
            used=runs.user_used,
        )
        if said.is_done:
            runs.user_finished = True
        else:
            runs.add_message(said.message, run_id=said.run_id)
        return not said.is_done

    async def cancel_all(self, *, note: str, case_id: str = "", trial: int | None = None) -> None:
        """Cancel every run of the evaluation that has not ended, or of a case or one of its trials."""
        open_runs = RunFilter(evaluation_id=self._evaluation_id, case_id=case_id, states=_OPEN)
        token = ""
        while True:
            page = Page(size=_PAGE_RUNS, token=token)
            found, token = await self._dependencies.store.runs.list(self._principal, open_runs, page)
            for run in found:
                if trial is None or run.evaluation.trial == trial:
                    await self._cancel(run.run_id, note=note)
            if not token:
                return

    async def _cancel(self, run_id: str, *, note: str) -> None:
        with suppress(NotFound):  # deleted meanwhile, with its session
            await self._dependencies.runs.cancel(self._principal, run_id, note=note)

    async def _begin(
        self,
        case: eval_set_pb2.EvalCase,
        named: CaseTrial,
        number: int,
        *,
        session_id: str,
        mocks: eval_set_pb2.ToolMocks | None,
    ) -> RunRow:
        """Start a turn, or find the run that was started for it before."""
        if number == 0 and case.HasField("origin"):
            start = partial(self._fork, case, named, mocks)
        else:
            if number == 0:
                await self._prepare_session(case, named)
            turn = case.turns[number]
            start = partial(self._start, case, named, turn, session=session_id, number=number, mocks=mocks)
        record = await start_within_quotas(start, clock=self._dependencies.clock, is_cancelled=self._is_cancelled)
        if self._is_cancelled():  # while the run was created, unseen by cancel_all
            await self._cancel(record.run.run_id, note="")
        return record

    async def _prepare_session(self, case: eval_set_pb2.EvalCase, named: CaseTrial) -> None:
        """Create the session of a case with the state that it begins with, unless its first turn has begun."""
        if not case.session_state_json:
            return
        sessions, principal = self._dependencies.store.sessions, self._principal
        if await self._dependencies.store.runs.find_request(principal, named.request_id(0)) is not None:
            return
        with suppress(SessionExists):  # an earlier server created it
            await sessions.create(
                principal, session_id=named.session_id, labels={}, now_ns=self._dependencies.clock.now_ns()
            )
        changes = [
            session_pb2.SessionStateChange(key=key, value_json=text)
            for key, text in values_of(case.session_state_json).items()
        ]
        if changes:
            await sessions.update_state(principal, named.session_id, changes)

    async def _start(
        self,
        case: eval_set_pb2.EvalCase,
        named: CaseTrial,
        turn: eval_set_pb2.EvalTurn,
        *,
        session: str,
        number: int,
        mocks: eval_set_pb2.ToolMocks | None,
    ) -> RunRow:
        request = agent_service_pb2.RunRequest(
            request_id=named.request_id(number),
            agent=self._agent,
            definitions=self._definitions,
            session_id=session or named.session_id,
            input=turn.input if turn.HasField("input") else messages.user(turn.user),
            policy=build_policy(case.timeout),
            on_missing_session=agent_service_pb2.MISSING_SESSION_POLICY_CREATE,
        )
        return await self._dependencies.runs.start(
            self._principal,
            request,
            deadline_time_ns=None,
            trace=self._trace,
            evaluation=EvaluationRun(ref=named.ref(number), mocks=mocks),
        )

    async def _fork(
        self, case: eval_set_pb2.EvalCase, named: CaseTrial, mocks: eval_set_pb2.ToolMocks | None
    ) -> RunRow:
        origin = case.origin
        request = agent_service_pb2.ForkRunRequest(
            request_id=named.request_id(0),
            run_id=origin.run_id,
            after_sequence=origin.after_sequence,
            policy=build_policy(case.timeout),
        )
        if origin.HasField("changes"):
            request.changes.CopyFrom(origin.changes)
        record, _ = await self._dependencies.runs.fork(
            self._principal,
            request,
            deadline_time_ns=None,
            evaluation=EvaluationRun(ref=named.ref(0), mocks=mocks),
            scope=self._scope,
        )
        return record

    async def _mocks(self, case: eval_set_pb2.EvalCase) -> eval_set_pb2.ToolMocks | None:
        """Return the mocks of a case with those that a recorded run adds, and its faults."""
        if not (case.HasField("mocks") or case.faults):
            return None
        mocks = messages.copy_of(case.mocks)
        mocks.faults.extend(case.faults)
        if mocks.run_id:
            try:
                mocks.tools.extend(mocks_of(await self._read_invocation(mocks.run_id)))
            except NotFound:
                raise NotScorable(f"The run {mocks.run_id!r} that tools are mocked from is not stored here.") from None
        # The run holds the mocks themselves: it can be continued when that other run has been deleted.
        mocks.run_id = ""
        return mocks

    async def _read_invocation(self, run_id: str) -> invocation_pb2.Invocation:
        return await read_invocation(self._dependencies.runs, self._dependencies.store.log, self._scope, run_id)

    async def _finish(self, row: RunRow, case: eval_set_pb2.EvalCase) -> tuple[invocation_pb2.Invocation, str]:
        """Follow a run to its end and answer what it asks. Raises NotScorable.

        Return its record, and the error of an agent that no mock answered for; the record has only those that models
        called.
        """
        reader = _TurnReader(row, has_state=needs_state(case))
        try:
            unanswered = await self._answer_to_the_end(reader, case)
        except (ServerStopping, StorageFailed):
            raise
        except CallError as error:
            # Else it would stay open after its evaluation.
            await self._cancel(row.run.run_id, note=_NOT_CONTINUED)
            raise NotScorable(f"The run could not be continued: {error.message}") from None
        if unanswered is not None:
            question = unanswered.prompt or f"the call of {unanswered.call.name}"
            raise NotScorable(f"No answer of the case answers this: {question}", unanswered=unanswered)
        return await reader.invocation(), reader.refusal

    async def _answer_to_the_end(
        self, reader: "_TurnReader", case: eval_set_pb2.EvalCase
    ) -> input_pb2.InputRequest | None:
        """Follow a run to its end; return the request that no answer of the case answers, and that ended it."""
        runs, run_id = self._dependencies.runs, reader.run_id
        while True:
            pages = runs.follow(self._principal, run_id, after=reader.after, until=follow_pb2.WATCH_UNTIL_INTERRUPTED)
            async with aclosing(pages):
                async for page in pages:
                    await reader.add(page)
            run = (await runs.get(self._principal, run_id)).run
            if run.last_sequence > reader.after:
                continue  # resumed meanwhile, by an earlier server or by a client's own answer
            if run.state in _ENDED:
                return answers_to(case.answers, reader.requests)[1] if reader.ended_unanswered else None
            if run.state != execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
                continue
            answers, unanswered = answers_to(case.answers, run.open_requests)
            if unanswered is not None:
                await runs.cancel(self._principal, run_id, note=_UNANSWERED)
                continue
            request = agent_service_pb2.ResumeRunRequest(run_id=run_id, answers=answers)
            await runs.resume(self._principal, request, deadline_time_ns=None)


class _TurnReader:
    """Reads the log of a turn's run."""

    def __init__(self, row: RunRow, *, has_state: bool) -> None:
        self.run_id = row.run.run_id
        tree = Tree(UNLIMITED, run_id=self.run_id, session_id=row.run.session_id)
        self._builder = TreeBuilder(tree, has_state=has_state)
        self.after = 0
        self.requests: Sequence[input_pb2.InputRequest] = ()
        """What the run asked when it was interrupted last."""
        self.ended_unanswered = False
        """Whether the run was cancelled because the case does not answer it, now or by an earlier server."""
        self.refusal = ""
        """The error of an agent that code or a composite agent was to run and no mock answered for; empty if none."""

    async def add(self, page: Sequence[StoredEvent]) -> None:
        """Add the next events of the log."""
        await self._builder.add_page(page)
        self.after = page[-1].sequence
        for stored in page:
            if stored.kind == events.RUN_INTERRUPTED:
                self.requests = events.parse(stored.data).run_interrupted.requests
            elif stored.kind == events.CANCEL_REQUESTED:
                self.ended_unanswered |= events.parse(stored.data).cancel_requested.note == _UNANSWERED
            elif stored.kind == events.VALUE_RECORDED and not self.refusal:
                error = events.parse(stored.data).value_recorded.error
                is_refusal = error.reason == error_pb2.ERROR_REASON_TOOL_NOT_MOCKED
                self.refusal = error.message if is_refusal else ""

    async def invocation(self) -> invocation_pb2.Invocation:
        """Return the record of what was read."""
        invocation = await self._builder.invocation()
        invocation.as_of_sequence = self.after
        return invocation
