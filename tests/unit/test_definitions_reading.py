"""Agent definitions as YAML and JSON: reading, mistakes, revisions, writing."""

import hashlib
import json

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_pb2, message_pb2, model_pb2, policy_pb2
from bough_server.agents.definition import Source, definition_yaml, parse_definition, revision
from bough_server.documents.yaml import parse_documents

LEAD = """
name: lead
description: no
llm:
  model: default
  maxSteps: 3
  instruction: |
    You lead.
    Ask: them
  tools: [{name: search, timeout: 1h30m, max_calls_per_run: 2, requires_approval: true}]
  settings: {temperature: 1, extra: {b: 1, a: [x]}}
sub_agents:
  - {agent: researcher}
  - {agent: writer, on_failure: ABORT, history: {scope: HISTORY_SCOPE_NONE}}
deltas: {passthrough: {}}
limits: {wall_duration: 50ms, depth: 0}
input_schema: {type: object, properties: {}}
"""


def read(text: str) -> tuple[Source, list[str]]:
    [document] = parse_documents(text, path="lead.yaml")
    source, problems = parse_definition(document)
    return source, [str(problem) for problem in problems]


def expected_lead() -> agent_pb2.AgentDefinition:
    return agent_pb2.AgentDefinition(
        name="lead",
        description="no",
        llm=agent_pb2.LlmAgent(
            model="default",
            max_steps=3,
            instruction="You lead.\nAsk: them\n",
            tools=[
                agent_pb2.ToolLink(
                    name="search", timeout=Duration(seconds=5400), max_calls_per_run=2, requires_approval=True
                )
            ],
            settings=model_pb2.ModelSettings(temperature=1, extra_json='{"b":1,"a":["x"]}'),
        ),
        sub_agents=[
            agent_pb2.AgentLink(agent="researcher"),
            agent_pb2.AgentLink(
                agent="writer",
                on_failure=policy_pb2.SUB_AGENT_FAILURE_POLICY_ABORT,
                history=agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_NONE),
            ),
        ],
        deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()),
        limits=policy_pb2.Limits(wall_duration=Duration(nanos=50_000_000), depth=0),
        input_schema_json='{"type":"object","properties":{}}',
    )


def test_a_definition_is_read_with_all_that_is_kinder_than_json() -> None:
    source, problems = read(LEAD)
    assert problems == []
    assert source.definition == expected_lead()


def test_protobufs_own_json_is_read_as_well() -> None:
    source, problems = read(json_format.MessageToJson(expected_lead()))
    assert (source.definition, problems) == (expected_lead(), [])


def test_every_mistake_of_a_file_names_file_line_and_field() -> None:
    _, problems = read("""
nam: lead
description: 1
llm:
  model: [x]
  maxSteps: 3
  max_steps: 4
  tools: {name: a}
  parallel_tools: yes
  settings: {temperature: hot, max_output_tokens: 1.5}
sub_agents:
  - 7
  - {agent: writer, on_failure: ABRT, history: {scope: 7}}
  - {agent: critic, limits: {wall_duration: 10, depth: 99999999999, model_calls: true}}
deltas: {passthrough: {}, aggregated: {}}
input_schema: {}
input_schema_json: "{}"
""")
    assert problems == [
        "lead.yaml:2: nam: There is no such field. Did you mean 'name'?",
        "lead.yaml:3: description: must be text; put it in quotes",
        "lead.yaml:5: llm.model: must be text",
        "lead.yaml:7: llm.max_steps: is the same field as 'maxSteps'; remove one of the two",
        "lead.yaml:8: llm.tools: must be a list",
        "lead.yaml:9: llm.parallel_tools: must be true or false",
        "lead.yaml:10: llm.settings.temperature: must be a number",
        "lead.yaml:10: llm.settings.max_output_tokens: must be a whole number",
        "lead.yaml:12: sub_agents[0]: "
        "must be a name, or a mapping of agent, link_mode, on_failure, history, input, limits",
        "lead.yaml:13: sub_agents[1].on_failure: must be CONTINUE or ABORT. Did you mean 'ABORT'?",
        "lead.yaml:13: sub_agents[1].history.scope: must be SESSION or BRANCH or NONE or CALLS.",
        "lead.yaml:14: sub_agents[2].limits.wall_duration: must be a duration such as 10m, 50ms or 1h30m",
        "lead.yaml:14: sub_agents[2].limits.depth: must be a whole number that fits 32 bits",
        "lead.yaml:14: sub_agents[2].limits.model_calls: must be a whole number",
        "lead.yaml:15: deltas.aggregated: excludes 'passthrough': there can be only one mode",
        "lead.yaml:17: input_schema_json: is the same field as 'input_schema'; remove one of the two",
    ]


