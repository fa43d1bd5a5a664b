"""Compare what came with what is expected, and find values by their paths."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tests.contract.scenario_files import ExpectedEnd, ExpectedEvent

ANY: Final = "..."
"""Any number of any events."""

_VARIABLE: Final = re.compile(r"\$\{([\w.-]+)\}")


def differences(expected: Any, actual: Any, path: str = "") -> Iterator[str]:
    """Return where `actual` lacks what is expected. A mapping may have more keys, a list no more items."""
    if expected == "any":
        return
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            yield f"{path or 'it'} is {actual!r} instead of a mapping"
            return
        for key, value in expected.items():
            yield from differences(value, actual.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(expected, list | tuple):
        if not isinstance(actual, Sequence) or len(actual) != len(expected):
            yield f"{path} is {actual!r} instead of {len(expected)} items: {expected!r}"
            return
        for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
            yield from differences(one, other, f"{path}.{number}")
    elif isinstance(expected, str) and expected.startswith("~ "):
        if not isinstance(actual, str) or re.search(expected[2:], actual) is None:
            yield f"{path} is {actual!r}, which {expected[2:]!r} does not match"
    elif not _equal(expected, actual):
        yield f"{path} is {actual!r} instead of {expected!r}"


def _equal(expected: Any, actual: Any) -> bool:
    # The JSON mapping has integers of 64 bits as texts, and leaves out what is zero or empty.
    if actual is None:
        return expected in (None, 0, "", False, "0")
    if isinstance(expected, int) and not isinstance(expected, bool) and isinstance(actual, str):
        return str(expected) == actual
    return type(expected) is type(actual) and bool(expected == actual)


def event_differences(
    expected: Sequence[str | ExpectedEvent], events: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[str]:
    """Return where events are not as expected, in order; `...` stands for any number of others.

    After `...` the next expected event is the first that fits it.
    """
    at, is_open = 0, False
    for one in expected:
        if one == ANY:
            is_open = True
            continue
        found = [list(_event_difference(one, events[at], names[at]))] if at < len(events) else [["no further event"]]
        while is_open and found[-1] and at + 1 < len(events):
            at += 1
            found.append(list(_event_difference(one, events[at], names[at])))
        if found[-1]:
            yield f"no event fits {one!r}" if is_open else f"event {at + 1}: {'; '.join(found[-1])}"
            return
        at, is_open = at + 1, False
    if at < len(events) and not is_open:
        yield f"events follow that are not expected: {', '.join(names[at:])}"


def _event_difference(expected: str | ExpectedEvent, event: Mapping[str, Any], name: str) -> Iterator[str]:
    wanted = ExpectedEvent.model_validate({"is": expected}) if isinstance(expected, str) else expected
    if name != wanted.name:
        yield f"it is {name} instead of {wanted.name}"
        return
    if wanted.agent is not None and event.get("agent") != wanted.agent:
        yield f"its agent is {event.get('agent')} instead of {wanted.agent}"
    yield from differences(wanted.payload, event.get(name, {}), name)


def end_differences(expected: ExpectedEnd, end: Mapping[str, Any]) -> Iterator[str]:
    """Return where the end of a call is not as expected."""
    codes = [expected.code] if isinstance(expected.code, str) else expected.code
    if end.get("code") not in codes:
        yield f"the code is {end.get('code')} instead of {' or '.join(codes)}: {end.get('message')}"
    if expected.reason not in ("any", end.get("reason", "")):
        yield f"the reason is {end.get('reason')!r} instead of {expected.reason!r}"
    if re.search(expected.message, end.get("message", "")) is None:
        yield f"the message is {end.get('message')!r}, which {expected.message!r} does not match"
    yield from differences(expected.metadata, end.get("metadata", {}), "metadata")
    violations = sorted(end.get("violations", []), key=lambda one: str(one.get("field")))
    wanted = sorted(expected.violations, key=lambda one: one["field"])
    yield from differences(wanted, violations, "violations")
    if expected.rejoins not in ("any", "some" if end.get("rejoins", 0) else "none"):
        yield f"the stream rejoined {end.get('rejoins', 0)} times instead of {expected.rejoins}"


def found(path: str, value: Any) -> Any:
    """Return the value at a path such as `events.-1.sequence`. Raises KeyError with the path."""
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, Sequence) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise KeyError(f"there is nothing at {path}") from None
    return value


def filled(value: Any, variables: Mapping[str, Any]) -> Any:
    """Return a value with its `${variables}` replaced; a text that is one variable becomes its value, of any type."""
    if isinstance(value, Mapping):
        return {key: filled(one, variables) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [filled(one, variables) for one in value]
    if not isinstance(value, str):
        return value
    if whole := _VARIABLE.fullmatch(value):
        return variables[whole[1]]
    return _VARIABLE.sub(lambda match: str(variables[match[1]]), value)
