"""Check a request and build the run's first events from it."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from google.protobuf.message import Message

from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    eval_set_pb2,
    evaluation_ref_pb2,
    event_pb2,
    execution_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
)
from bough_server import ids
from bough_server.agents.pinned import REPLAY_VERSION
from bough_server.agents.registry import VersionHashes, find_reachable
from bough_server.engine.input_requests import is_json_object, part_of_caller
from bough_server.errors import FieldViolation, InvalidRequest, RequestIdReused
from bough_server.identity import Principal
from bough_server.log import events
from bough_server.log.blobs import StoredBlob, extract_files_within
from bough_server.messages import copy_of
from bough_server.runtime.agent import Agent, Resolver
from bough_server.runtime.tool_mocks import mock_mistakes
from bough_server.store.ports.runs import RunRow

MAX_INPUT_BYTES: Final = 256 * 1024
"""The most bytes of an input without its files: all parts, and the metadata of the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDefaults:
    """The operator's policy: defaults for what a request leaves unset, and the maxima that it may ask for."""

    limits: policy_pb2.Limits = field(default_factory=lambda: policy_pb2.Limits(model_calls=500))
    maximum: policy_pb2.Limits = field(default_factory=policy_pb2.Limits)
    deltas: policy_pb2.DeltaPolicy = field(default_factory=policy_pb2.DeltaPolicy)
    on_disconnect: policy_pb2.DisconnectPolicy.ValueType = policy_pb2.DISCONNECT_POLICY_CANCEL
    disconnect_grace: float = 30.0


def collect_definitions(resolver: Resolver, root: str) -> Mapping[str, agent_pb2.AgentDefinition]:
    """Return the definitions that a run of `root` can reach, by revision, in order of name.

    Agents in code are left out: they have a declared version instead of a stored definition.
    """
    return {resolver.agents[one.name].revision: one for one in find_reachable(resolver, root) if one.WhichOneof("kind")}


def check_input(message: message_pb2.Message, *, field: str = "input") -> None:
    """Raise InvalidRequest for an input that is too large or has invalid parts; `field` is its path in the request.

    The files of the input are not counted: they have been taken out of it.
    """
    size = sum(part.ByteSize() for part in message.parts) + len(message.metadata_json.encode())
    if size > MAX_INPUT_BYTES:
        description = f"is {size} bytes; an input may have {MAX_INPUT_BYTES}. Send large content as a file (a blob)."
        raise InvalidRequest([FieldViolation(field=f"{field}.parts", description=description)])
    wrong = [*_part_violations(message, field), *_metadata_violations(message, field)]
    if wrong:
        raise InvalidRequest(wrong)


def _part_violations(message: message_pb2.Message, field: str) -> Iterator[FieldViolation]:
    for index, part in enumerate(message.parts):
        content = part.WhichOneof("content")
        if content in ("tool_call", "tool_result", "reasoning"):
            description = "An input may not hold tool calls, tool results or reasoning."
            yield FieldViolation(field=f"{field}.parts[{index}].{content}", description=description)
        elif content == "data_json" and not _is_json(part.data_json):
            description = "must be JSON text"
            yield FieldViolation(field=f"{field}.parts[{index}].data_json", description=description)


def _metadata_violations(message: message_pb2.Message, field: str) -> Iterator[FieldViolation]:
    metadata = {field: message.metadata_json}
    metadata |= {f"{field}.parts[{index}]": part.metadata_json for index, part in enumerate(message.parts)}
    for path, text in metadata.items():
        if text and not is_json_object(text):
            yield FieldViolation(field=f"{path}.metadata_json", description="must be a JSON object")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):  # deeply nested text exhausts the stack of Python's parser
        return False
    return True


def _reject_constant(name: str) -> None:
    # Python's parser accepts NaN and Infinity, which JSON does not have.
    raise ValueError(name)


FollowRequest = agent_service_pb2.RunRequest | agent_service_pb2.ResumeRunRequest | agent_service_pb2.ForkRunRequest


def digest_request(request: FollowRequest) -> str:
    """Return a SHA-256 hex digest of a request's content, without the fields that only concern following the run."""
    content: Message = type(request)()
    content.CopyFrom(request)
    content.ClearField("follow")
    if isinstance(request, agent_service_pb2.ResumeRunRequest):
        content.ClearField("after_sequence")
    content.DiscardUnknownFields()
    return hashlib.sha256(content.SerializeToString(deterministic=True)).hexdigest()


