"""Answer the requests of a run with the answers of a case."""

from collections.abc import Iterable, Sequence

from bough.v1 import eval_set_pb2, input_pb2, message_pb2

_APPROVE = eval_set_pb2.EVAL_DECISION_APPROVE


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
    if not _is_about(answer, request):
        return None
    given = input_pb2.InputAnswer(input_id=request.input_id)
    kind = request.kind
    if kind in (input_pb2.INPUT_KIND_APPROVAL, input_pb2.INPUT_KIND_RECOVERY) and answer.decision:
        given.approval.approved = answer.decision == _APPROVE
        given.approval.arguments_json = answer.arguments_json
        return given
    if not answer.value_json:
        return None
    if kind == input_pb2.INPUT_KIND_QUESTION:
        given.value_json = answer.value_json
        return given
    if kind in (input_pb2.INPUT_KIND_CLIENT_TOOL, input_pb2.INPUT_KIND_RECOVERY):
        given.tool_outcome.parts.append(message_pb2.Part(data_json=answer.value_json))
        return given
    return None


def _is_about(answer: eval_set_pb2.EvalAnswer, request: input_pb2.InputRequest) -> bool:
    if answer.agent and answer.agent != (request.agent_path[-1] if request.agent_path else ""):
        return False
    match answer.WhichOneof("about"):
        case "tool":
            return bool(request.call_id) and request.call.name == answer.tool
        case "question":
            return request.kind == input_pb2.INPUT_KIND_QUESTION and answer.question in request.prompt
        case _:
            return True
