"""Numbers, durations, states and free text as they are shown in a terminal."""

import re
from typing import Final

from google.protobuf import duration_pb2, timestamp_pb2
from rich.cells import cell_len, set_cell_size

from bough.v1 import error_pb2, event_pb2, message_pb2

UNKNOWN: Final = "-"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SPACE: Final = re.compile(r"\s+")

_SHORT_STATES: Final = {event_pb2.STATE_INPUT_REQUIRED: "waiting", event_pb2.STATE_AUTH_REQUIRED: "waiting"}
STATE_STYLES: Final = {
    event_pb2.STATE_PENDING: "dim",
    event_pb2.STATE_RUNNING: "cyan",
    event_pb2.STATE_SUCCEEDED: "green",
    event_pb2.STATE_FAILED: "red",
    event_pb2.STATE_CANCELLED: "yellow",
    event_pb2.STATE_INPUT_REQUIRED: "magenta",
}
DEPTH_STYLES: Final = ("cyan", "magenta", "green", "blue", "yellow")


def depth_style(depth: int) -> str:
    """The color of a depth in the tree."""
    return DEPTH_STYLES[depth % len(DEPTH_STYLES)]


def printable(text: str) -> str:
    """A text without control characters but newlines and tabs: a model's words must not steer the terminal."""
    return _CONTROL.sub("", text.replace("\r\n", "\n")).expandtabs(4)


def one_line(text: str) -> str:
    """A text on one line: every run of white space is one space."""
    return _SPACE.sub(" ", printable(text)).strip()


def clip(text: str, width: int) -> str:
    """A text of at most that many terminal cells; "…" says that it goes on."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 1 else "…"


def clip_middle(text: str, width: int) -> str:
    """A text of at most that many characters with its beginning and its end."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def seconds_text(seconds: float) -> str:
    """A duration, such as "40 ms", "2.4 s", "3 m 05 s" or "2 h 10 m"."""
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
    """A protobuf duration in words."""
    return seconds_text(duration.ToTimedelta().total_seconds())


def between(start: timestamp_pb2.Timestamp, end: timestamp_pb2.Timestamp) -> float:
    """Seconds from one time to another."""
    return (end.ToNanoseconds() - start.ToNanoseconds()) / 1e9


def moment(time: timestamp_pb2.Timestamp) -> str:
    """A time in UTC, to the minute."""
    return time.ToDatetime().strftime("%Y-%m-%d %H:%M")


def tokens(usage: message_pb2.Usage) -> int | None:
    """All tokens, as far as they are known."""
    if usage.HasField("total_tokens"):
        return usage.total_tokens
    if usage.HasField("input_tokens") or usage.HasField("output_tokens"):
        return usage.input_tokens + usage.output_tokens
    return None


def tokens_text(usage: message_pb2.Usage) -> str:
    """How many tokens, with thousands apart."""
    known = tokens(usage)
    return UNKNOWN if known is None else f"{known:,}"


def cost_text(usage: message_pb2.Usage) -> str:
    """The price in the configured currency, to the hundredth of a cent."""
    return f"{usage.cost_micros / 1e6:,.4f}" if usage.HasField("cost_micros") else UNKNOWN


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as "1 tool call" and "2 tool calls"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def state_text(state: event_pb2.State.ValueType) -> str:
    """A state in words, such as "input required"."""
    name = event_pb2.State.Name(state) if state in event_pb2.State.values() else f"STATE_{state}"
    return name.removeprefix("STATE_").replace("_", " ").lower()


def short_state_text(state: event_pb2.State.ValueType) -> str:
    """A state in at most nine letters."""
    return _SHORT_STATES.get(state) or state_text(state)


def state_style(state: event_pb2.State.ValueType) -> str:
    """The color of a state."""
    return STATE_STYLES.get(state, "")


def reason_text(reason: error_pb2.ErrorReason.ValueType) -> str:
    """An error's reason without its prefix; empty where none is said."""
    if reason == error_pb2.ERROR_REASON_UNSPECIFIED or reason not in error_pb2.ErrorReason.values():
        return ""
    return error_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


def error_text(error: error_pb2.AgentError) -> str:
    """An error on one line, its reason first."""
    return ": ".join(part for part in (reason_text(error.reason), one_line(error.message)) if part) or "no reason given"
