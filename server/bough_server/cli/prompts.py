"""Answers to the requests of a run: typed at the terminal, or given as options."""

import asyncio
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn, Protocol

from pydantic import JsonValue

from bough.v1 import input_pb2, message_pb2
from bough_server.cli.render.questions import headline, question_lines, takes_text
from bough_server.errors import ConfigurationError
from bough_server.tools.arguments import schema_mistakes

_MOST_BYTES = 65536

_ERROR: Final = "error:"
_APPROVE: Final = "Approve? y or n, and a note if you like; e to edit the arguments; Enter leaves it open:"
_AGAIN: Final = "Run it again? y or n, and a note if you like; r to say its result; Enter leaves it open:"
_RESULT: Final = 'Its result, as JSON or text, or "error: …"; Enter leaves it open:'
_VALUE: Final = "Your answer; Enter leaves it open:"

_SHORTEST: Final = 6
_APPROVAL_KEYS: Final = frozenset({"approved", "arguments", "note"})
_FAILURES: Final = ({"error"}, {"error", "result"})
"""The members of a JSON object that is the failure of a tool, alone or beside its result."""


class Dialog(Protocol):
    """Somebody to ask."""

    def show(self, lines: Iterable[str]) -> None:
        """Shows lines."""
        ...

    async def ask(self, prompt: str) -> str | None:
        """A line, without its end and the space around it; None where nobody types any more."""
        ...


class TerminalDialog:
    """Whoever sits at this process's terminal. Standard output is left to what the command gives."""

    def show(self, lines: Iterable[str]) -> None:
        """Shows lines on standard error."""
        for line in lines:
            print(line, file=sys.stderr)

    async def ask(self, prompt: str) -> str | None:
        """A line that is typed; Ctrl-C is heard while it waits."""
        print(f"{prompt} ", end="", file=sys.stderr, flush=True)
        descriptor = sys.stdin.fileno()
        await _readable(descriptor)
        # A terminal gives one line at a time, and all of it.
        typed = os.read(descriptor, _MOST_BYTES)
        if not typed:
            print(file=sys.stderr)
            return None
        return typed.decode(errors="replace").strip()


