"""Errors of requests that break the schema's rules."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from grpc import aio

from bough import reply, user_message
from bough.v1 import (
    agent_pb2,
    catalog_service_pb2,
    eval_service_pb2,
    event_pb2,
    follow_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
    session_pb2,
    session_service_pb2,
)
from bough.v1 import agent_service_pb2 as pb
from bough.v1.agent_service_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from bough.v1.eval_service_pb2_grpc import EvalServiceStub, add_EvalServiceServicer_to_server
from bough_server import ids
from bough_server.errors import InvalidRequest
from bough_server.interceptors.validation import violations
from bough_server.log.events import NAME_OF_KIND
from bough_server.runs.admission import build_user_message, check_input
from tests.rpc.interceptor_server import behaving, outcome, status_details

ROOT = "01890a5d-ac96-774b-bcce-b302099a8057"
LABEL_KEY = "^[a-zA-Z][a-zA-Z0-9._/-]{0,62}$"


async def test_a_stream_is_refused_before_its_handler_with_every_field_that_is_wrong() -> None:
    request = pb.RunRequest(
        agent="",
        input=message_pb2.Message(role=message_pb2.ROLE_TOOL, parts=[message_pb2.Part(text="hi")]),
        follow=follow_pb2.FollowOptions(event_names=["agent.llm.*", "everything"]),
        labels={"": "x"},
    )
    async with behaving(add_AgentServiceServicer_to_server) as channel:
        received, error = await outcome(AgentServiceStub(channel).Run(request))
    assert received == []
    assert error is not None
    info, bad_request = status_details(error)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert info == ErrorInfo(reason="INVALID_REQUEST", domain="bough.dev")
    assert [(violation.field, violation.description) for violation in bad_request.field_violations] == [
        ("agent", "must be at least 1 characters"),
        ("input", "must have the role USER, or none"),
        ('labels[""]', f"does not match regex pattern `{LABEL_KEY}`"),
        ("follow.event_names[1]", "There is no event 'everything'."),
    ]
    assert {violation.reason for violation in bad_request.field_violations} == {"INVALID_REQUEST"}


async def test_every_message_of_a_request_stream_is_checked() -> None:
    seen = []

    async def aggregate(requests: AsyncIterator[eval_service_pb2.AggregateEventsRequest], context: Any) -> Any:
        async for request in requests:
            seen.append(request.options.max_agents)  # noqa: PERF401 # what came before a refusal counts
        return eval_service_pb2.AggregateEventsResponse()

    def options(number: int) -> eval_service_pb2.AggregateEventsRequest:
        return eval_service_pb2.AggregateEventsRequest(options=invocation_pb2.InvocationOptions(max_agents=number))

    async with behaving(add_EvalServiceServicer_to_server, AggregateEvents=aggregate) as channel:
        stub = EvalServiceStub(channel)
        assert await stub.AggregateEvents(iter([options(1), options(2)])) == eval_service_pb2.AggregateEventsResponse()
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.AggregateEvents(iter([options(3), options(-1)]))
    _, bad_request = status_details(caught.value)
    assert seen == [1, 2, 3]
    assert bad_request == BadRequest(
        field_violations=[
            BadRequest.FieldViolation(
                field="options.max_agents", description="must be greater than or equal to 0", reason="INVALID_REQUEST"
            )
        ]
    )


def asking(policy: policy_pb2.RunPolicy | None = None, *parts: message_pb2.Part) -> pb.RunRequest:
    """Return a RunRequest that breaks no rule except in the given fields."""
    said = message_pb2.Message(parts=parts or [message_pb2.Part(text="hi")])
    return pb.RunRequest(agent="echo", input=said, policy=policy)


def broken(request: Message) -> list[tuple[str, str]]:
    return [(violation.field, violation.description) for violation in violations(request)]


@pytest.mark.parametrize(
    "unwritable",
    [
        Duration(seconds=2**62),
        Duration(seconds=-315_576_000_001),
        Duration(nanos=1_000_000_000),
        Duration(seconds=1, nanos=-1),
    ],
)
async def test_a_duration_that_json_cannot_write_is_refused_with_its_path(unwritable: Duration) -> None:
    policy = policy_pb2.RunPolicy(
        limits=policy_pb2.Limits(wall_duration=unwritable),
        deltas=policy_pb2.DeltaPolicy(aggregated=policy_pb2.AggregatedDeltas(max_interval=unwritable)),
        disconnect_grace=unwritable,
    )
    request = asking(policy)
    request.follow.heartbeat_interval.CopyFrom(unwritable)
    async with behaving(add_AgentServiceServicer_to_server) as channel:
        received, error = await outcome(AgentServiceStub(channel).Run(request))
    assert received == []
    assert error is not None
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [(violation.field, violation.description) for violation in status_details(error)[1].field_violations] == [
        ("policy.limits.wall_duration", "is out of the range of a duration"),
        ("policy.deltas.aggregated.max_interval", "is out of the range of a duration"),
        ("policy.disconnect_grace", "is out of the range of a duration"),
        ("follow.heartbeat_interval", "is out of the range of a duration"),
    ]


@pytest.mark.parametrize("unwritable", [Timestamp(seconds=2**62), Timestamp(seconds=-(2**62)), Timestamp(nanos=-1)])
def test_a_list_is_refused_times_out_of_range(unwritable: Timestamp) -> None:
    asked = run_pb2.RunFilter(create_time_from=unwritable, create_time_before=unwritable)
    assert broken(pb.ListRunsRequest(filter=asked)) == [
        (field, "is out of the range of a timestamp")
        for field in ("filter.create_time_from", "filter.create_time_before")
    ]


def test_the_longest_times_that_json_can_write_are_fine() -> None:
    longest = Duration(seconds=315_576_000_000, nanos=999_999_999)
    assert broken(asking(policy_pb2.RunPolicy(limits=policy_pb2.Limits(wall_duration=longest)))) == []
    last = Timestamp(seconds=253_402_300_799, nanos=999_999_999)
    asked = run_pb2.RunFilter(create_time_from=Timestamp(seconds=-62_135_596_800), create_time_before=last)
    assert broken(pb.ListRunsRequest(filter=asked)) == []


def test_times_of_recorded_events_and_of_definitions_are_others_to_judge() -> None:
    event = event_pb2.AgentEvent(record_time=Timestamp(nanos=-1))
    assert broken(eval_service_pb2.AggregateEventsRequest(events=[event])) == []
    far = policy_pb2.Limits(wall_duration=Duration(seconds=2**62))
    definition = agent_pb2.AgentDefinition(name="lead", limits=far)
    assert broken(catalog_service_pb2.ValidateAgentsRequest(definitions=[definition])) == []


def test_recorded_events_and_definitions_may_hold_what_the_rules_refuse_in_requests() -> None:
    unheard = policy_pb2.RunPolicy(limits=policy_pb2.Limits(depth=-1), on_disconnect=9)  # type: ignore[arg-type]
    started = event_pb2.RunStarted(policy=unheard)
    assert broken(asking(unheard)) == [
        ("policy.limits.depth", "must be greater than or equal to 0"),
        ("policy.on_disconnect", "value must be one of the defined enum values"),
    ]
    assert broken(eval_service_pb2.AggregateEventsRequest(events=[event_pb2.AgentEvent(run_started=started)])) == []
    definition = agent_pb2.AgentDefinition(name="lead", limits=unheard.limits)
    assert broken(catalog_service_pb2.ValidateAgentsRequest(definitions=[definition])) == []
    assert broken(catalog_service_pb2.CreateAgentRequest(definition=definition)) == []
    assert broken(catalog_service_pb2.UpdateAgentRequest(definition=definition, revision="r")) == []
    request = asking()
    request.definitions.append(definition)
    assert broken(request) == []


Labels = dict[str, str]
LABELED: list[Callable[[Labels], Message]] = [
    lambda labels: pb.RunRequest(agent="echo", input=user_message("hi"), labels=labels),
    lambda labels: pb.ForkRunRequest(run_id="r", after_sequence=1, labels=labels),
    lambda labels: session_service_pb2.CreateSessionRequest(labels=labels),
    lambda labels: session_service_pb2.UpdateSessionRequest(session_id="s", labels=labels),
]
FILTERED: list[Callable[[Labels], Message]] = [
    lambda labels: pb.ListRunsRequest(filter=run_pb2.RunFilter(labels=labels)),
    lambda labels: session_service_pb2.ListSessionsRequest(filter=session_pb2.SessionFilter(labels=labels)),
]
KINDS_OF_LABELS = [*((each, "labels") for each in LABELED), *((each, "filter.labels") for each in FILTERED)]


@pytest.mark.parametrize(("labeled", "path"), KINDS_OF_LABELS)
def test_keys_of_labels_are_names(labeled: Callable[[Labels], Message], path: str) -> None:
    good = ["a", "Z9", "team.example/eval-set_1", "bough", "boughs/x", "a" * 63]
    assert broken(labeled(dict.fromkeys(good, ""))) == []
    for key in ("", "a b\u0001", "1a", "/a", "ä", "a\n", "a" * 64):
        assert [field for field, _ in broken(labeled({key: ""}))] == [f'{path}["{key}"]']


@pytest.mark.parametrize("control", ["\0", "a\tb", "\n", "\x1b[2J", "\x7f", "a\x85"])
@pytest.mark.parametrize(("labeled", "path"), KINDS_OF_LABELS)
def test_values_of_labels_have_no_control_characters(
    labeled: Callable[[Labels], Message], path: str, control: str
) -> None:
    assert broken(labeled({"a": "«It's 5 €»\u2028 ok"})) == []
    assert broken(labeled({"a": control})) == [(f'{path}["a"]', "must not have control characters")]


@pytest.mark.parametrize("labeled", LABELED)
def test_labels_of_the_server_cannot_be_set(labeled: Callable[[Labels], Message]) -> None:
    reserved = "must not begin with bough/, which is reserved"
    assert broken(labeled({"bough/evaluation": "1"})) == [('labels["bough/evaluation"]', reserved)]


@pytest.mark.parametrize("filtered", FILTERED)
def test_labels_of_the_server_can_be_filtered_by(filtered: Callable[[Labels], Message]) -> None:
    assert broken(filtered({"bough/evaluation": "1"})) == []


@pytest.mark.parametrize(
    "identified",
    [
        lambda name: pb.RunRequest(agent="echo", input=user_message("hi"), request_id=name),
        lambda name: pb.ResumeRunRequest(run_id="r", answers=[reply("q", 1)], request_id=name),
        lambda name: pb.ForkRunRequest(run_id="r", after_sequence=1, request_id=name),
        lambda name: session_service_pb2.CreateSessionRequest(request_id=name),
    ],
)
def test_request_ids_are_visible_ascii_characters(identified: Callable[[str], Message]) -> None:
    for good in ("", "order-7/2026#1", "~" * 128):
        assert broken(identified(good)) == []
    for bad in ("\0", "a b", "a\n", "ä", "x" * 129):
        assert broken(identified(bad)) == [("request_id", "does not match regex pattern `^[!-~]{1,128}$`")]


def test_what_a_store_looks_up_or_keeps_as_text_has_no_control_characters() -> None:
    said = "must not have control characters"
    assert broken(pb.ListRunsRequest(filter=run_pb2.RunFilter(session_id="a\0", agent="\x1f"))) == [
        ("filter.session_id", said),
        ("filter.agent", said),
    ]
    assert broken(pb.CancelRunRequest(run_id="r", note="Enough.\0")) == [("note", said)]
    assert broken(pb.CancelRunRequest(run_id="r", note="Genug, für heute…")) == []


FOLLOWING: list[Callable[[follow_pb2.FollowOptions], Message]] = [
    lambda follow: pb.RunRequest(agent="echo", input=user_message("hi"), follow=follow),
    lambda follow: pb.WatchRunRequest(run_id="r", follow=follow),
    lambda follow: pb.ResumeRunRequest(run_id="r", answers=[reply("q", 1)], follow=follow),
    lambda follow: pb.ForkRunRequest(run_id="r", after_sequence=1, follow=follow),
]


@pytest.mark.parametrize("following", FOLLOWING)
def test_names_of_events_that_there_are_not_are_told_the_nearest(
    following: Callable[[follow_pb2.FollowOptions], Message],
) -> None:
    assert (
        broken(
            following(
                follow_pb2.FollowOptions(event_names=[*NAME_OF_KIND.values(), "agent.*", "agent.llm.*", "run_started"])
            )
        )
        == []
    )
    wrong = [
        "agent.llm.completed",
        "agent.llm.complete",
        "agent.lm.*",
        "agent.qqqqqqqqqqqqqqqqq",
        "agent",
        "run_startd",
    ]
    assert broken(following(follow_pb2.FollowOptions(event_names=wrong))) == [
        ("follow.event_names[1]", "There is no event 'agent.llm.complete'. Did you mean 'agent.llm.completed'?"),
        ("follow.event_names[2]", "There is no event 'agent.lm.*'. Did you mean 'agent.llm.*'?"),
        ("follow.event_names[3]", "There is no event 'agent.qqqqqqqqqqqqqqqqq'."),
        ("follow.event_names[4]", "There is no event 'agent'."),
        ("follow.event_names[5]", "There is no event 'run_startd'. Did you mean 'run_started'?"),
    ]


def test_a_request_has_at_most_so_many_definitions() -> None:
    request = asking()
    request.definitions.extend([agent_pb2.AgentDefinition()] * 129)
    assert broken(request) == [("definitions", "must contain no more than 128 item(s)")]


def test_enum_values_of_a_policy_that_are_not_known_are_refused() -> None:
    unknown = policy_pb2.RunPolicy(on_disconnect=9, on_sub_agent_failure=-1)  # type: ignore[arg-type]
    assert broken(asking(unknown)) == [
        ("policy.on_sub_agent_failure", "value must be one of the defined enum values"),
        ("policy.on_disconnect", "value must be one of the defined enum values"),
    ]
    known = policy_pb2.RunPolicy(
        on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE,
        on_sub_agent_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT,
    )
    assert broken(asking(known)) == []


@pytest.mark.parametrize(
    ("part", "counts"),
    [
        (message_pb2.Part(text=" \n\t"), False),
        (message_pb2.Part(data_json=""), False),
        (message_pb2.Part(blob=message_pb2.Blob(media_type="image/png")), False),
        (message_pb2.Part(blob=message_pb2.Blob(data=b"")), False),
        (message_pb2.Part(text="\n.\n"), True),
        (message_pb2.Part(data_json="{}"), True),
        (message_pb2.Part(blob=message_pb2.Blob(data=b"x")), True),
        (message_pb2.Part(blob=message_pb2.Blob(uri="https://example.com/a.png")), True),
    ],
)
def test_an_input_has_a_part_with_content(part: message_pb2.Part, counts: bool) -> None:
    assert broken(asking(None, part, message_pb2.Part())) == (
        [] if counts else [("input", "must have at least one part with text, data or a blob")]
    )


@pytest.mark.parametrize("field", ["input", "changes.input"])
def test_an_invalid_part_is_named(field: str) -> None:
    parts = [
        message_pb2.Part(text="hi"),
        message_pb2.Part(reasoning=message_pb2.Reasoning(text="so")),
        message_pb2.Part(tool_call=message_pb2.ToolCall()),
        message_pb2.Part(tool_result=message_pb2.ToolResult()),
    ]
    with pytest.raises(InvalidRequest) as caught:
        check_input(message_pb2.Message(parts=parts), field=field)
    assert [violation.field for violation in caught.value.violations] == [
        f"{field}.parts[1].reasoning",
        f"{field}.parts[2].tool_call",
        f"{field}.parts[3].tool_result",
    ]


@pytest.mark.parametrize("text", ["nope", "n" * 100_000, "[]", '"a"', '{"a": NaN}', '{"a":' * 20_000])
def test_metadata_of_an_input_is_a_json_object(text: str) -> None:
    good = message_pb2.Part(text="hi", metadata_json=' {"a": [1]} ')
    bad = message_pb2.Part(text="hi", metadata_json=text)
    check_input(message_pb2.Message(parts=[good], metadata_json="{}"))
    with pytest.raises(InvalidRequest) as caught:
        check_input(message_pb2.Message(parts=[good, bad], metadata_json=text), field="changes.input")
    assert [violation.field for violation in caught.value.violations] == [
        "changes.input.metadata_json",
        "changes.input.parts[1].metadata_json",
    ]


def test_of_an_input_only_content_and_metadata_are_kept() -> None:
    part = message_pb2.Part(text="hi", metadata_json='{"a": 1}', truncated=True, original_bytes=-5)
    said = message_pb2.Message(
        message_id="m",
        role=message_pb2.ROLE_USER,
        kind=message_pb2.MESSAGE_KIND_SUMMARY,
        author="root",
        parts=[part],
        invocation_id="i",
        create_time=Timestamp(seconds=1),
        position=7,
        summary_range=message_pb2.SummaryRange(from_position=1, to_position=99),
        metadata_json='{"b": 2}',
        run_id="r",
    )
    stored = build_user_message(said, root_id=ROOT, message_root=ROOT)
    assert stored == message_pb2.Message(
        message_id=ids.message_id(ROOT, "", "USER"),
        role=message_pb2.ROLE_USER,
        kind=message_pb2.MESSAGE_KIND_USER,
        author="user",
        parts=[message_pb2.Part(text="hi", metadata_json='{"a": 1}')],
        invocation_id=ROOT,
        metadata_json='{"b": 2}',
    )


def test_metadata_counts_into_the_size_of_an_input() -> None:
    large = json.dumps({"a": "x" * 200_000})
    check_input(message_pb2.Message(parts=[message_pb2.Part(text="hi", metadata_json=large)]))
    check_input(message_pb2.Message(parts=[message_pb2.Part(text="hi")], metadata_json=large))
    with pytest.raises(InvalidRequest, match="is 4000"):
        check_input(message_pb2.Message(parts=[message_pb2.Part(text="hi", metadata_json=large)], metadata_json=large))


def test_data_of_an_input_that_is_no_json_is_refused_by_its_part() -> None:
    texts = ["{}", "{", "NaN", "[" * 100_000, " 1 "]
    with pytest.raises(InvalidRequest) as caught:
        check_input(message_pb2.Message(parts=[message_pb2.Part(data_json=text) for text in texts]))
    assert [violation.field for violation in caught.value.violations] == [
        f"input.parts[{index}].data_json" for index in (1, 2, 3)
    ]


_NUL = "a\0b"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.RunRequest(agent=_NUL), "agent"),
        (pb.RunRequest(agent="lead", session_id=_NUL), "session_id"),
        (pb.RunRequest(agent="lead", request_id=_NUL), "request_id"),
        (pb.RunRequest(agent="lead", labels={"team": _NUL}), 'labels["team"]'),
        (pb.GetRunRequest(run_id=_NUL), "run_id"),
        (pb.WatchRunRequest(run_id=_NUL), "run_id"),
        (pb.ResumeRunRequest(run_id=_NUL), "run_id"),
        (pb.ForkRunRequest(run_id=_NUL), "run_id"),
        (pb.CancelRunRequest(run_id=_NUL), "run_id"),
        (pb.ListRunsRequest(filter=run_pb2.RunFilter(session_id=_NUL)), "filter.session_id"),
        (pb.ListRunsRequest(filter=run_pb2.RunFilter(agent=_NUL)), "filter.agent"),
        (pb.ListRunsRequest(filter=run_pb2.RunFilter(evaluation_id=_NUL)), "filter.evaluation_id"),
        (pb.ListRunsRequest(filter=run_pb2.RunFilter(labels={"team": _NUL})), 'filter.labels["team"]'),
        (eval_service_pb2.GetEvaluationRequest(evaluation_id=_NUL), "evaluation_id"),
        (session_service_pb2.GetSessionRequest(session_id=_NUL), "session_id"),
        (session_service_pb2.CreateSessionRequest(labels={"team": _NUL}), 'labels["team"]'),
    ],
)
def test_what_is_stored_as_text_has_no_nul(request_: Message, field: str) -> None:
    fields = [violation.field for violation in violations(request_)]
    assert fields.count(field) == 1
