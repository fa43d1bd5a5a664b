"""The format of model scripts, and the position of a conversation in its script.

A script is a YAML file, read and validated when the server starts. It has a list of turns for each agent, one for each
call of its model in an invocation:

    agents:
      lead:
        - calls:                                     # step 0: two tools, or linked agents
            - {name: call_researcher, arguments: {message: What do we know?}}
            - {name: note, arguments_json: '{"text": "unfin'}
          usage: {input_tokens: 12, output_tokens: 5}
        - The answer.                                # step 1: a string is short for `text`
      writer:
        - when: poem                                 # only if the user's last message contains this text
          reasoning: Four lines.
          chunks: ["Roses ", "are red."]             # pieces as they stream; `text` is split by words
          delay_ms: 20                               # before every piece
        - text: A plain text.
          error: {reason: RATE_LIMITED, retry_after: 0.5, after_chunks: 1, times: 2}
      "*":                                           # all other agents
        - ok

Which turn answers depends on the request alone: of the turns whose `when` matches, the one at the index that is the
number of the model's answers since the user's last message. So the same request gets the same answer in every session,
also in parallel.

`error` makes attempts fail after `after_chunks` pieces: the first `times` attempts of one request, or all of them if
`times` is absent. The reasons TRANSPORT, RATE_LIMITED, PROVIDER_ERROR, TIMEOUT and BAD_RESPONSE are retried,
UNAVAILABLE is not. `cut: true` ends the stream before the answer is complete. Without `usage` the model reports none.
`finish_reason` is the provider's word: `stop`, `tool_calls`, `length`, `content_filter`, `refusal`, or another one,
which is recorded as OTHER. Default: `tool_calls` if the turn has calls, else `stop`.
"""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import ErrorDetails

from bough.v1 import message_pb2, usage_pb2
from bough_server.documents.yaml import Document, parse_documents, read_documents, suggestion
from bough_server.errors import ConfigurationError, Problem
from bough_server.models.model import ModelRequest

FaultReason: TypeAlias = Literal[
    "TRANSPORT", "RATE_LIMITED", "PROVIDER_ERROR", "TIMEOUT", "BAD_RESPONSE", "UNAVAILABLE"
]
_Count = Annotated[int, Field(ge=0, strict=True)]
_Milliseconds = Annotated[float, Field(ge=0, le=3_600_000, allow_inf_nan=False)]
_ANY_AGENT: Final = "*"

_REWRITTEN: Final = "For context:"


class _Entry(BaseModel):
    """Base of every mapping in a script: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ScriptedUsage(_Entry):
    """Usage that a turn reports; absent counts are not reported."""

    input_tokens: _Count | None = None
    cached_input_tokens: _Count | None = None
    cache_write_tokens: _Count | None = None
    output_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None
    total_tokens: _Count | None = None

    def message(self) -> usage_pb2.Usage:
        """Return it as a protobuf message."""
        return usage_pb2.Usage(**self.model_dump(exclude_none=True))


class ScriptedCall(_Entry):
    """A tool call, with its arguments as a mapping, or as raw text that need not be JSON."""

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, JsonValue] | None = None
    arguments_json: str | None = None

    @model_validator(mode="after")
    def _check_arguments(self) -> "ScriptedCall":
        if self.arguments is not None and self.arguments_json is not None:
            raise ValueError("has both `arguments` and `arguments_json`; remove one")
        return self

    @property
    def arguments_text(self) -> str:
        """Arguments as text, as the model sends them."""
        if self.arguments_json is not None:
            return self.arguments_json
        return json.dumps(self.arguments or {}, ensure_ascii=False)


class ScriptedFault(_Entry):
    """How attempts of a turn fail."""

    reason: FaultReason
    message: str = "It fails by its script."
    retry_after: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    after_chunks: _Count = 0
    times: Annotated[int, Field(ge=1, strict=True)] | None = None
    """How many attempts of one request fail; None: all."""
    usage: ScriptedUsage | None = None
    """Usage that a failed attempt reports."""


def _to_turn(value: object) -> object:
    return {"text": value} if isinstance(value, str) else value


class ScriptedTurn(_Entry):
    """One answer."""

    when: str = ""
    text: str = ""
    chunks: tuple[str, ...] = ()
    reasoning: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    usage: ScriptedUsage | None = None
    finish_reason: str = ""
    delay_ms: _Milliseconds = 0.0
    error: ScriptedFault | None = None
    cut: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _check_text(self) -> "ScriptedTurn":
        if self.text and self.chunks:
            raise ValueError("has both `text` and `chunks`; remove one")
        return self

    @property
    def pieces(self) -> tuple[str, ...]:
        """The text, in the pieces that are streamed."""
        return self.chunks or split_words(self.text)


class _File(_Entry):
    agents: dict[str, tuple[Annotated[ScriptedTurn, BeforeValidator(_to_turn)], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The turns of every agent, and the path of their file."""

    agents: Mapping[str, Sequence[ScriptedTurn]]
    path: str

    def turn(self, request: ModelRequest) -> tuple[int, ScriptedTurn | None]:
        """Return the index of the turn that answers, and the turn; the step and None if the script has none for it."""
        messages = current_turn(request.messages)
        question = join_text(messages[0]) if messages else ""
        turns = self.agents.get(request.agent, self.agents.get(_ANY_AGENT, ()))
        matching = [index for index, turn in enumerate(turns) if turn.when in question]
        step = step_of(messages)
        return (matching[step], turns[matching[step]]) if step < len(matching) else (step, None)


