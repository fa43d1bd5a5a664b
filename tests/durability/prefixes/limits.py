"""Runs whose tokens, cost or places are bounded, so that a count that a crash changes would end them elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from bough.v1 import policy_pb2
from tests.durability.prefixes.scenario import Scenario, Team
from tests.durability.prefixes.scenario_tools import asks, looking, said
from tests.support.teams import call, calls, llm

_USED: Final = {"usage": {"input_tokens": 700, "output_tokens": 300}}
_LOST: Final = {"reason": "TRANSPORT", "after_chunks": 1, "times": 1, "usage": {"input_tokens": 90, "output_tokens": 0}}


def _bounded(name: str, turns: Mapping[str, Sequence[object]], **limits: Any) -> Scenario:
    return Scenario(
        name=name,
        turns=turns,
        team=lambda world: Team(
            definitions=[llm("lead", links=["a", "b"], tools=["look"]), llm("a", tools=["look"]), llm("b")],
            tools=[looking(world)],
        ),
        policy=policy_pb2.RunPolicy(limits=policy_pb2.Limits(**limits)),
    )


SPENT: Final = _bounded(
    "bounded tokens, reported and lost",
    {
        "lead": [
            calls(call("call_a", message="go"), text="Ask a.", **_USED, error=_LOST),
            calls(call("look", what="bark"), text="One more.", **_USED),
            {"text": "never", **_USED},
        ],
        "a": [calls(call("look", what="leaf"), **_USED), {"text": "The leaf is red.", **_USED}],
    },
    tokens=4_260,
)
"""Four calls and what was lost are 4,090 tokens."""

UNSAID: Final = _bounded(
    "bounded cost that no provider reports",
    {
        "lead": [calls(call("call_a", message="go")), calls(call("look", what="bark")), {"text": "never"}],
        "a": [calls(call("look", what="leaf")), {"text": "The leaf is red."}],
    },
    cost_nanos=400_000,
)

ONE_AT_A_TIME: Final = _bounded(
    "one call at a time",
    {
        "lead": [
            asks(call("call_a", message="go"), call("look", what="root"), call("call_b", message="go")),
            said("All is red."),
        ],
        "a": [asks(call("look", what="leaf"), call("look", what="bark")), said("The leaf is red.")],
        "b": [said("I know nothing.")],
    },
    concurrency=1,
)
