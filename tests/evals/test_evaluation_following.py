"""How streams follow an evaluation: which events they show, without trees, with heartbeats, and until when."""

import asyncio
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio

from bough.v1 import follow_pb2
from tests.evals.job_server import ARRIVED, GATES, begin, case, check_log, eval_set, evaluated, many, watch
from tests.evals.test_judges import broken, judge, judged_by, set_of
from tests.evals.test_judges import case as judged_case
from tests.rpc.run_server import Served

CURRENT = follow_pb2.WATCH_UNTIL_CURRENT
SCORED, TOTALED, COMPLETED = "case_trial_scored", "evaluation_totaled", "evaluation_completed"


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["evaluation.trial.scored"], [SCORED, SCORED, TOTALED, COMPLETED]),
        (["case_trial_scored", "evaluation.completed"], [SCORED, SCORED, TOTALED, COMPLETED]),
        (
            ["evaluation.case.*", "evaluation_totaled"],
            ["case_planned", "case_planned", TOTALED, COMPLETED],
        ),
        (["evaluation.cancel_requested"], [TOTALED, COMPLETED]),
    ],
)
async def test_a_stream_has_the_events_that_it_asks_for_and_those_of_the_end(
    server: Served, names: list[str], kinds: list[str]
) -> None:
    log = await begin(server, eval_set(*many(2)), follow={"event_names": names}).to_the_end()
    whole = await watch(server, log.evaluation_id).to_the_end()
    again = await watch(server, log.evaluation_id, follow={"event_names": names}).to_the_end()
    check_log(whole.events)
    assert log.kinds == kinds
    assert log.events == again.events == [event for event in whole.events if event in log.events]
    assert log.through == again.through == len(whole.events)


async def test_a_name_that_no_event_has_is_refused_with_the_nearest_one_before_anything_is_written(
    server: Served,
) -> None:
    log = await evaluated(server, eval_set(*many(1)))
    follow = {"event_names": ["evaluation.*", "evaluation.trial.scord", "agent.run.completed"]}
    for call in (begin(server, eval_set(*many(1)), follow=follow), watch(server, log.evaluation_id, follow=follow)):
        with pytest.raises(aio.AioRpcError) as refused:
            await call.to_the_end()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        first, second = broken(refused.value)
        assert first == (
            "follow.event_names[1]",
            "There is no event 'evaluation.trial.scord'. Did you mean 'evaluation.trial.scored'?",
        )
        assert second[0] == "follow.event_names[2]"


async def test_without_trees_a_result_keeps_its_verdict_and_scores(tmp_path: Path) -> None:
    metrics = [judge("It is polite.")]
    made = set_of(judged_case("Hello"), metrics=metrics)
    made.cases[0].turns[0].expect.agents.add(name="lead")
    async with judged_by(tmp_path, lambda *_: True) as (server, _):
        log = await begin(server, made, follow={"without_trees": True}).to_the_end()
        whole = await watch(server, log.evaluation_id).to_the_end()
    shown, kept = (one.result("Hello") for one in (log, whole))
    assert kept.turns[0].agents
    assert kept.turns[0].answer
    tree, polite = (kept.scores[1], kept.scores[0]) if kept.scores[0].judgments else kept.scores
    assert tree.tree_comparisons
    assert polite.judgments
    turn = kept.turns[0]
    turn.truncated = True
    for message, names in ((turn, ("agents", "answer")), (tree, ("tree_comparisons",)), (polite, ("judgments",))):
        for name in names:
            message.ClearField(name)
    assert shown == kept
    assert log.kinds == whole.kinds


async def test_a_stream_until_now_ends_with_what_the_log_has(server: Served) -> None:
    made = eval_set(*many(1, "now"), case("last", "until now"), agent="gated")
    GATES["now"].set()
    first = await begin(server, made, request_id="same", max_concurrency=1).until(SCORED)
    await asyncio.wait_for(ARRIVED["until now"].wait(), 30)
    again = await begin(server, made, request_id="same", max_concurrency=1, follow={"until": CURRENT}).to_the_end()
    rest = await watch(
        server, first.evaluation_id, after_sequence=again.through, follow={"until": CURRENT}
    ).to_the_end()
    GATES["until now"].set()
    await first.to_the_end()
    ended = await watch(server, first.evaluation_id, follow={"until": CURRENT}).to_the_end()
    assert again.kinds == [
        *("evaluation_planned", "case_planned", "case_planned"),
        *("case_trial_started", "case_trial_ended", SCORED),
        "case_trial_started",
    ]
    assert again.events == first.events[: again.through]
    assert rest.events == []
    assert ended.events == first.events


async def test_an_evaluation_is_never_interrupted_so_no_stream_waits_for_that(server: Served) -> None:
    for until in (follow_pb2.WATCH_UNTIL_INTERRUPTED, 99):
        with pytest.raises(aio.AioRpcError) as refused:
            await evaluated(server, eval_set(*many(1)), follow={"until": until})
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert [field for field, _ in broken(refused.value)] == ["follow.until"]


async def test_a_quiet_stream_has_heartbeats(server: Served) -> None:
    request = eval_set(case("one", "quiet", answers=["quiet"]), agent="gated")
    log = begin(server, request, follow={"heartbeat_interval": Duration(nanos=100_000_000)})
    await log.until("case_trial_started")
    await log.heartbeat()
    GATES["quiet"].set()
    await log.to_the_end()
    check_log(log.events)