def test_a_tool_and_a_sub_agent_can_be_their_names_alone() -> None:
    source, problems = read(
        "name: lead\nllm:\n  tools: [search, {name: read}]\nsub_agents:\n- writer\n- agent: editor\n"
    )
    assert problems == []
    assert source.definition == agent_pb2.AgentDefinition(
        name="lead",
        llm=agent_pb2.LlmAgent(tools=[agent_pb2.ToolLink(name="search"), agent_pb2.ToolLink(name="read")]),
        sub_agents=[agent_pb2.AgentLink(agent="writer"), agent_pb2.AgentLink(agent="editor")],
    )
    fields = ("llm.tools[0].name", "sub_agents[0].agent", "sub_agents[1].agent")
    assert [source.problem(field, "").line for field in fields] == [3, 5, 6]


def test_approval_is_required_or_not_and_nothing_between() -> None:
    _, problems = read("name: lead\nllm:\n  tools:\n    - {name: refund, requires_approval: always}\n")
    assert problems == ["lead.yaml:4: llm.tools[0].requires_approval: must be true or false"]


def test_a_document_that_is_no_mapping_says_what_it_should_be() -> None:
    _, problems = read("- lead\n")
    assert problems == ["lead.yaml:1: must be a mapping with `name`, `description` and a kind, such as `llm`"]


def test_a_problem_is_placed_at_the_nearest_thing_that_is_written() -> None:
    source, _ = read(LEAD)
    lines = [source.problem(field, "").line for field in ("llm.tools[0].name", "llm.tools[9].name", "kind", "name")]
    assert lines == [10, 10, 2, 2]


def test_a_revision_is_of_the_content_alone() -> None:
    first, second = expected_lead(), expected_lead()
    assert (
        revision(first) == revision(second) == hashlib.sha256(first.SerializeToString(deterministic=True)).hexdigest()
    )
    second.description = "another"
    assert revision(first) != revision(second)


def test_a_definition_is_written_as_an_author_would() -> None:
    definition = expected_lead()
    assert (
        definition_yaml(definition)
        == """\
name: lead
description: 'no'
llm:
  model: default
  instruction: |
    You lead.
    Ask: them
  tools:
  - name: search
    max_calls_per_run: 2
    timeout: 5400s
    requires_approval: true
  max_steps: 3
  settings:
    temperature: 1.0
    extra:
      b: 1
      a:
      - x
sub_agents:
- agent: researcher
- agent: writer
  on_failure: ABORT
  history:
    scope: NONE
deltas:
  passthrough: {}
limits:
  depth: 0
  wall_duration: 0.050s
input_schema:
  type: object
  properties: {}
"""
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON_TEXT = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
).flatmap(
    lambda value: st.sampled_from([(",", ":"), (", ", ": ")]).map(
        lambda separators: json.dumps(value, ensure_ascii=False, separators=separators)
    )
)


@st.composite
def definitions(draw: st.DrawFn) -> agent_pb2.AgentDefinition:
    """Any definition, sensible or not."""
    definition = agent_pb2.AgentDefinition(
        name=draw(TEXT), description=draw(TEXT), input_schema_json=draw(TEXT | JSON_TEXT)
    )
    if draw(st.booleans()):
        definition.llm.CopyFrom(
            agent_pb2.LlmAgent(
                instruction=draw(TEXT),
                tools=[
                    agent_pb2.ToolLink(
                        name=draw(TEXT),
                        timeout=Duration(seconds=draw(st.integers(0, 10**9))),
                        requires_approval=draw(st.booleans()),
                    )
                ],
                max_steps=draw(st.none() | st.integers(-(2**31), 2**31 - 1)),
                inherit_tools=draw(st.booleans()),
                settings=model_pb2.ModelSettings(
                    temperature=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
                    extra_json=draw(JSON_TEXT),
                ),
            )
        )
    definition.history.scope = draw(st.sampled_from(message_pb2.HistoryScope.values()))
    definition.limits.CopyFrom(policy_pb2.Limits(wall_duration=Duration(nanos=draw(st.integers(0, 999_999_999)))))
    return definition


@given(definitions())
def test_what_is_written_reads_back_to_the_same(definition: agent_pb2.AgentDefinition) -> None:
    source, problems = read(definition_yaml(definition))
    assert (source.definition, problems) == (definition, [])
