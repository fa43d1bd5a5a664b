"""Mocks of a run: what answers in a case of an evaluation instead of ordinary tools, and instead of agents."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from bough.v1 import agent_pb2, error_pb2, eval_set_pb2, execution_pb2, message_pb2
from bough_server.engine.input_requests import outcome_mistakes, result_of, value_mistakes
from bough_server.errors import RunError
from bough_server.matching.placeholders import match_placeholders
from bough_server.matching.values import check_matcher, mismatch
from bough_server.matching.work import TooMuchWork, limit_work
from bough_server.runtime.agent import Agent, Context, Outcome, value_of
from bough_server.runtime.faults import fault_mistakes
from bough_server.tools.builtin import RESERVED
from bough_server.tools.output import result_parts
from bough_server.truncation import truncate_text

MAX_MOCKS_BYTES: Final = 1024 * 1024
"""The most bytes of all mocks of a run: an event has to hold them beside the input and the session's values."""

_UNUSED: Final[Mapping[int, int]] = defaultdict(int)
"""How often mocks have answered that have not yet."""

_MAX_STEPS: Final = 10_000_000
"""The most steps to find the mock that answers a call; half a second."""

_SHOWN_BYTES: Final = 512
"""The most bytes of a call's arguments in an error's message."""


def find_mock(
    mocks: eval_set_pb2.ToolMocks, call: message_pb2.ToolCall, *, agent: str, uses: Mapping[int, int] = _UNUSED
) -> int | None:
    """Return the number of the mock that answers an agent's call of an ordinary tool, or None if the tool is to run.

    It is the first that matches and has not answered as often as it may; `uses` is how often each has.

    Raises RunError TOOL_NOT_MOCKED if there is none and the mocks are strict, or if it takes too long to find one.
    """
    shown = truncate_text(call.arguments_json or "{}", _SHOWN_BYTES)
    try:
        with limit_work(_MAX_STEPS), match_placeholders(None):
            for index, mock in enumerate(mocks.tools):
                is_meant = mock.name == call.name and mock.agent in ("", agent) and not _is_used_up(mock, uses[index])
                if is_meant and _matches(mock, call.arguments_json):
                    return index
    except TooMuchWork:
        raise RunError(
            f"The call of {call.name!r} by {agent!r} with the arguments {shown} cannot be compared with all mocks of "
            "this case, which takes too long: the tool did not run. Use fewer or simpler mocks.",
            reason=error_pb2.ERROR_REASON_TOOL_NOT_MOCKED,
        ) from None
    if not mocks.strict:
        return None
    raise RunError(
        f"No mock answers the call of {call.name!r} by {agent!r} with the arguments {shown}, and the mocks of this "
        "case are strict: the tool did not run. Add a mock for the call, or set mocks.strict to false.",
        reason=error_pb2.ERROR_REASON_TOOL_NOT_MOCKED,
    )


def find_agent_mock(
    mocks: eval_set_pb2.ToolMocks, agent: str, input: message_pb2.Message, *, caller: str, uses: Mapping[int, int]
) -> int | None:
    """Return the number of the mock that answers instead of an agent that another calls, or None if that is to run.

    Raises RunError TOOL_NOT_MOCKED if mocks name the agent, none of them answers this call, and the mocks are strict.
    """
    named = [(index, mock) for index, mock in enumerate(mocks.agents) if mock.agent == agent]
    value = value_of(input) if named else ""
    try:
        with limit_work(_MAX_STEPS), match_placeholders(None):
            for index, mock in named:
                is_meant = mock.caller in ("", caller) and not _is_used_up(mock, uses[index])
                if is_meant and not (mock.HasField("input_match") and mismatch(mock.input_match, value)):
                    return index
    except TooMuchWork:
        problem = "cannot be compared with all mocks of this case, which takes too long"
    else:
        if not named or (mocks.HasField("strict") and not mocks.strict):
            return None
        problem = "is answered by no mock of this case, and mocks name that agent"
    raise RunError(
        f"The call of the agent {agent!r} by {caller!r} with the input {truncate_text(value, _SHOWN_BYTES)} {problem}: "
        "the agent did not run. Add a mock for the call, or set mocks.strict to false.",
        reason=error_pb2.ERROR_REASON_TOOL_NOT_MOCKED,
    )


def _is_used_up(mock: eval_set_pb2.ToolMock | eval_set_pb2.AgentMock, uses: int) -> bool:
    return mock.HasField("times") and uses >= mock.times


