"""The final_response and budget metrics."""

import pytest
from google.protobuf import duration_pb2

from bough.v1.eval_result_pb2 import (
    VERDICT_FAILED,
    VERDICT_NOT_EVALUATED,
    VERDICT_PASSED,
    MetricScore,
)
from bough.v1.eval_set_pb2 import BudgetMetric, EvalExpectation, EvalMetric, ExpectedAnswer, FinalResponseMetric
from bough.v1.execution_pb2 import INVOCATION_TRIGGER_TRANSFER
from bough.v1.invocation_pb2 import Invocation
from bough.v1.policy_pb2 import Limits
from bough.v1.usage_pb2 import Usage
from bough_server.evals.metrics import budget, final_response
from tests.evals.records import FAILED, case_of, did, node, record, turns_of

YES = EvalExpectation(answer=ExpectedAnswer(exact="Yes."))


def answered(metric: FinalResponseMetric, *pairs: tuple[EvalExpectation | None, Invocation]) -> MetricScore | None:
    case = case_of(*(expect for expect, _ in pairs))
    return final_response.score(EvalMetric(final_response=metric), case, turns_of(case, *(run for _, run in pairs)))


def spent(
    *runs: Invocation, agent: str = "", errors: int | None = None, **bounds: int
) -> tuple[float | None, int, str]:
    limits = Limits(**bounds)  # type: ignore[arg-type]
    metric = EvalMetric(budget=BudgetMetric(agent=agent, limits=limits, errors=errors))
    return outcome(metric, *runs)


def outcome(metric: EvalMetric, *runs: Invocation) -> tuple[float | None, int, str]:
    case = case_of(*[None] * len(runs), metrics=[metric])
    found = budget.score(metric, case, turns_of(case, *runs))
    assert found is not None
    return (found.score if found.HasField("score") else None), found.verdict, found.reason


def test_the_answer_of_each_turn_is_compared_and_turns_without_expectation_are_not() -> None:
    found = answered(
        FinalResponseMetric(), (YES, record(answer="Yes.")), (None, record(answer="No.")), (YES, record(answer="No."))
    )
    assert found is not None
    assert (found.name, found.verdict, found.score) == ("final_response", VERDICT_FAILED, 0.5)
    assert found.reason == 'turns[2]: the answer is "No.", expected "Yes.".'
    assert answered(FinalResponseMetric(), (EvalExpectation(), record()), (None, record())) is None


def test_an_answer_in_the_metric_is_expected_of_the_last_turn_alone() -> None:
    own = FinalResponseMetric(answer=ExpectedAnswer(exact="Two."))
    found = answered(own, (YES, record(answer="One.")), (None, record(answer="Two.")))
    assert found is not None
    assert (found.verdict, found.score, found.reason) == (VERDICT_PASSED, 1, "")


def test_the_last_answer_of_an_agent_is_compared() -> None:
    agents = [
        node("lead"),
        node("writer", 1, "lead", seconds=(1, 9), answer="Yes."),
        node("writer", 1, "lead", seconds=(2, 5), answer="No."),
    ]
    found = answered(FinalResponseMetric(agent="writer"), (YES, record(agents=agents, answer="No.")))
    assert found is not None
    assert found.score == 1
    silent = answered(FinalResponseMetric(agent="critic"), (YES, record(agents=agents, answer="Yes.")))
    assert silent is not None
    assert (silent.score, silent.reason) == (0, "critic did not answer.")


def test_of_answers_whose_ends_are_not_known_the_last_one_is_compared() -> None:
    agents = [node("lead"), node("writer", 1, "lead", answer="No."), node("writer", 1, "lead", answer="Yes.")]
    found = answered(FinalResponseMetric(agent="writer"), (YES, record(agents=agents)))
    assert found is not None
    assert found.score == 1


def test_no_answer_differs_and_one_that_was_cut_is_not_compared() -> None:
    missing = answered(FinalResponseMetric(), (YES, record(answer=None)))
    assert missing is not None
    assert (missing.score, missing.reason) == (0, "there is no answer.")
    cut = record(answer="Yes.")
    cut.final_response.parts[0].truncated = True
    found = answered(FinalResponseMetric(), (YES, cut))
    assert found is not None
    assert (found.verdict, found.HasField("score")) == (VERDICT_NOT_EVALUATED, False)
    assert found.reason == "The answer was cut in the record, so it cannot be compared."


