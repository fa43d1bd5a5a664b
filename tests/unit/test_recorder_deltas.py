"""Streamed texts in a run's log: the first leaves at once, what follows is joined, however many arrive together."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import event_pb2
from bough_server.clock import SystemClock
from bough_server.engine.recorder import DeltaChunk, DeltaCoalescing, Recorder
from bough_server.log import events
from bough_server.store.ports.log import EventLog, LogEvent

EFFECT = "0/llm"
JOINED = DeltaCoalescing(max_interval=60, max_chars=10)
EACH = DeltaCoalescing(max_interval=0, max_chars=0)

Batch = tuple[int, str, list[str]]
KINDS = st.sampled_from(
    [(events.LLM_OUTPUT_TEXT_DELTA, ""), (events.LLM_REASONING_DELTA, ""), (events.LLM_TOOL_CALL_DELTA, "c1")]
)
BATCHES = st.lists(st.tuples(KINDS, st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=6)))


class Appends(EventLog):
    """A log that keeps the batches that were appended to it."""

    def __init__(self) -> None:
        self.batches: list[Sequence[LogEvent]] = []

    async def append(self, run_id: str, *, epoch: int, log_events: Sequence[LogEvent]) -> None:
        self.batches.append(log_events)


def recorder_of(log: EventLog) -> Recorder:
    return Recorder(log, "run", epoch=1, last_sequence=0, clock=SystemClock())


def text_of(event: event_pb2.AgentEvent) -> tuple[str, str]:
    """The kind of a delta and its text."""
    if event.HasField("llm_tool_call_delta"):
        return "call", event.llm_tool_call_delta.arguments_delta
    if event.HasField("llm_reasoning_delta"):
        return "reasoning", event.llm_reasoning_delta.text
    return "text", event.llm_output_text_delta.text


async def logged(batches: Sequence[Batch], coalescing: DeltaCoalescing) -> list[tuple[str, str]]:
    log = Appends()
    recorder = recorder_of(log)
    for kind, subject, texts in batches:
        recorder.buffer_delta(DeltaChunk(EFFECT, kind, subject, texts), coalescing, event_pb2.AgentEvent)
    recorder.flush(EFFECT)
    await recorder.wait_for_commit()
    return [text_of(record.event) for batch in log.batches for record in batch]


@given(BATCHES, st.sampled_from([JOINED, EACH]))
def test_texts_that_arrive_together_are_logged_as_if_they_came_one_by_one(
    batches: list[tuple[tuple[int, str], list[str]]], coalescing: DeltaCoalescing
) -> None:
    together: list[Batch] = [(kind, subject, texts) for (kind, subject), texts in batches]
    single: list[Batch] = [(kind, subject, [text]) for kind, subject, texts in together for text in texts]
    assert asyncio.run(logged(together, coalescing)) == asyncio.run(logged(single, coalescing))


async def test_the_first_text_is_an_event_of_its_own_and_the_rest_is_joined() -> None:
    texts = ["one ", "two ", "three ", "four ", "five"]
    batch = (events.LLM_OUTPUT_TEXT_DELTA, "", texts)
    assert await logged([batch], JOINED) == [("text", "one "), ("text", "two three "), ("text", "four five")]
    assert await logged([batch], EACH) == [("text", text) for text in texts]


@pytest.mark.parametrize(
    ("kind", "is_sent"), [(events.LLM_OUTPUT_TEXT_DELTA, True), (events.LLM_TOOL_CALL_DELTA, False)]
)
async def test_the_first_text_does_not_wait_for_a_batch_and_arguments_do(kind: int, is_sent: bool) -> None:
    log = Appends()
    recorder = recorder_of(log)
    recorder.buffer_delta(DeltaChunk(EFFECT, kind, "", ["a", "b"]), JOINED, event_pb2.AgentEvent)
    for _ in range(3):  # the submission is scheduled, then its append runs
        await asyncio.sleep(0)
    assert bool(log.batches) is is_sent
    recorder.drop_deltas()


@pytest.mark.parametrize(
    ("coalescing", "at_first", "later"),
    [(DeltaCoalescing(), 50, 100), (DeltaCoalescing(max_interval=0.03), 30, 30)],
)
async def test_a_text_is_held_back_longer_once_it_was_streamed_for_a_second_unless_a_policy_says_how_long(
    coalescing: DeltaCoalescing, at_first: int, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, milliseconds = asyncio.get_running_loop(), 1_000_000
    monkeypatch.setattr(loop, "time", lambda: milliseconds / 1000)
    recorder = recorder_of(Appends())

    def stream() -> None:
        chunk = DeltaChunk(EFFECT, events.LLM_OUTPUT_TEXT_DELTA, "", ["word "])
        recorder.buffer_delta(chunk, coalescing, event_pb2.AgentEvent)

    stream()
    for begin, bound in ((3, at_first), (807, at_first), (1_003, later), (5_001, later)):
        milliseconds = begin = 1_000_000 + begin
        recorded = recorder.last_sequence
        stream()
        while recorder.last_sequence == recorded:
            milliseconds += 1
            await asyncio.sleep(0)
        assert bound - 10 <= milliseconds - begin <= bound + 1
    recorder.drop_deltas()
