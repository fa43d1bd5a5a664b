"""Bounds of a subtree: what they refuse, and what is reserved, spent and given back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import error_pb2, event_pb2, message_pb2, policy_pb2, usage_pb2
from bough_server.engine.limits import Allowance, Amount, Budget, estimate_amount, to_amount
from bough_server.errors import RunError
from bough_server.models.model import ModelRequest, Price
from tests.support.teams import Scripts, script


def run_of(**limits: int) -> Budget:
    return Budget(policy_pb2.Limits(**limits), owner="the run", place="`here`", depth=0)


def below(above: Budget, **limits: int) -> Budget:
    return Budget(policy_pb2.Limits(**limits), owner="a", place="`here`", depth=1, above=above)


def started(key: str, amount: Amount | None = None) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(effect_key=key)
    amount = amount or Amount()
    event.llm_started.reserved_tokens = amount.tokens
    event.llm_started.reserved_cost_nanos = amount.cost_nanos
    return event


def usage_of(**numbers: int) -> usage_pb2.Usage:
    usage = usage_pb2.Usage()
    for name, number in numbers.items():
        setattr(usage, name, number)
    return usage


def completed(key: str, **used: int) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(effect_key=key)
    event.llm_completed.response.usage.CopyFrom(usage_of(**used))
    return event


def failed(key: str, *, not_sent: bool = False, **lost: int) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(effect_key=key)
    event.llm_failed.not_sent = not_sent
    event.llm_failed.lost_usage.CopyFrom(usage_of(**lost))
    return event


def retrying(key: str, **lost: int) -> event_pb2.AgentEvent:
    event = event_pb2.AgentEvent(effect_key=key)
    event.llm_retrying.lost_usage.CopyFrom(usage_of(**lost))
    return event


def spent(budget: Budget) -> tuple[int, int]:
    assert (budget.allowances.tokens.reserved, budget.allowances.cost_nanos.reserved) == (0, 0), (
        "nothing stays reserved"
    )
    return budget.allowances.tokens.spent, budget.allowances.cost_nanos.spent


def test_a_budget_counts_for_every_budget_above() -> None:
    run = run_of(model_calls=3)
    child = below(run, model_calls=2)
    for key in ("s0.m", "s1.m"):
        child.check_model_call()
        child.observe(started(key))
    with pytest.raises(RunError, match="2 model calls for a"):
        child.check_model_call()
    run.check_model_call()
    run.observe(started("s2.m"))
    with pytest.raises(RunError, match="3 model calls for the run"):
        run.check_model_call()


def test_a_refused_reservation_takes_nothing() -> None:
    run = run_of(tool_calls=1)
    child = below(run, tool_calls=0)
    with pytest.raises(RunError):
        child.reserve_tool_call("s0.t0", "a", message_pb2.ToolCall(name="look"))
    run.reserve_tool_call("s0.t1", "r", message_pb2.ToolCall(name="look"))


def test_what_is_reserved_for_a_tool_is_given_back_until_the_tool_has_begun() -> None:
    run, look = run_of(tool_calls=1), message_pb2.ToolCall(name="look")
    child = below(run)
    for key in ("s0.t0", "s0.t0", "s0.t1"):
        child.reserve_tool_call(key, "a", look)
        child.release_tool_call(key, "a", look)
    assert (run.count_calls("a", "look"), child.is_counted("s0.t1")) == (0, False)
    begun = event_pb2.AgentEvent(effect_key="s0.t2", agent="a", tool_started=event_pb2.ToolStarted(call=look))
    child.observe(begun)
    child.observe(begun)
    child.release_tool_call("s0.t2", "a", look)
    child.reserve_tool_call("s0.t2", "a", look)
    assert run.count_calls("a", "look") == child.count_calls("a", "look") == 1
    assert child.is_counted("s0.t2")
    with pytest.raises(RunError, match="1 tool calls for the run"):
        run.reserve_tool_call("s0.t3", "r", look)


def test_a_depth_limit_counts_from_where_it_is_set() -> None:
    run = run_of(depth=3)
    child = below(run, depth=1)
    child.check_depth(2, ["a"])
    with pytest.raises(RunError):
        child.check_depth(3, ["a"])


def test_a_call_that_too_little_is_left_for_is_refused_with_the_bound_and_its_owner() -> None:
    run = run_of(tokens=100, cost_nanos=1_000)
    child = below(run, tokens=50)
    child.observe(started("s0.m", Amount(tokens=30)))
    with pytest.raises(RunError, match="limit of 50 tokens for a is reached: 20 are left, and the call may take 21"):
        child.check_spending(Amount(tokens=21))
    with pytest.raises(RunError, match="limit of 1000 billionths of cost for the run") as raised:
        child.check_spending(Amount(tokens=20, cost_nanos=1_001))
    assert raised.value.reason == error_pb2.ERROR_REASON_LIMIT_EXCEEDED
    child.check_spending(Amount(tokens=20, cost_nanos=1_000))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([completed("m", input_tokens=7, output_tokens=5, cost_nanos=3)], (12, 3)),
        ([completed("m", input_tokens=7, output_tokens=5)], (12, 0)),
        ([completed("m", total_tokens=12)], (12, 40)),
        ([completed("m")], (10, 40)),
        ([failed("m")], (10, 40)),
        ([failed("m", not_sent=True)], (0, 0)),
        ([failed("m", input_tokens=7, output_tokens=1, cost_nanos=2)], (8, 2)),
        ([retrying("m", input_tokens=7, output_tokens=1, cost_nanos=2), completed("m")], (18, 42)),
        ([retrying("m"), retrying("m"), failed("m")], (10, 40)),
        ([retrying("m", total_tokens=4), failed("m", not_sent=True)], (4, 0)),
    ],
)
def test_what_a_call_took_takes_the_place_of_what_it_reserved(
    events: Sequence[event_pb2.AgentEvent], expected: tuple[int, int]
) -> None:
    run = run_of(tokens=100)
    child = below(run, cost_nanos=100)
    child.observe(started("m", Amount(tokens=10, cost_nanos=40)))
    for event in events:
        child.observe(event)
    assert spent(child) == spent(run) == expected


def test_a_refused_call_takes_nothing() -> None:
    run = run_of(tokens=0)
    run.observe(failed("m"))
    assert spent(run) == (0, 0)


def test_an_estimate_is_the_request_and_the_most_that_may_be_written() -> None:
    model = Scripts(script(p=["hi"])).get("default")
    assert model.price == Price(input_per_million=1, output_per_million=2)
    request = ModelRequest(messages=(), instruction="x" * 40)
    assert estimate_amount(request, model) == Amount(tokens=10, cost_nanos=10_000, currency_code="USD")
    request.settings.max_output_tokens = 100
    assert estimate_amount(request, model) == Amount(tokens=110, cost_nanos=210_000, currency_code="USD")


def test_what_is_not_said_of_a_usage_counts_as_it_was_reserved() -> None:
    unknown = Amount(tokens=10, cost_nanos=40)
    assert to_amount(usage_pb2.Usage(), unknown=unknown) == unknown
    assert to_amount(usage_pb2.Usage(input_tokens=3), unknown=unknown) == Amount(tokens=3, cost_nanos=40)


@dataclass
class Tree:
    """Budgets of a run and what goes on in it."""

    budgets: list[Budget]
    open: dict[str, tuple[Budget, Amount]] = field(default_factory=dict)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    bound = st.one_of(st.none(), st.integers(0, 60))
    budgets: list[Budget] = []
    for number in range(draw(st.integers(1, 6))):
        limits = policy_pb2.Limits(tokens=draw(bound), cost_nanos=draw(bound))
        above = draw(st.sampled_from(budgets)) if budgets else None
        budgets.append(Budget(limits, owner=f"b{number}", place="`here`", depth=0, above=above))
    return Tree(budgets)


steps = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["reserve", "report", "say nothing", "not sent"]),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
    max_size=40,
)


@given(trees(), steps)
def test_reservations_alone_never_pass_a_bound(tree: Tree, done: list[tuple[int, str, int, int]]) -> None:
    """Whatever runs at once: as long as no answer is longer than it was estimated, no bound is passed."""
    for number, (place, what, tokens, cost) in enumerate(done):
        budget = tree.budgets[place % len(tree.budgets)]
        if what == "reserve":
            amount = Amount(tokens=tokens, cost_nanos=cost)
            try:
                budget.check_spending(amount)
            except RunError:
                continue
            budget.observe(started(str(number), amount))
            tree.open[str(number)] = budget, amount
        elif tree.open:
            key, (budget, held) = tree.open.popitem()
            used = {
                "input_tokens": min(tokens, held.tokens),
                "output_tokens": 0,
                "cost_nanos": min(cost, held.cost_nanos),
            }
            end = {
                "report": completed(key, **used),
                "say nothing": failed(key),
                "not sent": failed(key, not_sent=True),
            }
            budget.observe(end[what])
        for each in tree.budgets:
            for allowance in (each.allowances.tokens, each.allowances.cost_nanos):
                assert allowance.reserved >= 0
                assert allowance.limit is None or allowance.spent + allowance.reserved <= allowance.limit
    for key, (budget, _) in tree.open.items():
        budget.observe(failed(key, not_sent=True))
    for each in tree.budgets:
        spent(each)


def test_a_purse_without_a_limit_lacks_nothing() -> None:
    assert not Allowance(None).lacks(10**18)


def test_the_error_of_a_depth_names_where_it_is_set_and_the_path_that_led_there() -> None:
    budget = Budget(policy_pb2.Limits(depth=2), owner="the run", place="`limits.default` of bough.yaml", depth=0)
    budget.check_depth(2, ("lead", "clerk", "lead"))
    with pytest.raises(RunError) as short:
        budget.check_depth(3, ("lead", "clerk", "lead", "clerk"))
    assert short.value.message == (
        "The limit of a depth of 2 in the tree for the run is reached by lead -> clerk -> lead -> clerk. "
        "It is set by `limits.default` of bough.yaml."
    )
    with pytest.raises(RunError, match=r"by 0 -> 1 -> 2 -> 3 -> 4 -> \.\.\. -> 15 -> 16\. It is set by"):
        budget.check_depth(16, [str(number) for number in range(17)])
