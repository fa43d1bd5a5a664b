"""What makes agent definitions sensible."""

import json

import pytest
from google.protobuf.duration_pb2 import Duration

from bough.v1 import agent_pb2, error_pb2, model_pb2, policy_pb2
from bough_server.agents.validation import Known, validate_code_agent, violations

KNOWN = Known(tools=["search", "call_writer", "final_answer"], models=["default", "large"])


def agent(name: str = "lead", **fields: object) -> agent_pb2.AgentDefinition:
    definition = agent_pb2.AgentDefinition(name=name, description="Leads.", llm=agent_pb2.LlmAgent(model="default"))
    definition.MergeFrom(agent_pb2.AgentDefinition(**fields))  # type: ignore[arg-type]
    return definition


def llm(**fields: object) -> agent_pb2.LlmAgent:
    return agent_pb2.LlmAgent(**fields)  # type: ignore[arg-type]


def tools(*names: str) -> agent_pb2.LlmAgent:
    return llm(tools=[agent_pb2.ToolLink(name=name) for name in names])


def links(*names: str) -> list[agent_pb2.AgentLink]:
    return [agent_pb2.AgentLink(agent=name) for name in names]


def limits(**fields: object) -> policy_pb2.Limits:
    return policy_pb2.Limits(**fields)  # type: ignore[arg-type]


def mistakes(*definitions: agent_pb2.AgentDefinition, known: Known = KNOWN) -> list[tuple[str, str]]:
    return [(violation.field, violation.description) for violation in violations(definitions, known)]


def test_sensible_definitions_have_no_violations() -> None:
    lead = agent(
        llm=llm(model="large", tools=[agent_pb2.ToolLink(name="search", timeout=Duration(seconds=1))], max_steps=1),
        sub_agents=links("writer", "researcher"),
        limits=limits(model_calls=0, depth=0, wall_duration=Duration(nanos=1)),
        input_schema_json='{"type": "object"}',
    )
    assert mistakes(lead, agent("writer", sub_agents=links("lead")), agent("researcher")) == []


