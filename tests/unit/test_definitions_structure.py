"""What a composite agent must be made of, and how it is written as YAML."""

import pytest

from bough.v1 import agent_pb2
from bough_server.agents.definition import definition_yaml, parse_definition
from bough_server.agents.validation import Known, violations
from bough_server.agents.validation_links import cycles
from bough_server.documents.yaml import parse_documents
from tests.support.composite_agents import composite, loop, parallel, plan_execute, sequence, supervisor, swarm
from tests.support.teams import llm

KNOWN = Known(models=["default"])


def mistakes(*definitions: agent_pb2.AgentDefinition) -> list[tuple[str, str, str]]:
    return [(one.agent, one.field, one.description) for one in violations(definitions, KNOWN)]


def kind_of(definition: agent_pb2.AgentDefinition) -> str:
    return definition.WhichOneof("kind") or ""


def read(text: str) -> agent_pb2.AgentDefinition:
    (document,) = parse_documents(text, path="agents.yaml")
    source, problems = parse_definition(document)
    assert problems == []
    return source.definition


@pytest.mark.parametrize(
    "definition",
    [
        sequence("s", "a"),
        parallel("s", "a"),
        loop("s", "a", rounds=1),
        swarm("s", "a"),
        plan_execute("s", roles=["a", "a"]),
    ],
    ids=kind_of,
)
def test_who_only_hands_an_answer_on_has_no_output_schema(definition: agent_pb2.AgentDefinition) -> None:
    definition.output_schema_json = '{"type": "object"}'
    [(who, field, words)] = mistakes(definition, llm("a"))
    assert (who, field) == ("s", "output_schema_json")
    assert words.startswith(f"is not for a {kind_of(definition)}, which ")
    assert words.endswith("in a sequence." if definition.HasField("plan_execute") else "on those agents.")


@pytest.mark.parametrize("definition", [supervisor("s", "a"), llm("s")], ids=kind_of)
def test_who_asks_a_model_may_have_an_output_schema(definition: agent_pb2.AgentDefinition) -> None:
    definition.output_schema_json = '{"type": "object"}'
    assert mistakes(definition, llm("a")) == []


def test_sensible_composites_have_no_violations() -> None:
    team = (sequence("s", "l", "b"), loop("l", "a", rounds=1), llm("a", links=["s"], tools=["exit", "break_loop"]))
    assert mistakes(*team, llm("b")) == []


@pytest.mark.parametrize(
    ("definition", "field", "description"),
    [
        (supervisor("s"), "sub_agents", "is required: they are its members."),
        (
            supervisor("s", "a", tools=["gone"]),
            "supervisor.llm.tools[0].name",
            "There is no tool 'gone'. There is break_loop, exit, get_state, set_state.",
        ),
        (sequence("s"), "sub_agents", "is required: they are its children, in order."),
        (loop("s", rounds=1), "sub_agents", "is required: they are its children, in order."),
        (
            composite("s", ["a"], loop=agent_pb2.LoopAgent()),
            "loop.max_iterations",
            "is required: a loop without a bound may never end.",
        ),
        (parallel("s", "a", max_concurrency=0), "parallel.max_concurrency", "must be at least 1."),
        (swarm("s"), "sub_agents", "is required: they are its members."),
        (swarm("s", "a", entry="b"), "swarm.entry_agent", "'b' is not one of its sub_agents. There is a."),
        (
            swarm("s", agent_pb2.AgentLink(agent="a", link_mode=agent_pb2.LINK_MODE_TOOL)),
            "sub_agents[0].link_mode",
            "TOOL is for an agent's own links: members of a swarm transfer to each other.",
        ),
        (plan_execute("s", "a", roles=["", "a"]), "plan_execute.planner", "is required: it is one of the sub_agents."),
        (plan_execute("s", "a", roles=["a"]), "plan_execute.executor", "is required: it is one of the sub_agents."),
        (
            plan_execute("s", "a", roles=["a", "a", "b"]),
            "plan_execute.replanner",
            "'b' is not one of its sub_agents. There is a.",
        ),
        (
            plan_execute("s", "a", roles=["a", "a"], rounds=0),
            "plan_execute.max_iterations",
            "must be between 1 and 1000.",
        ),
        (loop("s", "a", rounds=0), "loop.max_iterations", "must be between 1 and 10000."),
        (loop("s", "a", rounds=10_001), "loop.max_iterations", "must be between 1 and 10000."),
    ],
)
def test_what_is_wrong_with_a_composite_is_said(
    definition: agent_pb2.AgentDefinition, field: str, description: str
) -> None:
    assert mistakes(definition, llm("a")) == [("s", field, description)]


def test_no_agent_is_its_own_ancestor_by_rule_alone() -> None:
    assert mistakes(sequence("s", "t"), sequence("t", "a", "u"), sequence("u", "s"), llm("a")) == [
        ("s", "sub_agents[0].agent", "'t' runs 's' in turn: that would never end."),
        ("t", "sub_agents[1].agent", "'u' runs 't' in turn: that would never end."),
        ("u", "sub_agents[0].agent", "'s' runs 'u' in turn: that would never end."),
    ]


