"""Runs of graphs for the suite that holds of all kinds of agents; it judges nothing."""

import json
from typing import Any, Final

from bough.v1 import input_pb2
from bough_server.agents.graph.function import node
from bough_server.functions import NodeFunction, Snapshot, Update, handler, reducer, router
from bough_server.runtime.agent import Context
from tests.durability.prefixes.scenario import Scenario, Team, World
from tests.durability.prefixes.scenario_tools import asks, failing, looking, meeting, said, waiting
from tests.support.graphs import graph
from tests.support.teams import call, llm


def _counting(world: World, name: str) -> NodeFunction:
    """A function that gives its input; its node has its name, which says that its calls are counted."""

    @node(name=name)
    async def give(value: Any) -> Any:
        world.call(f"node {name}")
        return value

    return give


@handler
def note(value: Any, snapshot: Snapshot) -> Update:
    """Notes who was visited, and when."""
    return Update(value, {"notes": [f"{snapshot.node} {snapshot.visit} {snapshot.superstep}"]})


@router
def by_notes(output: Any, snapshot: Snapshot) -> list[str]:
    """Ends after two rounds."""
    return ["END"] if len(snapshot.channels["notes"]) > 3 else ["search"]


@reducer
def longest(current: Any, update: Any) -> Any:
    """Keeps the longer of two texts."""
    return max([current or "", update], key=len)


PREGEL: Final = Scenario(
    name="graph",
    turns={
        "top": [asks(call("call_graph", message="go")), said("It came back.")],
        "archivist": [failing()],
        "writer": [asks(call("look", what="bark")), said("The draft.")],
        "graph": [{"when": "Judge", **said('{"verdict": "poor"}')}],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["graph"]),
            graph(
                """
                name: graph
                graph:
                  max_supersteps: 20
                  channels:
                    - {name: notes, schema: {type: array}, reducer: EXTEND}
                    - {name: best, reducer_function: longest}
                  nodes:
                    - {name: search, tool: look, input: {what: {value: leaf}}, after: note}
                    - {name: counted, function: counted, writes: [{channel: best}]}
                    - {name: archive, agent: archivist, input: START, error_target: draft}
                    - name: draft
                      agent: writer
                      join: ALL
                      input: {found: search, why: "archive?", best: channels.best}
                    - {name: review, model: {prompt: "Judge {{input}}"}, before: note,
                       output_schema: {type: object, required: [verdict], properties: {verdict: {type: string}}}}
                    - {name: pass}
                  edges: [[START, search, counted, draft, review], [START, archive, draft], [review, pass]]
                  branches: [{source: pass, function: by_notes, targets: [search, END]}]
                  output: {notes: channels.notes, best: channels.best, verdict: review.verdict}
                sub_agents: [archivist, writer]
                """
            ),
            llm("archivist"),
            llm("writer", tools=["look"]),
        ],
        tools=[looking(world)],
        functions=[_counting(world, "counted"), note, by_notes, longest],
    ),
    root="top",
)


def _working(world: World) -> NodeFunction:
    @node(name="work", tools=["look"])
    async def work(ctx: Context, value: str) -> dict[str, str]:
        async def count(inner: Context) -> str:
            async def think() -> str:
                world.call("step think")
                return "think"

            inner.state[f"by_{value}"] = 1
            return str(await inner.step("think", think))

        ctx.state["shared"] = value
        thoughts = await ctx.gather(count, count)
        seen = await ctx.call_tool("look", what=value)
        said = await ctx.dispatch("helper", f"About {value}.")
        answer = await ctx.ask(f"Is {value} right?", schema={"type": "boolean"})
        return {value: f"{thoughts[0]} {seen} {said.parts[0].text} {json.dumps(answer)}"}

    return work


