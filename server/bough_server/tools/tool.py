"""Python functions as tools: @tool, Tool with its options, and the ToolContext that a call receives."""

import hashlib
import inspect
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args, overload

from bough_server.models.model import ToolSpec
from bough_server.tools.signature import Arguments, Signature, parse_docstring, read_signature

Approval: TypeAlias = bool | Callable[[Mapping[str, Any]], bool]
"""Which calls somebody has to approve: none, all, or those of which a predicate over their arguments says so."""

Place: TypeAlias = Literal["server", "client"]
"""Who runs a tool."""

OnRecovery: TypeAlias = Literal["retry", "fail", "ask"]
"""What becomes of a call that was running when its server died: again, never again, or as somebody says."""

_MOST_DAYS: Final = 3_650
"""The longest that an answer may take: a moment that every clock and every store can name."""

TOOL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""What a tool's name looks like: what every provider takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an author asks for; good only once check_rules has seen it."""

    timeout: float | None = None
    approval: Approval = False
    execution: Place = "server"
    on_recovery: OnRecovery = "retry"
    answer_within: float | None = None

    @property
    def is_client_side(self) -> bool:
        """Whether the client runs the tool."""
        return self.execution == "client"


def check_rules(rules: Rules, name: str, function: Callable[..., Any]) -> None:
    """Raises TypeError with what to change, where the rules do not fit each other or the function of the tool."""
    if rules.timeout is not None and not rules.timeout > 0:
        raise TypeError(f"The timeout of tool {name!r} must be a positive number of seconds.")
    for word, value, words in (
        ("execution", rules.execution, get_args(Place)),
        ("on_recovery", rules.on_recovery, get_args(OnRecovery)),
    ):
        if value not in words:
            raise TypeError(f"The {word} of tool {name!r} must be {' or '.join(map(repr, words))}, not {value!r}.")
    _check_approval(rules.approval, name)
    _check_answer_within(rules.answer_within, name)
    if rules.is_client_side:
        _check_client_side(rules, name, function)


def _check_approval(approval: object, name: str) -> None:
    if isinstance(approval, bool):
        return
    if not callable(approval):
        raise TypeError(
            f"The approval of tool {name!r} must be True, False, or a function that takes the call's arguments "
            f"and says whether it needs one, not {approval!r}."
        )
    if inspect.iscoroutinefunction(approval) or inspect.isasyncgenfunction(approval):
        raise TypeError(f"The approval of tool {name!r} must be a plain function: it decides by the arguments alone.")
    try:
        inspect.signature(approval).bind({})
    except TypeError:
        raise TypeError(f"The approval of tool {name!r} must take one argument: the call's arguments.") from None
    except ValueError:
        return  # a function without a readable signature; a call that it cannot take will need approval


def _check_answer_within(seconds: object, name: str) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MOST_DAYS * 86_400:
        raise TypeError(
            f"The answer_within of tool {name!r} must be a positive number of seconds, at most {_MOST_DAYS} days; "
            "None waits for ever."
        )


def _check_client_side(rules: Rules, name: str, function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"Tool {name!r} runs in the client and cannot stream: make it a plain function.")
    if rules.on_recovery != "retry":
        raise TypeError(f"Tool {name!r} runs in the client, which no crash of a server ends: take on_recovery away.")
    if rules.timeout is not None:
        raise TypeError(f"Tool {name!r} runs in the client, which no timeout stops: use answer_within instead.")


