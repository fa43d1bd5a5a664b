"""What is told on of a plan: whole where it is small, and never more than there is room for."""

import json

from hypothesis import given
from hypothesis import strategies as st

from bough_server.agents.plan_execute import EMPTY_BYTES, ROOM, ExecutedStep, Progress, SavedProgress
from bough_server.errors import MAX_DETAILS_BYTES
from bough_server.log.session_state import json_text

TEXTS = st.one_of(st.text(max_size=20), st.text(max_size=9).map(lambda text: text * 9_000), st.just("\x01" * 9_000))


def size(kept: SavedProgress) -> int:
    """Bytes of what is kept as the two values that it is in a state."""
    return sum(len(json_text(value).encode()) for value in (kept["plan"], kept["executed_steps"]))


@given(st.lists(TEXTS, max_size=20), st.lists(st.tuples(TEXTS, TEXTS), max_size=40))
def test_what_is_kept_has_every_step_and_fits_the_room_and_an_errors_details(
    plan: list[str], done: list[tuple[str, str]]
) -> None:
    executed = [ExecutedStep(step=step, result=result) for step, result in done]
    progress = Progress(objective="o", plan=plan, executed=executed)
    kept = progress.to_session_state()
    assert (len(kept["plan"]), len(kept["executed_steps"])) == (len(plan), len(done))
    assert size(kept) <= ROOM
    whole = SavedProgress(plan=plan, executed_steps=executed)
    if size(whole) <= ROOM:
        assert kept == whole
    details = progress.details()
    assert len(details.encode()) <= MAX_DETAILS_BYTES
    assert len(json.loads(details)["executed_steps"]) == len(done)


def test_a_step_that_is_done_is_no_longer_left() -> None:
    progress = Progress(objective="o", plan=["a", "b"])
    progress.complete_step("done")
    assert progress.to_session_state() == {"plan": ["b"], "executed_steps": [{"step": "a", "result": "done"}]}
    assert progress.facts("b") == {"plan": "1. b", "step": "b", "executed_steps": "1. a\n   Result: done"}


@given(st.lists(TEXTS, max_size=20), st.lists(st.tuples(TEXTS, TEXTS), max_size=20), st.integers(EMPTY_BYTES, 3_000))
def test_what_is_kept_fits_whatever_room_there_is_and_texts_are_cut_before_steps_are_left_out(
    plan: list[str], done: list[tuple[str, str]], room: int
) -> None:
    executed = [ExecutedStep(step=step, result=result) for step, result in done]
    kept = Progress(objective="o", plan=plan, executed=executed).to_session_state(room)
    assert size(kept) <= room
    without_texts = SavedProgress(plan=[""] * len(plan), executed_steps=[ExecutedStep(step="", result="")] * len(done))
    if size(without_texts) + 2 <= room:
        assert (len(kept["plan"]), len(kept["executed_steps"])) == (len(plan), len(done))


def test_the_longest_texts_as_json_are_cut_and_the_others_stay_whole() -> None:
    executed = [ExecutedStep(step="s1", result="\x01" * 300), ExecutedStep(step="s2", result="r" * 400)]
    kept = Progress(objective="o", plan=["s3"], executed=executed).to_session_state(1_500)
    assert kept["executed_steps"][1] == executed[1]
    assert kept["plan"] == ["s3"]
    cut = kept["executed_steps"][0]["result"]
    assert cut.startswith("\x01" * 70)
    assert cut.endswith("\x01" * 70)
    assert "[...]" in cut


def test_where_there_is_no_room_the_first_steps_that_were_done_are_left_out_and_then_the_last_of_the_plan() -> None:
    progress = Progress(
        objective="o", plan=["a" * 9, "b" * 9], executed=[ExecutedStep(step="s" * 9, result="r" * 9)] * 3
    )
    assert progress.to_session_state(40) == {"plan": ["", ""], "executed_steps": [{"step": "", "result": ""}]}
    assert progress.to_session_state(8) == {"plan": [""], "executed_steps": []}
    assert progress.to_session_state(EMPTY_BYTES) == {"plan": [], "executed_steps": []}
