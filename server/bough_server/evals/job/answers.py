"""Answer the requests of a run with the answers of a case."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from bough.v1 import eval_set_pb2, input_pb2
from bough_server.matching.placeholders import has_text, match_placeholders

_FITTING: Final[Mapping[str, Collection[input_pb2.InputKind.ValueType]]] = {
    "approval": (input_pb2.INPUT_KIND_APPROVAL, input_pb2.INPUT_KIND_RECOVERY),
    "value_json": (input_pb2.INPUT_KIND_QUESTION,),
    "tool_outcome": (input_pb2.INPUT_KIND_CLIENT_TOOL, input_pb2.INPUT_KIND_RECOVERY),
}
"""The kinds of requests that an answer of each kind fits."""


def answers_to(
    answers: Iterable[eval_set_pb2.EvalAnswer], requests: Sequence[input_pb2.InputRequest]
) -> tuple[list[input_pb2.InputAnswer], input_pb2.InputRequest | None]:
    """Return an answer to every request, or the first request that no answer of the case answers."""
    known = list(answers)
    given: list[input_pb2.InputAnswer] = []
    for request in requests:
        found = next((made for one in known if (made := _answer(one, request)) is not None), None)
        if found is None:
            return [], request
        given.append(found)
    return given, None


def _answer(answer: eval_set_pb2.EvalAnswer, request: input_pb2.InputRequest) -> input_pb2.InputAnswer | None:
    """Return the answer to a request, or None if this one is about something else."""
    if not _is_about(answer, request) or request.kind not in _FITTING.get(answer.WhichOneof("answer") or "", ()):
        return None
    given = input_pb2.InputAnswer(input_id=request.input_id)
    match answer.WhichOneof("answer"):
        case "approval":
            given.approval.CopyFrom(answer.approval)
        case "value_json":
            given.value_json = answer.value_json
        case "tool_outcome":
            given.tool_outcome.CopyFrom(answer.tool_outcome)
    return given


def _is_about(answer: eval_set_pb2.EvalAnswer, request: input_pb2.InputRequest) -> bool:
    if answer.agent and answer.agent != (request.agent_path[-1] if request.agent_path else ""):
        return False
    match answer.WhichOneof("about"):
        case "tool":
            return bool(request.call_id) and request.call.name == answer.tool
        case "question":
            return request.kind == input_pb2.INPUT_KIND_QUESTION and _asks(request, answer.question)
        case _:
            return True


def _asks(request: input_pb2.InputRequest, question: str) -> bool:
    with match_placeholders(None):
        return has_text(question, request.prompt)