class MockedAgent:
    """Answers as a mock says, in the place of an agent whose definition it has."""

    def __init__(self, agent: Agent, mock: eval_set_pb2.AgentMock) -> None:
        self._agent, self._mock = agent, mock

    @property
    def definition(self) -> agent_pb2.AgentDefinition:
        """That of the agent."""
        return self._agent.definition

    @property
    def revision(self) -> str:
        """That of the agent."""
        return self._agent.revision

    @property
    def kind(self) -> execution_pb2.AgentKind.ValueType:
        """That of the agent."""
        return self._agent.kind

    @property
    def tool_links(self) -> Sequence[agent_pb2.ToolLink]:
        """Those of the agent, none of which is called."""
        return self._agent.tool_links

    async def run(self, ctx: Context, input: message_pb2.Message) -> Outcome:
        """Return the mock's answer. Raises its error."""
        if self._mock.HasField("error"):
            error = RunError.of(self._mock.error)
            error.reason = error.reason or error_pb2.ERROR_REASON_INTERNAL
            raise error
        text = [message_pb2.Part(text=self._mock.text)] if self._mock.HasField("text") else []
        return Outcome(output=message_pb2.Message(parts=[*text, *self._mock.message.parts]))


def is_replaced(mocks: eval_set_pb2.ToolMocks | None, call: message_pb2.ToolCall, *, agent: str) -> bool:
    """True if an agent's call of an ordinary tool does not run the tool: a mock answers it, or it fails without one."""
    if mocks is None or mocks.strict:
        return mocks is not None
    try:
        return find_mock(mocks, call, agent=agent) is not None
    except RunError:
        return True


def _matches(mock: eval_set_pb2.ToolMock, arguments_json: str) -> bool:
    # A model may leave out the arguments of a tool that has none.
    return not mock.HasField("arguments_match") or not mismatch(mock.arguments_match, arguments_json or "{}")


def build_mock_result(mock: eval_set_pb2.ToolMock, call: message_pb2.ToolCall) -> message_pb2.ToolResult:
    """Return the result that a mock has for a call, bounded as that of a tool.

    A JSON string is a text and null an empty text, as what a tool in Python returns. Raises RunError OUTPUT_TOO_LARGE.
    """
    if mock.HasField("outcome"):
        result = result_of(mock.outcome, call)
        fitted = result_parts(list(result.parts)) if result.parts else []
        del result.parts[:]
        result.parts.extend(fitted)
        return result
    value: object = json.loads(mock.result_json)
    is_text = value is None or isinstance(value, str)
    # JSON is kept as it is written: numbers keep their digits, and members their order.
    return message_pb2.ToolResult(
        call=call, parts=result_parts(value if is_text else message_pb2.Part(data_json=mock.result_json))
    )


def mock_mistakes(mocks: eval_set_pb2.ToolMocks) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with mocks: the path of each wrong field in them, empty for the whole, and a sentence."""
    if (size := mocks.ByteSize()) > MAX_MOCKS_BYTES:
        yield "", f"The mocks have {size:,} bytes; those of a run may have {MAX_MOCKS_BYTES:,}. Remove or shorten some."
    for index, mock in enumerate(mocks.tools):
        for field, sentence in _mistakes_of(mock):
            yield f"tools[{index}].{field}", sentence
    for index, agent_mock in enumerate(mocks.agents):
        if agent_mock.HasField("input_match") and (problem := check_matcher(agent_mock.input_match)):
            yield f"agents[{index}].input_match", problem
        if agent_mock.WhichOneof("answer") is None:
            yield f"agents[{index}]", "A mock needs an answer: set text, message or error."
    for index, fault in enumerate(mocks.faults):
        for field, sentence in fault_mistakes(fault):
            yield f"faults[{index}]{field and f'.{field}'}", sentence


def _mistakes_of(mock: eval_set_pb2.ToolMock) -> Iterator[tuple[str, str]]:
    if mock.name in RESERVED:
        yield "name", f"{mock.name} is a built-in tool, and its calls cannot be mocked."
    if mock.HasField("arguments_match") and (problem := check_matcher(mock.arguments_match)):
        yield "arguments_match", problem
    answer = mock.WhichOneof("answer")
    if answer is None:
        yield "result_json", "A mock needs an answer: set result_json or outcome."
    elif answer == "outcome":
        yield from (("outcome", mistake) for mistake in outcome_mistakes(mock.outcome))
    else:
        yield from (("result_json", mistake) for mistake in value_mistakes(mock.result_json, "", "result_json"))