def is_terminal() -> bool:
    """Whether somebody can be asked: standard input and standard error are both a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def ask_all(requests: Sequence[input_pb2.InputRequest], dialog: Dialog) -> list[input_pb2.InputAnswer]:
    """The answers to those requests that get one; at the end of what is typed the rest stays open."""
    answers: list[input_pb2.InputAnswer] = []
    for number, request in enumerate(requests, start=1):
        first, *rest = question_lines(request)
        dialog.show([f"{number}/{len(requests)} {first.removeprefix('? ')}", *rest])
        try:
            answer = await _ask(request, dialog)
        except EOFError:
            break
        if answer is not None:
            answer.input_id = request.input_id
            answers.append(answer)
    return answers


async def _ask(request: input_pb2.InputRequest, dialog: Dialog) -> input_pb2.InputAnswer | None:
    match request.kind:
        case input_pb2.INPUT_KIND_APPROVAL:
            return await _ask_approval(request, dialog, _APPROVE)
        case input_pb2.INPUT_KIND_RECOVERY:
            return await _ask_approval(request, dialog, _AGAIN)
        case input_pb2.INPUT_KIND_CLIENT_TOOL:
            return await _ask_result(dialog)
        case _:
            return await _ask_value(request, dialog)


async def _ask_approval(request: input_pb2.InputRequest, dialog: Dialog, prompt: str) -> input_pb2.InputAnswer | None:
    is_recovery = request.kind == input_pb2.INPUT_KIND_RECOVERY
    while typed := await _line(dialog, prompt):
        word, _, note = typed.partition(" ")
        match word.lower():
            case "y" | "yes" | "n" | "no":
                approval = input_pb2.ApprovalDecision(approved=word.lower().startswith("y"), note=note.strip())
                return input_pb2.InputAnswer(approval=approval)
            case "e" | "edit" if not is_recovery:
                arguments = await _ask_arguments(request, dialog)
                if arguments:
                    approval = input_pb2.ApprovalDecision(approved=True, arguments_json=arguments, note=note.strip())
                    return input_pb2.InputAnswer(approval=approval)
            case "r" | "result" if is_recovery:
                return await _ask_result(dialog)
    return None


async def _ask_arguments(request: input_pb2.InputRequest, dialog: Dialog) -> str:
    """Other arguments as JSON text; empty where they stay as they are."""
    while typed := await _line(dialog, "The arguments as a JSON object; Enter goes back:"):
        try:
            value = json_of(typed, what="That")
        except ConfigurationError as error:
            dialog.show([error.message])
            continue
        mistakes = ["they must be one JSON object"] if not isinstance(value, dict) else _mistakes(request, value)
        if not mistakes:
            return typed
        dialog.show(mistakes)
    return ""


async def _ask_result(dialog: Dialog) -> input_pb2.InputAnswer | None:
    typed = await _line(dialog, _RESULT)
    return input_pb2.InputAnswer(tool_outcome=_typed_outcome(typed)) if typed else None


async def _ask_value(request: input_pb2.InputRequest, dialog: Dialog) -> input_pb2.InputAnswer | None:
    if request.answer_schema_json:
        dialog.show([f"    takes {takes_text(request)}"])
    while typed := await _line(dialog, _VALUE):
        value_json, mistakes = value_of(typed, request)
        if not mistakes:
            return input_pb2.InputAnswer(value_json=value_json)
        dialog.show(mistakes)
    return None


def value_of(typed: str, request: input_pb2.InputRequest) -> tuple[str, list[str]]:
    """The JSON text that something typed is, and what of it does not fit.

    JSON that fits is itself; anything else is a text, where the request takes one.
    """
    as_text = json.dumps(typed, ensure_ascii=False)
    try:
        value = json_of(typed, what="That")
    except ConfigurationError:
        return as_text, _mistakes(request, typed)
    mistakes = _mistakes(request, value)
    if mistakes and not _mistakes(request, typed):
        return as_text, []
    return typed, mistakes


def _mistakes(request: input_pb2.InputRequest, value: object) -> list[str]:
    return schema_mistakes(value, request.answer_schema_json) if request.answer_schema_json else []


def _typed_outcome(typed: str) -> message_pb2.ToolOutcome:
    if typed.lower().startswith(_ERROR):
        return _failed(typed[len(_ERROR) :].strip())
    try:
        return outcome_of(typed)
    except ConfigurationError:
        return message_pb2.ToolOutcome(parts=[message_pb2.Part(text=typed)])


async def _line(dialog: Dialog, prompt: str) -> str:
    typed = await dialog.ask(prompt)
    if typed is None:
        raise EOFError
    return typed


def answers_of(texts: Iterable[str], requests: Sequence[input_pb2.InputRequest]) -> list[input_pb2.InputAnswer]:
    """The answers of `--answer INPUT_ID=JSON`, each to another request of these.

    Raises ConfigurationError for one that cannot be read, fits no request, or answers what another one answered.
    """
    answers: dict[str, input_pb2.InputAnswer] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--answer {text!r} has no value: write INPUT_ID=JSON.")
        request = request_named(name.strip(), requests)
        if request.input_id in answers:
            raise ConfigurationError(f"Request {request.input_id} has two answers: give it one.")
        answers[request.input_id] = answer_of(request, value)
    return list(answers.values())


def request_named(name: str, requests: Sequence[input_pb2.InputRequest]) -> input_pb2.InputRequest:
    """The request of a full id, or of a beginning or an end that only it has. Raises ConfigurationError."""
    name = name.lower()
    found = [request for request in requests if request.input_id == name]
    if not found and len(name) < _SHORTEST:
        raise ConfigurationError(f"{name!r} is too short for a request: use its id, or 6 characters of either end.")
    found = found or [each for each in requests if each.input_id.startswith(name) or each.input_id.endswith(name)]
    if not found:
        known = ", ".join(request.input_id for request in requests) or "none"
        raise ConfigurationError(f"No request of the run is {name!r}; it asked {known}.")
    if len(found) > 1:
        both = " and ".join(request.input_id for request in found[:2])
        raise ConfigurationError(f"{len(found)} requests are {name!r}, such as {both}: say more.")
    return found[0]


def answer_of(request: input_pb2.InputRequest, text: str) -> input_pb2.InputAnswer:
    """The answer that a JSON text is to a request. Raises ConfigurationError where it cannot be one."""
    value = json_of(text, what=f"The answer to {request.input_id}")
    answer = input_pb2.InputAnswer(input_id=request.input_id)
    match request.kind:
        case input_pb2.INPUT_KIND_APPROVAL:
            answer.approval.CopyFrom(_approval(request, value))
        case input_pb2.INPUT_KIND_CLIENT_TOOL:
            answer.tool_outcome.CopyFrom(outcome_of(text))
        case input_pb2.INPUT_KIND_RECOVERY if isinstance(value, dict) and value.keys() in ({"result"}, *_FAILURES):
            given = text if "error" in value else json.dumps(value["result"], ensure_ascii=False)
            answer.tool_outcome.CopyFrom(outcome_of(given))
        case input_pb2.INPUT_KIND_RECOVERY:
            answer.approval.CopyFrom(_approval(request, value))
        case _:
            answer.value_json = text.strip()
    return answer


def outcome_of(text: str) -> message_pb2.ToolOutcome:
    """The outcome of a tool from JSON: a text is text, and any other value is data.

    {"error": "…"} is a failure, and {"error": "…", "result": …} one of a tool that returned a result nevertheless.
    Raises ConfigurationError for text that is not JSON.
    """
    value = json_of(text, what="A result")
    if isinstance(value, dict) and value.keys() in _FAILURES and isinstance(value["error"], str):
        outcome = _failed(value["error"])
        if "result" in value:
            outcome.parts.append(_part(value["result"], json.dumps(value["result"], ensure_ascii=False)))
        return outcome
    return message_pb2.ToolOutcome(parts=[_part(value, text.strip())])


def _part(value: JsonValue, text: str) -> message_pb2.Part:
    return message_pb2.Part(text=value) if isinstance(value, str) else message_pb2.Part(data_json=text)


def _failed(message: str) -> message_pb2.ToolOutcome:
    return message_pb2.ToolOutcome(failure=message_pb2.ToolFailure(message=message))


def json_of(text: str, *, what: str) -> JsonValue:
    """The value of a JSON text. Raises ConfigurationError; `what` it is of begins the sentence."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        # A message holds Unicode only: no halves of surrogate pairs, be they written out or escaped.
        json.dumps([text, value], ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what} is not JSON ({error}): a text needs quotes, such as '\"yes\"'.") from None
    return value


def _approval(request: input_pb2.InputRequest, value: JsonValue) -> input_pb2.ApprovalDecision:
    if isinstance(value, bool):
        return input_pb2.ApprovalDecision(approved=value)
    if isinstance(value, dict) and value.keys() <= _APPROVAL_KEYS:
        approved, note, arguments = value.get("approved"), value.get("note", ""), value.get("arguments")
        if isinstance(approved, bool) and isinstance(note, str) and isinstance(arguments, dict | None):
            arguments_json = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
            return input_pb2.ApprovalDecision(approved=approved, arguments_json=arguments_json, note=note)
    raise ConfigurationError(f"{headline(request)}; that takes {takes_text(request)}.")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
