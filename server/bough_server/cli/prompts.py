"""Answers to a run's input requests, typed at the terminal or parsed from options."""

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

_MAX_LINE_BYTES = 65536

_ERROR: Final = "error:"
_APPROVE: Final = "Approve? y or n, and an optional note; e to edit the arguments; Enter leaves it open:"
_AGAIN: Final = "Run it again? y or n, and an optional note; r to enter its result; Enter leaves it open:"
_RESULT: Final = 'Its result, as JSON or text, or "error: …"; Enter leaves it open:'
_VALUE: Final = "Your answer; Enter leaves it open:"

_MIN_ID_PART: Final = 6
_APPROVAL_KEYS: Final = frozenset({"approved", "arguments", "note"})
_FAILURES: Final = ({"error"}, {"error", "result"})
"""Keys of a JSON object that reports a tool's failure, without and with a result."""


class Dialog(Protocol):
    """A user who can be asked."""

    @property
    def is_interrupted(self) -> bool:
        """Whether the user ended the last question by Ctrl-C, so that answers to earlier ones do not count either."""
        ...

    def show(self, lines: Iterable[str]) -> None:
        """Show lines."""
        ...

    async def ask(self, prompt: str) -> str | None:
        """Ask for a line and return it without surrounding white space; None at the end of input."""
        ...


class TerminalDialog:
    """The user at this process's terminal. Standard output is kept for the command's result."""

    is_interrupted = False
    """Ctrl-C ends the command."""

    def show(self, lines: Iterable[str]) -> None:
        """Show lines on standard error."""
        for line in lines:
            print(line, file=sys.stderr)

    async def ask(self, prompt: str) -> str | None:
        """Ask for a line on standard error; Ctrl-C works while it waits."""
        print(f"{prompt} ", end="", file=sys.stderr, flush=True)
        descriptor = sys.stdin.fileno()
        # input() would block the event loop, and with it Ctrl-C.
        await wait_until_readable(descriptor)
        # In canonical mode, a read from a terminal returns one whole line.
        typed = os.read(descriptor, _MAX_LINE_BYTES)
        if not typed:
            print(file=sys.stderr)
            return None
        return typed.decode(errors="replace").strip()


def is_terminal() -> bool:
    """Return whether the user can be asked: standard input and standard error are both a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


async def wait_until_readable(descriptor: int) -> None:
    """Wait until a descriptor has something to read. Raises PermissionError for a regular file."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def ask_all(requests: Sequence[input_pb2.InputRequest], dialog: Dialog) -> list[input_pb2.InputAnswer]:
    """Ask for answers and return those given; at the end of input the remaining requests stay open."""
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
    """Ask for other arguments and return their JSON text; empty to keep the arguments."""
    while typed := await _line(dialog, "The arguments as a JSON object; Enter goes back:"):
        try:
            value = json_of(typed, what="This")
        except ConfigurationError as error:
            dialog.show([error.message])
            continue
        problems = _problems(request, value) if isinstance(value, dict) else ["they must be one JSON object"]
        if not problems:
            return typed
        dialog.show(problems)
    return ""


async def _ask_result(dialog: Dialog) -> input_pb2.InputAnswer | None:
    typed = await _line(dialog, _RESULT)
    return input_pb2.InputAnswer(tool_outcome=_parse_typed_outcome(typed)) if typed else None


async def _ask_value(request: input_pb2.InputRequest, dialog: Dialog) -> input_pb2.InputAnswer | None:
    if request.answer_schema_json:
        dialog.show([f"    takes {takes_text(request)}"])
    while typed := await _line(dialog, _VALUE):
        value_json, problems = value_of(typed, request)
        if not problems:
            return input_pb2.InputAnswer(value_json=value_json)
        dialog.show(problems)
    return None


def value_of(typed: str, request: input_pb2.InputRequest) -> tuple[str, list[str]]:
    """Return typed text as JSON, and its problems with the request's schema.

    JSON that fits the schema stays as it is; anything else becomes a JSON string if the request accepts that string.
    """
    as_text = json.dumps(typed, ensure_ascii=False)
    try:
        value = json_of(typed, what="This")
    except ConfigurationError:
        return as_text, _problems(request, typed)
    problems = _problems(request, value)
    # For example, 4711 typed for a request that takes a string.
    if problems and not _problems(request, typed):
        return as_text, []
    return typed, problems


def _problems(request: input_pb2.InputRequest, value: object) -> list[str]:
    if not request.answer_schema_json:
        return []
    from bough_server.matching.schemas import schema_mistakes

    return schema_mistakes(value, request.answer_schema_json)


