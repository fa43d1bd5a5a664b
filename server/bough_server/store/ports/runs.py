"""Ports of the store for the rows of runs and their definitions; their logs are EventLog's."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bough.v1 import agent_pb2, execution_pb2, input_pb2, run_pb2, tool_pb2
from bough_server.identity import Principal, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run's row: its principal, its owner, and the resource that clients see."""

    run: run_pb2.Run
    principal: Principal
    epoch: int
    request_digest: str
    owner: str = ""
    """The worker that executed it last; see Lease for whether that worker is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Conditions on the runs to list; an empty field is no condition.

    Times are nanoseconds since the Unix epoch; `create_time_before_ns` is exclusive.
    """

    session_id: str = ""
    agent: str = ""
    states: Sequence[execution_pb2.ExecutionState.ValueType] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    create_time_from_ns: int | None = None
    create_time_before_ns: int | None = None
    evaluation_id: str = ""
    case_id: str = ""
    evaluation_role: int = 0  # an EvaluationRole
    include_evaluation_runs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a list: its size (already bounded) and the opaque token from the page before; default: the first."""

    size: int
    token: str = ""


class RunIndex(Protocol):
    """Rows of runs; EventLog writes them, in the transactions of the events that change them.

    Ids and request ids of evaluations are unknown here.
    """

    async def get(self, scope: Scope, run_id: str) -> RunRow:
        """Return a run in a scope. Raises NotFound."""
        ...

    async def find(self, run_id: str) -> RunRow | None:
        """Return a run of any tenant, for workers, or None."""
        ...

    async def find_request(self, principal: Principal, request_id: str) -> RunRow | None:
        """Return the run that the principal's user started with a request id, or None."""
        ...

    async def list(self, scope: Scope, run_filter: RunFilter, page: Page) -> tuple[Sequence[run_pb2.Run], str]:
        """Return a page of runs, newest first, and the token of the next page, empty after the last.

        Raises InvalidRequest for a token that is not from this list with these filters.
        """
        ...

    async def list_open_inputs(
        self,
        scope: Scope,
        takes: Callable[[Principal, input_pb2.InputRequest], bool],
        page: Page,
        *,
        filters: Sequence[object],
    ) -> tuple[Sequence[input_pb2.OpenInput], str]:
        """Return a page of the open requests of a scope's runs that `takes` accepts, and the token of the next page.

        They are in the order in which their runs were created; `takes` gets the run's principal too. `filters` are the
        JSON values on which it depends: a token of others raises InvalidRequest.
        """
        ...

    async def list_input_requests(self, run_id: str) -> Sequence[input_pb2.InputRequest]:
        """Return what a run has asked for, also what is answered; nothing of a run that does not exist."""
        ...

    async def holder(self, principal: Principal, session_id: str) -> RunRow | None:
        """Return the run that holds a session of the principal's tenant, or None.

        When a holder ends, the oldest queued run becomes the holder in the same transaction.
        """
        ...

    async def next_expiry(self, *, but: Collection[str] = ()) -> tuple[int, str] | None:
        """Return the earliest expiry of an open request of a run that waits for input, and that run, or None.

        The time is in nanoseconds since the Unix epoch. The runs in `but` are left out.
        """
        ...


class Catalog(Protocol):
    """Agent definitions, and tools of tool servers, by revision; a revision is kept as long as a run names it."""

    async def get(self, revision: str) -> agent_pb2.AgentDefinition | None:
        """Return the definition with a revision, or None."""
        ...

    async def get_tool(self, revision: str) -> tool_pb2.ToolInfo | None:
        """Return the tool with a revision, or None."""
        ...

    async def get_for_tenant(self, tenant_id: str, revision: str) -> agent_pb2.AgentDefinition | None:
        """Return the definition with a revision if a run of the tenant names it, or None; for callers."""
        ...
