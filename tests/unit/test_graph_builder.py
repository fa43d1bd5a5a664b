"""Graphs in Python: the same definition as in YAML, with the lines that declare its parts."""

from pathlib import Path
from textwrap import dedent

import pytest
from pydantic import BaseModel

from bough.v1 import agent_pb2, policy_pb2
from bough_server import Graph, Snapshot, handler, node, reducer, router
from bough_server.agents.graph.builder import Constant
from bough_server.agents.loading import load_python, source_problems
from bough_server.agents.validation import Known
from tests.support.graphs import graph
from tests.support.teams import llm


class Question(BaseModel):
    question: str


@router
def by_verdict(output: dict[str, str], snapshot: Snapshot) -> str:
    return "draft"


@reducer
def latest(current: object, update: object) -> object:
    return update


@handler
def trim(value: object, snapshot: Snapshot) -> object:
    return value


@node
def count(value: str) -> int:
    return len(value)


def build() -> Graph:
    made = Graph("article", description="Writes.", input=Question, max_supersteps=12, result="draft")
    made.channel("notes", list[str], reducer="EXTEND")
    made.channel("best", reducer=latest)
    made.tool("search", "web_search", input={"query": "START.question", "limit": Constant(3)}, writes={"notes": "hits"})
    made.agent("draft", "writer", join="ALL", input={"notes": "channels.notes"}, before=trim)
    made.function(count, input="draft")
    made.model("review", instruction="Judge.", output_type=Question)
    made.ask("sure", "Sure?", expires=60, default=True, output_type=bool)
    made.chain("START", "search", "draft", count, "review")
    made.edge("sure", "END")
    made.branch("review", by_verdict, targets=["draft", "sure"])
    made.branch("START", "question", cases={"": "sure"}, otherwise="search")
    return made


def test_a_graph_in_python_is_the_definition_that_yaml_is() -> None:
    question = '{"properties": {"question": {"type": "string"}}, "required": ["question"], "type": "object"}'
    written = graph(
        f"""
        name: article
        description: Writes.
        input_schema: {question}
        graph:
          mode: PREGEL
          on_failure: WAIT_ALL
          max_supersteps: 12
          channels:
            - {{name: notes, schema: {{items: {{type: string}}, type: array}}, reducer: EXTEND}}
            - {{name: best, reducer_function: latest}}
          nodes:
            - name: search
              tool: web_search
              input: {{query: START.question, limit: {{value: 3}}}}
              writes: [{{channel: notes, path: hits}}]
            - {{name: draft, agent: writer, join: ALL, input: {{notes: channels.notes}}, before: trim}}
            - {{name: count, function: count, input: draft}}
            - {{name: review, model: {{instruction: Judge.}}, output_schema: {question}}}
            - {{name: sure, ask: {{prompt: "Sure?", expires: 60s, default: true}}, output_schema: {{type: boolean}}}}
          edges: [[START, search, draft, count, review], [sure, END]]
          branches:
            - {{source: review, function: by_verdict, targets: [draft, sure]}}
            - {{source: START, path: question, cases: {{"": sure}}, otherwise: search}}
          output: draft
        sub_agents: [writer]
        """
    )
    assert build().definition == written
    assert sorted(build().functions) == ["by_verdict", "count", "latest", "trim"]


def test_a_decorated_function_is_a_node_of_its_graph_alone() -> None:
    made = Graph("g", description="Counts.")

    @made.function
    def measure(value: str) -> int:
        return len(value)

    @made.function("double", input="measure")
    def twice(value: int) -> int:
        return 2 * value

    made.chain("START", measure, "double", "END")
    assert [(each.name, each.function) for each in made.definition.graph.nodes] == [
        ("measure", "g_measure"),
        ("double", "g_double"),
    ]
    assert list(made.functions) == ["g_measure", "g_double"]


def test_a_function_of_a_graph_with_a_long_name_may_be_named_itself() -> None:
    made = Graph("g" * 50, description="Counts.")

    def measure_all_of(value: str) -> int:
        return len(value)

    with pytest.raises(TypeError, match="pass name="):
        made.function(measure_all_of)
    assert made.function(measure_all_of, name="measure").name == "measure"
    assert [(each.name, each.function) for each in made.definition.graph.nodes] == [("measure_all_of", "measure")]


def test_two_links_to_one_agent_with_different_options_are_refused() -> None:
    made = Graph("g", description="d")
    link = agent_pb2.AgentLink(agent="writer", limits=policy_pb2.Limits(tool_calls=1))
    for name, agent in (("one", link), ("two", link), ("three", "writer")):
        made.agent(name, agent)
    assert list(made.definition.sub_agents) == [link]
    with pytest.raises(TypeError, match="The nodes 'one' and 'four' link the agent 'writer' with different options"):
        made.agent("four", agent_pb2.AgentLink(agent="writer"))


def test_an_option_that_no_node_has_is_refused() -> None:
    with pytest.raises(TypeError, match="A node has no option 'wait'; there is input, before"):
        Graph("g", description="d").node("n", wait=True)


def test_problems_of_a_graph_in_python_have_the_lines_that_declare_their_places(tmp_path: Path) -> None:
    module = """\
    from bough_server import Graph, node

    @node
    def measure(value: str) -> int:
        return len(value)

    lines = Graph("lines", description="Counts.")
    lines.function(measure)
    lines.agent("tell", "writer", input_type=str)
    lines.chain("START", "measure", "tell", "END")
    lines.edge("measure", "tel")
    """
    (tmp_path / "graph_lines.py").write_text(dedent(module))
    parts = load_python(["graph_lines"], tmp_path)
    known = Known(
        definitions=[llm("writer")],
        functions={each.name: each.kind for each in parts.functions},
        node_functions={each.name: each for each in parts.functions},  # type: ignore[misc] # it is of nodes only
    )
    (problem,) = source_problems(parts.graphs, known)
    assert str(problem) == (
        f"{tmp_path}/graph_lines.py:11: graph.edges[3].target: There is no node 'tel'. Did you mean 'tell'?"
    )
    fixed = module.replace('"tel")', '"tell")').replace("graph_lines", "graph_types")
    (tmp_path / "graph_types.py").write_text(dedent(fixed))
    parts = load_python(["graph_types"], tmp_path)
    assert [str(each) for each in source_problems(parts.graphs, known)] == [
        f"{tmp_path}/graph_types.py:{line}: graph.edges[{index}]: 'measure' gives integer, 'tell' takes string. "
        "0 does not fit."
        for line, index in ((10, 1), (11, 3))
    ]