@pytest.mark.parametrize(
    ("definition", "field", "description"),
    [
        (agent(""), "name", "is required."),
        (agent("9lives"), "name", "must be a letter, then up to 58 letters, digits, _ or -."),
        (agent("a" * 60), "name", "must be a letter, then up to 58 letters, digits, _ or -."),
        (
            agent_pb2.AgentDefinition(name="a", description=" ", llm=llm(model="default")),
            "description",
            "is required: models choose the agent by it.",
        ),
        (
            agent_pb2.AgentDefinition(name="a", description="A."),
            "llm",
            "is required, or another kind such as `sequence: {}`.",
        ),
        (agent(llm=llm(model="lage")), "llm.model", "There is no model 'lage'. Did you mean 'large'?"),
        (agent(llm=tools("")), "llm.tools[0].name", "is required, or `server` for all tools of a tool server."),
        (agent(llm=tools("serch")), "llm.tools[0].name", "There is no tool 'serch'. Did you mean 'search'?"),
        (
            agent(llm=tools("break_lop")),
            "llm.tools[0].name",
            "There is no tool 'break_lop'. Did you mean 'break_loop'?",
        ),
        (agent(llm=tools("search", "search")), "llm.tools[1].name", "'search' is listed twice."),
        (
            agent(llm=llm(tools=tools("final_answer").tools, final_answer_tool=True)),
            "llm.tools[0].name",
            "'final_answer' is also the tool of the final answer; remove one of the two.",
        ),
        (
            agent(output_key="9 lives"),
            "output_key",
            "must be a key of session state: a letter, then up to 127 of letters, digits and _ - . :",
        ),
        (agent(sub_agents=links("")), "sub_agents[0].agent", "is required."),
        (agent(sub_agents=links("lead")), "sub_agents[0].agent", "An agent cannot link to itself."),
        (
            agent(sub_agents=links("absent")),
            "sub_agents[0].agent",
            "There is no agent 'absent'. There is lead.",
        ),
        (agent(llm=llm(max_steps=0)), "llm.max_steps", "must be at least 1."),
        (
            agent(llm=llm(tools=[agent_pb2.ToolLink(name="search", max_calls_per_run=-1)])),
            "llm.tools[0].max_calls_per_run",
            "must not be negative.",
        ),
        (
            agent(llm=llm(tools=[agent_pb2.ToolLink(name="search", timeout=Duration())])),
            "llm.tools[0].timeout",
            "must be longer than 0 s.",
        ),
        (agent(limits=limits(tool_calls=-1)), "limits.tool_calls", "must not be negative."),
        (agent(limits=limits(tokens=-1)), "limits.tokens", "must not be negative."),
        (agent(limits=limits(cost_nanos=-1)), "limits.cost_nanos", "must not be negative."),
        (agent(limits=limits(concurrency=0)), "limits.concurrency", "must be at least 1."),
        (agent(limits=limits(wall_duration=Duration())), "limits.wall_duration", "must be longer than 0 s."),
        (
            agent(deltas=policy_pb2.DeltaPolicy(aggregated=policy_pb2.AggregatedDeltas(max_chars=0))),
            "deltas.aggregated.max_chars",
            "must be at least 1.",
        ),
        (
            agent(
                deltas=policy_pb2.DeltaPolicy(aggregated=policy_pb2.AggregatedDeltas(max_interval=Duration(seconds=11)))
            ),
            "deltas.aggregated.max_interval",
            "must be between 0 s and 10 s.",
        ),
        (
            agent(llm=llm(settings=model_pb2.ModelSettings(temperature=float("nan")))),
            "llm.settings.temperature",
            "must be 0 or more.",
        ),
        (
            agent(llm=llm(settings=model_pb2.ModelSettings(top_p=0))),
            "llm.settings.top_p",
            "must be more than 0 and at most 1.",
        ),
        (
            agent(llm=llm(settings=model_pb2.ModelSettings(max_output_tokens=0))),
            "llm.settings.max_output_tokens",
            "must be at least 1.",
        ),
        (
            agent(llm=llm(settings=model_pb2.ModelSettings(extra_json="[]"))),
            "llm.settings.extra_json",
            "must be one JSON object.",
        ),
        (
            agent(input_schema_json='{"type": "string"}'),
            "input_schema_json",
            'must be a JSON Schema of "type": "object": arguments have names.',
        ),
        (agent(description="x" * 5_000), "description", "must be at most 4 KiB; models read it with every call."),
        (agent(llm=llm(instruction="x" * 300_000)), "", "is larger than 256 KiB."),
        (
            agent(history=agent_pb2.HistoryPolicy(scope=9)),  # type: ignore[arg-type]
            "history.scope",
            "has a value that this server does not know: 9.",
        ),
    ],
)
def test_a_mistake_names_its_field_and_what_to_do(
    definition: agent_pb2.AgentDefinition, field: str, description: str
) -> None:
    assert mistakes(definition) == [(field, description)]


def test_all_mistakes_are_told_at_once_with_their_agents_and_reasons() -> None:
    lead = agent(
        llm=llm(model="none", tools=[agent_pb2.ToolLink(name="hammer")], max_steps=-1),
        sub_agents=[*links("absent"), agent_pb2.AgentLink(agent="writer", limits=limits(depth=-1))],
    )
    found = violations([lead, agent("writer", llm=tools("hammer"))], KNOWN)
    assert [(each.agent, each.field, each.reason) for each in found] == [
        ("lead", "llm.model", error_pb2.ERROR_REASON_INVALID_REQUEST),
        ("lead", "llm.tools[0].name", error_pb2.ERROR_REASON_UNKNOWN_TOOL),
        ("lead", "sub_agents[0].agent", error_pb2.ERROR_REASON_UNKNOWN_AGENT),
        ("lead", "sub_agents[1].limits.depth", error_pb2.ERROR_REASON_INVALID_REQUEST),
        ("lead", "llm.max_steps", error_pb2.ERROR_REASON_INVALID_REQUEST),
        ("writer", "llm.tools[0].name", error_pb2.ERROR_REASON_UNKNOWN_TOOL),
    ]


