"""The tables, as SQLModel: the log, the tables derived from it, stored agents, leases and commands.

Times are nanoseconds since the Unix epoch. Messages and errors are serialized protobuf; those of their fields that are
queried have columns too. Rows that belong to a tenant name it, or their run does. Callers choose ids of sessions, which
are unique only within their tenant: a session's key is (tenant_id, session_id) everywhere.
"""

from typing import Final

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, String, Table, literal_column, text
from sqlmodel import AutoString, Field, SQLModel

from bough.v1 import execution_pb2

metadata: Final = MetaData()

NUMBER: Final = Integer().with_variant(BigInteger(), "postgresql")
"""The type of columns that hold whole numbers: of 64 bits, which SQLite's only integer type has."""

TEXT: Final = String().with_variant(String(collation="C"), "postgresql")
"""The type of columns that hold ids, names and other texts: sorted by their bytes, as SQLite sorts all texts."""

PENDING: Final = int(execution_pb2.EXECUTION_STATE_PENDING)
INPUT_REQUIRED: Final = int(execution_pb2.EXECUTION_STATE_INPUT_REQUIRED)
"""The states of runs that are queued and that wait for input, as numbers for the conditions of indexes."""

RUN: Final = 0
EVALUATION: Final = 1
"""Kinds of rows in the table of runs: what the log of the row belongs to."""

SESSION: Final = 2
"""The kind of sessions among the rows that labels belong to."""

_SESSION: Final = ("tenant_id", "session_id")
_NEWEST_FIRST: Final = ("tenant_id", "create_time_ns", "run_id")
_OF_USER: Final = ("tenant_id", "user_id", "create_time_ns", "run_id")
_REQUEST: Final = ("tenant_id", "user_id", "request_id")
_SUMMED: Final = (
    *("kind", "input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens"),
    *("total_tokens", "cost_nanos", "charge_nanos", "currency_code"),
)
_ADDED_NUMBER: Final = {"server_default": text("0")}
_ADDED_TEXT: Final = {"server_default": text("''")}


class _Row(SQLModel):
    metadata = metadata