def _parse_typed_outcome(typed: str) -> message_pb2.ToolOutcome:
    if typed.lower().startswith(_ERROR):
        return _build_failure(typed[len(_ERROR) :].strip())
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
    """Parse the values of `--answer INPUT_ID=JSON`, each for another of these requests.

    Raises ConfigurationError for one that cannot be parsed, names no request, or names the request of another one.
    """
    answers: dict[str, input_pb2.InputAnswer] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--answer {text!r} has no value: write INPUT_ID=JSON.")
        request = find_request(name.strip(), requests)
        if request.input_id in answers:
            raise ConfigurationError(f"Request {request.input_id} has two answers: give only one.")
        answers[request.input_id] = answer_of(request, value)
    return list(answers.values())


def find_request(name: str, requests: Sequence[input_pb2.InputRequest]) -> input_pb2.InputRequest:
    """Return the request with an id, or with a unique beginning or end of one. Raises ConfigurationError."""
    name = name.lower()
    found = [request for request in requests if request.input_id == name]
    if not found and len(name) < _MIN_ID_PART:
        raise ConfigurationError(f"{name!r} is too short to name a request: use its id, or 6 characters of either end.")
    found = found or [each for each in requests if each.input_id.startswith(name) or each.input_id.endswith(name)]
    if not found:
        known = ", ".join(request.input_id for request in requests) or "none"
        raise ConfigurationError(f"The run has no request {name!r}; its requests: {known}.")
    if len(found) > 1:
        both = " and ".join(request.input_id for request in found[:2])
        raise ConfigurationError(f"{len(found)} requests match {name!r}, such as {both}: use more characters.")
    return found[0]


def answer_of(request: input_pb2.InputRequest, text: str) -> input_pb2.InputAnswer:
    """Parse a JSON text as the answer to a request. Raises ConfigurationError if it cannot answer that kind."""
    value = json_of(text, what=f"The answer to {request.input_id}")
    answer = input_pb2.InputAnswer(input_id=request.input_id)
    match request.kind:
        case input_pb2.INPUT_KIND_APPROVAL:
            answer.approval.CopyFrom(_approval(request, value))
        case input_pb2.INPUT_KIND_CLIENT_TOOL:
            answer.tool_outcome.CopyFrom(outcome_of(text))
        case input_pb2.INPUT_KIND_RECOVERY if isinstance(value, dict) and value.keys() in ({"result"}, *_FAILURES):
            outcome_json = text if "error" in value else json.dumps(value["result"], ensure_ascii=False)
            answer.tool_outcome.CopyFrom(outcome_of(outcome_json))
        case input_pb2.INPUT_KIND_RECOVERY:
            answer.approval.CopyFrom(_approval(request, value))
        case _:
            answer.value_json = text.strip()
    return answer


def outcome_of(text: str) -> message_pb2.ToolOutcome:
    """Parse the outcome of a tool: a JSON string becomes text, any other JSON value becomes data.

    {"error": "…"} is a failure, and {"error": "…", "result": …} a failure that comes with a result. Raises
    ConfigurationError if the text is not JSON.
    """
    value = json_of(text, what="A result")
    if isinstance(value, dict) and value.keys() in _FAILURES and isinstance(value["error"], str):
        outcome = _build_failure(value["error"])
        if "result" in value:
            outcome.parts.append(_part(value["result"], json.dumps(value["result"], ensure_ascii=False)))
        return outcome
    return message_pb2.ToolOutcome(parts=[_part(value, text.strip())])


def _part(value: JsonValue, text: str) -> message_pb2.Part:
    return message_pb2.Part(text=value) if isinstance(value, str) else message_pb2.Part(data_json=text)


def _build_failure(message: str) -> message_pb2.ToolOutcome:
    return message_pb2.ToolOutcome(failure=message_pb2.ToolFailure(message=message))


def json_of(text: str, *, what: str) -> JsonValue:
    """Parse a JSON text. Raises ConfigurationError if it is not JSON; the message begins with `what`."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        # Protobuf strings are UTF-8: encoding fails for lone surrogates, literal or escaped.
        json.dumps([text, value], ensure_ascii=False).encode()
    # The parser raises RecursionError for JSON that is nested too deeply.
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
    raise ConfigurationError(f"{headline(request)}; the answer must be {takes_text(request)}.")


def _finite(digits: str) -> float:
    # 1e999 is valid JSON, but float() turns it into infinity, which JSON cannot represent.
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