def test_a_tool_that_is_named_like_a_linked_agent_is_refused() -> None:
    lead = agent(llm=tools("call_writer"), sub_agents=links("writer"))
    assert mistakes(lead, agent("writer")) == [
        ("llm.tools[0].name", "'call_writer' is also the tool of the linked agent 'writer'; remove one of the two.")
    ]


def test_a_link_is_there_once() -> None:
    assert mistakes(agent(sub_agents=links("writer", "writer")), agent("writer")) == [
        ("sub_agents[1].agent", "'writer' is linked twice.")
    ]


def test_a_name_is_there_once_and_not_that_of_an_agent_in_code() -> None:
    known = Known(models=["default"], code_agents=[agent_pb2.AgentDefinition(name="coded", description="Codes.")])
    assert mistakes(agent(), agent(), agent("coded"), known=known) == [
        ("name", "'lead' is defined twice; names must be unique in a catalog."),
        ("name", "'coded' is the name of an agent in code; choose another."),
    ]


def test_definitions_may_link_to_the_catalogs_and_to_agents_in_code() -> None:
    known = Known(
        models=["default"],
        definitions=[agent("writer"), agent("lead")],
        code_agents=[agent_pb2.AgentDefinition(name="coded", description="Codes.")],
    )
    assert mistakes(agent(sub_agents=links("writer", "coded")), known=known) == []


def test_no_model_is_fine_where_there_is_a_default_or_a_caller_has_one() -> None:
    known = Known(models=["large"], has_default_model=False)
    writer = agent_pb2.AgentDefinition(name="writer", description="Writes.", llm=llm())
    editor = agent_pb2.AgentDefinition(name="editor", description="Edits.", llm=llm(), sub_agents=links("writer"))
    lead = agent(llm=llm(model="large"), sub_agents=links("editor"))
    missing = ("llm.model", "is required: there is no model named default, and no caller has one to inherit.")
    assert mistakes(lead, editor, writer, known=known) == []
    assert mistakes(editor, writer, known=known) == [missing, missing]
    assert mistakes(editor, writer, known=Known(models=["large"])) == []


def test_an_agent_in_code_is_judged_by_what_it_calls() -> None:
    coded = agent_pb2.AgentDefinition(name="coded", description="Codes.", sub_agents=links("absent"))
    found = validate_code_agent(coded, [agent_pb2.ToolLink(name="hammer")], [agent()], KNOWN)
    assert [(mistake.field, mistake.description) for mistake in found] == [
        (
            "tools[0].name",
            "There is no tool 'hammer'. "
            "There is break_loop, call_writer, exit, final_answer, get_state, search, set_state.",
        ),
        ("sub_agents[0].agent", "There is no agent 'absent'. There is lead."),
    ]


def test_what_runs_in_the_client_has_no_timeout_of_a_link_but_may_need_approval() -> None:
    known = Known(tools=["read_card"], client_tools=["read_card"], models=["default"])
    asked = agent_pb2.ToolLink(name="read_card", max_calls_per_run=1, requires_approval=True)
    timed = agent_pb2.ToolLink(name="read_card", timeout=Duration(seconds=1))
    description = "'read_card' runs in the client, which a timeout does not stop; use the tool's answer_within."
    assert mistakes(agent(llm=llm(tools=[asked])), known=known) == []
    assert mistakes(agent(llm=llm(tools=[timed])), known=known) == [("llm.tools[0].timeout", description)]
    coded = agent_pb2.AgentDefinition(name="coded", description="Codes.")
    found = validate_code_agent(coded, [timed], [agent()], known)
    assert [(mistake.field, mistake.description) for mistake in found] == [("tools[0].timeout", description)]