class EventTable(_Row, table=True):
    """An event of a log. `data` is its serialized form without the ids of the log; `kind` says of which message."""

    __tablename__ = "events"
    __table_args__ = ({"sqlite_with_rowid": False},)

    run_id: str = Field(primary_key=True)
    sequence: int = Field(primary_key=True)
    kind: int
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class RunTable(_Row, table=True):
    """A run or, by `kind`, an evaluation: `run_id` is its id then, and `session_id` is empty.

    `kind` and the columns up to `owner` are in no event; the others are derived from the log. A run of state PENDING
    waits in its session's queue, or holds the session and has not started yet. `evaluation` is what a run is in the
    evaluation that started it; lists use `evaluation_id`, `case_id` and `evaluation_role` of it. `eval_set_name`,
    `totals` and `verdict` belong to an evaluation. `reserved_nanos` is what the model calls in flight of a run have
    reserved, in billionths of the prices' currency.
    """

    __tablename__ = "runs"
    __table_args__ = (
        # Each row is in one of the three, or the query planner would read what stands between the rows of a list.
        Index("runs_newest_first", *_NEWEST_FIRST, sqlite_where=text("kind = 0 AND evaluation_role = 0")),
        Index("runs_of_evaluations", *_NEWEST_FIRST, sqlite_where=text("kind = 0 AND evaluation_role != 0")),
        Index("evaluations_newest_first", *_NEWEST_FIRST, sqlite_where=text("kind = 1")),
        # The same three of one user.
        Index("runs_of_user", *_OF_USER, sqlite_where=text("kind = 0 AND evaluation_role = 0")),
        Index("evaluation_runs_of_user", *_OF_USER, sqlite_where=text("kind = 0 AND evaluation_role != 0")),
        Index("evaluations_of_user", *_OF_USER, sqlite_where=text("kind = 1")),
        Index("runs_of_session", *_SESSION, "create_time_ns", "run_id"),
        Index("runs_of_agent", "tenant_id", "agent", "create_time_ns", "run_id"),
        # The last two only so that quotas count runs without reading their rows.
        Index("runs_by_state", "tenant_id", "state", "create_time_ns", "run_id", "kind", "user_id"),
        Index("runs_open", "create_time_ns", sqlite_where=text("NOT ended")),
        Index(
            "runs_by_owner",
            *("owner", "create_time_ns"),
            sqlite_where=text(f"NOT ended AND state != {INPUT_REQUIRED}"),
        ),
        Index(
            "runs_by_request",
            *("tenant_id", "user_id", "kind", "request_id"),
            unique=True,
            sqlite_where=text("request_id != ''"),
        ),
        # `state` is a column too, or the query planner would read all runs of the session by the index above.
        Index("runs_waiting", *_SESSION, "state", "create_time_ns", "run_id", sqlite_where=text(f"state = {PENDING}")),
        Index(
            "runs_asking",
            *_NEWEST_FIRST,
            sqlite_where=text("open_requests IS NOT NULL"),
        ),
        Index("runs_reserving", "tenant_id", "user_id", sqlite_where=text("reserved_nanos != 0")),
        Index("runs_by_expiry", "next_expire_time_ns", sqlite_where=text("next_expire_time_ns IS NOT NULL")),
        Index(
            "runs_of_evaluation",
            *("tenant_id", "evaluation_id", "create_time_ns", "run_id"),
            sqlite_where=text("evaluation_id != ''"),
        ),
        Index(
            "evaluations_of_set",
            "tenant_id",
            "eval_set_name",
            "create_time_ns",
            "run_id",
            sqlite_where=text("kind = 1"),
        ),
    )

    run_id: str = Field(primary_key=True)
    tenant_id: str
    user_id: str
    session_id: str
    create_time_ns: int
    epoch: int
    owner: str
    last_sequence: int
    ended: bool
    agent: str
    state: int
    labels: str
    input_excerpt: str
    start_time_ns: int | None
    end_time_ns: int | None
    deadline_time_ns: int | None
    error: bytes | None = Field(sa_column=Column(LargeBinary, nullable=True))
    tree_usage: bytes = Field(sa_column=Column(LargeBinary, nullable=False))
    request_id: str
    request_digest: str
    open_requests: bytes | None = Field(sa_column=Column(LargeBinary, nullable=True))
    next_expire_time_ns: int | None
    origin_run_id: str
    origin_sequence: int
    # Added to tables that had rows already, so with a default.
    kind: int = Field(sa_column_kwargs=_ADDED_NUMBER)
    evaluation_id: str = Field(sa_column_kwargs=_ADDED_TEXT)
    case_id: str = Field(sa_column_kwargs=_ADDED_TEXT)
    eval_set_name: str = Field(sa_column_kwargs=_ADDED_TEXT)
    totals: bytes | None = Field(sa_column=Column(LargeBinary, nullable=True))
    verdict: int = Field(sa_column_kwargs=_ADDED_NUMBER)
    evaluation_role: int = Field(sa_column_kwargs=_ADDED_NUMBER)
    evaluation: bytes | None = Field(sa_column=Column(LargeBinary, nullable=True))
    reserved_nanos: int = Field(sa_column_kwargs=_ADDED_NUMBER)


class SessionTable(_Row, table=True):
    """A session; `current_run_id` is the run that holds it, empty if none does.

    `last_run_time_ns` is when a run last started or ended in it; it never goes back. `state_run_id` is the run whose
    log determines its state; empty if a call has changed the state since or there is none. `request_id` and
    `request_digest` are those of the call that created it; empty if a run created it or the call had no request id.
    """

    __tablename__ = "sessions"
    __table_args__ = (
        Index("sessions_newest_first", "tenant_id", "create_time_ns", "session_id"),
        Index("sessions_of_user", "tenant_id", "user_id", "create_time_ns", "session_id"),
        Index("sessions_by_request", *_REQUEST, unique=True, sqlite_where=text("request_id != ''")),
    )

    tenant_id: str = Field(primary_key=True)
    session_id: str = Field(primary_key=True)
    user_id: str
    labels: str
    create_time_ns: int
    last_run_time_ns: int | None
    request_id: str
    request_digest: str
    current_run_id: str
    last_position: int
    state_json: str
    state_run_id: str