class ToolContext(Protocol):
    """What a tool may know of the call it answers; a parameter annotated with it is filled in and not in the schema."""

    @property
    def run_id(self) -> str:
        """The run."""
        ...

    @property
    def session_id(self) -> str:
        """The session."""
        ...

    @property
    def invocation_id(self) -> str:
        """The calling invocation."""
        ...

    @property
    def agent(self) -> str:
        """The calling agent."""
        ...

    @property
    def call_id(self) -> str:
        """The call."""
        ...

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of this call."""
        ...

    @property
    def state(self) -> MutableMapping[str, Any]:
        """The session's values, as JSON; copies: assign one to change it. What a call that fails wrote is dropped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that models may call. Made by `@tool`; still callable as the function it is."""

    name: str
    description: str
    input_schema_json: str
    function: Callable[..., Any]
    timeout: float | None = None
    """Seconds; None for no limit."""
    context_parameter: str = ""
    """The parameter that takes the ToolContext; empty for none."""
    digest: str = ""
    """SHA-256 hex of name, description and schema, and of where it runs if that is not here."""
    arguments: Arguments | None = None
    """What turns checked JSON into the function's own types; None where the function takes the JSON values."""
    approval: Approval = False
    """Which calls somebody has to approve: none, all, or those of which a predicate says so; see needs_approval."""
    is_client_side: bool = False
    """Whether the client runs it; the function is never called then."""
    on_recovery: OnRecovery = "retry"
    """What becomes of a call that was running when its server died."""
    answer_within: float | None = None
    """Seconds until an approval or a client's result is overdue; None for never."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def spec(tool: Tool) -> ToolSpec:
    """A tool as a model is told of it."""
    return ToolSpec(name=tool.name, description=tool.description, input_schema_json=tool.input_schema_json)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    approval: Approval = False,
    execution: Place = "server",
    on_recovery: OnRecovery = "retry",
    answer_within: float | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = None,
    approval: Approval = False,
    execution: Place = "server",
    on_recovery: OnRecovery = "retry",
    answer_within: float | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Makes a tool of a function; usable bare or with arguments.

    The JSON Schema comes from the type hints, the description from the docstring, and those of the parameters from its
    "Args:" section. The function may be sync (it runs in a thread), async, or a generator of either kind, which streams
    text by yielding it. A parameter annotated `ToolContext` is filled in and not in the schema. `timeout` is seconds.

    `approval` says which calls wait for somebody's approval: True for all, or a pure predicate over the call's
    arguments as JSON values, those that the model left out left out. With `execution="client"` the client runs the tool
    and the function never does: its body may be `...`. `on_recovery` is for a call that was running when its server
    died: run it again ("retry"), fail it ("fail"), or ask somebody ("ask"). `answer_within` is how many seconds an
    approval or a client's result may take.

    Raises TypeError where the function cannot be a tool; the message says what to change.
    """
    rules = Rules(
        timeout=timeout, approval=approval, execution=execution, on_recovery=on_recovery, answer_within=answer_within
    )

    def decorate(decorated: Callable[..., Any]) -> Tool:
        return _make(decorated, name, description, rules)

    return decorate if function is None else decorate(function)


def _make(function: Callable[..., Any], name: str | None, description: str | None, rules: Rules) -> Tool:
    if isinstance(function, Tool) or not callable(function):
        raise TypeError(f"@tool takes a function, not a {type(function).__name__}.")
    name = name if name is not None else getattr(function, "__name__", "")
    if not TOOL_NAME.fullmatch(name):
        raise TypeError(
            f"A tool cannot be called {name!r}: use a letter, then up to 63 letters, digits, _ or -, or pass name=."
        )
    check_rules(rules, name, function)
    documentation = parse_docstring(getattr(function, "__doc__", None) or "")
    description = documentation.summary if description is None else description.strip()
    if not description:
        raise TypeError(f"Tool {name!r} says nothing about itself: give it a docstring or description=.")
    signature = read_signature(function, name, documentation.parameters, context_type=ToolContext)
    if rules.is_client_side and signature.context_parameter:
        raise TypeError(f"Tool {name!r} runs in the client, where there is no ToolContext: take the parameter away.")
    return Tool(
        name=name,
        description=description,
        input_schema_json=signature.schema_json,
        function=function,
        timeout=rules.timeout,
        context_parameter=signature.context_parameter,
        digest=_digest(name, description, signature, rules),
        arguments=signature.arguments,
        approval=rules.approval,
        is_client_side=rules.is_client_side,
        on_recovery=rules.on_recovery,
        answer_within=rules.answer_within,
    )


def _digest(name: str, description: str, signature: Signature, rules: Rules) -> str:
    told = (name, description, signature.schema_json, *(["client"] if rules.is_client_side else []))
    return hashlib.sha256("\0".join(told).encode()).hexdigest()
