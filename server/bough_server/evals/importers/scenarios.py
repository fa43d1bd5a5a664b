"""Conversation scenarios of other tools, in which a model plays the user: as the simulated user of a case."""

from collections.abc import Iterator
from typing import Final

from bough.v1.eval_set_pb2 import SimulatedUser
from bough.v1.message_pb2 import ROLE_USER, Message, Part
from bough_server.evals.importers.conversations import Exchange
from bough_server.evals.importers.values import JsonObject

MOST_TURNS: Final = 100
"""The most turns of a conversation, in place of any number."""

_LONGEST_PLAN: Final = 16_384
_LONGEST_PERSONA: Final = 8_192


def read_scenario(source: JsonObject, *, model: str, max_turns: int) -> tuple[list[Exchange], SimulatedUser | None]:
    """Return the turns that open a conversation, and who plays the user then; None if there are no further turns.

    Raises ConfigurationError.
    """
    prompt = source.text("startingPrompt")
    opening = [Exchange(user=Message(role=ROLE_USER, parts=[Part(text=prompt)]))] if prompt.strip() else []
    if source.peek("driver") == "actual":
        source.raw("driver")
    if source.has("maxAllowedInvocations"):
        max_turns = round(source.number("maxAllowedInvocations")) or MOST_TURNS
    user = SimulatedUser(
        persona=_read_persona(source),
        plan=source.require_text("conversationPlan"),
        model=model,
        max_turns=min(max_turns, MOST_TURNS) if max_turns > 0 else MOST_TURNS,
    )
    if signal := source.text("stopSignal").strip():
        user.stop_when = f"Where the plan has you say {signal[:100]!r}, end the conversation instead."
    if len(user.plan) > _LONGEST_PLAN:
        raise source.wrong("conversationPlan", f"has more than {_LONGEST_PLAN:,} characters")
    return opening, user if user.max_turns > len(opening) else None


def _read_persona(source: JsonObject) -> str:
    """Return who the user is; a persona that is a name alone stays unread."""
    if not isinstance(source.peek("userPersona"), dict):
        return ""
    persona = source.child("userPersona")
    text = "\n".join(_describe_persona(persona)) if persona is not None else ""
    if len(text) > _LONGEST_PERSONA:
        raise source.wrong("userPersona", f"has more than {_LONGEST_PERSONA:,} characters")
    return text


def _describe_persona(persona: JsonObject) -> Iterator[str]:
    yield persona.text("description")
    for behavior in persona.children("behaviors"):
        yield behavior.text("description")
        yield from (f"- {instruction}" for instruction in behavior.texts("behaviorInstructions"))
