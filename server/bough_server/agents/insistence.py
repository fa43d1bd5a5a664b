"""What an LLM agent takes for its answer, and what it asks its model again, a bounded number of times; it asks none."""

import json
import re
from collections.abc import Sequence
from typing import Final, NoReturn

from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.state import json_text
from bough_server.tools.arguments import schema_mistakes

REPAIRS: Final = 2
"""How often an answer that does not fit its schema, or that stands for a call, is asked for again."""

_EMPTY: Final = "Your last answer was empty. Answer now, in words."
_EMPTY_FORM: Final = "Your last answer was empty. Answer now, with one JSON object and nothing around it."
_FENCED: Final = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)
_MOST_MISTAKES: Final = 5
_LONGEST_MISTAKE: Final = 300


class Insistence:
    """What one invocation of an agent has asked again so far.

    Without a schema whatever says something is an answer; where one of some tools must be called, words are none.
    """

    def __init__(self, agent: str, schema_json: str, *, must_call: Sequence[str] = ()) -> None:
        self._agent = agent
        self._schema_json = schema_json
        self._must_call = " or ".join(f"`{name}`" for name in must_call)
        self._was_empty = False
        self._refused: list[message_pb2.Message] = []
        self._repairs = 0

    def further(self) -> list[message_pb2.Message]:
        """What the model is told after its history: its answers that did not fit and why, or that one was empty."""
        if not self._was_empty:
            return list(self._refused)
        return [*self._refused, _asked(_EMPTY_FORM if self._schema_json else _EMPTY)]

    def called(self) -> None:
        """The model called tools instead of answering."""
        self._was_empty = False

    def answer(self, said: message_pb2.Message) -> message_pb2.Message | None:
        """The answer in what a model said without calls; None where it is to be asked again.

        Raises RunError INVALID_OUTPUT: it was empty twice, or did not fit after the repairs, or no call came instead.
        """
        answer = spoken(said)
        if self._must_call:
            self._ask_for_call(said if answer is not None else None)
            return None
        if answer is None:
            if self._was_empty:
                self._give_up("gave an empty answer twice.")
            self._was_empty = True
            return None
        self._was_empty = False
        return answer if not self._schema_json else self._fitting(said, answer)

    def _fitting(self, said: message_pb2.Message, answer: message_pb2.Message) -> message_pb2.Message | None:
        text = "".join(part.text or part.data_json for part in answer.parts)
        fenced = _FENCED.fullmatch(text)
        value_json = (fenced.group(1) if fenced else text).strip()
        mistakes = answer_mistakes(value_json, self._schema_json)
        if not mistakes:
            return message_pb2.Message(parts=[message_pb2.Part(data_json=value_json)])
        if self._repairs == REPAIRS:
            self._give_up(f"gave {REPAIRS + 1} answers that do not fit its output schema: {mistakes}.")
        self._repairs += 1
        again = f"Your answer does not fit: {mistakes}. Answer again, with one JSON object and nothing around it."
        self._refused += [said, _asked(again)]
        return None

    def _ask_for_call(self, said: message_pb2.Message | None) -> None:
        if self._repairs == REPAIRS:
            self._give_up(f"answered {REPAIRS + 1} times without calling {self._must_call}.")
        self._repairs += 1
        again = _asked(f"Answer with a call of {self._must_call}, not in words.")
        self._refused += [again] if said is None else [said, again]

    def _give_up(self, what: str) -> NoReturn:
        raise RunError(f"The model of {self._agent!r} {what}", reason=error_pb2.ERROR_REASON_INVALID_OUTPUT)


def spoken(message: message_pb2.Message) -> message_pb2.Message | None:
    """What a model's message says: its text and files, reasoning left out; None where there is nothing."""
    parts = [part for part in message.parts if part.WhichOneof("content") in ("text", "data_json", "blob")]
    if not any(part.text.strip() or part.data_json or part.HasField("blob") for part in parts):
        return None
    return message_pb2.Message(parts=parts)


def answer_mistakes(value_json: str, schema_json: str) -> str:
    """What is wrong with an answer, in one line; empty where nothing is."""
    try:
        value = json_value(value_json)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON ({error})"
    found = schema_mistakes(value, schema_json)
    shown = [mistake[:_LONGEST_MISTAKE] for mistake in found[:_MOST_MISTAKES]]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more")
    return "; ".join(shown)


def json_value(text: str) -> object:
    """The value of a JSON text. Raises ValueError or RecursionError, for NaN, infinities and half surrogates too."""
    value: object = json.loads(text)
    json_text(value).encode()
    return value


def _asked(text: str) -> message_pb2.Message:
    return message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=text)])
