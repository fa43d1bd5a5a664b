"""Events of the Responses API put together, whatever a server leaves out, doubles or invents."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import step_pb2, usage_pb2
from bough_server.models.answer import ReportedError
from bough_server.models.model import ReasoningDelta, TextDelta, ToolCallDelta
from bough_server.models.openai.responses import Response, usage_of
from bough_server.models.provider_json import BadChunk


def data(**event: object) -> bytes:
    return json.dumps(event).encode()


pieces = st.sampled_from(["", "a", "b "])
events = st.one_of(
    st.builds(
        lambda kind, index, delta: {"type": kind, "output_index": index, "delta": delta},
        st.sampled_from(
            [
                "response.output_text.delta",
                "response.refusal.delta",
                "response.reasoning_text.delta",
                "response.function_call_arguments.delta",
                "response.unheard.of",
            ]
        ),
        st.integers(0, 3),
        pieces,
    ),
    st.builds(
        lambda kind, index, item: {"type": kind, "output_index": index, "item": item},
        st.sampled_from(["response.output_item.added", "response.output_item.done"]),
        st.integers(0, 3),
        st.one_of(
            st.builds(lambda text: {"type": "message", "content": [{"type": "output_text", "text": text}]}, pieces),
            st.builds(lambda text: {"type": "function_call", "name": "f", "call_id": "c", "arguments": text}, pieces),
            st.builds(lambda text: {"type": "reasoning", "summary": [{"text": text}]}, pieces),
            st.just({"type": "web_search_call"}),
            st.none(),
        ),
    ),
)


@given(st.lists(events, max_size=12))
def test_the_answer_is_what_its_deltas_say_whatever_comes(stream: list[dict[str, object]]) -> None:
    response = Response()
    deltas = [delta for event in stream for delta in response.apply(data(**event))]
    deltas += response.apply(data(type="response.completed", response={"status": "completed"}))
    whole = response.response(provider="openai", model="m")
    calls = [part.tool_call for part in whole.message.parts if part.HasField("tool_call")]
    assert "".join(part.text for part in whole.message.parts) == "".join(
        delta.text for delta in deltas if isinstance(delta, TextDelta)
    )
    thought = sorted("".join(part.reasoning.text for part in whole.message.parts))
    assert thought == sorted("".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)))
    for position, call in enumerate(calls):
        said = [delta for delta in deltas if isinstance(delta, ToolCallDelta) and delta.index == position]
        assert call.arguments_json == "".join(delta.arguments for delta in said)
    expected = step_pb2.FINISH_REASON_TOOL_CALLS if calls else step_pb2.FINISH_REASON_STOP
    if not calls and any(event["type"] == "response.refusal.delta" for event in stream):
        expected = step_pb2.FINISH_REASON_REFUSAL
    assert (response.is_done, response.is_whole) == (True, True)
    assert (whole.finish_reason, whole.provider_finish_reason) == (expected, "completed")


def test_a_stream_that_stops_is_not_whole_and_its_end_alone_makes_it_so() -> None:
    response = Response()
    assert response.apply(data(type="response.output_text.delta", output_index=0, delta="a")) == [TextDelta("a")]
    assert response.apply(b"[DONE]") == []
    assert (response.is_done, response.is_whole) == (False, False)


def test_parts_of_a_summary_are_paragraphs() -> None:
    response = Response()
    deltas = []
    for index, text in enumerate(("One.", "Two.")):
        deltas += response.apply(
            data(type="response.reasoning_summary_part.added", output_index=0, summary_index=index)
        )
        deltas += response.apply(data(type="response.reasoning_summary_text.delta", output_index=0, delta=text))
    assert deltas == [ReasoningDelta("One."), ReasoningDelta("\n\n"), ReasoningDelta("Two.")]


@pytest.mark.parametrize("chunk", [b"<html>", b"[]", b'"text"'])
def test_what_is_no_event_is_refused(chunk: bytes) -> None:
    with pytest.raises(BadChunk):
        Response().apply(chunk)


@pytest.mark.parametrize(
    ("event", "value"),
    [
        ({"type": "error", "code": "server_error", "message": "No."}, None),
        ({"error": {"message": "No."}}, {"message": "No."}),
        ({"type": "response.failed", "response": {"error": {"code": "c", "message": "No."}}}, {"code": "c"}),
    ],
)
def test_an_error_in_the_stream_is_reported_as_the_provider_says_it(event: dict[str, object], value: object) -> None:
    with pytest.raises(ReportedError) as reported:
        Response().apply(data(**event))
    said = reported.value.value
    assert isinstance(said, dict)
    assert said["message"] == "No."
    assert value is None or said.items() >= value.items()  # type: ignore[attr-defined]


def test_usage_that_is_not_reported_or_no_number_is_absent() -> None:
    assert usage_of({}) == usage_pb2.Usage()
    assert usage_of({"input_tokens": "7", "output_tokens": True, "total_tokens": 3}) == usage_pb2.Usage(total_tokens=3)


@pytest.mark.parametrize(
    ("said", "reason", "word"),
    [
        ({"status": "completed"}, step_pb2.FINISH_REASON_STOP, "completed"),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
            step_pb2.FINISH_REASON_LENGTH,
            "max_output_tokens",
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            step_pb2.FINISH_REASON_CONTENT_FILTER,
            "content_filter",
        ),
        ({"status": "incomplete"}, step_pb2.FINISH_REASON_OTHER, "incomplete"),
        ({}, step_pb2.FINISH_REASON_UNSPECIFIED, ""),
    ],
)
def test_why_the_model_stopped_is_one_vocabulary_and_the_providers_word_beside_it(
    said: dict[str, object], reason: step_pb2.FinishReason.ValueType, word: str
) -> None:
    response = Response()
    response.apply(data(type="response.completed", response=said))
    whole = response.response(provider="openai", model="m")
    assert (whole.finish_reason, whole.provider_finish_reason) == (reason, word)


def cited(start: int, end: int) -> dict[str, object]:
    return {"type": "url_citation", "url": "https://oak.example", "start_index": start, "end_index": end}


def content(text: str, *annotations: dict[str, object]) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": list(annotations)}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_citation_names_its_part_and_counts_from_the_beginning_of_that(is_streamed: bool) -> None:
    """The second message is the third part, and its second content begins behind the first."""
    message: dict[str, object] = {"type": "message", "content": [content("Öl "), content("burns.", cited(0, 5))]}
    output: list[dict[str, object]] = [
        {"type": "message", "content": [content("Oaks.", cited(0, 4))]},
        {"type": "reasoning", "summary": [{"text": "Hm."}]},
        {"type": "web_search_call", "id": "ws_1"},
        message,
    ]
    response = Response()
    if is_streamed:
        for index, item in enumerate(output[:3]):
            response.apply(data(type="response.output_item.done", output_index=index, item=item))
        for at, piece in ((0, "Öl "), (1, "bur"), (1, "ns.")):
            kind = "response.output_text.delta"
            response.apply(data(type=kind, output_index=3, content_index=at, delta=piece))
        kind = "response.output_text.annotation.added"
        response.apply(data(type=kind, output_index=3, content_index=1, annotation=cited(0, 5)))
    response.apply(data(type="response.completed", response={"status": "completed", "output": output}))
    whole = response.response(provider="openai", model="m")
    places = [(one.part_index, one.start_offset, one.end_offset) for one in whole.annotations.citations]
    assert places == [(0, 0, 4), (2, 3, 8)]
    assert [whole.message.parts[part].text[start:end] for part, start, end in places] == ["Oaks", "burns"]
