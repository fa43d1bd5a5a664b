"""Random graphs of any shape and kind of node, for the suite of all prefixes; it runs nothing."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from hypothesis import strategies as st

from bough.v1 import input_pb2
from bough_server.agents.graph.function import node
from bough_server.functions import Function, Snapshot, router
from bough_server.runtime.agent import Context
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import failing, looking, said
from tests.support.graphs import graph
from tests.support.teams import llm

KINDS = ("counted", "work", "agent", "tool", "ask", "none", "fails", "items")


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A graph: its nodes by kind, what leads to each, and how it runs."""

    kinds: tuple[str, ...]
    before: tuple[tuple[int, ...], ...]
    """The nodes before each, which have lower numbers; none is START."""
    joins: tuple[bool, ...]
    is_dag: bool
    most: int
    waits_for_all: bool
    back: int | None
    """The node that the last one leads back to twice; None for no cycle."""
    aborts: bool
    is_cancelled: bool

    def name(self, number: int) -> str:
        """The name of a node, which gives it a place in merge order that its number does not."""
        kind = self.kinds[number]
        return f"counted{number}" if kind == "counted" else f"{'zyxwvuts'[number % 8]}{number}"

    @property
    def is_certain(self) -> bool:
        """Whether all of it runs whatever ends first: nothing aborts it."""
        return not (self.aborts and "agent" in self.kinds)

    @property
    def asks(self) -> bool:
        """Whether it waits for answers."""
        return "ask" in self.kinds or "work" in self.kinds


@st.composite
def graph_plans(draw: st.DrawFn) -> GraphPlan:
    """Draw a graph of two to six nodes."""
    count = draw(st.integers(2, 6))
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count)))
    before = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        for number in range(count)
    )
    is_dag = draw(st.booleans())
    return GraphPlan(
        kinds=kinds,
        before=before,
        joins=tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        is_dag=is_dag,
        most=draw(st.sampled_from([1, 2, 3, 16])),
        waits_for_all=draw(st.booleans()),
        back=None if is_dag else draw(st.none() | st.integers(0, count - 1)),
        aborts=draw(st.integers(0, 4)) == 0,
        is_cancelled=draw(st.integers(0, 5)) == 0,
    )


def scenario_of(plan: GraphPlan) -> Scenario:
    """The run of a random graph."""
    return Scenario(
        name="random graph",
        turns={"helper": [failing()] if plan.aborts else [said("I help.")]},
        team=lambda world: Team(
            definitions=[graph(json.dumps(_definition(plan))), llm("helper")],
            tools=[looking(world)],
            functions=_functions(world, plan),
        ),
        answer=lambda request: input_pb2.InputAnswer(value_json=json.dumps(f"to {request.prompt}")),
        cancelled_at="its questions" if plan.is_cancelled and plan.asks else "",
    )


def _definition(plan: GraphPlan) -> dict[str, Any]:
    names = [plan.name(number) for number in range(len(plan.kinds))]
    leading = {before for each in plan.before for before in each}
    last = names[-1]
    edges = [
        [names[before] if before is not None else "START", names[number]]
        for number, each in enumerate(plan.before)
        for before in (each or (None,))
    ]
    edges += [[name, "END"] for number, name in enumerate(names[:-1]) if number not in leading]
    nodes = [_node(plan, number, names) for number in range(len(names))]
    body: dict[str, Any] = {
        "mode": "DAG" if plan.is_dag else "PREGEL",
        "max_concurrency": plan.most,
        "nodes": [*nodes, {"name": "caught"}],
        "edges": [*edges, ["caught", "END"]],
        "branches": [],
        "output": {name: f"{name}?" for name in [*names, "caught"]},
    }
    if not plan.is_dag:
        body["channels"] = [{"name": "log", "reducer": "APPEND"}]
        body["end_join"] = "ALL" if plan.waits_for_all else "ANY"
        body["max_supersteps"] = 40
    # What has an error target leads to it; it is reached in any case.
    body["branches"].append({"source": "START", "path": "", "cases": {"never": "caught"}, "otherwise": names[0]})
    if plan.back is not None:
        body["branches"].append({"source": last, "function": "twice", "targets": ["END", names[plan.back]]})
        body["output"]["log"] = "channels.log"
    else:
        body["edges"].append([last, "END"])
    link = {"agent": "helper", "history": {"scope": "NONE"}, **({"on_failure": "ABORT"} if plan.aborts else {})}
    return {"name": "lead", "graph": body, "sub_agents": [link]}


def _node(plan: GraphPlan, number: int, names: Sequence[str]) -> dict[str, Any]:
    kind, name = plan.kinds[number], names[number]
    node: dict[str, Any] = {"name": name, "input": {"n": {"value": number}}}
    node["input"] |= {names[before]: f"{names[before]}?" for before in plan.before[number]}
    match kind:
        case "counted" | "work" | "fails":
            node |= {"function": kind}
        case "agent":
            node |= {"agent": "helper", "input": [{"value": name}]}
        case "tool":
            node |= {"tool": "look", "input": {"what": {"value": name}}}
        case "ask":
            node |= {"ask": {"prompt": f"Of {name}?"}}
        case "items":
            node |= {"function": "work", "map": True, "input": [{"value": [f"{name}{item}" for item in range(3)]}]}
    if kind == "fails":
        node["error_target"] = "caught"
    if not plan.is_dag:
        node["writes"] = [{"channel": "log"}]
        if plan.joins[number] and (plan.before[number] or plan.back == number):
            node["join"] = "ALL"
    return node


def _functions(world: World, plan: GraphPlan) -> list[Function]:
    @node
    async def counted(value: Any) -> str:
        world.call(f"node counted{value['n']}")
        await _take_a_while(value)
        return _digest(value)

    @node
    async def work(ctx: Context, value: Any) -> str:
        ctx.state[f"of_{crc32(json.dumps(value).encode()) % 97}"] = 1

        async def think() -> str:
            await _take_a_while(value)
            name = f"think {_digest(value)}"
            world.call(f"step {name}")
            return name

        ctx.state["shared"] = await ctx.step(f"think {_digest(value)}", think)
        return f"{_digest(value)} {await ctx.ask(f'What of {_digest(value)}?')}"

    @node
    def fails(value: Any) -> Any:
        raise ValueError("no")

    @router
    def twice(output: Any, snapshot: Snapshot) -> str:
        return "END" if snapshot.visit == 2 or plan.back is None else plan.name(plan.back)

    return [counted, work, fails, twice]


async def _take_a_while(value: Any) -> None:
    """Yield some times, so that what begins first need not end first."""
    for _ in range(crc32(json.dumps(value).encode()) % 7):
        await asyncio.sleep(0)


def _digest(value: Any) -> str:
    return f"{crc32(json.dumps(value, sort_keys=True).encode()):08x}"
