"""What a fork changes, from the options of `bough fork`."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bough import AsyncClient, user_message
from bough.v1 import event_pb2, follow_pb2, fork_pb2, message_pb2
from bough_server.cli.prompts import outcome_of
from bough_server.errors import ConfigurationError

_CALL_EVENTS: Final = ("agent.tool.started", "agent.tool.completed", "agent.tool.failed")

_CALL_OF_INVOCATION: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/(.+)", re.IGNORECASE)


def changes_of(
    *,
    models: Iterable[str],
    instructions: Iterable[str],
    tool_results: Iterable[str],
    node_outputs: Iterable[str],
    input_text: str | None,
) -> fork_pb2.ForkChanges:
    """Parse `--model`, `--instruction`, `--tool-result`, `--node-output` and `--input`.

    Raises ConfigurationError for a value that cannot be parsed, or is given twice.
    """
    changes = fork_pb2.ForkChanges()
    for agent, model in _pairs("--model", models, "AGENT=MODEL").items():
        changes.agents[agent].model = model
    for agent, instruction in _pairs("--instruction", instructions, "AGENT=@FILE or AGENT=TEXT").items():
        changes.agents[agent].instruction = read_content(instruction)
    for call, text in _pairs("--tool-result", tool_results, "CALL=JSON").items():
        edited = changes.tool_results.add(call_id=call, outcome=outcome_of(text))
        if found := _CALL_OF_INVOCATION.fullmatch(call):
            edited.invocation_id, edited.call_id = found.group(1).lower(), found.group(2)
    for sequence, text in _pairs("--node-output", node_outputs, "SEQUENCE=JSON").items():
        if not sequence.isdecimal():
            raise ConfigurationError(
                f"--node-output {sequence!r} is no sequence: `bough events RUN --types 'graph.*'` shows them."
            )
        changes.node_outputs.add(sequence=int(sequence), output_json=read_content(text))
    if input_text is not None:
        changes.input.CopyFrom(user_message(input_text))
    return changes


def _pairs(flag: str, texts: Iterable[str], shape: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigurationError(f"{flag} {text!r} cannot be parsed: write {shape}.")
        if name in pairs:
            raise ConfigurationError(f"{flag} names {name!r} twice: give one value.")
        pairs[name] = value
    return pairs


def read_content(text: str) -> str:
    """Return a text as it is, or the content of the file for @FILE."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: The file is not UTF-8 text.") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: The file cannot be read: {error.strerror or error}.") from None


async def find_calls(client: AsyncClient, origin_id: str, changes: fork_pb2.ForkChanges) -> None:
    """Replace the sequences that name tool calls by the calls. Raises ConfigurationError for one that is no call's."""
    by_sequence = [edited for edited in changes.tool_results if edited.call_id.isdecimal() and not edited.invocation_id]
    if not by_sequence:
        return
    calls: dict[int, tuple[str, str]] = {}
    until = follow_pb2.WATCH_UNTIL_CURRENT
    async with client.watch(origin_id, until=until, event_names=_CALL_EVENTS) as stream:
        async for event in stream:
            if call := _call_of(event):
                calls[event.sequence] = (event.invocation_id, call.call_id)
    ids = {call_id for _, call_id in calls.values()}
    for edited in by_sequence:
        if edited.call_id in ids:
            continue  # a provider's ids may be numbers, too
        if int(edited.call_id) not in calls:
            raise ConfigurationError(
                f"Event {edited.call_id} of run {origin_id} is not of a tool call: "
                f"`bough events {origin_id} --types 'tool.*'` shows which are."
            )
        edited.invocation_id, edited.call_id = calls[int(edited.call_id)]


def _call_of(event: event_pb2.AgentEvent) -> message_pb2.ToolCall | None:
    """Return the tool call that an event is about; None for other events."""
    match event.WhichOneof("payload"):
        case "tool_started":
            return event.tool_started.call
        case "tool_completed":
            return event.tool_completed.result.call
        case "tool_failed":
            return event.tool_failed.result.call
    return None
