"""Which items of a list break a rule that the schema has for all of them together; it judges nothing itself."""

from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.message import Message

from bough.v1 import agent_service_pb2 as pb
from bough.v1 import fork_pb2, input_pb2, message_pb2


def places(request: Message, rule: str) -> Sequence[str]:
    """The paths of the items that break a rule which a request breaks; none where the rule is of no list."""
    match request:
        case pb.RunRequest() if rule == "input.parts":
            return [*_unsaid(request.input.parts, "input.parts")]
        case pb.ForkRunRequest() if rule == "changes.input.parts":
            return [*_unsaid(request.changes.input.parts, "changes.input.parts")]
        case pb.ForkRunRequest() if rule == "changes.tool_results":
            return [*_unedited(request.changes.tool_results)]
        case pb.ResumeRunRequest() if rule == "answers.request_id":
            return [*_unnamed(request.answers)]
        case pb.ResumeRunRequest() if rule == "answers.answer":
            return [f"answers[{index}]" for index, one in enumerate(request.answers) if not one.WhichOneof("answer")]
    return ()


def _unsaid(parts: Iterable[message_pb2.Part], place: str) -> Iterator[str]:
    """Parts that nobody can say."""
    for index, part in enumerate(parts):
        content = part.WhichOneof("content")
        if content in ("tool_call", "tool_result", "reasoning"):
            yield f"{place}[{index}].{content}"


def _unedited(results: Iterable[fork_pb2.EditedResult]) -> Iterator[str]:
    """Edited results of no call, or without a result."""
    for index, edited in enumerate(results):
        if not edited.call_id:
            yield f"changes.tool_results[{index}].call_id"
        if not edited.HasField("result"):
            yield f"changes.tool_results[{index}].result"


def _unnamed(answers: Iterable[input_pb2.InputAnswer]) -> Iterator[str]:
    """Answers to no request, or to one that an answer before them is to."""
    seen = {""}
    for index, answer in enumerate(answers):
        if answer.request_id in seen:
            yield f"answers[{index}].request_id"
        seen.add(answer.request_id)
