"""The rules of a tool beside what it does: how long, where, with whose approval, and after a crash; it runs nothing."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

Approval: TypeAlias = bool | Callable[[Mapping[str, Any]], bool]
"""Which calls somebody has to approve: none, all, or those of which a predicate over their arguments says so."""

Place: TypeAlias = Literal["server", "client"]
"""Who runs a tool."""

OnRecovery: TypeAlias = Literal["retry", "fail", "ask"]
"""What becomes of a call that was running when its server died: again, never again, or as somebody says."""

_MOST_DAYS: Final = 3_650
"""The longest that an answer may take: a moment that every clock and every store can name."""


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
