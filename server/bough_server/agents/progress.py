"""How far a plan has come, and what of it is told on: no more than fits beside everything else; it runs nothing."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypedDict

from bough_server.cutting import cut_text, fit_texts, size_of
from bough_server.errors import MAX_DETAILS_BYTES
from bough_server.state import json_text

ROOM: Final = 48 * 1024
"""The most bytes of a plan and of what was done, with results, as JSON: the longest texts are cut."""

EMPTY_BYTES: Final = len("[]") * 2
"""Bytes of a plan without steps of which nothing was done, as two JSON values."""

_ITEM_BYTES: Final = len('"",')
_EXECUTED_BYTES: Final = len('{"step":"","result":""},')


class ExecutedStep(TypedDict):
    """A step that was done, as the session keeps it."""

    step: str
    result: str


class Kept(TypedDict):
    """The plan and what was done, as the session keeps them."""

    plan: list[str]
    executed_steps: list[ExecutedStep]


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a plan has come."""

    objective: str
    plan: list[str] = field(default_factory=list)
    """The steps that are left."""
    executed: list[ExecutedStep] = field(default_factory=list)

    def did(self, result: str) -> None:
        """Takes the first step of the plan for done."""
        self.executed.append(ExecutedStep(step=self.plan.pop(0), result=fit_texts([result], ROOM)[0]))

    def kept(self, room: int = ROOM) -> Kept:
        """What is kept of it: both values together in at most `room` bytes of JSON, which are EMPTY_BYTES or more.

        The longest texts are cut. Where even steps without texts do not fit, the first ones that were done are
        left out, and then the last ones of the plan.
        """
        left = room - EMPTY_BYTES
        plan = self.plan[: left // _ITEM_BYTES]
        left -= len(plan) * _ITEM_BYTES
        executed = self.executed[max(0, len(self.executed) - left // _EXECUTED_BYTES) :]
        left -= len(executed) * _EXECUTED_BYTES
        texts = [*plan, *(text for one in executed for text in (one["step"], one["result"]))]
        fitting = _fit_json(texts, left + bool(plan) + bool(executed))  # no comma follows the last of each
        done = fitting[len(plan) :]
        return Kept(
            plan=fitting[: len(plan)],
            executed_steps=[ExecutedStep(step=done[at], result=done[at + 1]) for at in range(0, len(done), 2)],
        )

    def details(self) -> str:
        """It as JSON for an error, cut as far as an error needs."""
        return json_text(self.kept(MAX_DETAILS_BYTES - len('{"plan":,"executed_steps":}')))

    def facts(self, step: str) -> dict[str, str]:
        """It as texts for an input builder; `step` is the one that is to be done, or was done last."""
        kept = self.kept()
        done = [f"{one['step']}\n   Result: {one['result']}" for one in kept["executed_steps"]]
        return {"plan": _numbered(kept["plan"]), "step": step, "executed_steps": _numbered(done)}


def _numbered(lines: Sequence[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def _fit_json(texts: Sequence[str], room: int) -> list[str]:
    """The texts in at most `room` bytes of JSON without their quotes: the longest are cut to one length."""
    # A text is no shorter as JSON, so what is cut by its own bytes is cut in any case and need not be encoded whole.
    sizes = [
        _json_size(text) if text == short else room + 1
        for text, short in zip(texts, fit_texts(texts, room), strict=True)
    ]
    fitting = [""] * len(texts)
    left = room
    for rank, index in enumerate(sorted(range(len(texts)), key=sizes.__getitem__)):
        share = left // (len(texts) - rank)
        fitting[index] = texts[index] if sizes[index] <= share else _cut_json(texts[index], share)
        left -= _json_size(fitting[index])
    return fitting


def _cut_json(text: str, share: int) -> str:
    """The longest cut of a text that has at most `share` bytes as JSON; empty where not even the mark of a cut fits."""
    if len(text) > 2 * share + 2:
        text = text[: share + 1] + text[-share - 1 :]  # nothing of the rest is left in any case
    limits = range(min(share + 1, size_of(text)))
    fits = bisect_right(limits, share, key=lambda limit: _json_size(cut_text(text, limit)))
    return cut_text(text, limits[fits - 1]) if fits else ""


def _json_size(text: str) -> int:
    return size_of(json_text(text)) - len('""')