def test_agents_beside_a_circle_are_not_a_part_of_it() -> None:
    circle = [sequence("t", "u", "a"), sequence("u", "t", "b")]
    assert mistakes(sequence("s", "t"), *circle, sequence("a", "b"), llm("b", links=["s"])) == [
        ("t", "sub_agents[0].agent", "'u' runs 't' in turn: that would never end."),
        ("u", "sub_agents[0].agent", "'t' runs 'u' in turn: that would never end."),
    ]


@pytest.mark.parametrize("is_round", [False, True])
def test_the_work_to_judge_a_long_chain_grows_as_the_chain(is_round: bool) -> None:
    """It is counted in links that are looked at, so no clock decides."""
    looked = []

    class Watched(dict[str, list[str]]):
        def get(self, name: str, default: object = None) -> list[str]:
            looked.append(name)
            return super().get(name, [])

    runs = Watched({f"s{number}": [f"s{number + 1}"] for number in range(600)})
    runs["s600"] = ["s0"] if is_round else []
    groups = cycles(runs)
    assert len(set(groups.values())) == (1 if is_round else 601)
    assert len(looked) <= 3 * 601


def test_all_that_is_wrong_with_a_plan_is_said_at_once() -> None:
    team = (plan_execute("s", "a", "p", "x", roles=["p", "e", "s"], rounds=-1), llm("a"), sequence("p", "a"), llm("x"))
    assert mistakes(*team) == [
        ("s", "plan_execute.planner", "'p' has no model that could call `plan`: use an llm or a supervisor."),
        ("s", "plan_execute.executor", "'e' is not one of its sub_agents. There is a, p, x."),
        ("s", "plan_execute.replanner", "'s' is not one of its sub_agents. There is a, p, x."),
        ("s", "sub_agents[0].agent", "'a' is not the planner, executor or replanner, so it would never run."),
        ("s", "sub_agents[2].agent", "'x' is not the planner, executor or replanner, so it would never run."),
        ("s", "plan_execute.max_iterations", "must be between 1 and 1000."),
    ]


def test_a_swarm_may_come_round_to_itself_where_members_choose_to_but_not_by_its_entry() -> None:
    team = (sequence("t", "s"), llm("a"))
    assert mistakes(swarm("s", "a", "t"), *team) == []
    assert mistakes(swarm("s", "a", "t", entry="t"), *team) == [
        ("s", "sub_agents[1].agent", "'t' runs 's' in turn: that would never end."),
        ("t", "sub_agents[0].agent", "'s' runs 't' in turn: that would never end."),
    ]


@pytest.mark.parametrize(
    ("text", "definition"),
    [
        (
            "name: s\ndescription: Does what s does.\nsequence: {}\nsub_agents: [{agent: a}, {agent: b}]\n",
            sequence("s", "a", "b"),
        ),
        (
            "name: p\ndescription: Does what p does.\n"
            "parallel: {on_failure: FAIL_FAST, max_concurrency: 2}\nsub_agents: [{agent: a}]\n",
            parallel("p", "a", fails_fast=True, max_concurrency=2),
        ),
        (
            "name: s\ndescription: Does what s does.\n"
            "swarm: {entry_agent: b}\nsub_agents: [{agent: a}, {agent: b, link_mode: TRANSFER}]\n",
            swarm("s", "a", agent_pb2.AgentLink(agent="b", link_mode=agent_pb2.LINK_MODE_TRANSFER), entry="b"),
        ),
        (
            "name: s\ndescription: Does what s does.\n"
            "plan_execute: {planner: a, executor: b, max_iterations: 3}\nsub_agents: [{agent: a}, {agent: b}]\n",
            plan_execute("s", roles=["a", "b"], rounds=3),
        ),
        (
            "name: s\ndescription: Does what s does.\n"
            "supervisor: {llm: {instruction: You are s.}}\nsub_agents: [{agent: a}]\n",
            supervisor("s", "a"),
        ),
        (
            "name: l\ndescription: Does what l does.\nloop: {max_iterations: 3}\nsub_agents: [{agent: a}]\n",
            loop("l", "a", rounds=3),
        ),
    ],
)
def test_composites_are_written_as_yaml_and_read_back(text: str, definition: agent_pb2.AgentDefinition) -> None:
    made = read(text)
    assert read(definition_yaml(made)) == made
    assert made == definition


def test_what_a_change_does_to_a_supervisor_it_reaches_names_the_field_as_the_supervisor_has_it() -> None:
    lead, without_model = llm("lead", links=["s"], model="m"), llm("lead", links=["s"])
    known = Known(models=["m"], has_default_model=False, definitions=[lead, supervisor("s", "a"), llm("a", model="m")])
    found = violations([without_model], known)
    assert [(one.agent, one.field) for one in found] == [("lead", "llm.model"), ("s", "supervisor.llm.model")]
