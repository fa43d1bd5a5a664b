"""What a fork does otherwise, as flags say it, in the words of the schema; whether it can is the server's to say."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from bough import user_message
from bough.v1 import fork_pb2
from bough_server.cli.answers import result_of
from bough_server.errors import ConfigurationError

_OF_AN_INVOCATION: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})/(.+)", re.IGNORECASE)


def changes_of(
    *, models: Iterable[str], instructions: Iterable[str], tool_results: Iterable[str], said: str | None
) -> fork_pb2.ForkChanges:
    """The changes of `--model AGENT=M`, `--instruction AGENT=@FILE`, `--tool-result CALL=JSON` and `--input TEXT`.

    Raises ConfigurationError for one that cannot be read.
    """
    changes = fork_pb2.ForkChanges()
    for agent, model in _pairs("--model", models, "AGENT=MODEL").items():
        changes.models[agent] = model
    for agent, instruction in _pairs("--instruction", instructions, "AGENT=@FILE or AGENT=TEXT").items():
        changes.instructions[agent] = _content(instruction)
    for call, text in _pairs("--tool-result", tool_results, "CALL=JSON").items():
        edited = changes.tool_results.add(call_id=call, result=result_of(text))
        if found := _OF_AN_INVOCATION.fullmatch(call):
            edited.invocation_id, edited.call_id = found.group(1).lower(), found.group(2)
    if said is not None:
        changes.input.CopyFrom(user_message(said))
    return changes


def _pairs(flag: str, texts: Iterable[str], shape: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ConfigurationError(f"{flag} {text!r} cannot be read: write {shape}.")
        if name in pairs:
            raise ConfigurationError(f"{flag} names {name!r} twice: say it once.")
        pairs[name] = value
    return pairs


def _content(text: str) -> str:
    """A text, or what the file of an @FILE holds."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: The file is not UTF-8 text.") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: The file cannot be read: {error.strerror or error}.") from None