def check_same_request(earlier: RunRow, digest: str, request_id: str) -> RunRow:
    """Return the run that an earlier request started. Raises RequestIdReused if that request had other content."""
    if earlier.request_digest != digest:
        raise RequestIdReused(
            f"The request id {request_id!r} was used for another run with other content. Use a new one.",
            details={"run_id": earlier.run.run_id},
        )
    return earlier


_Number = Literal["model_calls", "tool_calls", "tokens", "cost_nanos", "depth", "transfers", "concurrency"]
_NUMBERS: Final[Sequence[_Number]] = (
    "model_calls",
    "tool_calls",
    "tokens",
    "cost_nanos",
    "depth",
    "transfers",
    "concurrency",
)


def effective_policy(asked: policy_pb2.RunPolicy, defaults: RunDefaults) -> policy_pb2.RunPolicy:
    """Return the request's policy, with the server's defaults for unset fields, capped at the server's maxima."""
    policy = copy_of(asked)
    for name in _NUMBERS:
        if not policy.limits.HasField(name) and defaults.limits.HasField(name):
            setattr(policy.limits, name, getattr(defaults.limits, name))
        if defaults.maximum.HasField(name):
            most = getattr(defaults.maximum, name)
            if not policy.limits.HasField(name) or getattr(policy.limits, name) > most:
                setattr(policy.limits, name, most)
    if not policy.limits.HasField("wall_duration") and defaults.limits.HasField("wall_duration"):
        policy.limits.wall_duration.CopyFrom(defaults.limits.wall_duration)
    if defaults.maximum.HasField("wall_duration"):
        longest = defaults.maximum.wall_duration
        if not policy.limits.HasField("wall_duration") or policy.limits.wall_duration.ToNanoseconds() > (
            longest.ToNanoseconds()
        ):
            policy.limits.wall_duration.CopyFrom(longest)
    if not policy.on_disconnect:
        policy.on_disconnect = policy_pb2.DISCONNECT_POLICY_CONTINUE if policy.background else defaults.on_disconnect
    if not policy.HasField("disconnect_grace"):
        policy.disconnect_grace.FromNanoseconds(int(defaults.disconnect_grace * 1e9))
    if not policy.on_sub_agent_failure:
        policy.on_sub_agent_failure = policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE
    return policy


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRun:
    """The role of a run in the evaluation that starts it, and the mocks that answer its tool calls.

    No request of a client can set it.
    """

    ref: evaluation_ref_pb2.EvaluationRef
    mocks: eval_set_pb2.ToolMocks | None = None
    """None: nothing does, or in a fork what does in its origin. Their run_id is not read: `tools` has its results."""


