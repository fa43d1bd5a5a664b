"""Build requests from plain values, for both clients."""

import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from google.protobuf import duration_pb2, field_mask_pb2, timestamp_pb2

from bough.arguments import build, wrong_type
from bough.messages import json_text, user_message
from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    catalog_service_pb2,
    eval_result_pb2,
    eval_service_pb2,
    eval_set_pb2,
    evaluation_pb2,
    evaluation_ref_pb2,
    execution_pb2,
    follow_pb2,
    fork_pb2,
    input_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
    session_pb2,
    session_service_pb2,
    usage_pb2,
)

View: TypeAlias = follow_pb2.EventView.ValueType
WatchUntil: TypeAlias = follow_pb2.WatchUntil.ValueType
State: TypeAlias = execution_pb2.ExecutionState.ValueType
Verdict: TypeAlias = eval_result_pb2.Verdict.ValueType
EvaluationRole: TypeAlias = evaluation_ref_pb2.EvaluationRole.ValueType
UsageDimension: TypeAlias = usage_pb2.UsageDimension.ValueType
MissingSession: TypeAlias = agent_service_pb2.MissingSessionPolicy.ValueType


def _duration(name: str, seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    if not isinstance(seconds, int | float):
        raise wrong_type(name, "a number of seconds", seconds)
    value = duration_pb2.Duration()
    value.FromTimedelta(timedelta(seconds=seconds))
    return value


def _new_request_id() -> str:
    return str(uuid.uuid4())


def _timestamp(name: str, moment: datetime | None) -> timestamp_pb2.Timestamp | None:
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        raise wrong_type(name, "a datetime", moment)
    value = timestamp_pb2.Timestamp()
    value.FromDatetime(moment.astimezone(UTC))
    return value


def follow_options(
    *,
    view: View = follow_pb2.EVENT_VIEW_UNSPECIFIED,
    event_names: Iterable[str] = (),
    heartbeat: float | None = None,
) -> follow_pb2.FollowOptions:
    """Build the options for following a run; `heartbeat` in seconds."""
    return build(
        follow_pb2.FollowOptions,
        view=view,
        event_names=event_names,
        heartbeat_interval=_duration("heartbeat", heartbeat),
    )


def run_request(
    agent: str,
    input: str | message_pb2.Message,
    *,
    session_id: str = "",
    on_missing_session: MissingSession = agent_service_pb2.MISSING_SESSION_POLICY_UNSPECIFIED,
    request_id: str = "",
    definitions: Iterable[agent_pb2.AgentDefinition] = (),
    policy: policy_pb2.RunPolicy | None = None,
    follow: follow_pb2.FollowOptions | None = None,
    labels: Mapping[str, str] | None = None,
) -> agent_service_pb2.RunRequest:
    """Build a Run; it always has a request id, so that a repeated call never starts a second run."""
    return build(
        agent_service_pb2.RunRequest,
        request_id=request_id or _new_request_id(),
        agent=agent,
        definitions=definitions,
        session_id=session_id,
        on_missing_session=on_missing_session,
        input=user_message(input),
        policy=policy,
        follow=follow,
        labels=labels,
    )


def resume_request(
    run_id: str,
    answers: Iterable[input_pb2.InputAnswer],
    *,
    request_id: str = "",
    after_sequence: int | None = None,
    follow: follow_pb2.FollowOptions | None = None,
) -> agent_service_pb2.ResumeRunRequest:
    """Build a ResumeRun; it always has a request id, so that a repeated call follows from the same event."""
    return build(
        agent_service_pb2.ResumeRunRequest,
        run_id=run_id,
        answers=answers,
        request_id=request_id or _new_request_id(),
        follow=follow,
        after_sequence=after_sequence,
    )


def fork_request(
    run_id: str,
    after_sequence: int,
    *,
    changes: fork_pb2.ForkChanges | None = None,
    allow_open_effects: bool = False,
    request_id: str = "",
    policy: policy_pb2.RunPolicy | None = None,
    follow: follow_pb2.FollowOptions | None = None,
    labels: Mapping[str, str] | None = None,
) -> agent_service_pb2.ForkRunRequest:
    """Build a ForkRun; it always has a request id, so that a repeated call never makes a second fork."""
    return build(
        agent_service_pb2.ForkRunRequest,
        request_id=request_id or _new_request_id(),
        run_id=run_id,
        after_sequence=after_sequence,
        changes=changes,
        allow_open_effects=allow_open_effects,
        policy=policy,
        follow=follow,
        labels=labels,
    )


def watch_request(
    run_id: str, *, after_sequence: int = 0, until: WatchUntil, follow: follow_pb2.FollowOptions | None = None
) -> agent_service_pb2.WatchRunRequest:
    """Build a WatchRun that begins after a sequence."""
    return build(
        agent_service_pb2.WatchRunRequest, run_id=run_id, after_sequence=after_sequence, until=until, follow=follow
    )


def run_filter(
    *,
    session_id: str = "",
    agent: str = "",
    states: Iterable[State] = (),
    labels: Mapping[str, str] | None = None,
    create_time_from: datetime | None = None,
    create_time_before: datetime | None = None,
    evaluation_id: str = "",
    case_id: str = "",
    evaluation_role: EvaluationRole = evaluation_ref_pb2.EVALUATION_ROLE_UNSPECIFIED,
    include_evaluation_runs: bool = False,
) -> run_pb2.RunFilter:
    """Build the filter of ListRuns. A time without a zone is local time."""
    return build(
        run_pb2.RunFilter,
        session_id=session_id,
        agent=agent,
        states=states,
        labels=labels,
        create_time_from=_timestamp("create_time_from", create_time_from),
        create_time_before=_timestamp("create_time_before", create_time_before),
        evaluation_id=evaluation_id,
        case_id=case_id,
        evaluation_role=evaluation_role,
        include_evaluation_runs=include_evaluation_runs,
    )


def usage_filter(
    *,
    user_id: str = "",
    session_id: str = "",
    run_id: str = "",
    invocation_id: str = "",
    agent: str = "",
    model: str = "",
    time_from: datetime | None = None,
    time_before: datetime | None = None,
) -> usage_pb2.UsageFilter:
    """Build the filter of GetUsage and ListUsageEntries. A time without a zone is local time."""
    return build(
        usage_pb2.UsageFilter,
        user_id=user_id,
        session_id=session_id,
        run_id=run_id,
        invocation_id=invocation_id,
        agent=agent,
        model=model,
        time_from=_timestamp("time_from", time_from),
        time_before=_timestamp("time_before", time_before),
    )


def invocation_request(
    run_id: str, *, options: invocation_pb2.InvocationOptions | None = None, as_of_sequence: int = 0
) -> eval_service_pb2.GetInvocationRequest:
    """Build a GetInvocation, of the whole log or of the log up to a sequence."""
    return build(eval_service_pb2.GetInvocationRequest, run_id=run_id, options=options, as_of_sequence=as_of_sequence)


def create_session_request(
    *, session_id: str = "", labels: Mapping[str, str] | None = None, request_id: str = ""
) -> session_service_pb2.CreateSessionRequest:
    """Build a CreateSession; it always has a request id, so that a repeated call never creates a second session."""
    return build(
        session_service_pb2.CreateSessionRequest,
        labels=labels,
        session_id=session_id,
        request_id=request_id or _new_request_id(),
    )


def list_sessions_request(
    *, labels: Mapping[str, str] | None = None, include_evaluation_sessions: bool = False, page_size: int
) -> session_service_pb2.ListSessionsRequest:
    """Build a ListSessions of the sessions that have all these labels."""
    wanted = build(session_pb2.SessionFilter, labels=labels, include_evaluation_sessions=include_evaluation_sessions)
    return build(
        session_service_pb2.ListSessionsRequest,
        page_size=page_size,
        filter=wanted if labels or include_evaluation_sessions else None,
    )


def update_state_request(
    session_id: str, values: Mapping[str, object] | None, state_json: Mapping[str, str | None] | None
) -> session_service_pb2.UpdateSessionStateRequest:
    """Build an UpdateSessionState from values and JSON texts by key, None to delete a key.

    Raises TypeError or ValueError for a value that JSON cannot represent, and ValueError for a key that is in both.
    """
    values, state_json = values or {}, state_json or {}
    for name, given in (("values", values), ("state_json", state_json)):
        if not isinstance(given, Mapping):
            raise wrong_type(name, "a mapping", given)
    if twice := sorted(values.keys() & state_json.keys()):
        raise ValueError(f"{twice[0]!r} is in values and in state_json.")
    for key, text in state_json.items():
        if not isinstance(text, str | None):
            raise wrong_type(f"state_json[{key!r}]", "a str or None", text)
    texts = {key: None if value is None else json_text(value) for key, value in values.items()} | dict(state_json)
    changes = [build(session_pb2.SessionStateChange, key=key, value_json=text) for key, text in texts.items()]
    return build(session_service_pb2.UpdateSessionStateRequest, session_id=session_id, state_changes=changes)


def update_agent_request(
    definition: agent_pb2.AgentDefinition, *, revision: str, fields: Iterable[str] = ()
) -> catalog_service_pb2.UpdateAgentRequest:
    """Build an UpdateAgent of a revision; `fields` are the paths to change, default: all."""
    if isinstance(fields, str):
        raise wrong_type("fields", "a list of str", fields)
    return build(
        catalog_service_pb2.UpdateAgentRequest,
        definition=definition,
        update_mask=build(field_mask_pb2.FieldMask, paths=fields),
        revision=revision,
    )


def evaluate_request(
    eval_set: eval_set_pb2.EvalSet,
    *,
    agent: str = "",
    definitions: Iterable[agent_pb2.AgentDefinition] = (),
    trials: int | None = None,
    max_concurrency: int | None = None,
    gates: Iterable[str] = (),
    budget: policy_pb2.Limits | None = None,
    baseline: eval_result_pb2.EvalSource | None = None,
    allow_removed: bool = False,
    rerun_suspects: int | None = None,
    retry_crashed: int | None = None,
    matrix: eval_set_pb2.EvalMatrix | None = None,
    allow_incomplete_baseline: bool = False,
    labels: Mapping[str, str] | None = None,
    request_id: str = "",
    follow: follow_pb2.EvaluationFollowOptions | None = None,
) -> eval_service_pb2.EvaluateRequest:
    """Build an Evaluate; it always has a request id, so that a repeated call never starts a second evaluation."""
    return build(
        eval_service_pb2.EvaluateRequest,
        request_id=request_id or _new_request_id(),
        eval_set=eval_set,
        agent=agent,
        definitions=definitions,
        trials=trials,
        max_concurrency=max_concurrency,
        gates=gates,
        budget=budget,
        baseline=baseline,
        allow_removed=allow_removed,
        rerun_suspects=rerun_suspects,
        retry_crashed=retry_crashed,
        matrix=matrix,
        allow_incomplete_baseline=allow_incomplete_baseline,
        labels=labels,
        follow=follow,
    )


def evaluation_follow_options(
    *,
    heartbeat: float | None = None,
    event_names: Iterable[str] = (),
    without_trees: bool = False,
    until: follow_pb2.WatchUntil.ValueType = follow_pb2.WATCH_UNTIL_UNSPECIFIED,
) -> follow_pb2.EvaluationFollowOptions:
    """Build the options of a stream that follows an evaluation."""
    return build(
        follow_pb2.EvaluationFollowOptions,
        heartbeat_interval=_duration("heartbeat", heartbeat),
        event_names=event_names,
        without_trees=without_trees,
        until=until,
    )


def watch_evaluation_request(
    evaluation_id: str, *, after_sequence: int = 0, follow: follow_pb2.EvaluationFollowOptions | None = None
) -> eval_service_pb2.WatchEvaluationRequest:
    """Build a WatchEvaluation that begins after a sequence."""
    return build(
        eval_service_pb2.WatchEvaluationRequest,
        evaluation_id=evaluation_id,
        after_sequence=after_sequence,
        follow=follow,
    )


def list_case_results_request(
    evaluation_id: str,
    *,
    verdicts: Iterable[Verdict] = (),
    labels: Mapping[str, str] | None = None,
    case_ids: Iterable[str] = (),
    page_size: int,
) -> eval_service_pb2.ListCaseResultsRequest:
    """Build a ListCaseResults of the cases that match every filter that is set."""
    wanted = build(evaluation_pb2.CaseResultFilter, verdicts=verdicts, labels=labels, case_ids=case_ids)
    return build(
        eval_service_pb2.ListCaseResultsRequest, page_size=page_size, evaluation_id=evaluation_id, filter=wanted
    )


def list_evaluations_request(
    *,
    eval_set_name: str = "",
    agent: str = "",
    states: Iterable[State] = (),
    labels: Mapping[str, str] | None = None,
    page_size: int,
) -> eval_service_pb2.ListEvaluationsRequest:
    """Build a ListEvaluations of those that match every filter that is set."""
    wanted = build(
        evaluation_pb2.EvaluationFilter, eval_set_name=eval_set_name, agent=agent, states=states, labels=labels
    )
    return build(eval_service_pb2.ListEvaluationsRequest, page_size=page_size, filter=wanted)
