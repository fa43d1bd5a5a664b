"""Random trees of scripted agents for properties: whom each calls, whether it fails, what its failure does."""

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from bough.v1 import agent_pb2, policy_pb2
from tests.support.teams import call, calls, llm

ABORT = policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT
CONTINUE = policy_pb2.SUB_AGENT_FAILURE_POLICY_CONTINUE


@dataclass(frozen=True, slots=True)
class Plan:
    """An agent of a random team: whether it fails in the end, what its failure does, and whom it calls how."""

    name: str
    fails: bool
    aborts: bool
    parallel: bool
    children: "tuple[Plan, ...]"

    def everybody(self) -> "Iterator[Plan]":
        """It and all below, in preorder."""
        yield self
        for child in self.children:
            yield from child.everybody()

    def is_certain(self) -> bool:
        """Whether its own calls are made whatever comes first: siblings of an abort may or may not have begun."""
        return not (self.parallel and any(child.aborts for child in self.children))


def plans(depth: int) -> "st.SearchStrategy[Plan]":
    """Plans without names, so many levels deep."""
    children = st.lists(plans(depth - 1), max_size=3) if depth else st.just([])
    flags = st.tuples(st.booleans(), st.booleans(), st.booleans())
    return st.builds(lambda told, below: Plan("", told[0] and told[1], told[1], told[2], tuple(below)), flags, children)


def named(plan: Plan, name: str = "n") -> Plan:
    """The same plan with a name for everybody."""
    children = tuple(named(child, f"{name}{place}") for place, child in enumerate(plan.children))
    return Plan(name, plan.fails, plan.aborts, plan.parallel, children)


def definition(plan: Plan) -> agent_pb2.AgentDefinition:
    """The agent of a plan."""
    links = [
        agent_pb2.AgentLink(agent=child.name, on_failure=ABORT if child.aborts else CONTINUE) for child in plan.children
    ]
    return llm(plan.name, links=links, parallel_tools=plan.parallel)


def turns(plan: Plan) -> list[object]:
    """What its model says."""
    used = {"usage": {"input_tokens": 3, "output_tokens": 1}}
    made = [calls(*(call(f"call_{child.name}", message="go") for child in plan.children), **used)]
    error = {"error": {"reason": "UNAVAILABLE", "after_chunks": 1, "usage": {"input_tokens": 2}}} if plan.fails else {}
    return [*(made if plan.children else []), {"text": f"{plan.name} is done", **used, **error}]
