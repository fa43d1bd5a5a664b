"""Short phrases for events and for kinds of agents."""

import json
from collections.abc import Sequence
from typing import Final

from bough import text_of
from bough.v1 import event_pb2, fork_pb2, input_pb2, message_pb2, state_pb2
from bough_server.cli.render.format import counted, error_text, moment, one_line

_RESUMED: Final = {
    event_pb2.RESUME_CAUSE_RECOVERY: "continued after its server was gone",
    event_pb2.RESUME_CAUSE_ANSWER: "continued with an answer",
    event_pb2.RESUME_CAUSE_TAKEOVER: "continued by another server",
}

_ENDINGS: Final = {
    event_pb2.END_REASON_EXITED: "exited",
    event_pb2.END_REASON_TRANSFERRED: "handed over",
    event_pb2.END_REASON_BROKE_LOOP: "broke the loop",
    event_pb2.END_REASON_ITERATIONS_EXHAUSTED: "rounds used up",
}
_PLAIN: Final = (event_pb2.AGENT_KIND_UNSPECIFIED, event_pb2.AGENT_KIND_LLM)


def queued_text(queued: event_pb2.RunQueued) -> str:
    """That a run waits for its session."""
    return f"waits for its session, behind run {queued.behind_run_id}"


def resumed_text(resumed: event_pb2.RunResumed) -> str:
    """Why a run is continued."""
    return _RESUMED.get(resumed.cause, "continued")


def forked_text(forked: event_pb2.RunForked) -> str:
    """Where a fork comes from and what it does otherwise."""
    changes = "; ".join(_changes(forked.changes))
    return f"fork of run {forked.origin_run_id} after {forked.origin_sequence}" + (f": {changes}" if changes else "")


def interrupted_text(interrupted: event_pb2.RunInterrupted) -> str:
    """How many answers a run waits for."""
    return f"waits for {counted(len(interrupted.requests), 'answer')}"


def asker_text(request: input_pb2.InputRequest) -> str:
    """Who asks: the agents' names from the root."""
    return "/".join(request.address) or "?"


def request_text(request: input_pb2.InputRequest) -> str:
    """What is asked, on one line."""
    call = call_text(request.call)
    match request.reason:
        case input_pb2.INPUT_REASON_APPROVAL:
            return f"asks for approval of {call}"
        case input_pb2.INPUT_REASON_CLIENT_TOOL:
            return f"asks the client to run {call}"
        case input_pb2.INPUT_REASON_RECOVERY:
            return f"asks whether {call} may run again: its server was gone while it ran"
        case _:
            return f"asks: {one_line(request.prompt)}"


def expiry_text(request: input_pb2.InputRequest) -> str:
    """Until when a request waits, and what happens then; empty where it waits for ever."""
    if not request.HasField("expire_time"):
        return ""
    then = answer_text(request.default_answer) if request.HasField("default_answer") else "it counts as not answered"
    return f"until {moment(request.expire_time)} UTC; then {then}"


def received_text(answer: input_pb2.InputAnswer) -> str:
    """What a request got, and whether from nobody."""
    if answer.source != input_pb2.ANSWER_SOURCE_EXPIRY:
        return answer_text(answer)
    said = answer_text(answer) if answer.WhichOneof("answer") else ""
    return f"nobody answered in time{': ' if said else ''}{said}"


def answer_text(answer: input_pb2.InputAnswer) -> str:
    """What an answer says, on one line."""
    match answer.WhichOneof("answer"):
        case "approval":
            return _approval(answer.approval)
        case "tool_result":
            return f"result: {result_text(answer.tool_result)}"
        case "value_json":
            return f"answered: {one_line(_plain(answer.value_json))}"
        case _:
            return "not answered"


def call_text(call: message_pb2.ToolCall) -> str:
    """A call's name and its arguments, where it has any, on one line."""
    arguments = one_line(call.arguments_json)
    return f"{call.name} {'' if arguments == '{}' else arguments}".rstrip()


def result_text(result: message_pb2.ToolResult) -> str:
    """What a tool gave, in words: its error, or its parts."""
    if result.HasField("error"):
        return error_text(result.error)
    return text_of(message_pb2.Message(parts=result.parts))


def _approval(approval: input_pb2.Approval) -> str:
    words = "approved" if approval.approved else "refused"
    if approval.arguments_json:
        words += f" with {one_line(approval.arguments_json)}"
    return f"{words}: {one_line(approval.note)}" if approval.note else words


def _changes(changes: fork_pb2.ForkChanges) -> list[str]:
    said = [f"model of {agent} is {model}" for agent, model in sorted(changes.models.items())]
    said += [f"another instruction of {agent}" for agent in sorted(changes.instructions)]
    if changes.HasField("input"):
        said.append(f"input {one_line(text_of(changes.input))}")
    return said + [f"result of {edit.call_id}: {one_line(result_text(edit.result))}" for edit in changes.tool_results]


def _plain(value_json: str) -> str:
    """A JSON text without its quotes, and any other JSON as it is."""
    try:
        value = json.loads(value_json)
    except ValueError:
        return value_json
    return value if isinstance(value, str) else value_json


def kind_text(kind: event_pb2.AgentKind.ValueType) -> str:
    """What runs an agent, as definitions name it; empty for a model in a loop with tools, and where it is not said."""
    if kind in _PLAIN or kind not in event_pb2.AgentKind.values():
        return ""
    return event_pb2.AgentKind.Name(kind).removeprefix("AGENT_KIND_").lower()


def ending_text(
    reason: event_pb2.EndReason.ValueType, kind: event_pb2.AgentKind.ValueType = event_pb2.AGENT_KIND_UNSPECIFIED
) -> str:
    """How an agent of a kind ended; empty where it simply answered, or where its state and its error say it."""
    if kind == event_pb2.AGENT_KIND_LOOP and reason == event_pb2.END_REASON_BROKE_LOOP:
        return "ended by a break"
    return _ENDINGS.get(reason, "")


def round_text(started: event_pb2.LoopRoundStarted) -> str:
    """Which round of a loop begins, counted from 1 as people do."""
    return f"round {started.round + 1}"


def steps_text(items: Sequence[event_pb2.PlanItem]) -> str:
    """A plan on one line."""
    said = "; ".join(one_line(item.text) for item in items)
    return f"{counted(len(items), 'step')}: {said}" if said else "nothing"


def changes_text(changes: Sequence[state_pb2.StateChange]) -> str:
    """What became of a session's values, on one line."""
    return ", ".join(
        f"{change.key} = {one_line(change.value_json)}" if change.HasField("value_json") else f"{change.key} deleted"
        for change in changes
    )


def compacted_text(compacted: event_pb2.HistoryCompacted) -> str:
    """What a summary stands for, and the summary, on one line."""
    covered = []
    if compacted.to_position:
        covered.append(f"messages {compacted.from_position} to {compacted.to_position} of the session")
    if compacted.run_messages:
        covered.append(f"{counted(compacted.run_messages, 'message')} of this run")
    summary = one_line(text_of(compacted.summary))
    return f"summarized {' and '.join(covered) or 'nothing'}" + (f": {summary}" if summary else "")


def retry_text(reason: event_pb2.RetryReason.ValueType) -> str:
    """Why a model call is tried again."""
    if reason not in event_pb2.RetryReason.values():
        return ""
    return event_pb2.RetryReason.Name(reason).removeprefix("RETRY_REASON_").lower().replace("_", " ")