class LabelTable(_Row, table=True):
    """A label of a run, an evaluation or a session, as `kind` says, whose id is `name`: the index of filters by labels.

    Triggers derive it from the columns `labels`; see label_index.
    """

    __tablename__ = "labels"
    __table_args__ = ({"sqlite_with_rowid": False},)

    tenant_id: str = Field(primary_key=True)
    kind: int = Field(primary_key=True)
    key: str = Field(primary_key=True)
    value: str = Field(primary_key=True)
    create_time_ns: int = Field(primary_key=True)
    name: str = Field(primary_key=True)


class MessageTable(_Row, table=True):
    """A message of a session; `agent` and `chain` say which agent's invocation it belongs to.

    If its run belongs to another session, a fork copied it from there: it stems from a run before the origin, so no log
    of this session can restore it.
    """

    __tablename__ = "messages"
    __table_args__ = ({"sqlite_with_rowid": False},)

    tenant_id: str = Field(primary_key=True)
    session_id: str = Field(primary_key=True)
    position: int = Field(primary_key=True)
    run_id: str
    agent: str
    chain: str
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class CallTable(_Row, table=True):
    """Calls of linked agents that a model made in a session, or the result of one; see StoredCall.

    `inside` are ids of invocations with a space between. What MessageTable says of runs of other sessions holds here.
    """

    __tablename__ = "calls"
    __table_args__ = ({"sqlite_with_rowid": False},)

    tenant_id: str = Field(primary_key=True)
    session_id: str = Field(primary_key=True)
    position: int = Field(primary_key=True)
    run_id: str = Field(primary_key=True)
    sequence: int = Field(primary_key=True)
    agent: str
    chain: str
    inside: str
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class BlobTable(_Row, table=True):
    """The bytes of a file, once for each tenant; they are kept as long as a row of SessionBlobTable names them."""

    __tablename__ = "blobs"

    # With a rowid: SQLite keeps large values apart from the rows only in such tables.
    tenant_id: str = Field(primary_key=True)
    sha256: str = Field(primary_key=True)
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class SessionBlobTable(_Row, table=True):
    """A file that a run of a session got first with the append that begins at `sequence`.

    What MessageTable says of runs of other sessions holds here.
    """

    __tablename__ = "session_blobs"
    __table_args__ = (Index("sessions_of_blob", "tenant_id", "sha256", "session_id"), {"sqlite_with_rowid": False})

    tenant_id: str = Field(primary_key=True)
    session_id: str = Field(primary_key=True)
    sha256: str = Field(primary_key=True)
    run_id: str = Field(primary_key=True)
    sequence: int
    media_type: str


class UsageTable(_Row, table=True):
    """A line of the usage ledger: an attempt that was sent to a model, or by `kind` the start of a run.

    It outlives its run. NULL is an unknown number, as in Usage; of `charge_nanos` it is what a server of an older
    version wrote, and means the cost. `currency_code` is that of the charge. The indexes hold all columns that sums
    need.
    """

    __tablename__ = "usage_entries"
    __table_args__ = (
        Index("usage_of_tenant", "tenant_id", "time_ns", *_SUMMED),
        Index("usage_of_user", "tenant_id", "user_id", "time_ns", *_SUMMED),
        {"sqlite_with_rowid": False},
    )

    run_id: str = Field(primary_key=True)
    sequence: int = Field(primary_key=True)
    tenant_id: str
    user_id: str
    session_id: str
    agent: str
    invocation_id: str
    model: str
    time_ns: int
    input_tokens: int | None
    cached_input_tokens: int | None
    output_tokens: int | None
    reasoning_tokens: int | None
    total_tokens: int | None
    model_calls: int
    model_calls_without_usage: int
    cost_nanos: int | None
    currency_code: str
    cache_write_tokens: int | None
    kind: int = Field(sa_column_kwargs=_ADDED_NUMBER)
    charge_nanos: int | None


class AdjustmentTable(_Row, table=True):
    """An adjustment of the account of a user or, with an empty `user_id`, of a tenant; see StoredAdjustment."""

    __tablename__ = "adjustments"
    __table_args__ = (
        Index("adjustments_newest_first", "tenant_id", "user_id", "time_ns", "request_id"),
        {"sqlite_with_rowid": False},
    )

    tenant_id: str = Field(primary_key=True)
    user_id: str = Field(primary_key=True)
    request_id: str = Field(primary_key=True)
    currency_code: str
    amount_nanos: int
    note: str
    time_ns: int
    made_by: str