USED = Usage(
    input_tokens=90, output_tokens=10, model_calls=2, tool_calls=3, cost_nanos=500_000_000, currency_code="USD"
)


@pytest.mark.parametrize(
    ("name", "used", "words"),
    [
        ("model_calls", 4, "model calls: 4, at most 3"),
        ("tool_calls", 6, "tool calls: 6, at most 5"),
        ("tokens", 200, "tokens: 200, at most 199"),
        ("cost_nanos", 1_000_000_000, "cost: 1, at most 1"),
    ],
)
def test_what_all_turns_used_together_is_within_its_bound(name: str, used: int, words: str) -> None:
    runs = [record(usage=USED), record(usage=USED)]
    assert spent(*runs, **{name: used}) == (1, VERDICT_PASSED, "")
    assert spent(*runs, **{name: used - 1}) == (0, VERDICT_FAILED, f"It used too much: {words}.")


def test_the_time_of_turns_adds_up_and_depth_is_the_deepest() -> None:
    runs = [
        record(agents=[node("a"), node("b", 1, "a"), node("c", 2, "b")], seconds=(0, 2)),
        record(agents=[node("a")], seconds=(100, 103)),
    ]
    assert spent(*runs, depth=2) == (1, VERDICT_PASSED, "")
    assert spent(*runs, depth=1) == (0, VERDICT_FAILED, "It used too much: depth: 2, at most 1.")
    five, four = (Limits(wall_duration=duration_pb2.Duration(seconds=seconds)) for seconds in (5, 4))
    assert outcome(EvalMetric(budget=BudgetMetric(limits=five)), *runs)[0] == 1
    found = outcome(EvalMetric(budget=BudgetMetric(limits=four)), *runs)
    assert found == (0, VERDICT_FAILED, "It used too much: time: 5 s, at most 4 s.")


def test_transfers_and_failures_are_counted() -> None:
    agents = [node("a"), node("b", 1, "a"), node("c", 1, "a")]
    agents[1].trigger = agents[2].trigger = INVOCATION_TRIGGER_TRANSFER
    agents[2].state = FAILED
    calls = [did("search"), did("call_c"), did("search")]
    calls[1].state = calls[2].state = FAILED
    calls[1].child_invocation_id = "c"
    run = record(*calls, agents=agents)
    assert spent(run, transfers=2, errors=2) == (1, VERDICT_PASSED, "")
    words = "It used too much: transfers: 2, at most 1; errors: 2, at most 1."
    assert spent(run, transfers=1, errors=1) == (0, VERDICT_FAILED, words)
    assert spent(run, errors=1)[0] == 0


def test_an_agents_part_is_its_invocations_with_everything_below() -> None:
    agents = [node("a"), node("b", 1, "a", seconds=(0, 3)), node("c", 2, "b"), node("b", 3, "c"), node("d", 1, "a")]
    agents[3].invocation_id = "b2"
    agents[0].tree_usage.CopyFrom(Usage(tool_calls=100))
    agents[1].tree_usage.CopyFrom(Usage(tool_calls=5))
    agents[3].tree_usage.CopyFrom(Usage(tool_calls=2))
    agents[4].state, agents[2].state = FAILED, FAILED
    agents[2].trigger, agents[2].from_invocation_id = INVOCATION_TRIGGER_TRANSFER, "b"
    agents[4].trigger, agents[4].from_invocation_id = INVOCATION_TRIGGER_TRANSFER, "a"
    inside, outside = did("x"), did("y")
    inside.state = outside.state = FAILED
    inside.invocation_id, outside.invocation_id = "b2", "d"
    run = record(inside, outside, agents=agents, usage=USED)
    assert spent(run, agent="b", tool_calls=5, depth=2, transfers=1, errors=2)[0] == 1
    words = "tool calls: 5, at most 4; depth: 2, at most 1; transfers: 1, at most 0; errors: 2, at most 1."
    assert spent(run, agent="b", tool_calls=4, depth=1, transfers=0, errors=1)[2] == f"It used too much: {words}"
    assert spent(run, agent="critic", tool_calls=0, tokens=0, depth=0)[0] == 1
    three = Limits(wall_duration=duration_pb2.Duration(seconds=3))
    assert outcome(EvalMetric(budget=BudgetMetric(agent="b", limits=three)), run)[0] == 1


