"""Validation of eval sets, with all problems at once; documents/messages.py checks how they are written.

The same list answers `bough eval validate` and the requests of EvalService. Rules that the schema states, such as the
bounds of numbers, are in schema_rules.py.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Final

from bough.v1 import eval_set_pb2, message_pb2
from bough_server.agents.loading import drop_reported_problems
from bough_server.engine.input_requests import outcome_mistakes
from bough_server.errors import InvalidRequest, Problem
from bough_server.evals.sets.eval_set import (
    MAX_SET_BYTES,
    SetSource,
    count_trials,
    is_recorded,
    max_turns_of,
    merge_metrics,
)
from bough_server.evals.sets.expectation_validation import (
    FieldProblem,
    KnownNames,
    expectation_problems,
    find_missing_expectation,
    json_problem,
    metrics_problems,
    reference_problems,
    unknown_name,
)
from bough_server.evals.sets.matrix import count_cells, matrix_problems
from bough_server.evals.sets.unknown_names import find_root_mocks, unknown_names
from bough_server.log.session_state import is_key
from bough_server.matching.values import check_matcher
from bough_server.matching.work import limit_work
from bough_server.runs.admission import check_input
from bough_server.runtime.faults import fault_mistakes
from bough_server.schema_rules import find_violations
from bough_server.tools.builtin import RESERVED

MAX_TRIALS: Final = 100_000
"""The most trials of all cases in one evaluation."""

MAX_CASE_BYTES: Final = 2 * 1024 * 1024
MAX_MOCKS_BYTES: Final = 1024 * 1024
MAX_DEFAULTS_BYTES: Final = 256 * 1024
MAX_MERGED_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of the cases once each has the defaults: so they are written to the log."""

_USER_ROLES: Final = (message_pb2.ROLE_UNSPECIFIED, message_pb2.ROLE_USER)
_KEY_WORDS: Final = "a letter, then up to 127 of letters, digits and _ - . :"


def problems_of(
    eval_set: eval_set_pb2.EvalSet, *, agent: str = "", known: KnownNames, trials: int | None = None
) -> list[FieldProblem]:
    """Return every problem of a set: the field's path and a sentence.

    `agent` and `trials` are what the request says instead of the set.
    """
    with limit_work():
        return list(_problems(eval_set, agent, known, trials))


def _problems(
    eval_set: eval_set_pb2.EvalSet, agent: str, known: KnownNames, trials: int | None
) -> Iterator[FieldProblem]:
    yield from _set_problems(eval_set, agent, known, trials)
    yield from metrics_problems(eval_set.defaults.metrics, "defaults.metrics", known)
    yield from _faults_problems(eval_set.defaults.faults, "defaults.faults", known)
    yield from matrix_problems(eval_set, known)
    yield from _default_problems(eval_set)
    yield from _id_problems(eval_set)
    if known.agents is not None:
        yield from unknown_names(eval_set, agents=known.agents, tools=known.tools)
    if known.called_agents is not None:
        yield from find_root_mocks(eval_set, agent=agent or eval_set.agent, called=known.called_agents)
    for index, case in enumerate(eval_set.cases):
        yield from _case_problems(case, f"cases[{index}]", eval_set.defaults, known)


def request_problems(
    eval_set: eval_set_pb2.EvalSet, *, agent: str = "", known: KnownNames, trials: int | None = None
) -> list[FieldProblem]:
    """Return every problem of a set in a request, by the schema's rules too."""
    problems = problems_of(eval_set, agent=agent, known=known, trials=trials)
    reported = {field for field, _ in problems}
    broken = [(each.field, each.description) for each in find_violations(eval_set) if each.field not in reported]
    return [*problems, *broken]


def set_problems(source: SetSource, known: KnownNames) -> list[Problem]:
    """Return every problem of a file's set, by the schema's rules too, each with its line."""
    problems = [source.problem(field, description) for field, description in problems_of(source.set, known=known)]
    rules = [source.problem(violation.field, violation.description) for violation in find_violations(source.set)]
    return [*problems, *drop_reported_problems(rules, problems)]


