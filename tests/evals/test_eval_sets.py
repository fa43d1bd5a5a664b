"""Eval sets as YAML and JSON: reading, mistakes, writing, digests, and the defaults of their cases."""

import json
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import HealthCheck, given, settings

from bough.v1 import agent_pb2, eval_set_pb2, input_pb2, invocation_pb2, message_pb2, policy_pb2, usage_pb2
from bough.v1.invocation_pb2 import InvocationSource
from bough_server.agents.definition import definition_yaml, parse_definition
from bough_server.documents.messages import read_message
from bough_server.documents.yaml import parse_documents, parse_json
from bough_server.errors import ConfigurationError
from bough_server.evals.sets.eval_set import (
    SetSource,
    eval_set_yaml,
    parse_eval_set,
    plan_cases,
    read_eval_set,
    set_digest,
)
from tests.support.random_messages import messages

DESK = """
name: desk
agent: lead
defaults:
  trials: 3
  metrics:
    - budget: {limits: {tokens: "5000"}, errors: 0}
    - {name: order, tool_trajectory: {mode: IN_ORDER}}
cases:
  - id: leaves
    labels: {topic: nature, x.y: z}
    turns:
      - user: Why do leaves turn red?
        expect:
          answer: Because.
          tools:
            - search
            - {name: read, arguments: {page: 1}, result: null}
          agents: [lead, {name: "*", children: [writer], extra: ALLOW}]
    mocks: {tools: [{name: search, arguments_match: {equals: null}, result: [1, two]}]}
    origin: {run_id: r, after_sequence: 7, changes: {agents: {lead: {model: small}}}}
"""


def expected_desk() -> eval_set_pb2.EvalSet:
    pb = eval_set_pb2
    case = pb.EvalCase(
        id="leaves",
        labels={"topic": "nature", "x.y": "z"},
        turns=[
            pb.EvalTurn(
                user="Why do leaves turn red?",
                expect=pb.EvalExpectation(
                    answer=pb.ExpectedAnswer(exact="Because."),
                    tools=[
                        pb.ExpectedTool(name="search"),
                        pb.ExpectedTool(name="read", arguments_json='{"page":1}', result_json="null"),
                    ],
                    agents=[
                        pb.ExpectedAgent(name="lead"),
                        pb.ExpectedAgent(
                            name="*", children=[pb.ExpectedAgent(name="writer")], extra=pb.EXTRA_AGENTS_POLICY_ALLOW
                        ),
                    ],
                ),
            )
        ],
        mocks=pb.ToolMocks(
            tools=[
                pb.ToolMock(name="search", arguments_match=pb.ValueMatcher(equals_json="null"), result_json='[1,"two"]')
            ]
        ),
    )
    case.origin.run_id, case.origin.after_sequence = "r", 7
    case.origin.changes.agents["lead"].model = "small"
    return pb.EvalSet(
        name="desk",
        agent="lead",
        defaults=pb.EvalDefaults(
            trials=3,
            metrics=[
                pb.EvalMetric(budget=pb.BudgetMetric(limits=policy_pb2.Limits(tokens=5000), errors=0)),
                pb.EvalMetric(name="order", tool_trajectory=pb.ToolTrajectoryMetric(mode=pb.TRAJECTORY_MODE_IN_ORDER)),
            ],
        ),
        cases=[case],
    )


def record() -> invocation_pb2.Invocation:
    """A record with times, 64-bit integers, enums, labels and bytes."""
    return invocation_pb2.Invocation(
        run_id="r",
        labels={"a": "b"},
        start_time=Timestamp(seconds=5, nanos=7),
        tree_usage=usage_pb2.Usage(input_tokens=2**53 + 1, cost_nanos=2**60),
        final_response=message_pb2.Message(
            role=message_pb2.ROLE_ASSISTANT,
            parts=[message_pb2.Part(blob=message_pb2.Blob(data=b"\x00\xff", media_type="image/png"))],
        ),
    )


