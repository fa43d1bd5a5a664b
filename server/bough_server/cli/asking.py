"""Requests answered by somebody, one after the other; what cannot be an answer is asked again before it is sent."""

import json
from collections.abc import Sequence
from typing import Final

from bough.v1 import input_pb2, message_pb2
from bough_server.cli.answers import failed, json_of, result_of
from bough_server.cli.dialog import Dialog
from bough_server.cli.render.questions import question_lines, takes_text
from bough_server.errors import ConfigurationError
from bough_server.tools.arguments import schema_mistakes

_ERROR: Final = "error:"
_APPROVE: Final = "Approve? y or n, and a note if you like; e to edit the arguments; Enter leaves it open:"
_AGAIN: Final = "Run it again? y or n, and a note if you like; r to say its result; Enter leaves it open:"
_RESULT: Final = 'Its result, as JSON or text, or "error: …"; Enter leaves it open:'
_VALUE: Final = "Your answer; Enter leaves it open:"


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
            answer.request_id = request.request_id
            answers.append(answer)
    return answers


async def _ask(request: input_pb2.InputRequest, dialog: Dialog) -> input_pb2.InputAnswer | None:
    match request.reason:
        case input_pb2.INPUT_REASON_APPROVAL:
            return await _ask_approval(request, dialog, _APPROVE)
        case input_pb2.INPUT_REASON_RECOVERY:
            return await _ask_approval(request, dialog, _AGAIN)
        case input_pb2.INPUT_REASON_CLIENT_TOOL:
            return await _ask_result(dialog)
        case _:
            return await _ask_value(request, dialog)


async def _ask_approval(request: input_pb2.InputRequest, dialog: Dialog, prompt: str) -> input_pb2.InputAnswer | None:
    is_recovery = request.reason == input_pb2.INPUT_REASON_RECOVERY
    while typed := await _line(dialog, prompt):
        word, _, note = typed.partition(" ")
        match word.lower():
            case "y" | "yes" | "n" | "no":
                approval = input_pb2.Approval(approved=word.lower().startswith("y"), note=note.strip())
                return input_pb2.InputAnswer(approval=approval)
            case "e" | "edit" if not is_recovery:
                arguments = await _ask_arguments(request, dialog)
                if arguments:
                    approval = input_pb2.Approval(approved=True, arguments_json=arguments, note=note.strip())
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
    return input_pb2.InputAnswer(tool_result=_typed_result(typed)) if typed else None


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


def _typed_result(typed: str) -> message_pb2.ToolResult:
    if typed.lower().startswith(_ERROR):
        return failed(typed[len(_ERROR) :].strip())
    try:
        return result_of(typed)
    except ConfigurationError:
        return message_pb2.ToolResult(parts=[message_pb2.Part(text=typed)])


async def _line(dialog: Dialog, prompt: str) -> str:
    typed = await dialog.ask(prompt)
    if typed is None:
        raise EOFError
    return typed
