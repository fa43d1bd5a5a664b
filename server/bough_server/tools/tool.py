"""Python functions as tools: @tool, Tool with its options, and the ToolContext that a call receives."""

import hashlib
import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args, overload

from bough.v1 import message_pb2, tool_pb2
from bough_server.identity import is_group
from bough_server.models.model import ToolSpec
from bough_server.tools.signature import Arguments, Signature, parse_docstring, read_signature

Approval: TypeAlias = bool | Callable[[Mapping[str, Any]], bool]
"""Which calls must be approved: none, all, or those for whose arguments a predicate returns True."""

Place: TypeAlias = Literal["server", "client"]
"""Where a tool runs."""

OnRecovery: TypeAlias = Literal["retry", "fail", "ask"]
"""What recovery does with a call that was running when its server died: run it again, fail it, or ask a user."""

_MOST_DAYS: Final = 3_650
"""The longest `answer_within`, in days: every clock and every store can represent the time at its end."""

TOOL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""Names of tools that every provider accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Options of `@tool`, as the author of a tool sets them; check_rules validates them."""

    timeout: float | None = None
    approval: Approval = False
    execution: Place = "server"
    on_recovery: OnRecovery = "retry"
    answer_within: float | None = None
    approvers: str | None = None
    four_eyes: bool = False

    @property
    def is_client_side(self) -> bool:
        """Whether the client runs the tool."""
        return self.execution == "client"


def check_rules(rules: Rules, name: str, function: Callable[..., Any]) -> None:
    """Raise TypeError, with what to change, if the rules contradict each other or the function of the tool."""
    if rules.timeout is not None and not rules.timeout > 0:
        raise TypeError(f"The timeout of tool {name!r} must be a positive number of seconds.")
    for option, value, choices in (
        ("execution", rules.execution, get_args(Place)),
        ("on_recovery", rules.on_recovery, get_args(OnRecovery)),
    ):
        if value not in choices:
            raise TypeError(f"The {option} of tool {name!r} must be {' or '.join(map(repr, choices))}, not {value!r}.")
    _check_approval(rules.approval, name)
    _check_approvers(rules, name)
    _check_answer_within(rules.answer_within, name)
    if rules.is_client_side:
        _check_client_side(rules, name, function)


def _check_approval(approval: object, name: str) -> None:
    if isinstance(approval, bool):
        return
    if not callable(approval):
        raise TypeError(
            f"The approval of tool {name!r} must be True, False, or a function that takes the call's arguments "
            f"and returns whether it must be approved, not {approval!r}."
        )
    if inspect.iscoroutinefunction(approval) or inspect.isasyncgenfunction(approval):
        raise TypeError(f"The approval of tool {name!r} must be a plain function: it decides by the arguments alone.")
    try:
        inspect.signature(approval).bind({})
    except TypeError:
        raise TypeError(f"The approval of tool {name!r} must take one argument: the call's arguments.") from None
    except ValueError:
        return  # some builtins have no readable signature; if the predicate fails, the call must be approved


def _check_approvers(rules: Rules, name: str) -> None:
    if rules.approvers is not None and not (isinstance(rules.approvers, str) and is_group(rules.approvers)):
        raise TypeError(
            f"The approvers of tool {name!r} must be the name of a group, 1 to 128 printable characters, not "
            f"{rules.approvers!r}."
        )
    if (rules.approvers is not None or rules.four_eyes) and rules.approval is False:
        raise TypeError(f"Tool {name!r} needs no approval, so it has no approvers: set approval too.")


def _check_answer_within(seconds: object, name: str) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MOST_DAYS * 86_400:
        raise TypeError(
            f"The answer_within of tool {name!r} must be a positive number of seconds, at most {_MOST_DAYS} days; "
            "None waits forever."
        )


def _check_client_side(rules: Rules, name: str, function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"Tool {name!r} runs in the client and cannot stream: make it a plain function.")
    if rules.on_recovery != "retry":
        raise TypeError(f"Tool {name!r} runs in the client, which no crash of a server ends: remove on_recovery.")
    if rules.timeout is not None:
        raise TypeError(f"Tool {name!r} runs in the client, which no timeout stops: use answer_within instead.")


class ToolContext(Protocol):
    """Context of the call that a tool answers. A parameter annotated with it is filled in and not in the schema."""

    @property
    def run_id(self) -> str:
        """Id of the run."""
        ...

    @property
    def session_id(self) -> str:
        """Id of the session."""
        ...

    @property
    def tenant_id(self) -> str:
        """Id of the tenant that the run's user is of."""
        ...

    @property
    def user_id(self) -> str:
        """Id of the user who started the run, or forked it; not of one who approves the call."""
        ...

    @property
    def invocation_id(self) -> str:
        """Id of the calling agent's invocation."""
        ...

    @property
    def agent(self) -> str:
        """Name of the calling agent."""
        ...

    @property
    def call_id(self) -> str:
        """Id of the call."""
        ...

    @property
    def idempotency_key(self) -> str:
        """Key that is the same for every attempt of this call."""
        ...

    @property
    def attempt(self) -> int:
        """Number of this attempt of the call, from 1."""
        ...

    async def read_file(self, blob: message_pb2.Blob) -> bytes:
        """Return the bytes of a file of the session. Raises RunError BAD_ARGUMENTS if it has an address only."""
        ...

    @property
    def state(self) -> MutableMapping[str, Any]:
        """Session state as JSON values. They are copies: assign one to change it. A call that fails changes nothing."""
        ...


