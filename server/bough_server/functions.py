"""Pure functions by name, @condition, @input_builder and @rewriter, and the Snapshot they receive.

They are functions of recorded values, so a replay calls them again and the log does not hold their results. An
exception that one raises, or a result of another type, is an error of the run that names them.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, overload

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""What a function may be called in a definition."""

_SAYABLE: Final = frozenset({"text", "data_json", "blob"})
_ROLES: Final = (message_pb2.ROLE_UNSPECIFIED, message_pb2.ROLE_USER, message_pb2.ROLE_ASSISTANT)

Given = TypeVar("Given")
Made = TypeVar("Made")


class Values(Mapping[str, Any]):
    """A session's values by name, read only: every reading gives a copy."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """`texts` are the values as JSON text."""
        self._texts = texts

    def __getitem__(self, key: str) -> Any:
        return json.loads(self._texts[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is known where a condition or an input builder is called: copies of what is recorded, and nothing else."""

    agent: str
    """The agent whose link or loop it is."""
    state: Mapping[str, Any]
    """The session's values, as JSON."""
    input: message_pb2.Message
    """What that agent was told."""
    user: message_pb2.Message
    """What the user said."""
    message: message_pb2.Message | None = None
    """What the call says: of a model, of a transfer or of code; None where nothing does."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of a model's call, as JSON; empty where no model called."""
    iteration: int | None = None
    """The iteration of the loop that has just ended, from 0; None if it is not a loop's condition."""
    plan: str = ""
    """The steps of the plan that are left, as text; empty where there is no plan."""
    step: str = ""
    """The step of the plan that is to be done; empty where there is none."""
    executed_steps: str = ""
    """The steps that were done and what came of them, as text; empty where there are none."""
    look: Callable[[], Sequence[message_pb2.Message]] = field(default=tuple, repr=False, compare=False)
    """Gives what `history` is made of."""

    @cached_property
    def history(self) -> list[message_pb2.Message]:
        """What the agent sees of the session and the run so far, as its model would be shown it."""
        return [copied(message) for message in self.look()]


def copied(message: message_pb2.Message) -> message_pb2.Message:
    """A copy that may be changed."""
    copy = message_pb2.Message()
    copy.CopyFrom(message)
    return copy


