"""A trial of a case: the names of its runs, and what was run of it so far."""

import hashlib
from dataclasses import dataclass, field

from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_ref_pb2, input_pb2, invocation_pb2
from bough_server.evals.job.model_runs import OF_SERVER
from bough_server.evals.metrics.scoring import build_crashed_attempt
from bough_server.evals.sets.eval_set import max_turns_of
from bough_server.log.usage import Sums
from bough_server.messages import copy_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTrial:
    """A trial of a case: the names of its session and runs derive from it."""

    evaluation_id: str
    case_id: str
    trial: int
    attempt: int = 0
    """How often the trial crashed before and began anew."""

    def _digest(self) -> str:
        # The case's id may be longer than a request id, and have characters that one may not have.
        attempt = f"\0{self.attempt}" if self.attempt else ""
        return hashlib.sha256(f"{self.case_id}\0{self.trial}{attempt}".encode()).hexdigest()[:24]

    @property
    def session_id(self) -> str:
        """The session of the turns, unless the case begins with a fork."""
        name = hashlib.sha256(f"{self.evaluation_id}\0{self._digest()}".encode()).hexdigest()[:32]
        return f"{OF_SERVER}{name}"

    def request_id(self, turn: int) -> str:
        """Return the request id of a turn's run."""
        return f"{OF_SERVER}turn/{self.evaluation_id}-{self._digest()}-{turn}"

    def fault_seed(self, turn: int) -> str:
        """Return what the draws of a turn's faults depend on; not on the evaluation, so that others draw the same."""
        return f"{self._digest()}-{turn}"

    def ref(self, turn: int) -> evaluation_ref_pb2.EvaluationRef:
        """Return what a turn's run is in the evaluation."""
        return self._ref(turn, evaluation_ref_pb2.EVALUATION_ROLE_TURN)

    def user_request_id(self, turn: int) -> str:
        """Return the request id of the run in which the simulated user says what the turn's input is."""
        return f"{OF_SERVER}user/{self.evaluation_id}-{self._digest()}-{turn}"

    def user_ref(self, turn: int) -> evaluation_ref_pb2.EvaluationRef:
        """Return what that run is in the evaluation."""
        return self._ref(turn, evaluation_ref_pb2.EVALUATION_ROLE_USER)

    def _ref(self, turn: int, role: evaluation_ref_pb2.EvaluationRole.ValueType) -> evaluation_ref_pb2.EvaluationRef:
        return evaluation_ref_pb2.EvaluationRef(
            evaluation_id=self.evaluation_id,
            case_id=self.case_id,
            trial=self.trial,
            turn=turn,
            role=role,
            attempt=self.attempt,
        )


@dataclass(slots=True, kw_only=True)
class TrialRuns:
    """What was run of a trial so far."""

    case: eval_set_pb2.EvalCase
    """The case, with a turn more for each message that its simulated user has sent."""
    invocations: list[invocation_pb2.Invocation] = field(default_factory=list)
    """The records of the turns."""
    user_used: Sums = field(default_factory=Sums)
    user_run_ids: dict[int, str] = field(default_factory=dict)
    """The runs of the simulated user, by the numbers of the turns that it began."""
    user_finished: bool = False
    """Whether the simulated user has ended the conversation."""

    @classmethod
    def begin(cls, case: eval_set_pb2.EvalCase) -> "TrialRuns":
        """Return the runs of a trial that has none yet."""
        return cls(case=copy_of(case) if case.HasField("user") else case)

    @property
    def may_speak(self) -> bool:
        """Whether there is a simulated user, and room for another turn."""
        return self.case.HasField("user") and len(self.case.turns) < max_turns_of(self.case.user)

    def add_message(self, message: str, *, run_id: str) -> None:
        """Add a turn that begins with what the simulated user said in a run."""
        self.user_run_ids[len(self.case.turns)] = run_id
        self.case.turns.add(user=message)

    def build_crashed_attempt(self) -> eval_result_pb2.CrashedAttempt:
        """Return what is kept of these runs if one of them crashed and the trial begins anew."""
        attempt = build_crashed_attempt(self.case, self.invocations)
        if self.case.HasField("user"):
            attempt.user_usage.CopyFrom(self.user_used.usage())
        return attempt

    def add_user_to(self, result: eval_result_pb2.CaseTrialResult) -> None:
        """Add to the trial's result what its simulated user did, if there is one."""
        if not self.case.HasField("user"):
            return
        result.user_usage.CopyFrom(self.user_used.usage())
        result.user_finished = self.user_finished
        for number, turn in enumerate(result.turns):
            turn.user_run_id = self.user_run_ids.get(number, "")


class NotScorable(Exception):
    """A trial that cannot be scored; the message is a sentence that says why.

    `unanswered` is the request that no answer of the case answers, and `runs` is what was run.
    """

    def __init__(
        self, reason: str, *, unanswered: input_pb2.InputRequest | None = None, runs: TrialRuns | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.unanswered, self.runs = reason, unanswered, runs
