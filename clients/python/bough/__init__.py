"""Python client of Bough: runs, their events and their agent trees. The generated messages are in `bough.v1`."""

from bough.agent_tree import AgentTree
from bough.answers import approve, refuse, reply, tool_outcome
from bough.calls import USE_CLIENT_DEFAULT, Timeout
from bough.client import AsyncClient
from bough.collection import CollectedRun, answer_of, collect, collect_sync
from bough.errors import (
    AgentFixed,
    AgentLinked,
    AgentUnusable,
    AlreadyAnswered,
    AlreadyExists,
    BoughError,
    CallCancelled,
    CallFailed,
    ConcurrentChange,
    DeadlineExceeded,
    EvaluationNotEnded,
    FieldViolation,
    ForkRefused,
    InsufficientBalance,
    InvalidRequest,
    NotFound,
    OutOfRange,
    RevisionMoved,
    RunCancelledError,
    RunEnded,
    RunFailedError,
    RunInterruptedError,
    RunNotAnswered,
    SessionBusy,
    SessionQueueFull,
    Unavailable,
)
from bough.messages import file_part, text_of, user_message
from bough.rejoining import NO_REJOINING, Rejoining
from bough.sources import run_source
from bough.stream import EvaluationStream, RunStream
from bough.sync import Client
from bough.sync.stream import SyncEvaluationStream, SyncRunStream
from bough.transcript import StepText

__all__ = [
    "NO_REJOINING",
    "USE_CLIENT_DEFAULT",
    "AgentFixed",
    "AgentLinked",
    "AgentTree",
    "AgentUnusable",
    "AlreadyAnswered",
    "AlreadyExists",
    "AsyncClient",
    "BoughError",
    "CallCancelled",
    "CallFailed",
    "Client",
    "CollectedRun",
    "ConcurrentChange",
    "DeadlineExceeded",
    "EvaluationNotEnded",
    "EvaluationStream",
    "FieldViolation",
    "ForkRefused",
    "InsufficientBalance",
    "InvalidRequest",
    "NotFound",
    "OutOfRange",
    "Rejoining",
    "RevisionMoved",
    "RunCancelledError",
    "RunEnded",
    "RunFailedError",
    "RunInterruptedError",
    "RunNotAnswered",
    "RunStream",
    "SessionBusy",
    "SessionQueueFull",
    "StepText",
    "SyncEvaluationStream",
    "SyncRunStream",
    "Timeout",
    "Unavailable",
    "answer_of",
    "approve",
    "collect",
    "collect_sync",
    "file_part",
    "refuse",
    "reply",
    "run_source",
    "text_of",
    "tool_outcome",
    "user_message",
]


def __getattr__(name: str) -> str:
    """Return the version of the installed distribution as `__version__`, which takes a moment to find."""
    if name == "__version__":
        from importlib import metadata

        return metadata.version("bough-agents")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
