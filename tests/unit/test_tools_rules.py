"""What an author may ask of a tool beside what it does: approval, where it runs, recovery, and time for an answer."""

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bough_server.models.model import ToolSpec
from bough_server.tools.execution import needs_approval
from bough_server.tools.tool import Tool, ToolContext, spec, tool


def refund(order: str, amount: int = 0) -> str:
    """Gives money back."""
    return f"{order}: {amount}"


async def refund_later(order: str) -> str:
    """Gives money back."""
    return order


def counted(order: str) -> Iterator[str]:
    """Counts."""
    yield order


async def counted_later(order: str) -> AsyncIterator[str]:
    """Counts."""
    yield order


def asking(order: str, ctx: ToolContext) -> str:
    """Asks who."""
    return order + ctx.agent


def is_large(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["amount"] > 100)


async def is_large_later(arguments: Mapping[str, Any]) -> bool:
    return is_large(arguments)


def rules_of(made: Tool) -> tuple[object, ...]:
    return (made.approval, made.is_client_side, made.on_recovery, made.answer_within)


def test_a_tool_that_asks_for_nothing_runs_here_unasked_and_again_after_a_crash() -> None:
    assert rules_of(tool(refund)) == (False, False, "retry", None)


def test_what_an_author_asks_for_is_what_the_tool_says() -> None:
    made = tool(approval=is_large, on_recovery="ask", answer_within=3_600)(refund)
    assert rules_of(made) == (is_large, False, "ask", 3_600)
    assert rules_of(tool(approval=True, on_recovery="fail")(refund)) == (True, False, "fail", None)


@pytest.mark.parametrize("function", [refund, refund_later])
def test_a_tool_of_the_client_is_sync_or_async_and_may_need_approval_too(function: Callable[..., Any]) -> None:
    made = tool(name="refund", execution="client", approval=True, answer_within=0.5)(function)
    assert rules_of(made) == (True, True, "retry", 0.5)
    assert spec(made) == ToolSpec(
        name="refund", description="Gives money back.", input_schema_json=made.input_schema_json
    )


def test_a_body_of_three_dots_is_enough_in_the_client() -> None:
    @tool(execution="client", description="Reads the card.")
    def read_card() -> None: ...

    assert (read_card.description, read_card.is_client_side) == ("Reads the card.", True)


def test_the_digest_tells_where_a_tool_runs_and_nothing_else_of_its_rules() -> None:
    here = tool(refund)
    asked = tool(approval=True, on_recovery="fail", answer_within=1, timeout=1)(refund)
    there = tool(execution="client")(refund)
    told = "\0".join((here.name, here.description, here.input_schema_json, "client"))
    assert (asked.digest, there.digest) == (here.digest, hashlib.sha256(told.encode()).hexdigest())
    assert spec(here) == spec(asked) == spec(there)


@pytest.mark.parametrize(
    ("function", "rules", "words"),
    [
        (refund, {"approval": "always"}, "must be True, False, or a function that takes the call's arguments"),
        (refund, {"approval": None}, "not None."),
        (refund, {"approval": 1}, "not 1."),
        (refund, {"approval": is_large_later}, "must be a plain function"),
        (refund, {"approval": counted_later}, "must be a plain function"),
        (refund, {"approval": lambda: True}, "must take one argument: the call's arguments"),
        (
            refund,
            {"execution": "browser"},
            "The execution of tool 'refund' must be 'server' or 'client', not 'browser'.",
        ),
        (refund, {"on_recovery": "again"}, "must be 'retry' or 'fail' or 'ask', not 'again'."),
        (refund, {"answer_within": 0}, "must be a positive number of seconds, at most 3650 days"),
        (refund, {"answer_within": -1.5}, "None waits forever"),
        (refund, {"answer_within": float("nan")}, "None waits forever"),
        (refund, {"answer_within": float("inf")}, "None waits forever"),
        (refund, {"answer_within": 10**400}, "None waits forever"),
        (refund, {"answer_within": "1h"}, "None waits forever"),
        (refund, {"answer_within": True}, "None waits forever"),
        (counted, {"execution": "client"}, "cannot stream"),
        (counted_later, {"execution": "client"}, "cannot stream"),
        (refund, {"execution": "client", "on_recovery": "fail"}, "remove on_recovery"),
        (refund, {"execution": "client", "timeout": 5}, "use answer_within instead"),
        (asking, {"execution": "client"}, "there is no ToolContext: remove the parameter"),
    ],
)
def test_rules_that_do_not_fit_are_refused_with_what_to_change(
    function: Callable[..., Any], rules: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError) as refused:
        tool(**rules)(function)
    assert words in str(refused.value)
    assert repr(function.__name__) in str(refused.value)


@pytest.mark.parametrize("approval", [True, False])
def test_all_calls_need_approval_or_none_does(approval: bool) -> None:
    assert needs_approval(tool(approval=approval)(refund), {"order": "a"}) is approval


@given(st.integers())
def test_a_predicate_decides_by_the_calls_arguments(amount: int) -> None:
    assert needs_approval(tool(approval=is_large)(refund), {"order": "a", "amount": amount}) is (amount > 100)


def raising(arguments: Mapping[str, Any]) -> bool:
    raise SystemExit(str(arguments))


def not_awaited(arguments: Mapping[str, Any]) -> Any:
    return is_large_later(arguments)


@pytest.mark.parametrize(
    "approval", [is_large, raising, not_awaited, lambda _: None, lambda _: 0, lambda _: "", lambda given: given["x"]]
)
def test_a_predicate_that_cannot_say_no_is_taken_for_a_yes_and_logged(approval: Any) -> None:
    guarded = tool(approval=approval)(refund)
    with capture_logs() as logged:
        assert needs_approval(guarded, {"order": "a"})
    assert [(each["log_level"], each["tool"]) for each in logged] == [("warning", "refund")]


def test_what_a_predicate_does_to_the_arguments_is_lost() -> None:
    def greedy(arguments: Mapping[str, Any]) -> bool:
        arguments["items"].clear()
        return False

    arguments = {"items": [{"amount": 1}]}
    assert not needs_approval(tool(approval=greedy)(refund), arguments)
    assert arguments == {"items": [{"amount": 1}]}
