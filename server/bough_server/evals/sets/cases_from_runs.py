"""Make cases of runs: what they were asked, what they did, and mocks of what their tools returned."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import error_pb2, eval_set_pb2, event_pb2, execution_pb2, input_pb2, invocation_pb2, message_pb2
from bough_server.evals.metrics.agent_trajectory import TRANSPARENT
from bough_server.evals.metrics.tool_trajectory import is_of_agent, names_of, select_calls
from bough_server.messages import effective_arguments, has_truncated_arguments, text_of
from bough_server.tools.builtin import RESERVED
from bough_server.truncation import truncate_text

_SHOWN_BYTES: Final = 200
"""The most bytes of a call's arguments in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMocks:
    """Mocks of a recorded run's tool calls."""

    tools: Sequence[eval_set_pb2.ToolMock]
    """In the order of the calls."""
    dropped: Sequence[str]
    """A sentence for each call whose outcome no mock has: it contradicts an earlier one, or was not recorded whole."""


def mocks_of(invocation: invocation_pb2.Invocation) -> list[eval_set_pb2.ToolMock]:
    """Return the mocks of extract_mocks."""
    return list(extract_mocks(invocation).tools)


def extract_mocks(invocation: invocation_pb2.Invocation) -> RunMocks:
    """Return a mock for each outcome of an ordinary tool in a run, whichever agent called it.

    Each answers calls with equal arguments. Of calls with equal arguments the first counts. Calls of agents and of
    built-in tools have no mocks, and neither do calls that were refused, were cancelled or have not ended. The record
    describes files as text, and so do the mocks.
    """
    first: dict[tuple[str, str], eval_set_pb2.ToolMock] = {}
    dropped: list[str] = []
    agents = names_of(invocation.agents)
    for call in invocation.tools:
        if is_of_agent(call, agents) or not _has_outcome(call):
            continue
        if call.HasField("fault_index"):
            dropped.append(
                f"{_describe_call(call)} had a fault that an evaluation injected, so no mock has its outcome."
            )
            continue
        arguments, answer = _canonical(effective_arguments(call) or "{}"), _mock(call)
        if arguments is None or answer is None:
            dropped.append(f"{_describe_call(call)} was not recorded whole, so no mock can stand for it.")
        elif not _equal(first.setdefault((call.name, arguments), answer), answer):
            dropped.append(
                f"{_describe_call(call)} had another outcome than an earlier call with equal arguments, which is kept."
            )
    return RunMocks(tools=list(first.values()), dropped=dropped)


def _has_outcome(call: invocation_pb2.ToolInvocation) -> bool:
    """True if an ordinary tool returned a result or failed; refused calls have not started."""
    if call.name in RESERVED:
        return False
    # A tool that the client runs has no start; its failures have one reason.
    has_run = call.HasField("start_time") or call.error.reason == error_pb2.ERROR_REASON_TOOL_FAILED
    is_failure = call.state == execution_pb2.EXECUTION_STATE_FAILED and has_run
    return is_failure or call.state == execution_pb2.EXECUTION_STATE_SUCCEEDED


def _mock(call: invocation_pb2.ToolInvocation) -> eval_set_pb2.ToolMock | None:
    """Return a mock with the outcome of a call; None if its result is no whole JSON."""
    mock = eval_set_pb2.ToolMock(name=call.name)
    mock.arguments_match.equals_json = effective_arguments(call) or "{}"
    if call.state == execution_pb2.EXECUTION_STATE_FAILED:
        error, failure = call.error, mock.outcome.failure
        failure.message, failure.retryable, failure.details_json = error.message, error.retryable, error.details_json
    elif (result := _canonical(call.result_json)) is None:
        return None
    elif result == "null":  # as `result_json` it would stand for an empty text
        mock.outcome.parts.append(message_pb2.Part(data_json=result))
    else:
        mock.result_json = call.result_json
    return mock


def _equal(one: eval_set_pb2.ToolMock, other: eval_set_pb2.ToolMock) -> bool:
    if one.WhichOneof("answer") == other.WhichOneof("answer") == "result_json":
        return _canonical(one.result_json) == _canonical(other.result_json)
    return one.WhichOneof("answer") == other.WhichOneof("answer") and one.outcome == other.outcome