async def admit_evaluation(
    evaluation: EvaluationRun | None, *, most: int
) -> tuple[EvaluationRun | None, Sequence[StoredBlob]]:
    """Return an EvaluationRun whose mocks name their files by their SHA-256, and the files, of `most` bytes at most.

    Raises InvalidRequest if the mocks cannot be used.
    """
    if evaluation is None or evaluation.mocks is None:
        return evaluation, ()
    mocks = copy_of(evaluation.mocks)
    mocks.DiscardUnknownFields()
    mocks, files = await extract_files_within(mocks, most=most, field="mocks")
    wrong = [
        FieldViolation(field=f"mocks.{field}" if field else "mocks", description=sentence)
        for field, sentence in mock_mistakes(mocks)
    ]
    if wrong:
        raise InvalidRequest(wrong)
    return replace(evaluation, mocks=mocks), files


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Everything about a run that is decided before it is created."""

    request: agent_service_pb2.RunRequest
    digest: str
    run_id: str
    principal: Principal
    agent: Agent
    resolver: Resolver
    """The catalog that the run uses from start to end."""
    versions: VersionHashes
    policy: policy_pb2.RunPolicy
    deadline_time_ns: int | None
    now_ns: int
    files: Sequence[StoredBlob] = ()
    """The files of the input and of the mocks, to be stored with them."""
    evaluation: EvaluationRun | None = None


def build_row(admission: Admission, principal: Principal, session_id: str, *, owner: str, is_queued: bool) -> RunRow:
    """Return the row of a run as it is right after it was created."""
    run = run_pb2.Run(
        run_id=admission.run_id,
        session_id=session_id,
        user_id=principal.user_id,
        agent=admission.agent.definition.name,
        state=execution_pb2.EXECUTION_STATE_PENDING if is_queued else execution_pb2.EXECUTION_STATE_RUNNING,
        labels=admission.request.labels,
        last_sequence=2 if is_queued else 1,
    )
    if admission.evaluation is not None:
        run.evaluation.CopyFrom(admission.evaluation.ref)
    run.create_time.FromNanoseconds(admission.now_ns)
    run.start_time.FromNanoseconds(admission.now_ns)
    if admission.deadline_time_ns is not None:
        run.deadline_time.FromNanoseconds(admission.deadline_time_ns)
    return RunRow(run=run, principal=principal, epoch=1, request_digest=admission.digest, owner=owner)


def build_queue_event(started: event_pb2.AgentEvent, behind_run_id: str) -> event_pb2.AgentEvent:
    """Return the second event of a run that waits for its session."""
    event = events.in_place_of(started)
    event.sequence = 2
    event.record_time.CopyFrom(started.record_time)
    event.run_queued.behind_run_id = behind_run_id
    return event


def build_start_event(
    admission: Admission, *, session_position: int, trace_id: str, span_id: str
) -> event_pb2.AgentEvent:
    """Return the first event of a run."""
    request, definition, resolver = admission.request, admission.agent.definition, admission.resolver
    event = event_pb2.AgentEvent(
        sequence=1,
        invocation_id=admission.run_id,
        agent=definition.name,
        branch=definition.name,
        trace_id=trace_id,
        span_id=span_id,
    )
    event.record_time.FromNanoseconds(admission.now_ns)
    begun = event.run_started
    begun.invocation_id = begun.key_root = admission.run_id
    begun.agent, begun.kind = definition.name, admission.agent.kind
    begun.run_path.append(definition.name)
    begun.input.CopyFrom(build_user_message(request.input, root_id=admission.run_id, message_root=admission.run_id))
    begun.input.create_time.FromNanoseconds(admission.now_ns)
    begun.policy.CopyFrom(admission.policy)
    if admission.deadline_time_ns is not None:
        begun.deadline_time.FromNanoseconds(admission.deadline_time_ns)
    begun.labels.update(request.labels)
    for revision, reached in collect_definitions(resolver, definition.name).items():
        begun.definition_refs.add(name=reached.name, revision=revision)
    begun.session_cut = session_position
    versions = admission.versions
    begun.versions.replay, begun.versions.prices = REPLAY_VERSION, versions.prices
    begun.versions.nodes.update(versions.nodes)
    begun.versions.tools.update(versions.tools)
    begun.versions.models.update(versions.models)
    begun.versions.agents.update(versions.agents)
    for revision, tool in versions.server_tools.items():
        begun.tool_refs.add(name=tool.name, server=tool.server, revision=revision)
    begun.request_id = request.request_id
    begun.request_digest = admission.digest if request.request_id else ""
    begun.tenant_id, begun.user_id = admission.principal.tenant_id, admission.principal.user_id
    if admission.evaluation is not None:
        set_evaluation(begun, admission.evaluation)
    return event


def set_evaluation(begun: event_pb2.RunStarted | event_pb2.RunForked, evaluation: EvaluationRun) -> None:
    """Set what a run began with as a run of an evaluation."""
    begun.evaluation.CopyFrom(evaluation.ref)
    if evaluation.mocks is not None:
        begun.mocks.CopyFrom(evaluation.mocks)


def build_user_message(content: message_pb2.Message, *, root_id: str, message_root: str) -> message_pb2.Message:
    """Return a user's message in the form that the session stores; `message_root` is the root of ids.message_id.

    Of the request's message it has the parts and the metadata. Everything else is for the server to say.
    """
    return message_pb2.Message(
        message_id=ids.message_id(message_root, "", "USER"),
        role=message_pb2.ROLE_USER,
        kind=message_pb2.MESSAGE_KIND_USER,
        author="user",
        parts=map(part_of_caller, content.parts),
        invocation_id=root_id,
        metadata_json=content.metadata_json,
    )