def text_of(message: message_pb2.Message) -> str:
    """Return the text of a message: its parts of text joined, and its parts of JSON among them as JSON text.

    Files, reasoning, calls and results are left out.
    """
    return "".join(part.text or part.data_json for part in message.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Says whether something holds. Made by `@condition`; still callable as the function it is."""

    kind: ClassVar[str] = "condition"
    name: str
    function: Callable[[Snapshot], bool]

    def __call__(self, situation: Snapshot) -> bool:
        return self.function(situation)

    def holds(self, situation: Snapshot) -> bool:
        """What it says. Raises RunError INTERNAL, or what RunError it raises."""
        answer = _ask(self, self.function, situation)
        if not isinstance(answer, bool):
            raise _wrong(self, answer, "True or False")
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBuilder:
    """Makes what a child is told. Made by `@input_builder`; still callable as the function it is."""

    kind: ClassVar[str] = "input builder"
    name: str
    function: Callable[[Snapshot], str | message_pb2.Message]

    def __call__(self, situation: Snapshot) -> str | message_pb2.Message:
        return self.function(situation)

    def built(self, situation: Snapshot) -> message_pb2.Message:
        """What it makes, with its parts and metadata alone. Raises RunError INTERNAL, or what RunError it raises."""
        answer = _ask(self, self.function, situation)
        if isinstance(answer, str):
            return message_pb2.Message(parts=[message_pb2.Part(text=answer.encode(errors="replace").decode())])
        if not isinstance(answer, message_pb2.Message):
            raise _wrong(self, answer, "a text or a Message")
        if any(part.WhichOneof("content") not in _SAYABLE for part in answer.parts):
            raise _refused(self, "gave a Message with other parts than text, JSON and files")
        return message_pb2.Message(parts=answer.parts, metadata_json=answer.metadata_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriter:
    """Says how a model is shown what another agent said. Made by `@rewriter`; still callable as the function it is."""

    kind: ClassVar[str] = "rewriter"
    name: str
    function: Callable[[message_pb2.Message], list[message_pb2.Message]]

    def __call__(self, message: message_pb2.Message) -> list[message_pb2.Message]:
        return self.function(message)

    def rewritten(self, message: message_pb2.Message) -> list[message_pb2.Message]:
        """What it makes of a message without its reasoning; messages without parts are left out.

        Raises RunError INTERNAL, or what RunError it raises.
        """
        given = copied(message)
        del given.parts[:]
        given.parts.extend(part for part in message.parts if not part.HasField("reasoning"))
        answer = _ask(self, self.function, given) if given.parts else []
        if not isinstance(answer, list) or not all(isinstance(one, message_pb2.Message) for one in answer):
            raise _wrong(self, answer, "a list of Messages")
        return [self._shown(one, message) for one in answer if one.parts]

    def _shown(self, made: message_pb2.Message, message: message_pb2.Message) -> message_pb2.Message:
        if any(part.WhichOneof("content") not in _SAYABLE for part in made.parts):
            raise _refused(self, "gave a call or a result as it is; write it as text, or leave it out")
        if made.role not in _ROLES:
            raise _refused(self, "gave a message that is neither a user's nor an assistant's")
        shown = copied(made)
        shown.role = made.role or message_pb2.ROLE_USER
        shown.author = made.author or message.author
        shown.invocation_id = message.invocation_id
        return shown


Function: TypeAlias = Condition | InputBuilder | Rewriter


@overload
def condition(function: Callable[[Snapshot], bool], /) -> Condition: ...


@overload
def condition(*, name: str) -> Callable[[Callable[[Snapshot], bool]], Condition]: ...


def condition(
    function: Callable[[Snapshot], bool] | None = None, /, *, name: str = ""
) -> Condition | Callable[[Callable[[Snapshot], bool]], Condition]:
    """Makes `def name(situation) -> bool` a condition that a loop's `until` can name. Raises TypeError."""

    def make(function: Callable[[Snapshot], bool]) -> Condition:
        return Condition(name=_name(function, name, "condition", "situation"), function=function)

    return make if function is None else make(function)


@overload
def input_builder(function: Callable[[Snapshot], str | message_pb2.Message], /) -> InputBuilder: ...


@overload
def input_builder(*, name: str) -> Callable[[Callable[[Snapshot], str | message_pb2.Message]], InputBuilder]: ...


def input_builder(
    function: Callable[[Snapshot], str | message_pb2.Message] | None = None, /, *, name: str = ""
) -> InputBuilder | Callable[[Callable[[Snapshot], str | message_pb2.Message]], InputBuilder]:
    """Makes `def name(situation) -> str | Message` a builder that a link's `input` can name. Raises TypeError."""

    def make(function: Callable[[Snapshot], str | message_pb2.Message]) -> InputBuilder:
        return InputBuilder(name=_name(function, name, "input_builder", "situation"), function=function)

    return make if function is None else make(function)


@overload
def rewriter(function: Callable[[message_pb2.Message], list[message_pb2.Message]], /) -> Rewriter: ...


@overload
def rewriter(*, name: str) -> Callable[[Callable[[message_pb2.Message], list[message_pb2.Message]]], Rewriter]: ...


def rewriter(
    function: Callable[[message_pb2.Message], list[message_pb2.Message]] | None = None, /, *, name: str = ""
) -> Rewriter | Callable[[Callable[[message_pb2.Message], list[message_pb2.Message]]], Rewriter]:
    """Makes `def name(message) -> list[Message]` a rewriter that an agent's `history_rewriter` can name.

    Raises TypeError.
    """

    def make(function: Callable[[message_pb2.Message], list[message_pb2.Message]]) -> Rewriter:
        return Rewriter(name=_name(function, name, "rewriter", "message"), function=function)

    return make if function is None else make(function)


def _name(function: Callable[[Given], Made], name: str, decorator: str, parameter: str) -> str:
    """What a function is called. Raises TypeError where it cannot be a pure function of one thing."""
    if not callable(function):
        raise TypeError(f"@{decorator} takes a function, not a {type(function).__name__}.")
    name = name or getattr(function, "__name__", "")
    if not NAME.fullmatch(name):
        raise TypeError(
            f"A function cannot be called {name!r} in a definition: use a letter, then up to 63 letters, digits, _ or "
            "-, or pass name=."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{name!r} must be a plain `def`: it is asked again in a replay, so it cannot wait for anything. Do the "
            "work in a tool or an agent, and put what it gives into the state."
        )
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{name!r} must return what it makes, not yield it.")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise TypeError(f"{name!r} must be `def {name}({parameter})`.") from None
    return name


def _ask(asked: Function, function: Callable[[Given], Made], given: Given) -> Made:
    try:
        return function(given)
    except RunError as error:
        raise RunError(f"The {asked.kind} {asked.name!r} failed: {error.message}", reason=error.reason) from error
    except (Exception, SystemExit) as error:
        raise _refused(asked, f"raised {type(error).__name__}: {error}"[:2000]) from error


def _wrong(asked: Function, answer: object, wanted: str) -> RunError:
    if inspect.iscoroutine(answer):
        answer.close()
    return _refused(asked, f"gave {type(answer).__name__}; it must give {wanted}")


def _refused(asked: Function, what: str) -> RunError:
    return RunError(f"The {asked.kind} {asked.name!r} {what}.", reason=error_pb2.ERROR_REASON_INTERNAL)