def _set_problems(
    eval_set: eval_set_pb2.EvalSet, agent: str, known: KnownNames, trials: int | None
) -> Iterator[FieldProblem]:
    if eval_set.ByteSize() > MAX_SET_BYTES:
        yield "", f"is larger than {MAX_SET_BYTES // 1024 // 1024} MiB."
    defaults = eval_set.defaults.ByteSize()
    if defaults > MAX_DEFAULTS_BYTES:
        yield "defaults", f"are larger than {MAX_DEFAULTS_BYTES // 1024} KiB."
    elif defaults * len(eval_set.cases) > MAX_MERGED_BYTES:
        most = MAX_MERGED_BYTES // len(eval_set.cases)
        yield "defaults", f"are {defaults:,} bytes, and with {len(eval_set.cases):,} cases they may be {most:,}."
    if not eval_set.cases:
        yield "cases", "must have at least one case."
    named = agent or eval_set.agent
    if not named and not all(is_recorded(case) for case in eval_set.cases):
        yield "agent", "is required: the agent that the cases run."
    yield from unknown_name("agent", named, known.agents, "agent")
    planned = sum(count_trials(case, eval_set.defaults, trials=trials) for case in eval_set.cases)
    if planned > MAX_TRIALS:
        yield "cases", f"have {planned:,} trials in all; an evaluation may have {MAX_TRIALS:,}."
    cells = count_cells(eval_set.matrix)
    if planned <= MAX_TRIALS < planned * cells:
        yield "matrix", f"{planned:,} trials in {cells} cells are {planned * cells:,}, and may be {MAX_TRIALS:,}."
    merged = (eval_set.ByteSize() + defaults * len(eval_set.cases)) * cells
    if merged > MAX_MERGED_BYTES:
        yield "matrix", f"The cases of all {cells} cells are {merged:,} bytes, and may be {MAX_MERGED_BYTES:,}."


def _default_problems(eval_set: eval_set_pb2.EvalSet) -> Iterator[FieldProblem]:
    for index, metric in enumerate(eval_set.defaults.metrics):
        missing = {find_missing_expectation(metric, case) for case in eval_set.cases}
        if missing and "" not in missing:
            yield f"defaults.metrics[{index}]", f"has nothing to score: no case expects any {missing.pop()}."


def _id_problems(eval_set: eval_set_pb2.EvalSet) -> Iterator[FieldProblem]:
    first: dict[str, int] = {}
    for index, case in enumerate(eval_set.cases):
        if case.id in first:
            yield f"cases[{index}].id", f"{case.id!r} is also the id of cases[{first[case.id]}]."
        first.setdefault(case.id, index)


def _case_problems(
    case: eval_set_pb2.EvalCase, place: str, defaults: eval_set_pb2.EvalDefaults, known: KnownNames
) -> Iterator[FieldProblem]:
    if case.ByteSize() > MAX_CASE_BYTES:
        yield place, f"is larger than {MAX_CASE_BYTES // 1024 // 1024} MiB."
    yield from _state_problems(case.session_state_json, f"{place}.session_state_json")
    yield from _turns_problems(case, place)
    if case.HasField("user"):
        yield from _find_user_problems(case, f"{place}.user", known)
    yield from _mocks_problems(case.mocks, f"{place}.mocks")
    yield from _faults_problems(case.faults, f"{place}.faults", known)
    if case.faults and is_recorded(case):
        yield f"{place}.faults", "must not be set: the turns are recorded, so nothing runs."
    size = sum(fault.ByteSize() for fault in case.faults or defaults.faults)
    if case.mocks.ByteSize() <= MAX_MOCKS_BYTES < case.mocks.ByteSize() + size:
        yield f"{place}.faults", f"are with `mocks` larger than {MAX_MOCKS_BYTES // 1024 // 1024} MiB."
    for name, changes in case.origin.changes.agents.items():
        yield from unknown_name("model", changes.model, known.models, f'{place}.origin.changes.agents["{name}"].model')
    for index, answer in enumerate(case.answers):
        yield from _answer_problems(answer, f"{place}.answers[{index}]")
    yield from metrics_problems(case.metrics, f"{place}.metrics", known)
    yield from reference_problems(case, merge_metrics(case, defaults).values(), place)
    for index, metric in enumerate(case.metrics):
        if missing := find_missing_expectation(metric, case):
            yield f"{place}.metrics[{index}]", f"has nothing to score: the case {case.id!r} expects no {missing}."


