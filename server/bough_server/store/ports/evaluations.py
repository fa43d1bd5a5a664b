"""Port of the store for the rows of evaluations; their logs are EventLog's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bough.v1 import evaluation_pb2, execution_pb2
from bough_server.identity import Principal, Scope
from bough_server.store.ports.runs import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """An evaluation's row: its principal, its owner, and the resource that clients see."""

    evaluation: evaluation_pb2.Evaluation
    principal: Principal
    epoch: int
    request_digest: str
    owner: str = ""
    """The worker that executed it last; see Lease for whether that worker is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFilter:
    """Conditions on the evaluations to list; an empty field is no condition."""

    eval_set_name: str = ""
    agent: str = ""
    states: Sequence[execution_pb2.ExecutionState.ValueType] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


class EvaluationIndex(Protocol):
    """Rows of evaluations; EventLog writes them, in the transactions of the events that change them.

    Ids and request ids of runs are unknown here.
    """

    async def get(self, scope: Scope, evaluation_id: str) -> EvaluationRow:
        """Return an evaluation in a scope. Raises NotFound."""
        ...

    async def find(self, evaluation_id: str) -> EvaluationRow | None:
        """Return an evaluation of any tenant, for workers, or None."""
        ...

    async def find_request(self, principal: Principal, request_id: str) -> EvaluationRow | None:
        """Return the evaluation that the principal's user started with a request id, or None."""
        ...

    async def list(
        self, scope: Scope, evaluation_filter: EvaluationFilter, page: Page
    ) -> tuple[Sequence[evaluation_pb2.Evaluation], str]:
        """Return a page of evaluations, newest first, and the token of the next page, empty after the last.

        Raises InvalidRequest for a token that is not from this list with these filters.
        """
        ...

    async def delete(self, scope: Scope, evaluation_id: str) -> bool:
        """Delete an evaluation that has ended, with its log; return False, and delete nothing, if it has not ended.

        Raises NotFound and StorageFailed.
        """
        ...

    async def open_evaluations(self) -> Sequence[EvaluationRow]:
        """Return every evaluation of every tenant that has not ended, oldest first."""
        ...
