"""What is wrong with a graph is said at once, each problem with its field; types are checked when it is loaded."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_pb2
from bough_server import handler, node
from bough_server.agents.definition import parse_definition
from bough_server.agents.graph.topology import build_topology
from bough_server.agents.graph.types import GraphTypes
from bough_server.agents.graph.validation import graph_notes
from bough_server.agents.validation import Known, names_of_catalog, validate
from bough_server.documents.yaml import parse_documents
from bough_server.matching.json_types import Fit, describe
from tests.support.graphs import graph
from tests.support.teams import llm


@node
def measure(value: str) -> int:
    return len(value)


@node
def spell(value: int) -> str:
    return str(value)


@node
def anything(value: Any) -> Any:
    return value


@handler
def trim(value: Any, snapshot: object) -> Any:
    return value


FUNCTIONS = (measure, spell, anything)
HITS = '{"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}'
KNOWN = Known(
    tools=["search"],
    models=["default"],
    definitions=[llm("writer")],
    functions={**{each.name: each.kind for each in FUNCTIONS}, "trim": trim.kind},
    node_functions={each.name: each for each in FUNCTIONS},
    tool_schemas={"search": HITS},
)


def problems_of(text: str) -> list[str]:
    """The problems of a graph, each with its field."""
    return problems_in(graph(text))


def problems_in(definition: agent_pb2.AgentDefinition) -> list[str]:
    """The problems of a definition of a graph, each with its field."""
    (found,) = validate([definition], KNOWN)
    return [f"{each.field}: {each.description}" for each in found]


def test_all_problems_of_a_structure_are_reported_at_once() -> None:
    text = """
    graph:
      max_supersteps: 20000
      max_concurrency: 0
      channels: [{name: notes, reducer: SUM, initial: []}, {name: notes}]
      nodes:
        - {name: END}
        - {name: 1st}
        - {name: a, function: measre, error_target: END}
        - {name: a, tool: serch, writes: [{channel: note}]}
        - {name: lost, agent: wrter, input: {x: nowhere.y, z: lost.q, c: channels.note}}
        - {name: act, tools: {tools: [exit]}}
        - {name: q, ask: {prompt: "{{x}}", default: 1}, output_schema: {type: text}}
      edges: [[START, a, START], [END, q], [aa, act]]
      branches:
        - {source: a, path: x., cases: [{value: 1, target: act}, {value: 1.0, target: ac}], targets: [a]}
        - {source: a, function: choose, otherwise: q}
        - {source: b}
    """
    assert problems_of(text) == [
        "graph.nodes[2].function: There is no node function 'measre'. Did you mean 'measure'?",
        "graph.branches[1].function: There is no router 'choose'.",
        "graph.max_supersteps: must be between 1 and 10,000.",
        "graph.max_concurrency: must be between 1 and 1,000.",
        "graph.nodes[0].name: 'END' is reserved; choose another name.",
        "graph.nodes[1].name: must be a letter, then up to 63 letters, digits, _ or -.",
        "graph.nodes[3].name: 'a' is the name of another node; names must be unique in a graph.",
        "graph.edges[1].target: Nothing leads into START.",
        "graph.edges[2].source: Nothing leads out of END.",
        "graph.edges[3].source: There is no node 'aa'. Did you mean 'a'?",
        "graph.nodes[2].error_target: must be a node: END takes no errors.",
        "graph.branches[0].path: must be a path such as verdict or review.verdict.",
        "graph.branches[0].targets: is for a `function`; a path has `cases` and `otherwise`.",
        "graph.branches[0].cases[1].target: There is no node 'ac'. Did you mean 'act'?",
        "graph.branches[0].cases[1].value_json: 1.0 is another case's value.",
        "graph.branches[1].cases: is for a `path`; a router returns one of `targets`.",
        "graph.branches[1].targets: is required: the nodes that the router may return.",
        "graph.branches[2].source: There is no node 'b'. There is 1st, END, START, a, act, lost, q.",
        "graph.branches[2].path: is required, or `function`: what chooses the target.",
        "graph.branches[2].cases: is required: the targets by value.",
        "graph.nodes[1].name: START does not reach '1st': add an edge or a branch to it.",
        "graph.nodes[4].name: START does not reach 'lost': add an edge or a branch to it.",
        "graph.channels[0].initial_json: must be of the type that the reducer starts with, such as 0.",
        "graph.channels[1].name: 'notes' is the name of another channel.",
        "graph.nodes[3].writes[0].channel: There is no channel 'note'. Did you mean 'notes'?",
        "graph.nodes[4].agent: 'wrter' is not one of its sub_agents.",
        "graph.nodes[4].input[0].path: There is no node 'nowhere'. There is 1st, END, START, a, act, history, lost, q.",
        "graph.nodes[4].input[1].path: 'lost' does not lead to 'lost', so it may never have an output.",
        "graph.nodes[4].input[2].path: There is no channel 'note'. Did you mean 'notes'?",
        "graph.nodes[6].output_schema_json: is not a JSON Schema: type: "
        "'text' is not valid under any of the given schemas.",
        "graph.nodes[6].ask.prompt: has unknown placeholders: {{x}}. Known are {{input}}, "
        "{{state.NAME}}, and {{state.NAME?}} for a value that may be missing.",
        "graph.nodes[6].ask.default_json: is used if the question expires: set `expires` too.",
        "graph.nodes[3].tool.name: There is no tool 'serch'. Did you mean 'search'?",
        "graph.nodes[5].tools.tools[0].name: 'exit' is for models of agents: a graph routes by edges.",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "{nodes: [{name: a}, {name: b}], edges: [[START, a, END]]}",
            "graph.nodes[1].name: START does not reach 'b': add an edge or a branch to it.",
        ),
        (
            "{nodes: [{name: a}], edges: [[START, a]]}",
            "graph.edges: START does not reach END: add an edge or a branch to it.",
        ),
        (
            "{mode: DAG, nodes: [{name: a}, {name: b}], edges: [[START, a, b, a], [b, END]]}",
            "graph.edges: A DAG has no cycles, and this has a -> b -> a.",
        ),
        (
            "{max_supersteps: 9, nodes: [{name: a}, {name: b}], edges: [[START, a, b, a], [b, END]]}",
            "graph.edges: The cycle a -> b -> a would never end: no branch is on it.",
        ),
        (
            "{nodes: [{name: a}, {name: b}], edges: [[START, a, b]], "
            "branches: [{source: b, path: '', cases: {x: a}, otherwise: END}]}",
            "graph.max_supersteps: is required, as there is a cycle: a -> b -> a.",
        ),
        (
            "{mode: DAG, channels: [{name: c}], nodes: [{name: a}], edges: [[START, a, END]]}",
            "graph.channels: is for PREGEL: in a DAG name the outputs of nodes by their paths.",
        ),
        (
            "{mode: DAG, end_join: ALL, nodes: [{name: a}], edges: [[START, a, END]]}",
            "graph.end_join: is for PREGEL: in a DAG everything ends before END.",
        ),
        (
            "{mode: DAG, nodes: [{name: a, join: ALL}], edges: [[START, a, END]]}",
            "graph.nodes[0].join: is for PREGEL: every node of a DAG waits for all that can reach it.",
        ),
        (
            "{nodes: [{name: a}, {name: b, input: a}, {name: c, input: [{path: d}]}, {name: d}], "
            "edges: [[START, a, b, END], [START, c, END], [START, d, END]]}",
            "graph.nodes[2].input[0].path: 'd' does not lead to 'c', so it may never have an output.",
        ),
        (
            "{nodes: [{name: a, function: measure}], edges: [[START, a, END]], "
            "branches: [{source: a, path: x, cases: {y: END}}]}",
            "graph.branches[0].path: There is no 'x': 'a' gives integer.",
        ),
        (
            "{nodes: [{name: a, function: measure}, {name: b, function: measure}], edges: [[START, a, b, END]]}",
            "graph.edges[1]: 'a' gives integer, 'b' takes string. 0 does not fit.",
        ),
        (
            "{nodes: [{name: a, tool: search}], edges: [[START, a, END]]}",
            "graph.edges[0]: 'START' gives string, 'a' takes {query: string}. \"\" does not fit.",
        ),
        (
            "{nodes: [{name: a, tool: search, input: {q: START}}], edges: [[START, a, END]]}",
            "graph.nodes[0].input: 'input' gives {q: string}, 'a' takes {query: string}. "
            '{"q": ""} does not fit at query.',
        ),
        (
            "{nodes: [{name: a, function: measure, map: true}], edges: [[START, a, END]]}",
            "graph.edges[0]: 'START' gives string, 'a' takes list of string. \"\" does not fit.",
        ),
        (
            "{nodes: [{name: a, model: {}, output_schema: {type: object, required: [v], properties: "
            "{v: {enum: [good, poor]}}}}], edges: [[START, a]], "
            "branches: [{source: a, path: v, cases: {bad: END}, otherwise: END}]}",
            'graph.branches[0].cases[0].value_json: "bad" cannot be: v is "good" | "poor".',
        ),
        (
            "{channels: [{name: c, schema: {type: array, items: {type: string}}, reducer: APPEND}], "
            "nodes: [{name: a, function: measure, writes: [{channel: c}]}], edges: [[START, a, END]]}",
            "graph.nodes[0].writes[0].path: is integer, and a write to 'c' takes string.",
        ),
        (
            "{mode: DAG, nodes: [{name: a, function: measure}, {name: b, function: measure}, {name: c}], "
            "edges: [[START, a, c, END], [START, b, c]]}",
            "graph.nodes[2].input: 'c' gets values of 'a' and 'b', and that of 'a' is no object: give it an `input`.",
        ),
        (
            "{nodes: [{name: a, tool: search, input: [{value: {query: x}}]}, {name: b, model: {tools: [{name: search, "
            "timeout: 3s}]}}], edges: [[START, a, b, END]]}",
            "graph.nodes[1].model.tools[0]: 'search' has other options at graph.nodes[0].tool; a graph has one set of "
            "options for each tool.",
        ),
        (
            "{nodes: [{name: a, function: trim}], edges: [[START, a, END]]}",
            "graph.nodes[0].function: 'trim' is a function of another kind, handler; use one of kind node function.",
        ),
        (
            "{nodes: [{name: a, before: trm}], edges: [[START, a, END]]}",
            "graph.nodes[0].before: There is no handler 'trm'. Did you mean 'trim'?",
        ),
        (
            "{nodes: [{name: a, agent: writer}], edges: [[START, a, END]]}",
            "graph.nodes[0].agent: 'writer' is not one of its sub_agents.",
        ),
        (
            "{nodes: [{name: a}, {name: b, function: measure, input: 'a?'}], edges: [[START, a, b, END]]}",
            "graph.nodes[1].input: 'input' gives string | null, 'b' takes string. null does not fit.",
        ),
        (
            "{nodes: [{name: a, tool: {name: search, timeout: -1s}, input: {query: START}}], edges: [[START, a, END]]}",
            "graph.nodes[0].tool.timeout: must be longer than 0 s.",
        ),
        (
            "{nodes: [{name: a, model: {model: defalt}}], edges: [[START, a, END]]}",
            "graph.nodes[0].model.model: There is no model 'defalt'. Did you mean 'default'?",
        ),
    ],
)
def test_what_no_run_could_get_right_is_refused(text: str, problem: str) -> None:
    assert problems_of(f"graph: {text}") == [problem]


def test_values_that_may_be_objects_may_be_merged() -> None:
    text = """
    graph:
      nodes:
        - {name: a, ask: {prompt: A}, output_schema: {type: [object, "null"]}}
        - {name: b, ask: {prompt: B}, output_schema: {type: object}}
        - {name: c, join: ALL}
      edges: [[START, a, c, END], [START, b, c]]
    """
    assert problems_of(text) == []


def test_an_input_of_a_type_that_has_changed_since_the_graph_was_checked_is_checked_in_each_run() -> None:
    definition = graph(
        """
        graph:
          nodes: [{name: a, function: measure}, {name: b, function: spell, input: a.x}]
          edges: [[START, a, b, END]]
        """
    )
    types = GraphTypes(definition, build_topology(definition.graph), names_of_catalog(KNOWN, {}))
    assert not types.is_proved("b", ["a"])


def test_links_of_nodes_say_nothing_that_the_node_says() -> None:
    text = """
    graph: {nodes: [{name: a, agent: writer}], edges: [[START, a, END]]}
    sub_agents: [{agent: writer, on_failure: CONTINUE, link_mode: TOOL, input: {template: "{{input}}"}}]
    """
    assert problems_of(text) == [
        "sub_agents[0].input: is not for an agent of a node: the node's `input` says what it gets.",
        "sub_agents[0].link_mode: is not for an agent of a node, which runs it.",
        "sub_agents[0].on_failure: CONTINUE is not for an agent of a node: set the node's error_target.",
    ]


def test_a_graph_has_bounds() -> None:
    names = [f"n{number}" for number in range(501)]
    nodes = ", ".join(f"{{name: {name}}}" for name in names)
    channels = ", ".join(f"{{name: c{number}}}" for number in range(65))
    text = f"graph: {{channels: [{channels}], nodes: [{nodes}], edges: [[START, {', '.join(names)}, END]]}}"
    assert problems_of(text) == [
        "graph.nodes: must be at most 500; there are 501.",
        "graph.channels: must be at most 64; there are 65.",
    ]


def test_a_graph_that_is_too_large_is_refused_before_anything_goes_through_it() -> None:
    definition = graph("graph: {nodes: [{name: a}], branches: [{source: a, path: x}]}")
    (node,), (branch,) = definition.graph.nodes, definition.graph.branches
    node.input.extend(agent_pb2.FieldMapping(path="lost") for _ in range(5_001))
    node.writes.extend(agent_pb2.ChannelWrite(channel="lost") for _ in range(2_001))
    branch.cases.extend(agent_pb2.BranchCase(target="lost") for _ in range(2_001))
    assert problems_in(definition) == [
        "graph.nodes: must have at most 5,000 mappings with the output together; there are 5,001.",
        "graph.branches: must have at most 2,000 cases together; there are 2,001.",
        "graph.nodes: must have at most 2,000 writes together; there are 2,001.",
    ]


def test_the_first_unknown_names_of_a_graph_have_suggestions() -> None:
    chains = ", ".join(f"[START, lst{number}]" for number in range(30))
    found = problems_of(f"graph: {{nodes: [{{name: lst}}], edges: [[START, lst, END], {chains}]}}")
    assert [problem.endswith("Did you mean 'lst'?") for problem in found] == [True] * 20 + [False] * 10


def test_a_schema_that_no_value_can_be_checked_with_in_a_bounded_time_is_refused() -> None:
    twice = ", ".join(
        f"d{n}: {{allOf: [{{$ref: '#/$defs/d{n + 1}'}}, {{$ref: '#/$defs/d{n + 1}'}}]}}" for n in range(18)
    )
    schema = f"{{$ref: '#/$defs/d0', $defs: {{{twice}, d18: {{}}}}}}"
    node = f"{{name: a, input_schema: {schema}}}"
    assert problems_of(f"graph: {{nodes: [{node}], edges: [[START, a, END]]}}") == [
        "graph.nodes[0].input_schema_json: cannot be used: "
        "the schema follows more than 20,000 references for one value."
    ]


@pytest.mark.parametrize("mappings", ["x: {}", "a: {}, b: {}"])
def test_types_that_grow_from_node_to_node_are_known_as_far_as_they_are_small(mappings: str) -> None:
    names = [f"n{number}" for number in range(200)]
    nodes = ", ".join(
        f"{{name: {name}, input: {{{mappings.format(before, before)}}}}}"
        for before, name in zip(["START", *names], names, strict=False)
    )
    text = f"graph: {{mode: DAG, nodes: [{nodes}], edges: [[START, {', '.join(names)}, END]]}}"
    assert problems_of(f"{text}\noutput_schema: {{type: object}}") == []
    types = GraphTypes(definition := graph(text), build_topology(definition.graph), names_of_catalog(KNOWN, {}))
    assert describe(types.output_of("n199")).startswith("{")
    assert max(len(types.output_of(name)) for name in names) < 17 * 1024


def test_the_types_of_a_graph_are_compared_as_far_as_its_steps_go() -> None:
    wide = '{"type": "array", "minItems": 100, "items": ' * 4 + '{"type": "string"}' + "}" * 4
    definition = graph("graph: {nodes: [{name: a}], edges: [[START, a, END]]}")
    types = GraphTypes(definition, build_topology(definition.graph), names_of_catalog(KNOWN, {}))
    fits = [types.compare(wide, f'{{"type": "integer", "minimum": {number}}}').fit for number in range(30)]
    assert fits == [Fit.UNKNOWN] * 30
    assert types.compare('{"type": "string"}', '{"type": "integer"}').fit is Fit.UNKNOWN  # no steps are left
    assert types.describe('{"type": "integer"}') == "a large type"


EDGES = st.lists(st.tuples(st.sampled_from(["START", *"abcdef"]), st.sampled_from("abcdef")), max_size=14)


@given(EDGES)
def test_a_node_leads_to_another_if_edges_do(edges: list[tuple[str, str]]) -> None:
    nodes = [agent_pb2.GraphNode(name=name) for name in "abcdef"]
    links = [agent_pb2.GraphEdge(source=source, target=target) for source, target in edges]
    topology = build_topology(agent_pb2.GraphAgent(nodes=nodes, edges=links))
    closure = set(edges)
    while more := {(one, last) for one, two in closure for first, last in edges if two == first} - closure:
        closure |= more
    assert {(one, two) for one in ["START", *"abcdef"] for two in "abcdef" if topology.leads_to(one, two)} == closure
    assert topology.reached == {two for one, two in closure if one == "START"}


def test_notes_name_what_each_run_checks_and_what_an_author_may_not_expect() -> None:
    text = """
    graph:
      nodes: [{name: any, function: anything}, {name: add, function: spell}, {name: last}]
      edges: [[START, any, add, END], [any, END], [add, last]]
    """
    definition = graph(text)
    assert problems_of(text) == []
    assert [f"{field}: {note}" for field, note in graph_notes(definition, names_of_catalog(KNOWN, {}))] == [
        "graph.edges[1]: 'any' gives any, 'add' takes integer: checked in each run.",
        "graph.nodes[2].name: Nothing leads on from 'last': its output is dropped.",
        "graph.end_join: 'any' leads to END and to 'add': the graph ends before those run. Set ALL to let them.",
        "graph.end_join: 'add' leads to END and to 'last': the graph ends before those run. Set ALL to let them.",
    ]


def test_short_forms_of_edges_inputs_and_cases_have_problems_at_their_places() -> None:
    text = "graph: {nodes: [{name: a, input: 3}], edges: [[START], a], branches: [{source: a, cases: 3}]}"
    (document,) = parse_documents(text, path="graph.yaml")
    _, problems = parse_definition(document)
    assert [str(problem) for problem in problems] == [
        "graph.yaml:1: graph.nodes[0].input: must be a list, a path, or a mapping of fields to paths",
        "graph.yaml:1: graph.edges: has a chain of one node at [0]; write two or more, such as [START, node]",
        "graph.yaml:1: graph.branches[0].cases: must be a list, or a mapping of texts",
    ]