def test_a_deep_schema_and_a_duration_out_of_range_are_judged_without_failing() -> None:
    deep: object = 1
    for _ in range(500):
        deep = [deep]
    far = limits(wall_duration=Duration(seconds=-(2**62), nanos=-5))
    schema = json.dumps({"type": "object", "enum": [deep]})
    assert mistakes(agent(limits=far, input_schema_json=schema)) == [
        ("limits.wall_duration", "is out of the range of a duration.")
    ]


@pytest.mark.parametrize(
    "unwritable", [Duration(seconds=2**62), Duration(seconds=1, nanos=-1), Duration(nanos=1_000_000_000)]
)
def test_every_duration_of_a_definition_is_in_range(unwritable: Duration) -> None:
    definition = agent(
        limits=limits(wall_duration=unwritable),
        deltas=policy_pb2.DeltaPolicy(aggregated=policy_pb2.AggregatedDeltas(max_interval=unwritable)),
        llm=llm(tools=[agent_pb2.ToolLink(name="search", timeout=unwritable)]),
        sub_agents=[agent_pb2.AgentLink(agent="writer", limits=limits(wall_duration=unwritable))],
    )
    fields = ("limits.wall_duration", "sub_agents[0].limits.wall_duration", "deltas.aggregated.max_interval")
    assert mistakes(definition, agent("writer")) == [
        (field, "is out of the range of a duration.") for field in (*fields, "llm.tools[0].timeout")
    ]


def test_a_schema_deeper_than_can_be_read_is_refused() -> None:
    schema = '{"type": "object", "enum": ' + "[" * 30_000 + "]" * 30_000 + "}"
    [(field, description)] = mistakes(agent(input_schema_json=schema))
    assert (field, description[:18]) == ("input_schema_json", "must be JSON text:")


def test_a_schema_that_would_take_seconds_to_judge_is_refused_unread() -> None:
    huge = agent_pb2.AgentDefinition(name="a", description="Does it.", input_schema_json="{" + " " * 70_000 + "}")
    huge.llm.instruction = "Do it."
    fields = {(each.field, each.description) for each in violations([huge], KNOWN)}
    assert ("input_schema_json", "is larger than 64 KiB.") in fields


def test_agents_that_definitions_reach_are_judged_for_what_they_would_make_of_them() -> None:
    def unmodelled(name: str, *linked: str) -> agent_pb2.AgentDefinition:
        definition = agent(name, sub_agents=links(*linked))
        definition.llm.model = ""
        return definition

    lead, writer, poet = agent(sub_agents=links("writer")), unmodelled("writer", "poet"), unmodelled("poet")
    broken = agent("broken", sub_agents=links("absent"))
    known = Known(models=["default"], has_default_model=False, definitions=[lead, writer, poet, broken])
    taken = unmodelled("lead", "writer", "broken")
    found = [(each.agent, each.field) for each in violations([taken], known)]
    assert found == [("lead", "llm.model"), ("poet", "llm.model"), ("writer", "llm.model")]
    assert violations([agent(sub_agents=links("broken"))], known) == []


@pytest.mark.parametrize(
    ("schema", "description"),
    [
        ('{"type": "array"}', 'must be a JSON Schema of "type": "object".'),
        ("{", "must be JSON text: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)."),
        ('{"type": "object", "required": 1}', "is not a JSON Schema: required: 1 is not of type 'array'."),
        ('{"type": "object"' + " " * 64 * 1024 + "}", "is larger than 64 KiB."),
    ],
)
def test_an_output_schema_is_one_of_an_object(schema: str, description: str) -> None:
    assert mistakes(agent(output_schema_json=schema)) == [("output_schema_json", description)]


def test_an_output_schema_leaves_no_room_for_a_final_answer_in_words() -> None:
    definition = agent(output_schema_json='{"type": "object"}', llm=llm(final_answer_tool=True))
    words = "is for answers in text; remove it if there is an output schema."
    assert mistakes(definition) == [("llm.final_answer_tool", words)]