def written(folder: Path, text: str, name: str = "set.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def read(folder: Path, text: str) -> tuple[SetSource, list[str]]:
    """The set of a text, and its problems without the path of the folder."""
    source, problems = read_eval_set(written(folder, text))
    return source, [str(problem).removeprefix(f"{folder}/") for problem in problems]


def test_a_set_is_read_with_all_that_is_kinder_than_json(tmp_path: Path) -> None:
    source, problems = read(tmp_path, DESK)

    assert problems == []
    assert source.set == expected_desk()


def test_names_and_texts_alone_are_expected_agents_tools_and_answers_with_their_lines(tmp_path: Path) -> None:
    source, _ = read(tmp_path, DESK)
    expect = "cases[0].turns[0].expect"

    fields = (f"{expect}.answer.exact", f"{expect}.tools[0].name", f"{expect}.agents[1].children[0].name")
    assert [source.problem(field, "").line for field in fields] == [15, 17, 19]
    assert source.problem('cases[0].labels["x.y"]', "").line == 11
    assert source.problem('cases[0].origin.changes.agents["lead"].instruction', "").line == 21


ANSWERS = """
name: s
cases:
  - id: a
    answers:
      - {tool: pay, approval: APPROVE}
      - {agent: clerk, approval: REFUSE}
      - {approval: {approved: true, arguments: {amount: 2}}}
      - {approval: {note: Too much.}}
      - {question: Why, value: broken}
      - {tool: look, tool_outcome: {parts: [{text: a cat}]}}
"""


def test_an_answer_of_a_case_approves_or_refuses_in_a_word_and_is_written_as_it_was_read(tmp_path: Path) -> None:
    source, problems = read(tmp_path, ANSWERS)
    pb, decision = eval_set_pb2.EvalAnswer, input_pb2.ApprovalDecision
    looked = message_pb2.ToolOutcome(parts=[message_pb2.Part(text="a cat")])

    assert problems == []
    assert list(source.set.cases[0].answers) == [
        pb(tool="pay", approval=decision(approved=True)),
        pb(agent="clerk", approval=decision()),
        pb(approval=decision(approved=True, arguments_json='{"amount":2}')),
        pb(approval=decision(note="Too much.")),
        pb(question="Why", value_json='"broken"'),
        pb(tool="look", tool_outcome=looked),
    ]
    (read_one, written_one) = (parse_documents(text, path="") for text in (ANSWERS, eval_set_yaml(source.set)))
    assert [document.value for document in written_one] == [document.value for document in read_one]


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("answers: [{approval: MAYBE}]", "answers[0].approval: must be APPROVE or REFUSE, or a mapping of approved,"),
        ("answers: [{approval: true}]", "answers[0].approval: must be APPROVE or REFUSE, or a mapping of approved,"),
        ("answers: [{approval: APPROVE, value: 1}]", "answers[0].value: excludes 'approval': there can be only one"),
        ("runs: 3", "runs: `runs` is `trials` now."),
        ("from: {run_id: r}", "from: `from` is `origin` now."),
        ("origin: {through_sequence: 3}", "origin.through_sequence: `through_sequence` is `after_sequence` now."),
        ("origin: {throughSequence: 3}", "origin.throughSequence: `throughSequence` is `after_sequence` now."),
        ("answers: [{decision: APPROVE}]", "answers[0].decision: `decision` is `approval` now."),
        ("answers: [{arguments: {a: 1}}]", "answers[0].arguments: `arguments` is `approval.arguments` now."),
    ],
)
def test_answers_that_are_none_and_names_of_version_0_1_are_refused_with_what_to_write(
    tmp_path: Path, case: str, problem: str
) -> None:
    _, problems = read(tmp_path, f"name: s\ndefaults: {{runs: 2}}\ncases: [{{id: a, {case}}}]\n")

    assert problems[0] == "set.yaml:2: defaults.runs: `runs` is `trials` now."
    (sentence,) = problems[1:]
    assert sentence.startswith(f"set.yaml:3: cases[0].{problem}")