class SnapshotTable(_Row, table=True):
    """The charges of an account from its first adjustment up to a time; an index, which can be made again."""

    __tablename__ = "account_snapshots"
    __table_args__ = ({"sqlite_with_rowid": False},)

    tenant_id: str = Field(primary_key=True)
    user_id: str = Field(primary_key=True)
    currency_code: str = Field(primary_key=True)
    before_ns: int = Field(primary_key=True)
    charge_nanos: int


class DefinitionTable(_Row, table=True):
    """A revision of an agent's definition, or of a tool of a tool server; the key is a hash of its content."""

    __tablename__ = "definitions"

    revision: str = Field(primary_key=True)
    name: str
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class RunDefinitionTable(_Row, table=True):
    """A revision that a run names; it is kept as long as the run."""

    __tablename__ = "run_definitions"
    __table_args__ = (Index("runs_of_definition", "revision"), {"sqlite_with_rowid": False})

    run_id: str = Field(primary_key=True)
    revision: str = Field(primary_key=True)


class AgentTable(_Row, table=True):
    """An agent that a tenant has stored by a call."""

    __tablename__ = "agents"

    tenant_id: str = Field(primary_key=True)
    name: str = Field(primary_key=True)
    data: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class CatalogTable(_Row, table=True):
    """The version of a tenant's agents: how often they have been changed."""

    __tablename__ = "catalogs"
    __table_args__ = ({"sqlite_with_rowid": False},)

    tenant_id: str = Field(primary_key=True)
    version: int


class WorkerTable(_Row, table=True):
    """A worker's lease: its counter increases while the worker is alive."""

    __tablename__ = "workers"
    __table_args__ = ({"sqlite_with_rowid": False},)

    worker: str = Field(primary_key=True)
    counter: int


class RunCommandTable(_Row, table=True):
    """A command that the owner of a run or an evaluation has not acted on yet; ids are never reused.

    Exactly one of `cancel` and `answers` is set; `user_id` is the sender of answers.
    """

    __tablename__ = "run_commands"
    __table_args__ = (Index("commands_of_run", "run_id", "command_id"), {"sqlite_autoincrement": True})

    command_id: int = Field(primary_key=True)
    run_id: str
    cancel: bytes | None = Field(sa_column=Column(LargeBinary, nullable=True))
    answers: bytes | None = Field(sa_column=Column(LargeBinary, nullable=True))
    user_id: str
    deadline_time_ns: int | None


events: Final[Table] = metadata.tables["events"]
runs: Final[Table] = metadata.tables["runs"]
sessions: Final[Table] = metadata.tables["sessions"]
labels: Final[Table] = metadata.tables["labels"]
messages: Final[Table] = metadata.tables["messages"]
calls: Final[Table] = metadata.tables["calls"]
blobs: Final[Table] = metadata.tables["blobs"]
session_blobs: Final[Table] = metadata.tables["session_blobs"]
usage_entries: Final[Table] = metadata.tables["usage_entries"]
adjustments: Final[Table] = metadata.tables["adjustments"]
account_snapshots: Final[Table] = metadata.tables["account_snapshots"]
definitions: Final[Table] = metadata.tables["definitions"]
run_definitions: Final[Table] = metadata.tables["run_definitions"]
agents: Final[Table] = metadata.tables["agents"]
catalogs: Final[Table] = metadata.tables["catalogs"]
workers: Final[Table] = metadata.tables["workers"]
run_commands: Final[Table] = metadata.tables["run_commands"]


def _set_column_types() -> None:
    """Give the columns the types that do the same in both databases: pages and their tokens depend on the order."""
    for table in metadata.tables.values():
        for column in table.columns:
            if isinstance(column.type, Integer):
                column.type = NUMBER
            elif isinstance(column.type, AutoString):
                column.type = TEXT


_set_column_types()

IS_RUN: Final = runs.c.kind == literal_column(str(RUN))
IS_EVALUATION: Final = runs.c.kind == literal_column(str(EVALUATION))
IS_OF_CALLER: Final = runs.c.evaluation_role == literal_column("0")
IS_OF_EVALUATION: Final = runs.c.evaluation_role != literal_column("0")
"""Literal numbers, for the partial indexes."""
