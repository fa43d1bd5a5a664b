"""The final_response metric: the answer of a run, or of one of its agents, compared with the expected one."""

from collections.abc import Sequence

from bough.v1 import eval_result_pb2, eval_set_pb2, invocation_pb2, message_pb2
from bough_server.evals.metrics.turn import Turn, TurnScore, mean_score, no_turn_score, score_difference
from bough_server.matching.values import answer_mismatch
from bough_server.messages import text_of


def score(
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]
) -> eval_result_pb2.MetricScore | None:
    """Return the mean over the turns with an expected answer; None if there are none.

    If the metric has an expected answer, only the last turn is judged, by that.
    """
    wanted = metric.final_response
    if wanted.HasField("answer"):
        expected = {turn.index: (wanted.answer, turn) for turn in turns[-1:]}
    else:
        expected = {
            turn.index: (turn.expect.answer, turn)
            for turn in turns
            if turn.expect is not None and turn.expect.HasField("answer")
        }
    scores = {index: _turn_score(answer, turn, wanted.agent) for index, (answer, turn) in expected.items()}
    return mean_score(metric, case, scores)


def _turn_score(expected: eval_set_pb2.ExpectedAnswer, turn: Turn, agent: str) -> TurnScore:
    said = last_answer(turn.invocation, agent)
    if said is None:
        return score_difference(f"{agent} did not answer" if agent else "there is no answer")
    if any(part.truncated for part in said.parts):
        return no_turn_score("The answer was cut in the record, so it cannot be compared.")
    return score_difference(answer_mismatch(expected, text_of(said)))


def last_answer(invocation: invocation_pb2.Invocation, agent: str) -> message_pb2.Message | None:
    """Return the answer of a run, or with a name the answer of that agent which came last; None if there is none."""
    if not agent:
        return invocation.final_response if invocation.HasField("final_response") else None
    answers = [each for each in invocation.agents if each.name == agent and each.HasField("output")]
    if not answers:
        return None
    # Of several that ended at the same time, or do not say when, the last one of the preorder.
    ends = [(each.end_time.seconds, each.end_time.nanos, index) for index, each in enumerate(answers)]
    return answers[max(ends)[-1]].output