@pytest.mark.parametrize(
    ("used", "name", "words"),
    [
        (Usage(model_calls=1), "tokens", "tokens"),
        (Usage(model_calls=2, model_calls_without_usage=1, input_tokens=1, output_tokens=1), "tokens", "tokens"),
        (Usage(model_calls=1, input_tokens=5), "tokens", "tokens"),
        (Usage(model_calls=1, input_tokens=5, output_tokens=5), "cost_nanos", "cost"),
        (None, "model_calls", "model calls"),
    ],
)
def test_something_unknown_under_a_bound_is_not_scored(used: Usage | None, name: str, words: str) -> None:
    run = record(usage=used)
    reason = f"It is not known how much was used: {words}."
    assert spent(run, record(usage=USED), **{name: 10**9}) == (None, VERDICT_NOT_EVALUATED, reason)
    assert spent(run, transfers=0) == (1, VERDICT_PASSED, "")


def test_a_cost_is_not_known_if_one_of_the_agents_has_a_model_without_a_price() -> None:
    agents = [node("a"), node("b", 1, "a")]
    agents[0].usage.CopyFrom(Usage(model_calls=1, cost_nanos=5, currency_code="USD"))
    agents[1].usage.CopyFrom(Usage(model_calls=1, input_tokens=1_000_000, output_tokens=1))
    for agent in agents:
        agent.tree_usage.CopyFrom(USED)
    run = record(agents=agents, usage=USED)
    words = "It is not known how much was used: cost."
    assert spent(run, cost_nanos=10**12) == (None, VERDICT_NOT_EVALUATED, words)
    assert spent(run, agent="a", cost_nanos=10**12)[2] == words
    assert spent(run, cost_nanos=1)[1] == VERDICT_FAILED
    agents[1].usage.ClearField("model_calls")
    assert spent(record(agents=agents, usage=USED), cost_nanos=10**12)[1] == VERDICT_PASSED


def test_a_cost_is_not_known_if_an_agent_called_a_model_without_a_price_beside_one_with_a_price() -> None:
    mixed = Usage(model_calls=2, model_calls_without_cost=1, cost_nanos=5, currency_code="USD")
    words = "It is not known how much was used: cost."
    assert spent(record(usage=mixed), cost_nanos=10**12) == (None, VERDICT_NOT_EVALUATED, words)


def test_costs_in_two_currencies_have_no_sum() -> None:
    euros = Usage(model_calls=1, cost_nanos=1, currency_code="EUR")
    assert spent(record(usage=USED), record(usage=euros), cost_nanos=10**12)[1] == VERDICT_NOT_EVALUATED


def test_a_known_part_that_exceeds_a_bound_fails() -> None:
    used = Usage(model_calls=2, model_calls_without_usage=1, total_tokens=50)
    assert spent(record(usage=used), tokens=49) == (
        0,
        VERDICT_FAILED,
        "It used too much: tokens: 50, at most 49.",
    )
    assert spent(record(usage=used), tokens=50)[1] == VERDICT_NOT_EVALUATED
    assert spent(record(usage=used), tokens=50, model_calls=1)[1] == VERDICT_FAILED


def test_a_run_without_model_calls_used_no_tokens() -> None:
    assert spent(record(usage=Usage()), tokens=0, cost_nanos=0) == (1, VERDICT_PASSED, "")


def test_a_provider_that_reports_the_sum_alone_is_enough() -> None:
    assert spent(record(usage=Usage(model_calls=1, total_tokens=7)), tokens=7)[0] == 1


def test_the_shared_beginning_of_a_fork_is_not_charged() -> None:
    run = record(usage=USED)
    run.inherited_usage.CopyFrom(Usage(input_tokens=80, output_tokens=5, model_calls=1, tool_calls=3))
    assert spent(run, tokens=15, model_calls=1, tool_calls=0) == (1, VERDICT_PASSED, "")


def test_a_time_that_is_not_known_is_not_scored() -> None:
    run = record()
    run.ClearField("end_time")
    limits = Limits(wall_duration=duration_pb2.Duration(seconds=5))
    found = outcome(EvalMetric(budget=BudgetMetric(limits=limits)), run)
    assert found == (None, VERDICT_NOT_EVALUATED, "It is not known how much was used: time.")