def test_a_recorded_invocation_is_read_as_protobufs_json_has_it(tmp_path: Path) -> None:
    turn = eval_set_pb2.EvalTurn(recorded=InvocationSource(invocation=record()))
    recorded = eval_set_pb2.EvalSet(name="s", cases=[eval_set_pb2.EvalCase(id="a", turns=[turn])])

    source = parse_eval_set(written(tmp_path, json_format.MessageToJson(recorded), "set.json"))

    assert source.set == recorded


def test_every_mistake_names_file_line_and_field(tmp_path: Path) -> None:
    _, problems = read(
        tmp_path,
        """
nam: desk
cases:
  - id: 7
    labels: {a: 1, b: [x]}
    turns:
      - {user: Hi., expect: {tools: [7], answer: [x], agents: {}}}
      - {recorded: {invocation: {start_time: noon, tree_usage: {cost_nanos: 1 EUR}}}}
      - {input: {parts: [{blob: {data: "%"}}]}}
    mocks: {tools: [{name: t, result: 1, outcome: {}}]}
    metrics: [{threshold: high, agent_trajectory: {roots_order: SORTED}}]
    origin: {changes: {agents: [lead]}}
    timeout: 10
""",
    )

    assert problems == [
        "set.yaml:2: nam: There is no such field. Did you mean 'name'?",
        "set.yaml:4: cases[0].id: must be text; put it in quotes",
        "set.yaml:5: cases[0].labels.a: must be text; put it in quotes",
        "set.yaml:5: cases[0].labels.b: must be text",
        "set.yaml:7: cases[0].turns[0].expect.tools[0]: "
        "must be a name, or a mapping of name, arguments, arguments_match, result, result_match, "
        "name_regex, nth, state",
        "set.yaml:7: cases[0].turns[0].expect.answer: "
        "must be a text, or a mapping of exact, contains, excludes, regex, json, ignore_case, min_characters, "
        "max_characters",
        "set.yaml:7: cases[0].turns[0].expect.agents: must be a list",
        "set.yaml:8: cases[0].turns[1].recorded.invocation.start_time: must be a time such as 2026-01-31T12:00:00Z",
        "set.yaml:8: cases[0].turns[1].recorded.invocation.tree_usage.cost_nanos: must be a whole number",
        "set.yaml:9: cases[0].turns[2].input.parts[0].blob.data: must be bytes as base64",
        "set.yaml:10: cases[0].mocks.tools[0].outcome: excludes 'result': there can be only one answer",
        "set.yaml:11: cases[0].metrics[0].threshold: must be a number",
        "set.yaml:11: cases[0].metrics[0].agent_trajectory.roots_order: must be UNORDERED or ORDERED."
        " Did you mean 'ORDERED'?",
        "set.yaml:12: cases[0].origin.changes.agents: must be a mapping",
        "set.yaml:13: cases[0].timeout: must be a duration such as 10m, 50ms or 1h30m",
    ]