def _answering(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    return input_pb2.InputAnswer(value_json=json.dumps("yes" if request.prompt.startswith("May") else True))


DAG: Final = Scenario(
    name="graph in DAG mode",
    turns={"helper": [said("I help.")]},
    team=lambda world: Team(
        definitions=[
            graph(
                """
                graph:
                  mode: DAG
                  max_concurrency: 2
                  nodes:
                    - {name: zeta, function: work, input: [{value: left}]}
                    - {name: alpha, function: work, input: [{value: right}]}
                    - {name: counted, function: counted}
                    - {name: check, ask: {prompt: "May {{input}} pass?"}, output_schema: {type: string}}
                    - {name: items, tool: look, map: true, input: [{value: [{what: leaf}, {what: bark}, {what: root}]}]}
                    - {name: failing, tool: look, input: {what: {value: nothing}}, error_target: caught}
                    - {name: caught}
                    - name: join
                      input: {checked: check, items: items, why: caught.reason, left: zeta, right: alpha}
                  edges:
                    - [START, zeta, join, END]
                    - [START, alpha, join]
                    - [START, counted, check, join]
                    - [START, items, join]
                    - [START, failing, join]
                    - [caught, join]
                sub_agents: [helper]
                """
            ),
            llm("helper"),
        ],
        tools=[looking(world)],
        functions=[_working(world), _counting(world, "counted")],
    ),
    answer=_answering,
)

REACT: Final = Scenario(
    name="graph of a model and its tools",
    turns={
        "graph": [
            asks(call("look", what="leaf"), call("look", what="bark"), text="Let me see."),
            asks(call("look", what="nothing")),
            said("All is red."),
        ],
    },
    team=lambda world: Team(
        definitions=[
            graph(
                """
                name: graph
                graph:
                  max_supersteps: 10
                  channels: [{name: talk, reducer: EXTEND}]
                  nodes:
                    - {name: think, model: {tools: [look]}, before: remember, after: keep}
                    - {name: act, tools: {tools: [look]}}
                    - {name: answer, input: [{path: think.parts.0.text}]}
                  edges: [[START, think], [act, think], [answer, END]]
                  branches: [{source: think, function: by_calls, targets: [act, answer]}]
                """
            )
        ],
        tools=[looking(world)],
        functions=[remember, keep, by_calls],
    ),
    root="graph",
)


@handler
def remember(value: Any, snapshot: Snapshot) -> Update:
    """Adds what came to the conversation, and gives all of it."""
    told = value if isinstance(value, list) else [{"role": "ROLE_USER", "parts": [{"text": value}]}]
    return Update([*snapshot.channels["talk"], *told], {"talk": told})


@handler
def keep(value: Any, snapshot: Snapshot) -> Update:
    """Adds what the model said."""
    return Update(value, {"talk": [value]})


@router
def by_calls(output: Any, snapshot: Snapshot) -> str:
    """Runs the calls, if there are any."""
    return "act" if any("toolCall" in part for part in output["parts"]) else "answer"


FAILS_FAST: Final = Scenario(
    name="graph that fails fast",
    turns={
        "top": [asks(call("call_lead", message="go")), said("They failed.")],
        "a": [asks(call("meet")), failing()],
        "b": [asks(call("wait")), said("never")],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            graph(
                """
                graph:
                  on_failure: FAIL_FAST
                  nodes:
                    - {name: first, agent: a}
                    - {name: second, agent: b}
                    - {name: never, function: counted}
                  edges: [[START, first, never, END], [START, second, never]]
                sub_agents: [a, b]
                """
            ),
            llm("a", tools=["meet"]),
            llm("b", tools=["wait"]),
        ],
        tools=[meeting(world), waiting(world)],
        functions=[_counting(world, "counted")],
    ),
    root="top",
)

NESTED: Final = Scenario(
    name="graph in a graph",
    turns={
        "top": [asks(call("call_lead", message="go")), said("They failed.")],
        "a": [asks(call("meet")), failing()],
        "b": [asks(call("wait")), said("never")],
        "c": [asks(call("look", what="leaf"), call("exit", final_answer="Enough."), text="I stop here.")],
    },
    team=lambda world: Team(
        definitions=[
            llm("top", links=["lead"]),
            graph(
                """
                graph:
                  nodes:
                    - {name: outer, agent: inner, error_target: rest}
                    - {name: rest, agent: c, input: [{value: go}]}
                  edges: [[START, outer, rest, END]]
                sub_agents: [inner, c]
                """
            ),
            graph(
                """
                name: inner
                graph:
                  nodes:
                    - {name: left, agent: a}
                    - {name: right, agent: b}
                  edges: [[START, left, END], [START, right, END]]
                sub_agents: [{agent: a, on_failure: ABORT}, b]
                """
            ),
            llm("a", tools=["meet"]),
            llm("b", tools=["wait"]),
            llm("c", tools=["look", "exit"]),
        ],
        tools=[meeting(world), waiting(world), looking(world)],
    ),
    root="top",
)

CANCELLED: Final = Scenario(
    name="graph that is cancelled",
    turns={
        "graph": [said("Judged.")],
        "a": [asks(call("look", what="leaf")), said("The leaf is red.")],
        "b": [asks(call("call_a", message="look"), call("wait")), said("never")],
    },
    team=lambda world: Team(
        definitions=[
            graph(
                """
                name: graph
                graph:
                  nodes:
                    - {name: first, model: {}}
                    - {name: items, agent: b, map: true, input: [{value: [one]}]}
                  edges: [[START, first, END], [START, items, END]]
                  end_join: ALL
                  output: items
                sub_agents: [b]
                """
            ),
            llm("a", tools=["look"]),
            llm("b", tools=["wait"], links=["a"]),
        ],
        tools=[waiting(world), looking(world)],
    ),
    cancelled_at="wait",
    root="graph",
)

GRAPH_KINDS: Final = (PREGEL, DAG, REACT, FAILS_FAST, NESTED, CANCELLED)
