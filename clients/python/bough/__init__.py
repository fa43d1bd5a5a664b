"""Bough's client: runs, their events and their trees, from Python; the schema's own messages are in `bough.v1`."""

from bough.client import AsyncClient, answer_of
from bough.collection import CollectedRun, StepText, collect, collected
from bough.errors import (
    AlreadyExists,
    BoughError,
    CallCancelled,
    CallFailed,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    NotFound,
    OutOfRange,
    RunCancelled,
    RunFailed,
    RunNotAnswered,
    SessionBusy,
    Unavailable,
)
from bough.messages import text_of, user_message
from bough.rejoining import Rejoining
from bough.requests import RunQuery
from bough.stream import RunStream
from bough.sync import Client, SyncRunStream

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "BoughError",
    "CallCancelled",
    "CallFailed",
    "Client",
    "CollectedRun",
    "DeadlineExceeded",
    "FieldViolation",
    "InvalidRequest",
    "NotFound",
    "OutOfRange",
    "Rejoining",
    "RunCancelled",
    "RunFailed",
    "RunNotAnswered",
    "RunQuery",
    "RunStream",
    "SessionBusy",
    "StepText",
    "SyncRunStream",
    "Unavailable",
    "answer_of",
    "collect",
    "collected",
    "text_of",
    "user_message",
]