def test_a_file_holds_one_set(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing\n")[1] == ["set.yaml:1: The file has no eval set."]
    assert read(tmp_path, "name: a\n---\nname: b\n")[1] == [
        "set.yaml:1: The file has 2 documents; a file holds one eval set."
    ]
    assert read(tmp_path, "- a\n")[1] == ["set.yaml:1: must be a mapping with `name`, `agent` and `cases`"]


def test_a_set_with_mistakes_is_refused_with_all_of_them(tmp_path: Path) -> None:
    file = written(tmp_path, "nam: a\ncases: {}\n")

    with pytest.raises(ConfigurationError) as refused:
        parse_eval_set(file)
    assert refused.value.message.splitlines() == [
        f"{file}:1: nam: There is no such field. Did you mean 'name'?",
        f"{file}:2: cases: must be a list",
    ]


def test_a_hundred_megabytes_are_refused_without_being_read(tmp_path: Path) -> None:
    file = tmp_path / "set.yaml"
    with file.open("wb") as huge:
        huge.truncate(100 * 1024 * 1024)

    with pytest.raises(ConfigurationError) as refused:
        read_eval_set(file)
    assert refused.value.message == f"{file}: The file is larger than 8 MiB."


@pytest.mark.parametrize("name", ["set.yaml", "set.json"])
def test_a_set_of_several_megabytes_is_read_with_its_lines(tmp_path: Path, name: str) -> None:
    cases = [{"id": f"case {index}", "turns": [{"user": "x" * 3000}]} for index in range(600)]
    file = written(tmp_path, json.dumps({"name": "s", "cases": cases}, indent=1), name)

    source = parse_eval_set(file)

    assert file.stat().st_size > 1.5 * 1024 * 1024
    assert [case.id for case in source.set.cases] == [case["id"] for case in cases]
    lines = file.read_text(encoding="utf-8").splitlines()
    assert '"case 599"' in lines[source.problem("cases[599].id", "").line - 1]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(messages(eval_set_pb2.EvalSet))
def test_a_set_that_is_written_reads_back_to_the_same(eval_set: eval_set_pb2.EvalSet) -> None:
    # An empty set is an empty document.
    eval_set.name = eval_set.name or "s"
    made = eval_set_pb2.EvalSet()

    [document] = parse_documents(eval_set_yaml(eval_set), path="set.yaml")
    _, problems = read_message(document, made, required="", null_is_json=True)

    assert (problems, made) == ([], eval_set)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(messages(eval_set_pb2.EvalSet))
def test_protobufs_own_json_of_a_set_is_read_as_well(eval_set: eval_set_pb2.EvalSet) -> None:
    made = eval_set_pb2.EvalSet()

    [document] = parse_json(json_format.MessageToJson(eval_set), path="set.json")
    _, problems = read_message(document, made, required="", null_is_json=True)

    assert (problems, made) == ([], eval_set)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(messages(agent_pb2.AgentDefinition))
def test_a_definition_that_is_written_reads_back_to_the_same(definition: agent_pb2.AgentDefinition) -> None:
    definition.name = definition.name or "a"

    [document] = parse_documents(definition_yaml(definition), path="agent.yaml")
    source, problems = parse_definition(document)

    assert (problems, source.definition) == ([], definition)


def test_equal_sets_have_equal_digests_whatever_the_order_of_their_labels() -> None:
    first, second = expected_desk(), expected_desk()
    second.cases[0].labels.clear()
    for key in ("x.y", "topic"):
        second.cases[0].labels[key] = first.cases[0].labels[key]

    assert set_digest(first) == set_digest(second)
    second.cases[0].id = "other"
    assert set_digest(first) != set_digest(second)


def test_a_case_is_planned_with_the_defaults_of_its_set() -> None:
    eval_set = expected_desk()
    own = eval_set_pb2.EvalMetric(name="order", threshold=0.5, tool_trajectory=eval_set_pb2.ToolTrajectoryMetric())
    answer = eval_set_pb2.EvalMetric(final_response=eval_set_pb2.FinalResponseMetric())
    eval_set.cases[0].metrics.extend([answer, own])

    [planned] = plan_cases(eval_set, trials=None)

    assert planned.trials == 3
    assert planned.eval_case.timeout == Duration(seconds=600)
    assert list(planned.eval_case.metrics) == [eval_set.defaults.metrics[0], own, answer]
    assert list(eval_set.cases[0].metrics) == [answer, own]


def test_what_a_case_says_replaces_the_defaults_and_what_a_request_says_replaces_both() -> None:
    eval_set = expected_desk()
    eval_set.defaults.timeout.seconds = 60
    eval_set.cases.add(id="own", trials=7, timeout=Duration(seconds=5))

    assert [each.trials for each in plan_cases(eval_set, trials=None)] == [3, 7]
    assert [each.trials for each in plan_cases(eval_set, trials=2)] == [2, 2]
    assert [each.eval_case.timeout.seconds for each in plan_cases(eval_set, trials=2)] == [60, 5]


def test_a_recorded_case_is_scored_once_because_nothing_runs() -> None:
    eval_set = expected_desk()
    eval_set.cases.add(
        id="recorded", trials=5, turns=[eval_set_pb2.EvalTurn(recorded=InvocationSource(invocation=record()))]
    )

    assert [each.trials for each in plan_cases(eval_set, trials=9)] == [9, 1]
