"""What definitions name in free text: functions, code, placeholders and paths, judged all at once."""

import pytest

from bough.v1 import agent_pb2, error_pb2
from bough_server.agents.definition import definition_yaml, parse_definition
from bough_server.agents.function import agent
from bough_server.agents.validation import Known, validate_code_agent, violations
from bough_server.agents.validation_links import find_function_references
from bough_server.documents.yaml import parse_documents
from bough_server.runtime.agent import Context
from tests.support.composite_agents import composite, loop, parallel, sequence, supervisor, swarm
from tests.support.teams import llm

CODE = agent_pb2.AgentDefinition(name="worker", description="Works.")
KNOWN = Known(
    models=["default"],
    code_agents=[CODE],
    functions={"enough": "condition", "build": "input builder", "bare": "rewriter"},
)


def mistakes(*definitions: agent_pb2.AgentDefinition) -> list[tuple[str, str, str]]:
    return [(one.agent, one.field, one.description) for one in violations(definitions, KNOWN)]


def read(text: str) -> agent_pb2.AgentDefinition:
    (document,) = parse_documents(text, path="agents.yaml")
    source, problems = parse_definition(document)
    assert problems == []
    return source.definition


def filled(template: str, agent: str = "a") -> agent_pb2.AgentLink:
    return agent_pb2.AgentLink(agent=agent, input=agent_pb2.InputBuilder(template=template))


def until(**condition: str) -> agent_pb2.AgentDefinition:
    made = agent_pb2.LoopAgent(max_iterations=1, until=agent_pb2.LoopUntil(**condition))
    return composite("s", ["a"], loop=made)


FUNCTION = """
name: f
description: Works under a name of its own.
function: {function: worker}
limits: {model_calls: 3}
sub_agents:
  - agent: a
    input: {template: "Look at {{message}} and {{state.x.0?}}."}
"""


def test_code_is_named_in_yaml_as_by_the_wire() -> None:
    definition = read(FUNCTION)
    assert definition.function == agent_pb2.FunctionAgent(function="worker")
    assert read(definition_yaml(definition)) == definition
    assert mistakes(definition, llm("a")) == []


def test_everything_that_names_something_has_no_violations() -> None:
    rewriting = llm("a", history_rewriter="bare")
    rewriting.llm.instruction = 'You know {{state.x}} and {{ state.y? }}. Answer with {"a": {{}}}.'
    built = agent_pb2.AgentLink(agent="a", input=agent_pb2.InputBuilder(function="build"))
    rounds = until(predicate="enough")
    rounds.sub_agents[0].CopyFrom(built)
    assert mistakes(rounds, rewriting) == []
    assert mistakes(until(state_path="review.approved"), llm("a")) == []
    assert [(one.field, one.name, one.kind) for one in find_function_references(rounds)] == [
        ("loop.until.predicate", "enough", "condition"),
        ("sub_agents[0].input.function", "build", "input builder"),
    ]


@pytest.mark.parametrize(
    ("definition", "field", "description"),
    [
        (
            composite("s", [], function=agent_pb2.FunctionAgent(function="wroker")),
            "function.function",
            "There is no agent in code named 'wroker'. Did you mean 'worker'?",
        ),
        (
            composite("s", [], function=agent_pb2.FunctionAgent()),
            "function.function",
            "is required: the name of an agent in code.",
        ),
        (until(predicate="enuogh"), "loop.until.predicate", "There is no condition 'enuogh'. Did you mean 'enough'?"),
        (
            until(predicate="bare"),
            "loop.until.predicate",
            "'bare' is a function of another kind, rewriter; use one of kind condition.",
        ),
        (until(predicate=""), "loop.until.predicate", "is required: the name of a condition."),
        (until(), "loop.until", "needs a `predicate` or a `state_path`."),
        (until(state_path="a..b"), "loop.until.state_path", "must be a path such as `approved` or `review.approved`."),
        (
            llm("s", history_rewriter="gone"),
            "llm.history_rewriter",
            "There is no rewriter 'gone'. There is bare.",
        ),
        (
            sequence("s", agent_pb2.AgentLink(agent="a", input=agent_pb2.InputBuilder(function="gone"))),
            "sub_agents[0].input.function",
            "There is no input builder 'gone'. There is build.",
        ),
        (
            sequence("s", agent_pb2.AgentLink(agent="a", input=agent_pb2.InputBuilder())),
            "sub_agents[0].input",
            "needs a `template` or a `function`.",
        ),
    ],
)
def test_a_name_that_nothing_has_is_named_with_its_field(
    definition: agent_pb2.AgentDefinition, field: str, description: str
) -> None:
    assert mistakes(definition, llm("a")) == [("s", field, description)]


def test_code_that_is_not_there_has_a_reason_of_its_own() -> None:
    only = violations([composite("s", [], function=agent_pb2.FunctionAgent(function="x"))], KNOWN)[0]
    assert only.reason == error_pb2.ERROR_REASON_UNKNOWN_AGENT


@pytest.mark.parametrize(
    "definition",
    [
        llm("s", links=[filled("{{message}}")]),
        supervisor("s", filled("{{message}}")),
        swarm("s", filled("{{message}}")),
    ],
)
def test_a_template_knows_the_message_of_its_caller(definition: agent_pb2.AgentDefinition) -> None:
    assert mistakes(definition, llm("a")) == []


@pytest.mark.parametrize("make", [sequence, parallel, lambda *links: loop(*links, rounds=1)])
def test_a_template_of_a_rule_knows_no_message(make: object) -> None:
    (found,) = mistakes(make("s", filled("{{message}} {{input}} {{user}} {{history}}")), llm("a"))  # type: ignore[operator]
    assert found[1] == "sub_agents[0].input.template"
    assert found[2].startswith("has unknown placeholders: {{message}}. Known are {{input}}, {{user}}, {{history}}, ")


def test_a_plan_is_known_where_one_is_made_alone() -> None:
    template = "{{plan}} {{step}} {{executed_steps}}"
    (found,) = mistakes(llm("s", links=[filled(template)]), llm("a"))
    assert "{{plan}}, {{step}}, {{executed_steps}}. Known are" in found[2]


def test_instructions_know_the_state_alone() -> None:
    lead = supervisor("s", "a")
    lead.supervisor.llm.instruction = "{{input}} {{name}} {{state.x}}"
    assert mistakes(lead, llm("a")) == [
        (
            "s",
            "supervisor.llm.instruction",
            "has unknown placeholders: {{input}}, {{name}}. Known are {{state.NAME}}, and "
            "{{state.NAME?}} for a value that may be missing.",
        )
    ]


def test_all_of_it_is_said_at_once() -> None:
    worst = until(predicate="gone")
    worst.sub_agents[0].input.template = "{{x}}"
    worst.sub_agents.add(agent="a2").input.function = "gone"
    assert [field for _, field, _ in mistakes(worst, llm("a"), llm("a2"))] == [
        "loop.until.predicate",
        "sub_agents[1].input.function",
        "sub_agents[0].input.template",
    ]


def test_links_of_agents_in_code_are_judged_too() -> None:
    @agent(agents=[filled("{{nothing}}")])
    async def lead(ctx: Context, input: object) -> str:
        """Leads."""
        return ""

    (found,) = validate_code_agent(lead.definition, lead.tool_links, [llm("a")], KNOWN)
    assert found.field == "sub_agents[0].input.template"