def read_script(path: Path) -> Script:
    """Read and validate a script file. Raises ConfigurationError with each problem as "file:line: field: message"."""
    return _script(read_documents(path), str(path))


def parse_script(text: str, *, path: str = "script.yaml") -> Script:
    """Parse and validate a script. Raises ConfigurationError with every problem."""
    return _script(parse_documents(text, path=path), path)


def split_words(text: str) -> tuple[str, ...]:
    """Split a text into words, each with the whitespace after it; joined they are the text again."""
    return tuple(re.findall(r"\s*\S+\s*|\s+", text))


def _script(documents: list[Document], path: str) -> Script:
    if len(documents) != 1:
        line = documents[1].line(()) if documents else 0
        raise ConfigurationError(
            str(Problem(path=path, line=line, field="", description="must be one document with `agents`"))
        )
    document = documents[0]
    try:
        return Script(agents=_File.model_validate(document.value).agents, path=path)
    except ValidationError as error:
        problems = [document.problem(each["loc"], _message_of(each)) for each in error.errors()]
        raise ConfigurationError("\n".join(str(problem) for problem in problems)) from None


def _message_of(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        known = {name for entry in _Entry.__subclasses__() for name in entry.model_fields}
        return f"There is no such field.{suggestion(str(error['loc'][-1]), known)}"
    if error["type"] == "tuple_type":
        return "must be a list"
    return error["msg"].removeprefix("Value error, ")


def join_text(message: message_pb2.Message) -> str:
    """Return the text of a message, its parts of text and of JSON joined by line feeds."""
    return "\n".join(part.text or part.data_json for part in message.parts if part.text or part.data_json)


def current_turn(messages: Sequence[message_pb2.Message]) -> Sequence[message_pb2.Message]:
    """Return the messages of the current turn: the user's message that opened it, and all after it.

    That is the last one that is stored in the session, which has a kind; if there is none, the last one that is not
    another agent's ("For context:"). So a question that the runtime adds opens no turn. Without either: all messages.
    """
    opening: int | None = None
    for index in range(len(messages) - 1, -1, -1):
        if _is_plain(messages[index]):
            if messages[index].kind != message_pb2.MESSAGE_KIND_UNSPECIFIED:
                return messages[index:]
            opening = index if opening is None else opening
    return messages[opening or 0 :]


def step_of(turn: Sequence[message_pb2.Message]) -> int:
    """Return how many answers the model has given in a turn.

    An empty answer leaves no message, only the question after it, which the runtime repeats: so a user message that
    follows no answer counts as one.
    """
    pairs = itertools.pairwise(turn)
    return sum(
        after.role == message_pb2.ROLE_ASSISTANT or (_is_plain(after) and before.role != message_pb2.ROLE_ASSISTANT)
        for before, after in pairs
    )


def find_answered_tools(turn: Sequence[message_pb2.Message]) -> set[str]:
    """Return the names of the tools that have a result in a turn, failures included."""
    return {part.tool_result.call.name for message in turn for part in message.parts if part.HasField("tool_result")}


def _is_plain(message: message_pb2.Message) -> bool:
    if message.role not in (message_pb2.ROLE_USER, message_pb2.ROLE_UNSPECIFIED):
        return False
    return not join_text(message).startswith(_REWRITTEN) and not _has_foreign_author(message)


def _has_foreign_author(message: message_pb2.Message) -> bool:
    """Return whether a message is another agent's file, which has no "For context:" text to recognize it by."""
    return message.kind == message_pb2.MESSAGE_KIND_UNSPECIFIED and message.author not in ("", "user")
