"""The JSON Schemas for editors: they take what the server takes, and refuse unknown keys."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from bough_server.agents.definition import parse_definition
from bough_server.documents.yaml import Document, Value, parse_documents, read_documents
from bough_server.errors import ConfigurationError
from bough_server.evals.sets.eval_set import read_eval_set
from bough_server.settings import Settings

ROOT = Path(__file__).parents[2]
EVAL_SETS = [ROOT / "examples" / "eval" / name for name in ("desk.yaml", "reader.yaml")]
EXAMPLES = [
    *sorted(ROOT.glob("examples/*/bough.yaml")),
    *sorted(ROOT.glob("examples/*/agents/*.yaml")),
    *EVAL_SETS,
]
MODELINE = re.compile(r"^# yaml-language-server: \$schema=(.*)$", re.MULTILINE)

AGENT = "name: lead\ndescription: Leads.\n"
AGENT_FORMS = [
    "llm: {}",
    "llm: {model: default, maxSteps: 3, parallel_tools: false, instruction: }",
    "llm: {max_steps: 3.0, settings: {temperature: 1, extra: {reasoning: {effort: low}}}}",
    "llm: {settings: {extra_json: '{\"a\": 1}', topP: 0.5}}",
    "llm: {tools: [{name: a, timeout: 1h30m}, {name: b, timeout: 1.5s, maxCallsPerRun: 2}]}",
    "llm: {tools: [search, {name: read}]}\nsub_agents: [writer, {agent: editor}]",
    "llm: {}\nhistory: {scope: NONE}",
    "llm: {}\nhistory: {scope: HISTORY_SCOPE_BRANCH, sliding_window: {max_tokens: 100}}",
    "llm: {}\nhistory: {scope: UNSPECIFIED, summarize: {maxTokens: 100}}",
    "llm: {}\noutput_schema: {type: object}\ninputSchema: {type: object}",
    "llm: {}\noutput_schema_json: '{}'\ninputSchemaJson: '{}'",
    "llm: {}\nsequence:\nlimits: {wall_duration: 50ms}",
    "sequence: {}\nsub_agents: [{agent: a}, {agent: b, on_failure: ABORT, input: {template: x}}]",
    "sequence: {}\nsubAgents: [{agent: a, linkMode: LINK_MODE_TOOL, onFailure: CONTINUE}]",
    "parallel: {on_failure: FAIL_FAST}\ndeltas: {aggregated: {max_interval: 1s, max_chars: 5}}",
    "loop: {maxIterations: 3, until: {predicate: done}}\ndeltas: {passthrough: {}}",
    "planExecute: {planner: a, executor: b}",
    "plan_execute: {planner: a, executor: b}",
    "supervisor: {llm: {}}",
]
EVAL_SET = "name: desk\nagent: lead\n"
EVAL_SET_FORMS = [
    "cases: [{id: a, turns: [{user: Hi.}]}]",
    "cases_from: {file: rows.csv, template: {id: '{{id}}', trials: 2}}",
    "matrix: {agent: lead, model: [a, b], instruction: [Be kind.], temperature: [0, 0.5]}",
    "cases: [{id: a, turns: [{user: Hi., expect: {answer: Yes., tools: [search], agents: [lead, {name: '*'}]}}]}]",
    "cases: [{id: a, turns: [{expect: {answer: {json: {equals: null, numberTolerance: 0.5}}}}]}]",
    "cases: [{id: a, turns: [{expect: {tools: [{name: t, result: , argumentsMatch: {subsetJson: '{}'}}]}}]}]",
    "cases: [{id: a, mocks: {strict: true, tools: [{name: t, result: null}, {name: u, outcome: {parts: []}}]}}]",
    "cases: [{id: a, turns: [{recorded: {invocation: {runId: r, startTime: 2026-01-31T12:00:00Z}}}]}]",
    "cases: [{id: a, turns: [{recorded: {run: {run_id: r, asOfSequence: '7'}}}], labels: {team: x}}]",
    "cases: [{id: a, origin: {run_id: r, after_sequence: '7', changes: {agents: {lead: {model: m}}}}}]",
    "cases: [{id: a, turns: [{input: {parts: [{blob: {data: aGk=, media_type: text/plain}}]}}]}]",
    "cases: [{id: a, answers: [{tool: t, approval: APPROVE}, {approval: REFUSE}, {question: how, value: false}]}]",
    "cases: [{id: a, answers: [{approval: {approved: true, arguments: {a: 1}, note: Less.}}, {toolOutcome: {}}]}]",
    "defaults: {trials: 3, timeout: 2m, metrics: [{agent_trajectory: {transparent: {kinds: [LOOP]}}, threshold: 0.5}]}",
    "defaults: {metrics: [{budget: {limits: {tokens: '5000', cost_nanos: 7}, errors: 0}}, {custom: {name: f}}]}",
]
EVAL_SET_MISTAKES = [
    ("case: []", "case"),
    ("cases: {}", "{}"),
    ("cases_from: {file: rows.csv, templates: {}}", "templates"),
    ("cases: [a]", "a"),
    ("cases: [{id: a, turns: [{users: Hi.}]}]", "users"),
    ("cases: [{id: a, turns: [{expect: {agents: [{name: a, children: [{nam: b}]}]}}]}]", "nam"),
    ("cases: [{id: a, labels: {team: 7}}]", "7"),
    ("cases: [{id: a, labels: [team]}]", "team"),
    ("cases: [{id: a, origin: {run_id: r, after_sequence: last}}]", "last"),
    ("cases: [{id: a, origin: {run_id: r, changes: {agents: {lead: {models: m}}}}}]", "models"),
    ("cases: [{id: a, turns: [{recorded: r}]}]", "r"),
    ("cases: [{id: a, answers: [{tool: t, approval: MAYBE}]}]", "MAYBE"),
    ("defaults: {runs: 3}", "runs"),
    ("defaults: {metrics: [{name: a}]}", "budget"),
    ("defaults: {metrics: [{budget: {}, custom: {}}]}", "budget"),
]
AGENT_MISTAKES = [
    ("llms: {}", "llms"),
    ("llm: {max_step: 3}", "max_step"),
    ("llm: {tools: [7]}", "7"),
    ("llm: {tools: search}", "search"),
    ("llm: {tools: [{name: search, time_out: 1s}]}", "time_out"),
    ("llm: {}\nhistory: {scope: none}", "none"),
    ("llm: {}\nlimits: {wall_duration: 10}", "10"),
    ("llm: {}\nlimits: {wall_duration: ten minutes}", "ten minutes"),
    ("llm: {}\nlimits: {tokens: many}", "many"),
    ("llm: {}\nsub_agents: writer", "writer"),
    ("llm: {}\nsequence: {}", "llm"),
    ("loop: {}", "max_iterations"),
    ("sub_agents: []", "llm"),
]
SETTINGS_FORMS = [
    "agents:\npython: []\nserver:",
    "server: {port: 0, drain_grace: 30s, reflection: false}",
    "server: {drain_grace: 30}\nruns: {disconnect_grace: 0.5, deltas: {max_interval: 1s500ms}}",
    "storage: {durability: process}",
    "models: {default: {alias: a}, a: {provider: local}}",
    "models: {a: {provider: openai, model: m, timeouts: {start: 1m}, breaker: }}",
    "models: {a: {provider: openai, model: m, price: {input_per_million: 1, output_per_million: 2.5}}}",
    "limits: {default: {tokens: 5, wall_duration: }, maximum: {concurrency: 1}}",
    "telemetry: {prometheus_port: }\nlog_level: debug\nlog_format: json\ncurrency: EUR\naddress: ",
]
SETTINGS_MISTAKES = [
    ("servers: {}", "servers"),
    ("server: {ports: 1}", "ports"),
    ("server: {port: 70000}", "70000"),
    ('server: {port: "1"}', "1"),
    ("server: {drain_grace: soon}", "soon"),
    ("server: {host: }", "None"),
    ("agents: agents/*.yaml", "agents/*.yaml"),
    ("models: {a: {provider: llama}}", "llama"),
    ("models: {a: {provider: local, modell: x}}", "modell"),
    ("limits: {maximum: {depth: -1}}", "-1"),
    ("log_level: loud", "loud"),
    ("log_format: xml", "xml"),
]


@cache
def validator(name: str) -> Draft7Validator:
    """The validator of a shipped schema."""
    schema = json.loads((resources.files("bough_server") / "schemas" / f"{name}.schema.json").read_text("utf-8"))
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def mistakes(name: str, document: Value) -> str:
    """What a schema says against a document, with everything inside it."""
    found: list[str] = []
    waiting = list(validator(name).iter_errors(document))
    while waiting:
        error = waiting.pop()
        found.append(f"{error.json_path}: {error.message}")
        waiting.extend(error.context or [])
    return "\n".join(found)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_document_of_an_example_names_its_schema_and_is_accepted(file: Path) -> None:
    documents = read_documents(file)
    named = {(file.parent / path).resolve() for path in MODELINE.findall(file.read_text(encoding="utf-8"))}

    name = "bough" if file.name == "bough.yaml" else "eval" if file in EVAL_SETS else "agent"
    assert named == {ROOT / "server" / "bough_server" / "schemas" / f"{name}.schema.json"}
    assert len(MODELINE.findall(file.read_text(encoding="utf-8"))) == len(documents)
    assert [mistakes(name, document.value) for document in documents] == [""] * len(documents)


@pytest.mark.parametrize("text", AGENT_FORMS)
def test_every_form_that_a_definition_can_have_is_accepted(text: str) -> None:
    [document] = parse_documents(AGENT + text, path="agents.yaml")

    assert parse_definition(document)[1] == []
    assert mistakes("agent", document.value) == ""


@pytest.mark.parametrize(("text", "about"), AGENT_MISTAKES)
def test_mistakes_in_a_definition_are_refused(text: str, about: str) -> None:
    [document] = parse_documents(AGENT + text, path="agents.yaml")

    assert about in mistakes("agent", document.value)


def test_a_definition_needs_a_name_and_a_description() -> None:
    assert "'name' is a required property" in mistakes("agent", {"description": "D.", "llm": {}})
    assert "'description' is a required property" in mistakes("agent", {"name": "a", "llm": {}})


@pytest.mark.parametrize("text", EVAL_SET_FORMS)
def test_every_form_that_an_eval_set_can_have_is_accepted(text: str, tmp_path: Path) -> None:
    file = tmp_path / "eval.yaml"
    file.write_text(EVAL_SET + text, encoding="utf-8")
    (tmp_path / "rows.csv").write_text("id\na\n", encoding="utf-8")

    assert read_eval_set(file)[1] == []
    assert mistakes("eval", read_documents(file)[0].value) == ""


@pytest.mark.parametrize(("text", "about"), EVAL_SET_MISTAKES)
def test_mistakes_in_an_eval_set_are_refused(text: str, about: str) -> None:
    [document] = parse_documents(EVAL_SET + text, path="eval.yaml")

    assert about in mistakes("eval", document.value)


@pytest.mark.parametrize("text", SETTINGS_FORMS)
def test_every_form_that_a_setting_can_have_is_accepted(text: str, tmp_path: Path) -> None:
    assert settings_problem(text, tmp_path) == ""
    [document] = parse_documents(text, path="bough.yaml")
    assert mistakes("bough", document.value) == ""


@pytest.mark.parametrize(("text", "about"), SETTINGS_MISTAKES)
def test_mistakes_in_settings_are_refused(text: str, about: str, tmp_path: Path) -> None:
    assert settings_problem(text, tmp_path) != ""
    [document] = parse_documents(text, path="bough.yaml")
    assert about in mistakes("bough", document.value)


def test_definitions_in_tests_are_judged_as_the_server_reads_them() -> None:
    accepted = 0
    for place, document in documents_of_tests():
        value = document.value
        if not isinstance(value, dict) or "name" not in value or not KINDS & value.keys():
            continue
        problems = [str(problem) for problem in parse_definition(document)[1]]
        said = mistakes("agent", value)
        if any("There is no such field" in problem for problem in problems):
            assert said, f"{place}: {problems}"
        # What is missing is the validator's to say, which a half-written definition has not met.
        elif not problems and {"name", "description"} <= value.keys():
            assert not said, f"{place}: {said}"
            accepted += 1
    assert accepted > 10


def test_settings_in_tests_are_judged_as_the_server_reads_them(tmp_path: Path) -> None:
    accepted = 0
    for place, document in documents_of_tests():
        value = document.value
        if not isinstance(value, dict) or not value.keys() & Settings.model_fields.keys():
            continue
        problem = settings_problem(json.dumps(value), tmp_path)
        said = mistakes("bough", value)
        if "There is no such setting" in problem:
            assert said, f"{place}: {problem}"
        elif not problem:
            assert not said, f"{place}: {said}"
            accepted += 1
    assert accepted > 10


KINDS = {"llm", "sequence", "parallel", "loop", "supervisor", "swarm", "plan_execute", "function"}


def settings_problem(text: str, folder: Path) -> str:
    """What the server says against a configuration; empty if it takes it."""
    file = folder / "bough.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        Settings.load(file)
    except ConfigurationError as error:
        return str(error)
    return ""


def documents_of_tests() -> Iterator[tuple[str, Document]]:
    """The YAML documents in the strings of tests, each with its file and line."""
    for file in sorted((ROOT / "tests").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        # Most files have no YAML at all, and to parse them all takes seconds.
        if "llm: " not in text and "models: " not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and ": " in node.value:
                yield from ((f"{file}:{node.lineno}", document) for document in _documents(node.value))


def _documents(text: str) -> list[Document]:
    try:
        return parse_documents(text, path="text.yaml")
    except ConfigurationError:
        return []
