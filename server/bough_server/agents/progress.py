"""How far a plan has come, and what of it is told on: no more than fits beside everything else; it runs nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypedDict

from bough_server.cutting import fit_texts, size_of
from bough_server.errors import MAX_DETAILS_BYTES

ROOM: Final = 48 * 1024
"""The most bytes of a plan and of what was done, with results, as they are told on: the longest texts are cut."""


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
        """What is kept of it: the texts together in at most `room` bytes."""
        texts = [*self.plan, *(text for one in self.executed for text in (one["step"], one["result"]))]
        fitting = fit_texts(texts, room)
        done = fitting[len(self.plan) :]
        executed = [ExecutedStep(step=done[at], result=done[at + 1]) for at in range(0, len(done), 2)]
        return Kept(plan=fitting[: len(self.plan)], executed_steps=executed)

    def details(self) -> str:
        """It as JSON for an error, cut as far as an error needs."""
        room = ROOM
        while size_of(text := json.dumps(self.kept(room), ensure_ascii=False)) > MAX_DETAILS_BYTES and room:
            room //= 2
        return text

    def facts(self, step: str) -> dict[str, str]:
        """It as texts for an input builder; `step` is the one that is to be done, or was done last."""
        kept = self.kept()
        done = [f"{one['step']}\n   Result: {one['result']}" for one in kept["executed_steps"]]
        return {"plan": _numbered(kept["plan"]), "step": step, "executed_steps": _numbered(done)}


def _numbered(lines: Sequence[str]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
