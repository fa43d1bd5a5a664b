"""Refuse U+0000 in what the server looks up or stores as text: PostgreSQL cannot hold it, and no id has it."""

from collections.abc import Container, Iterator
from typing import Final

from google.protobuf.message import Message

from bough_server.errors import FieldViolation

_IDS: Final = frozenset(
    {"run_id", "session_id", "evaluation_id", "case_id", "agent", "eval_set_name", "name", "revision"}
)
_MESSAGES: Final = frozenset({"filter", "baseline", "candidate"})
"""The fields of requests that have ids in them too."""

_DESCRIPTION: Final = "must not have the character U+0000"


def unstorable_texts(request: Message, reported: Container[str], path: str = "") -> Iterator[FieldViolation]:
    """Yield a violation for each id and label with U+0000. Fields in `reported` are skipped."""
    for field, value in request.ListFields():
        where = f"{path}{field.name}"
        if field.name in _IDS and isinstance(value, str):
            if "\0" in value and where not in reported:
                yield FieldViolation(field=where, description=_DESCRIPTION)
        elif field.name == "labels":
            for key, text in value.items():
                at = f'{where}["{key}"]'
                if "\0" in key + text and at not in reported:
                    yield FieldViolation(field=at.replace("\0", ""), description=_DESCRIPTION)
        elif field.name in _MESSAGES and not path:
            yield from unstorable_texts(value, reported, f"{where}.")
