"""The requests of a caller, made from plain values; both clients send the same ones."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from google.protobuf import duration_pb2, timestamp_pb2

from bough.messages import user_message
from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    eval_service_pb2,
    event_pb2,
    fork_pb2,
    input_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
)

View: TypeAlias = agent_service_pb2.View.ValueType
WatchUntil: TypeAlias = agent_service_pb2.WatchUntil.ValueType
State: TypeAlias = event_pb2.State.ValueType


@dataclass(frozen=True, slots=True, kw_only=True)
class RunQuery:
    """Which runs to list: every filter that is set must hold; `since` is inclusive, `before` exclusive.

    A time without a zone is this machine's local time.
    """

    session_id: str = ""
    agent: str = ""
    states: tuple[State, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    since: datetime | None = None
    before: datetime | None = None


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """A Duration of that many seconds; None stays None."""
    if seconds is None:
        return None
    value = duration_pb2.Duration()
    value.FromTimedelta(timedelta(seconds=seconds))
    return value


def _new_request_id() -> str:
    return str(uuid.uuid4())


def _timestamp(moment: datetime | None) -> timestamp_pb2.Timestamp | None:
    if moment is None:
        return None
    value = timestamp_pb2.Timestamp()
    value.FromDatetime(moment.astimezone(UTC))
    return value


def follow_options(
    *,
    view: View = agent_service_pb2.VIEW_UNSPECIFIED,
    event_names: Iterable[str] = (),
    heartbeat: float | None = None,
) -> agent_service_pb2.FollowOptions:
    """How to follow a run; `heartbeat` is in seconds."""
    return agent_service_pb2.FollowOptions(view=view, event_names=list(event_names), heartbeat=duration(heartbeat))


def run_request(
    agent: str,
    content: str | message_pb2.Message,
    *,
    session_id: str = "",
    request_id: str = "",
    definitions: Iterable[agent_pb2.AgentDefinition] = (),
    policy: policy_pb2.RunPolicy | None = None,
    follow: agent_service_pb2.FollowOptions | None = None,
    labels: Mapping[str, str] | None = None,
) -> agent_service_pb2.RunRequest:
    """A turn to start. It always has a request id, so that sending it again never starts a second one."""
    return agent_service_pb2.RunRequest(
        request_id=request_id or _new_request_id(),
        agent=agent,
        definitions=definitions,
        session_id=session_id,
        input=user_message(content),
        policy=policy,
        follow=follow,
        labels=labels,
    )


def resume_request(
    run_id: str,
    answers: Iterable[input_pb2.InputAnswer],
    *,
    request_id: str = "",
    after: int | None = None,
    follow: agent_service_pb2.FollowOptions | None = None,
) -> agent_service_pb2.ResumeRunRequest:
    """Answers to a run. It always has a request id, so that sending it again follows from the same place."""
    return agent_service_pb2.ResumeRunRequest(
        run_id=run_id,
        answers=answers,
        request_id=request_id or _new_request_id(),
        follow=follow,
        after_sequence=after,
    )


def fork_request(
    run_id: str,
    after_sequence: int,
    *,
    changes: fork_pb2.ForkChanges | None = None,
    allow_open_effects: bool = False,
    request_id: str = "",
    follow: agent_service_pb2.FollowOptions | None = None,
    labels: Mapping[str, str] | None = None,
) -> agent_service_pb2.ForkRunRequest:
    """A run to fork. It always has a request id, so that sending it again never makes a second fork."""
    return agent_service_pb2.ForkRunRequest(
        request_id=request_id or _new_request_id(),
        run_id=run_id,
        after_sequence=after_sequence,
        changes=changes,
        allow_open_effects=allow_open_effects,
        follow=follow,
        labels=labels,
    )


def watch_request(
    run_id: str, *, after: int = 0, until: WatchUntil, follow: agent_service_pb2.FollowOptions | None = None
) -> agent_service_pb2.WatchRunRequest:
    """A run to follow, after a sequence."""
    return agent_service_pb2.WatchRunRequest(run_id=run_id, after_sequence=after, until=until, follow=follow)


def list_runs_request(query: RunQuery, *, page_size: int) -> agent_service_pb2.ListRunsRequest:
    """The first page of a list of runs."""
    return agent_service_pb2.ListRunsRequest(
        page_size=page_size,
        session_id=query.session_id,
        agent=query.agent,
        states=query.states,
        labels=query.labels,
        start_create_time=_timestamp(query.since),
        end_create_time=_timestamp(query.before),
    )


def list_invocations_request(query: RunQuery, *, page_size: int) -> eval_service_pb2.ListInvocationsRequest:
    """The first page of a list of records."""
    return eval_service_pb2.ListInvocationsRequest(
        page_size=page_size,
        session_id=query.session_id,
        agent=query.agent,
        states=query.states,
        labels=query.labels,
        start_create_time=_timestamp(query.since),
        end_create_time=_timestamp(query.before),
    )


def tree_request(
    run_id: str, *, options: invocation_pb2.InvocationOptions | None = None, as_of_sequence: int = 0
) -> eval_service_pb2.GetInvocationRequest:
    """The record of a run, whole or up to a sequence."""
    return eval_service_pb2.GetInvocationRequest(run_id=run_id, options=options, as_of_sequence=as_of_sequence)