def _canonical(text: str) -> str | None:
    """Return a JSON text in one form for equal values; None if it is no JSON."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _describe_call(call: invocation_pb2.ToolInvocation) -> str:
    shown = truncate_text(effective_arguments(call), _SHOWN_BYTES)
    return f"The call {call.call_id!r} of {call.name!r} by {call.agent!r} with the arguments {shown}"


def case_of(
    invocation: invocation_pb2.Invocation, case_id: str, *, parts: Collection[str], with_mocks: bool
) -> tuple[eval_set_pb2.EvalCase, Sequence[str]]:
    """Return a case that a run passes, and sentences about what it leaves out.

    `parts` are what it expects: "agents", "tools" and "answer". With mocks no tool runs: they are strict.
    """
    case = eval_set_pb2.EvalCase(id=case_id)
    turn = case.turns.add()
    left_out = list(_copy_input(turn, invocation.user_content))
    if "answer" in parts and invocation.HasField("final_response"):
        if any(part.truncated for part in invocation.final_response.parts):
            left_out.append("The answer is too long to be expected, so the case expects none.")
        else:
            turn.expect.answer.exact = text_of(invocation.final_response).strip()
    has_all_tools = len(invocation.tools) >= invocation.tools_total
    if "tools" in parts and has_all_tools:
        left_out += _expect_calls(turn, invocation)
    if "agents" in parts:
        if len(invocation.agents) >= invocation.agents_total:
            turn.expect.agents.extend(_build_expected_agents(invocation))
        else:
            left_out.append("The record does not have all agents of the run, so the case expects none.")
    if not has_all_tools and ("tools" in parts or with_mocks):
        left_out.append(
            "The record does not have all tool calls of the run: those have no mocks, and none is expected."
        )
    if not with_mocks:
        return case, left_out
    mocks = extract_mocks(invocation)
    case.mocks.tools.extend(mocks.tools)
    case.mocks.strict = True
    return case, [*left_out, *mocks.dropped]


def _expect_calls(turn: eval_set_pb2.EvalTurn, invocation: invocation_pb2.Invocation) -> Iterator[str]:
    """Add the calls of a run to a turn's expectations, and yield a sentence for each whose arguments it cannot
    expect.
    """
    for call in select_calls((), invocation.tools, agents=names_of(invocation.agents)):
        arguments = effective_arguments(call)
        is_whole = not has_truncated_arguments(call) and _canonical(arguments or "{}") is not None
        turn.expect.tools.add(name=call.name, arguments_json=arguments if is_whole else "")
        if not is_whole:
            yield f"{_describe_call(call)} was not recorded whole: any arguments of it will do."


def _copy_input(turn: eval_set_pb2.EvalTurn, message: message_pb2.Message) -> Iterator[str]:
    """Copy the user's message into a turn, and yield a sentence for each part that a case cannot hold."""
    if any(part.truncated for part in message.parts):
        yield "What the user said is too long for the record, and was cut in the case."
    if any(part.HasField("blob") for part in message.parts):
        yield "The user sent files, which the case does not have."
    kept = [part for part in message.parts if part.WhichOneof("content") in ("text", "data_json")]
    if all(part.HasField("text") for part in kept):
        turn.user = text_of(message)
        return
    for part in kept:
        if part.HasField("text"):
            turn.input.parts.add(text=part.text)
        else:
            turn.input.parts.add(data_json=part.data_json)


def extract_answers(
    events: Iterable[event_pb2.AgentEvent], *, with_mocks: bool
) -> tuple[Sequence[eval_set_pb2.EvalAnswer], Sequence[str]]:
    """Return the answers that a run got, and sentences about those that a case cannot give.

    With mocks, tools that the client runs need no answer.
    """
    asked: dict[str, input_pb2.InputRequest] = {}
    made: dict[tuple[str, str], eval_set_pb2.EvalAnswer] = {}
    dropped: list[str] = []
    for event in events:
        if event.HasField("input_requested"):
            asked[event.input_requested.request.input_id] = event.input_requested.request
        elif event.HasField("input_received"):
            given = event.input_received.answer
            request = asked.get(given.input_id)
            if request is None or (with_mocks and request.kind == input_pb2.INPUT_KIND_CLIENT_TOOL):
                continue
            answer = _case_answer(request, given)
            about = request.call.name or request.prompt
            if answer is None:
                dropped.append(f"The answer about {truncate_text(about, _SHOWN_BYTES)!r} is none that a case can give.")
            elif made.setdefault((answer.agent, about), answer) != answer:
                dropped.append(
                    f"{truncate_text(about, _SHOWN_BYTES)!r} was answered in another way before, which is kept for "
                    "both."
                )
    return list(made.values()), dropped


def _case_answer(request: input_pb2.InputRequest, given: input_pb2.InputAnswer) -> eval_set_pb2.EvalAnswer | None:
    """Return an answer of a case that answers a request as it was answered; None if there is none."""
    answer = eval_set_pb2.EvalAnswer(agent=request.agent_path[-1] if request.agent_path else "")
    match given.WhichOneof("answer"):
        case "approval":
            answer.tool = request.call.name
            answer.approval.CopyFrom(given.approval)
        case "value_json":
            answer.question, answer.value_json = request.prompt, given.value_json
        case "tool_outcome":
            answer.tool = request.call.name
            answer.tool_outcome.CopyFrom(given.tool_outcome)
        case _:
            return None
    return answer


def _build_expected_agents(invocation: invocation_pb2.Invocation) -> list[eval_set_pb2.ExpectedAgent]:
    """Return the tree of a run as an expectation; agents that only order others are left out, as metrics do."""
    roots: list[eval_set_pb2.ExpectedAgent] = []
    path: list[tuple[int, eval_set_pb2.ExpectedAgent | None]] = []
    for agent in invocation.agents:
        while path and path[-1][0] >= agent.depth:
            path.pop()
        if agent.kind in TRANSPARENT:
            path.append((agent.depth, None))
            continue
        made = eval_set_pb2.ExpectedAgent(name=agent.name)
        parent = next((one for _, one in reversed(path) if one is not None), None)
        if parent is None:
            roots.append(made)
            path.append((agent.depth, made))
        else:
            parent.children.append(made)
            path.append((agent.depth, parent.children[-1]))
    return roots