class RemoteCall(Protocol):
    """Calls a tool at its tool server."""

    async def __call__(
        self, arguments: dict[str, Any], context: ToolContext, emit: Callable[[str], Awaitable[None]], *, timeout: float
    ) -> list[message_pb2.Part]:
        """Call it within a timeout, in seconds, and return its result. Raises RunError, also ToolOutcomeUnknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that models may call, made by `@tool`. Code can still call it like the function."""

    name: str
    description: str
    input_schema_json: str
    function: Callable[..., Any]
    timeout: float | None = None
    """Seconds; None: no limit."""
    context_parameter: str = ""
    """The parameter that takes the ToolContext; empty: none."""
    digest: str = ""
    """SHA-256 hex of name, description and schema, and of "client" if the client runs it."""
    arguments: Arguments | None = None
    """Converts validated JSON to the types of the function; None: the function takes JSON values."""
    approval: Approval = False
    """Which calls must be approved; see needs_approval."""
    is_client_side: bool = False
    """Whether the client runs it; the function is never called then."""
    on_recovery: OnRecovery = "retry"
    """What recovery does with a call that was running when its server died."""
    answer_within: float | None = None
    """Seconds until an approval or a client's result is overdue; None: never."""
    approvers: str | None = None
    """The group that approves; None: the run's user, and administrators."""
    four_eyes: bool = False
    """Whether the run's user may not approve."""
    info: tool_pb2.ToolInfo | None = None
    """What its tool server listed, with the operator's rules for it: a run keeps that. None: it has no tool server."""
    remote: RemoteCall | None = None
    """Calls it at its tool server; then the function is never called."""

    @property
    def server(self) -> str:
        """The tool server that has it; empty if none does."""
        return self.info.server if self.info is not None else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def spec(tool: Tool) -> ToolSpec:
    """Return a tool as it is described to a model."""
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
    approvers: str | None = None,
    four_eyes: bool = False,
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
    approvers: str | None = None,
    four_eyes: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function; works with and without arguments.

    The JSON Schema comes from the type hints, the description from the docstring, and those of the parameters from its
    "Args:" section. The function may be sync (it runs in a thread), async, or a generator of either kind, which streams
    the text that it yields. A parameter annotated `ToolContext` is filled in and not in the schema. `timeout` is in
    seconds.

    `approval` selects the calls that must be approved: True for all, or a pure predicate over the call's arguments as
    JSON values, without those that the model left out. With `execution="client"` the client runs the tool and the
    function is never called: its body may be `...`. `on_recovery` is for a call that was running when its server died:
    run it again ("retry"), fail it ("fail"), or ask a user ("ask"). `answer_within` is the number of seconds that an
    approval or a client's result may take. `approvers` is the group of callers who approve; default: the run's user,
    and administrators. With `four_eyes` the run's user does not, whatever groups the user has.

    Raises TypeError, with what to change, if the function cannot be a tool.
    """
    rules = Rules(
        timeout=timeout,
        approval=approval,
        execution=execution,
        on_recovery=on_recovery,
        answer_within=answer_within,
        approvers=approvers,
        four_eyes=four_eyes,
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
            f"{name!r} is no valid name for a tool: use a letter or _, then up to 63 letters, digits, _ or -, "
            "or pass name=."
        )
    check_rules(rules, name, function)
    documentation = parse_docstring(getattr(function, "__doc__", None) or "")
    description = documentation.summary if description is None else description.strip()
    if not description:
        raise TypeError(f"Tool {name!r} has no description: add a docstring or pass description=.")
    signature = read_signature(function, name, documentation.parameters, context_type=ToolContext)
    if rules.is_client_side and signature.context_parameter:
        raise TypeError(f"Tool {name!r} runs in the client, where there is no ToolContext: remove the parameter.")
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
        approvers=rules.approvers,
        four_eyes=rules.four_eyes,
    )


def _digest(name: str, description: str, signature: Signature, rules: Rules) -> str:
    parts = (name, description, signature.schema_json, *(["client"] if rules.is_client_side else []))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
