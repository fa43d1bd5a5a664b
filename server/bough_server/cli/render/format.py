"""Formatting of numbers, durations, states and free text for a terminal."""

from collections.abc import Iterable
from typing import Final

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor import EnumDescriptor
from rich.cells import cell_len, set_cell_size

from bough.v1 import error_pb2, execution_pb2, usage_pb2
from bough_server.plain_text import one_line

UNKNOWN: Final = "-"

STATE_STYLES: Final = {
    execution_pb2.EXECUTION_STATE_PENDING: "dim",
    execution_pb2.EXECUTION_STATE_RUNNING: "cyan",
    execution_pb2.EXECUTION_STATE_SUCCEEDED: "green",
    execution_pb2.EXECUTION_STATE_FAILED: "red",
    execution_pb2.EXECUTION_STATE_CANCELLED: "yellow",
    execution_pb2.EXECUTION_STATE_INPUT_REQUIRED: "magenta",
}
DEPTH_STYLES: Final = ("cyan", "magenta", "green", "blue", "yellow")


def depth_style(depth: int) -> str:
    """Return the color of a depth in the tree."""
    return DEPTH_STYLES[depth % len(DEPTH_STYLES)]


def clip(text: str, width: int) -> str:
    """Cut a text to at most `width` terminal cells; "…" marks the cut."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 1 else "…"


def clip_middle(text: str, width: int) -> str:
    """Cut a text to at most `width` characters by replacing its middle with "…"."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def seconds_text(seconds: float) -> str:
    """Format a duration in seconds, such as "40 ms", "2.4 s", "3 m 05 s" or "2 h 10 m"."""
    if seconds < 0.0995:
        return f"{max(seconds, 0.0) * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m"


def duration_text(duration: duration_pb2.Duration) -> str:
    """Format a protobuf duration, such as "2.4 s"."""
    return seconds_text(duration.ToTimedelta().total_seconds())


def seconds_between(start: timestamp_pb2.Timestamp, end: timestamp_pb2.Timestamp) -> float:
    """Return the seconds from one time to another."""
    return (end.ToNanoseconds() - start.ToNanoseconds()) / 1e9


def time_text(time: timestamp_pb2.Timestamp) -> str:
    """Format a time in UTC, to the minute."""
    return time.ToDatetime().strftime("%Y-%m-%d %H:%M")


def tokens(usage: usage_pb2.Usage) -> int | None:
    """Return the total number of tokens; None if none is known."""
    if usage.HasField("total_tokens"):
        return usage.total_tokens
    if usage.HasField("input_tokens") or usage.HasField("output_tokens"):
        return usage.input_tokens + usage.output_tokens
    return None


def tokens_text(usage: usage_pb2.Usage) -> str:
    """Format the total number of tokens, with thousands separators."""
    known = tokens(usage)
    return UNKNOWN if known is None else f"{known:,}"


def amount_text(usage: usage_pb2.Usage) -> str:
    """Format the cost without its currency, as `nanos_text` does."""
    return nanos_text(usage.cost_nanos) if usage.HasField("cost_nanos") else UNKNOWN


def nanos_text(nanos: int) -> str:
    """Format billionths of a currency: four decimals, or six below 0.001."""
    if nanos < 0:
        return f"-{nanos_text(-nanos)}"
    units = nanos / 1e9
    if units == 0 or units >= 0.001:
        return f"{units:,.4f}"
    return f"{units:.6f}" if units >= 0.000001 else "<0.000001"


def cost_text(usage: usage_pb2.Usage) -> str:
    """Format the cost with its currency, such as "0.0013 USD"."""
    return f"{amount_text(usage)} {usage.currency_code}".rstrip()


def pluralize(number: int, noun: str) -> str:
    """Format a number with its noun, such as "1 tool call" and "2 tool calls"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def enum_text(enum: EnumDescriptor, number: int) -> str:
    """Return an enum value's name in lower case without the enum's prefix, such as "input_required".

    Returns the number of a value that this version does not know.
    """
    value = enum.values_by_number.get(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return value.name.removeprefix(prefix).lower() if value is not None else str(number)


def state_text(state: execution_pb2.ExecutionState.ValueType) -> str:
    """Return a state's name, such as "input_required"."""
    return enum_text(execution_pb2.ExecutionState.DESCRIPTOR, state)


def state_style(state: execution_pb2.ExecutionState.ValueType) -> str:
    """Return the color of a state."""
    return STATE_STYLES.get(state, "")


def reason_text(reason: error_pb2.ErrorReason.ValueType) -> str:
    """Return an error's reason without its prefix; empty if it is unset or unknown."""
    if reason == error_pb2.ERROR_REASON_UNSPECIFIED or reason not in error_pb2.ErrorReason.values():
        return ""
    return error_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


def error_text(error: error_pb2.AgentError, shown_errors: Iterable[str] = ()) -> str:
    """Format an error on one line, its reason first; without the messages that `shown_errors` has."""
    message = one_line(error.message)
    for each in shown_errors:
        message = message.replace(each, "").rstrip(": ")
    return ": ".join(part for part in (reason_text(error.reason), message) if part) or "no reason given"
