"""Functions by name: @condition, @input_builder, @rewriter, @handler, @router and @reducer, and their Snapshot.

They depend on recorded values only, so replay calls them again and the log does not hold their results. An exception,
or a result of another type, is an error of the run that uses them. Only functions of graphs' nodes, which the `@node`
of agents/graph makes, may touch the world: their results are recorded.
"""

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, overload

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError, text_of_error
from bough_server.messages import copy_of

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""Names that a function may have in a definition."""

_SAYABLE: Final = frozenset({"text", "data_json", "blob"})
_ROLES: Final = (message_pb2.ROLE_UNSPECIFIED, message_pb2.ROLE_USER, message_pb2.ROLE_ASSISTANT)

Made = TypeVar("Made")


class Values(Mapping[str, Any]):
    """A session's values by name, read only; every access returns a copy."""

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
    """Recorded values at the point at which a condition or an input builder is called, all of them copies."""

    agent: str
    """The agent that has the link or the loop."""
    state: Mapping[str, Any]
    """Session state, as JSON values."""
    input: message_pb2.Message
    """The agent's input."""
    user: message_pb2.Message
    """The user's message."""
    message: message_pb2.Message | None = None
    """The message of the call, by a model, a transfer or code; None if there is none."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of a model's call, as JSON values; empty if no model called."""
    iteration: int | None = None
    """The loop iteration that has just ended, from 0; None outside of a loop's condition."""
    plan: str = ""
    """The remaining steps of the plan, as text; empty without a plan."""
    step: str = ""
    """The step of the plan to execute; empty without one."""
    executed_steps: str = ""
    """The executed steps and their results, as text; empty if there are none."""
    node: str = ""
    """The graph's node that the function is called for; empty outside of graphs."""
    visit: int = 0
    """The number of the visit of that node, from 0."""
    superstep: int | None = None
    """The superstep of the visit, from 0; None in a DAG and outside of graphs."""
    remaining_supersteps: int | None = None
    """How many supersteps may follow this one; None without a limit."""
    channels: Mapping[str, Any] = field(default_factory=dict)
    """The values of the graph's channels at the beginning of the superstep, as JSON values; missing ones left out."""
    read_history: Callable[[], Sequence[message_pb2.Message]] = field(default=tuple, repr=False, compare=False)
    """Returns the messages of `history`."""

    @cached_property
    def history(self) -> list[message_pb2.Message]:
        """The session and the run so far as the agent sees them, in the form in which its model would be shown them."""
        return [copy_of(message) for message in self.read_history()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A pure predicate, made by `@condition`; callable like the wrapped function."""

    kind: ClassVar[str] = "condition"
    name: str
    function: Callable[[Snapshot], bool]

    def __call__(self, snapshot: Snapshot) -> bool:
        return self.function(snapshot)

    def holds(self, snapshot: Snapshot) -> bool:
        """Return the function's result.

        Raises RunError: INTERNAL, or with the reason of a RunError that the function raises.
        """
        answer = _call(self, self.function, snapshot)
        if not isinstance(answer, bool):
            raise _build_type_error(self, answer, "True or False")
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBuilder:
    """A pure function that builds a child's input, made by `@input_builder`; callable like the wrapped one."""

    kind: ClassVar[str] = "input builder"
    name: str
    function: Callable[[Snapshot], str | message_pb2.Message]

    def __call__(self, snapshot: Snapshot) -> str | message_pb2.Message:
        return self.function(snapshot)

    def build(self, snapshot: Snapshot) -> message_pb2.Message:
        """Return the built message, with only its parts and metadata.

        Raises RunError: INTERNAL, or with the reason of a RunError that the function raises.
        """
        answer = _call(self, self.function, snapshot)
        if isinstance(answer, str):
            return message_pb2.Message(parts=[message_pb2.Part(text=answer.encode(errors="replace").decode())])
        if not isinstance(answer, message_pb2.Message):
            raise _build_type_error(self, answer, "a text or a Message")
        if any(part.WhichOneof("content") not in _SAYABLE for part in answer.parts):
            raise _build_error(self, "returned a Message with parts other than text, JSON and files")
        return message_pb2.Message(parts=answer.parts, metadata_json=answer.metadata_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewriter:
    """A pure function that rewrites other agents' messages, made by `@rewriter`; callable like the wrapped one."""

    kind: ClassVar[str] = "rewriter"
    name: str
    function: Callable[[message_pb2.Message], list[message_pb2.Message]]

    def __call__(self, message: message_pb2.Message) -> list[message_pb2.Message]:
        return self.function(message)

    def rewrite(self, message: message_pb2.Message) -> list[message_pb2.Message]:
        """Return the function's messages for a message without its reasoning; messages without parts are left out.

        Raises RunError: INTERNAL, or with the reason of a RunError that the function raises.
        """
        given = copy_of(message)
        del given.parts[:]
        given.parts.extend(part for part in message.parts if not part.HasField("reasoning"))
        answer = _call(self, self.function, given) if given.parts else []
        if not isinstance(answer, list) or not all(isinstance(one, message_pb2.Message) for one in answer):
            raise _build_type_error(self, answer, "a list of Messages")
        return [self._check_message(one, message) for one in answer if one.parts]

    def _check_message(self, made: message_pb2.Message, message: message_pb2.Message) -> message_pb2.Message:
        if any(part.WhichOneof("content") not in _SAYABLE for part in made.parts):
            raise _build_error(self, "returned a tool call or result; write it as text, or omit it")
        if made.role not in _ROLES:
            raise _build_error(self, "returned a message whose role is neither user nor assistant")
        shown = copy_of(made)
        shown.role = made.role or message_pb2.ROLE_USER
        shown.author = made.author or message.author
        shown.invocation_id = message.invocation_id
        return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a handler returns to write channels: a value, and what is written to each channel, in order."""

    value: Any
    channels: Mapping[str, Any] = field(default_factory=dict)

    def __init__(self, value: Any, channels: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "channels", dict(channels or {}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A pure function that replaces a node's input or output, made by `@handler`; callable like the wrapped one."""

    kind: ClassVar[str] = "handler"
    name: str
    function: Callable[[Any, Snapshot], Any]

    def __call__(self, value: Any, snapshot: Snapshot) -> Any:
        return self.function(value, snapshot)

    def handle(self, value: Any, snapshot: Snapshot) -> Update:
        """Return the value that the function returns, and its writes.

        Raises RunError: INTERNAL, or with the reason of a RunError that the function raises.
        """
        answer = _call(self, self.function, value, snapshot)
        return answer if isinstance(answer, Update) else Update(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A pure function that chooses the targets of a node's output, made by `@router`; callable like the wrapped one."""

    kind: ClassVar[str] = "router"
    name: str
    function: Callable[[Any, Snapshot], str | list[str]]

    def __call__(self, output: Any, snapshot: Snapshot) -> str | list[str]:
        return self.function(output, snapshot)

    def choose(self, output: Any, snapshot: Snapshot) -> Sequence[str]:
        """Return the names of the targets.

        Raises RunError: INTERNAL, or with the reason of a RunError that the function raises.
        """
        answer = _call(self, self.function, output, snapshot)
        chosen = [answer] if isinstance(answer, str) else answer
        if not isinstance(chosen, list | tuple) or not all(isinstance(name, str) for name in chosen):
            raise _build_type_error(self, answer, "a target or a list of targets")
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """A pure function that applies a write to a channel, made by `@reducer`; callable like the wrapped one."""

    kind: ClassVar[str] = "reducer"
    name: str
    function: Callable[[Any, Any], Any]

    def __call__(self, current: Any, update: Any) -> Any:
        return self.function(current, update)

    def reduce(self, current: Any, update: Any) -> Any:
        """Return the channel's new value; `current` is None if it has none.

        Raises RunError: INTERNAL, or with the reason of a RunError that the function raises.
        """
        return _call(self, self.function, current, update)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFunction:
    """The code of a graph's node, made by `@node`; callable like the wrapped function."""

    kind: ClassVar[str] = "node function"
    name: str
    function: Callable[..., Any]
    version: str
    """Changes when its effects or its result do: a run continues only with the version that it started with."""
    tools: Sequence[str] = ()
    """The tools that it may call through its context."""
    takes_context: bool = False
    """Whether its first parameter is a Context; else it is one recorded effect."""
    input_schema_json: str = ""
    output_schema_json: str = ""
    """JSON Schemas of its hints; empty for any value."""
    convert: Callable[[Any], Any] = field(default=lambda value: value, repr=False)
    """Returns a JSON value as its parameter's type; raises ValueError."""
    to_json: Callable[[Any], Any] = field(default=lambda value: value, repr=False)
    """Returns what it returned as a JSON value; raises ValueError or TypeError."""

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


Function: TypeAlias = Condition | InputBuilder | Rewriter | Handler | Router | Reducer | NodeFunction


@overload
def condition(function: Callable[[Snapshot], bool], /) -> Condition: ...


@overload
def condition(*, name: str) -> Callable[[Callable[[Snapshot], bool]], Condition]: ...


def condition(
    function: Callable[[Snapshot], bool] | None = None, /, *, name: str = ""
) -> Condition | Callable[[Callable[[Snapshot], bool]], Condition]:
    """Make `def name(snapshot) -> bool` a condition that a loop's `until` can name. Raises TypeError."""

    def make(function: Callable[[Snapshot], bool]) -> Condition:
        return Condition(name=_name(function, name, "condition", "snapshot"), function=function)

    return make if function is None else make(function)


@overload
def input_builder(function: Callable[[Snapshot], str | message_pb2.Message], /) -> InputBuilder: ...


@overload
def input_builder(*, name: str) -> Callable[[Callable[[Snapshot], str | message_pb2.Message]], InputBuilder]: ...


def input_builder(
    function: Callable[[Snapshot], str | message_pb2.Message] | None = None, /, *, name: str = ""
) -> InputBuilder | Callable[[Callable[[Snapshot], str | message_pb2.Message]], InputBuilder]:
    """Make `def name(snapshot) -> str | Message` a builder that a link's `input` can name. Raises TypeError."""

    def make(function: Callable[[Snapshot], str | message_pb2.Message]) -> InputBuilder:
        return InputBuilder(name=_name(function, name, "input_builder", "snapshot"), function=function)

    return make if function is None else make(function)


@overload
def rewriter(function: Callable[[message_pb2.Message], list[message_pb2.Message]], /) -> Rewriter: ...


@overload
def rewriter(*, name: str) -> Callable[[Callable[[message_pb2.Message], list[message_pb2.Message]]], Rewriter]: ...


def rewriter(
    function: Callable[[message_pb2.Message], list[message_pb2.Message]] | None = None, /, *, name: str = ""
) -> Rewriter | Callable[[Callable[[message_pb2.Message], list[message_pb2.Message]]], Rewriter]:
    """Make `def name(message) -> list[Message]` a rewriter that an agent's `history_rewriter` can name.

    Raises TypeError.
    """

    def make(function: Callable[[message_pb2.Message], list[message_pb2.Message]]) -> Rewriter:
        return Rewriter(name=_name(function, name, "rewriter", "message"), function=function)

    return make if function is None else make(function)


@overload
def handler(function: Callable[[Any, Snapshot], Any], /) -> Handler: ...


@overload
def handler(*, name: str) -> Callable[[Callable[[Any, Snapshot], Any]], Handler]: ...


def handler(
    function: Callable[[Any, Snapshot], Any] | None = None, /, *, name: str = ""
) -> Handler | Callable[[Callable[[Any, Snapshot], Any]], Handler]:
    """Make `def name(value, snapshot)` a handler that a node's `before` or `after` can name.

    It returns the value that replaces the given one, or an `Update` to write channels too. Raises TypeError.
    """

    def make(function: Callable[[Any, Snapshot], Any]) -> Handler:
        return Handler(name=_name(function, name, "handler", "value, snapshot"), function=function)

    return make if function is None else make(function)


@overload
def router(function: Callable[[Any, Snapshot], str | list[str]], /) -> Router: ...


@overload
def router(*, name: str) -> Callable[[Callable[[Any, Snapshot], str | list[str]]], Router]: ...


def router(
    function: Callable[[Any, Snapshot], str | list[str]] | None = None, /, *, name: str = ""
) -> Router | Callable[[Callable[[Any, Snapshot], str | list[str]]], Router]:
    """Make `def name(output, snapshot)` a router, which returns the targets that a graph's branch leads to.

    Raises TypeError.
    """

    def make(function: Callable[[Any, Snapshot], str | list[str]]) -> Router:
        return Router(name=_name(function, name, "router", "output, snapshot"), function=function)

    return make if function is None else make(function)


@overload
def reducer(function: Callable[[Any, Any], Any], /) -> Reducer: ...


@overload
def reducer(*, name: str) -> Callable[[Callable[[Any, Any], Any]], Reducer]: ...


def reducer(
    function: Callable[[Any, Any], Any] | None = None, /, *, name: str = ""
) -> Reducer | Callable[[Callable[[Any, Any], Any]], Reducer]:
    """Make `def name(current, update)` a reducer that a graph's channel can name. Raises TypeError."""

    def make(function: Callable[[Any, Any], Any]) -> Reducer:
        return Reducer(name=_name(function, name, "reducer", "current, update"), function=function)

    return make if function is None else make(function)


def _name(function: Callable[..., Any], name: str, decorator: str, parameters: str) -> str:
    """Return a function's name. Raises TypeError if it cannot be a pure function of these parameters."""
    if not callable(function):
        raise TypeError(f"@{decorator} takes a function, not a {type(function).__name__}.")
    name = name or getattr(function, "__name__", "")
    if not NAME.fullmatch(name):
        raise TypeError(
            f"{name!r} is not a valid name of a function in a definition: use a letter, then up to 63 letters, digits, "
            "_ or -, or pass name=."
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{name!r} must be a plain `def`: replay calls it again, so it must not wait for anything. Do the "
            "work in a tool or an agent, and put the result into session state."
        )
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{name!r} must return its result, not yield it.")
    try:
        inspect.signature(function).bind(*parameters.split(","))
    except TypeError:
        raise TypeError(f"{name!r} must be `def {name}({parameters})`.") from None
    return name


def _call(asked: Function, function: Callable[..., Made], *given: object) -> Made:
    try:
        return function(*given)
    except RunError as error:
        raise RunError(f"The {asked.kind} {asked.name!r} failed: {error.message}", reason=error.reason) from error
    except BaseException as error:  # whatever its class: a function must not end the server, or cancel its agent
        raise _build_error(asked, f"raised {type(error).__name__}: {text_of_error(error)}"[:2000]) from error


def _build_type_error(asked: Function, answer: object, wanted: str) -> RunError:
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns that it was never awaited
    return _build_error(asked, f"returned {type(answer).__name__}; it must return {wanted}")


def _build_error(asked: Function, what: str) -> RunError:
    return RunError(f"The {asked.kind} {asked.name!r} {what}.", reason=error_pb2.ERROR_REASON_INTERNAL)
