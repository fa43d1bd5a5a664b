"""Open requests as text: questions, accepted answers, and the command that answers."""

import shlex
from collections.abc import Sequence
from typing import Final

from bough.v1 import input_pb2, run_pb2
from bough_server.cli.render.format import pluralize
from bough_server.cli.render.notes import asker_text, expiry_text, request_text
from bough_server.plain_text import one_line, printable

_TAKES: Final = {
    input_pb2.INPUT_KIND_APPROVAL: 'true, false, or {"approved": …, "arguments": {…}, "note": "…"}',
    input_pb2.INPUT_KIND_CLIENT_TOOL: 'the tool\'s result as JSON, {"error": "…"}, or {"error": "…", "result": …}',
    input_pb2.INPUT_KIND_RECOVERY: 'true (run it again), false, {"result": …}, {"error": "…"}, or both of these',
}


def headline(request: input_pb2.InputRequest) -> str:
    """Return who asks for what, on one line."""
    return f"{asker_text(request)} {request_text(request)}"


def question_lines(request: input_pb2.InputRequest) -> list[str]:
    """Return who asks for what, and until when."""
    details = [*_prompt(request), expiry_text(request)]
    return [f"? {headline(request)}", *(f"    {detail}" for detail in details if detail)]


def request_lines(request: input_pb2.InputRequest) -> list[str]:
    """Return a request's question, accepted answers and id."""
    return [*question_lines(request), f"    takes {takes_text(request)}", f"    id {request.input_id}"]


def waiting_lines(run_id: str, requests: Sequence[input_pb2.InputRequest], command: str) -> list[str]:
    """Return all requests of a run, and the command that answers them, which begins with `command`."""
    lines = [f"The run waits for {pluralize(len(requests), 'answer')}."]
    for request in requests:
        lines += request_lines(request)
    return [*lines, "Answer with:", f"  {answer_command(run_id, requests, command)}"]


def open_request_lines(run: run_pb2.Run) -> list[str]:
    """Return a line for each open request, and one for the reason if the run is parked."""
    lines = [f"? {headline(request)}" for request in run.open_requests]
    return lines + ([f"‖ parked: {one_line(run.parked_reason)}"] if run.parked_reason else [])


def origin_lines(run: run_pb2.Run) -> list[str]:
    """Return a line with a fork's origin; none for other runs."""
    origin = run.forked_from
    return [f"⑂ fork of run {origin.run_id} after {origin.sequence}"] if run.HasField("forked_from") else []


def answer_command(run_id: str, requests: Sequence[input_pb2.InputRequest], command: str) -> str:
    """Return the command that answers all requests; without its --answer options it asks in the terminal."""
    answers = (shlex.quote(f"{request.input_id}={_example(request)}") for request in requests)
    return " ".join([command, "resume", run_id, *(f"--answer {answer}" for answer in answers)])


def takes_text(request: input_pb2.InputRequest) -> str:
    """Describe the answers that a request accepts."""
    if known := _TAKES.get(request.kind):
        return known
    schema = one_line(request.answer_schema_json)
    return f"JSON that fits {schema}" if schema else "any JSON"


def _prompt(request: input_pb2.InputRequest) -> list[str]:
    # A question's headline already has its prompt, unless that has several lines, which the headline joins.
    lines = printable(request.prompt).strip().splitlines()
    return lines if len(lines) > 1 or request.call.name else []


def _example(request: input_pb2.InputRequest) -> str:
    return "true" if request.kind in (input_pb2.INPUT_KIND_APPROVAL, input_pb2.INPUT_KIND_RECOVERY) else "JSON"