def _state_problems(state_json: str, place: str) -> Iterator[FieldProblem]:
    if problem := json_problem(state_json, is_object=True):
        yield place, problem
        return
    for key in json.loads(state_json or "{}"):
        if not is_key(key):
            yield place, f"{key[:40]!r} is not a key of session state: {_KEY_WORDS}."


def _turns_problems(case: eval_set_pb2.EvalCase, place: str) -> Iterator[FieldProblem]:
    if not (case.turns or case.HasField("user")):
        yield f"{place}.turns", "must have at least one turn, unless a model plays the user: see `user`."
    ids: set[str] = set()
    for index, turn in enumerate(case.turns):
        inner = f"{place}.turns[{index}]"
        if turn.id in ids:
            yield f"{inner}.id", f"There are two turns {turn.id!r}: give each its own id."
        ids |= {turn.id} - {""}
        if is_recorded(case):
            yield from _invocation_problems(turn, inner)
        elif index == 0 and case.HasField("origin"):
            if said := _list_input_fields(turn):
                yield (
                    f"{inner}.{said[0]}",
                    "must not be set: the first turn of a case with `origin` is what follows in it.",
                )
        else:
            yield from _user_problems(turn, inner)
        yield from expectation_problems(turn.expect, f"{inner}.expect")
    if is_recorded(case) and case.HasField("origin"):
        yield f"{place}.origin", "must not be set: the turns are recorded, so nothing runs."


def _find_user_problems(case: eval_set_pb2.EvalCase, place: str, known: KnownNames) -> Iterator[FieldProblem]:
    user, count = case.user, len(case.turns)
    if is_recorded(case):
        yield place, "must not be set: the turns are recorded, so nothing runs."
    elif case.HasField("origin"):
        yield place, "must not be set: a case with `origin` continues a recorded run with the turns that it has."
    if not (user.goal.strip() or user.plan.strip()):
        yield f"{place}.goal", "is required, or `plan`: what the user wants."
    if count >= (most := max_turns_of(user)):
        default = "" if user.HasField("max_turns") else ", the default,"
        yield (
            f"{place}.max_turns",
            f"is {most}{default} and must be more than the {count} turns before the user speaks.",
        )
    yield from unknown_name("model", user.model, known.models, f"{place}.model")
    if problem := json_problem(user.settings.extra_json, is_object=True):
        yield f"{place}.settings.extra_json", problem
    yield from expectation_problems(user.expect, f"{place}.expect")


def _list_input_fields(turn: eval_set_pb2.EvalTurn) -> list[str]:
    """Return the names of the fields that hold the user's message."""
    return [*(["user"] if turn.user else []), *(["input"] if turn.HasField("input") else [])]


def _invocation_problems(turn: eval_set_pb2.EvalTurn, place: str) -> Iterator[FieldProblem]:
    if not turn.HasField("recorded"):
        yield f"{place}.recorded", "is required: either every turn of a case has it or none."
    elif turn.recorded.WhichOneof("source") is None:
        yield f"{place}.recorded", "names no record: set `run` or `invocation`."
    for name in _list_input_fields(turn):
        yield f"{place}.{name}", "must not be set: the turns are recorded, so nothing runs."


def _user_problems(turn: eval_set_pb2.EvalTurn, place: str) -> Iterator[FieldProblem]:
    said = _list_input_fields(turn)
    if not said:
        yield f"{place}.user", "is required, or `input`, or in every turn `recorded`."
    elif len(said) > 1:
        yield f"{place}.input", "excludes `user`: set one of the two."
    elif turn.user:
        message = message_pb2.Message(parts=[message_pb2.Part(text=turn.user)])
        if not turn.user.strip():
            yield f"{place}.user", "must not be blank."
        elif wrong := _input_problems(message, ""):
            yield f"{place}.user", wrong[0][1]
    else:
        yield from _input_problems(turn.input, f"{place}.input")


