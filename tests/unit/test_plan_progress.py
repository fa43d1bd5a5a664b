"""What is told on of a plan: whole where it is small, and never more than there is room for."""

import json

from hypothesis import given
from hypothesis import strategies as st

from bough_server.agents.progress import ROOM, ExecutedStep, Progress
from bough_server.errors import MAX_DETAILS_BYTES

TEXTS = st.one_of(st.text(max_size=20), st.text(max_size=9).map(lambda text: text * 9_000))


@given(st.lists(TEXTS, max_size=20), st.lists(st.tuples(TEXTS, TEXTS), max_size=40))
def test_what_is_kept_has_every_step_and_fits_the_room_and_an_errors_details(
    plan: list[str], done: list[tuple[str, str]]
) -> None:
    executed = [ExecutedStep(step=step, result=result) for step, result in done]
    progress = Progress(objective="o", plan=plan, executed=executed)
    kept = progress.kept()
    texts = [*kept["plan"], *(text for one in kept["executed_steps"] for text in (one["step"], one["result"]))]
    assert (len(kept["plan"]), len(kept["executed_steps"])) == (len(plan), len(done))
    assert sum(len(text.encode()) for text in texts) <= ROOM
    if sum(len(text.encode()) for text in (*plan, *(text for one in done for text in one))) <= ROOM:
        assert kept == {"plan": plan, "executed_steps": executed}
    details = progress.details()
    assert len(details.encode()) <= MAX_DETAILS_BYTES
    assert len(json.loads(details)["executed_steps"]) == len(done)


def test_a_step_that_is_done_is_no_longer_left() -> None:
    progress = Progress(objective="o", plan=["a", "b"])
    progress.did("done")
    assert progress.kept() == {"plan": ["b"], "executed_steps": [{"step": "a", "result": "done"}]}
    assert progress.facts("b") == {"plan": "1. b", "step": "b", "executed_steps": "1. a\n   Result: done"}