def _input_problems(message: message_pb2.Message, place: str) -> list[FieldProblem]:
    if message.role not in _USER_ROLES:
        return [(f"{place}.role", "must be USER, or left out.")]
    if not any(part.text.strip() or part.data_json or part.HasField("blob") for part in message.parts):
        return [(f"{place}.parts", "must have at least one part with text, data or a blob.")]
    light = message_pb2.Message(metadata_json=message.metadata_json)
    # Files have their own bound.
    light.parts.extend(part for part in message.parts if not part.HasField("blob"))
    try:
        check_input(light, field=place)
    except InvalidRequest as error:
        return [(violation.field, violation.description) for violation in error.violations]
    return []


def _mocks_problems(mocks: eval_set_pb2.ToolMocks, place: str) -> Iterator[FieldProblem]:
    if mocks.faults or mocks.fault_seed:
        yield f"{place}.faults", "must not be set: the faults of a case are beside its mocks, in `faults`."
    if mocks.ByteSize() > MAX_MOCKS_BYTES:
        yield place, f"are larger than {MAX_MOCKS_BYTES // 1024 // 1024} MiB."
    for index, agent_mock in enumerate(mocks.agents):
        inner = f"{place}.agents[{index}]"
        if problem := check_matcher(agent_mock.input_match):
            yield f"{inner}.input_match", problem
        if agent_mock.WhichOneof("answer") is None:
            yield inner, "answers nothing: set `text`, `message` or `error`."
        elif agent_mock.HasField("message") and not agent_mock.message.parts:
            yield f"{inner}.message.parts", "must have at least one part."
    for index, mock in enumerate(mocks.tools):
        inner = f"{place}.tools[{index}]"
        if mock.name in RESERVED:
            yield f"{inner}.name", f"{mock.name!r} is a built-in tool, which cannot be mocked."
        if problem := check_matcher(mock.arguments_match):
            yield f"{inner}.arguments_match", problem
        match mock.WhichOneof("answer"):
            case None:
                yield inner, "answers nothing: set `result` or `outcome`."
            case "result_json":
                problem = json_problem(mock.result_json) if mock.result_json else "must be JSON text."
                yield from [(f"{inner}.result_json", problem)] if problem else []
            case "outcome":
                yield from ((f"{inner}.outcome", mistake) for mistake in outcome_mistakes(mock.outcome))


def _faults_problems(faults: Sequence[eval_set_pb2.EvalFault], place: str, known: KnownNames) -> Iterator[FieldProblem]:
    for index, fault in enumerate(faults):
        for field, mistake in fault_mistakes(fault):
            yield f"{place}[{index}]{field and f'.{field}'}", mistake
        yield from unknown_name("model", fault.model, known.models, f"{place}[{index}].model")


def _answer_problems(answer: eval_set_pb2.EvalAnswer, place: str) -> Iterator[FieldProblem]:
    about = answer.WhichOneof("about")
    if about == "tool" and answer.HasField("value_json"):
        yield place, "is about a tool, whose calls are answered by `approval` or `tool_outcome`, not by `value`."
    if about == "question" and (answer.HasField("approval") or answer.HasField("tool_outcome")):
        yield place, "is about a question, which is answered by `value`."
    match answer.WhichOneof("answer"):
        case None:
            yield place, "answers nothing: set `approval`, `value` or `tool_outcome`."
        case "approval":
            if answer.approval.arguments_json and not answer.approval.approved:
                yield f"{place}.approval.arguments_json", "is for an approval: other arguments to run the call with."
            if problem := json_problem(answer.approval.arguments_json, is_object=True):
                yield f"{place}.approval.arguments_json", problem
        case "value_json":
            problem = json_problem(answer.value_json) if answer.value_json else "must be JSON text."
            yield from [(f"{place}.value_json", problem)] if problem else []
        case "tool_outcome":
            yield from ((f"{place}.tool_outcome", mistake) for mistake in outcome_mistakes(answer.tool_outcome))
