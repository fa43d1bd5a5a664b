"""Tools and functions that the graphs name."""

from typing import Any

from pydantic import BaseModel

from bough_server import Snapshot, Update, handler, node, router, tool


@tool
def web_search(query: str) -> dict[str, list[str]]:
    """Search the web.

    Args:
        query: What to search for.
    """
    return {"hits": [f"A page about {query}", f"Another page about {query}"]}


@tool
def find_invoice(article: str) -> dict[str, object]:
    """Find the invoice of an article.

    Args:
        article: The article.
    """
    return {"number": 1002, "amount": 129.0, "article": article}


class Case(BaseModel):
    """What is known of a refund when it is decided."""

    approved: bool
    letter: str
    invoice: dict[str, Any]


@node
def decide(case: Case) -> str:
    """Say what happens."""
    if not case.approved:
        return "Nothing is paid."
    return f"{case.letter} {case.invoice['amount']:.2f} EUR are on their way."


@handler
def join_talk(value: Any, snapshot: Snapshot) -> Update:
    """Add what came to the conversation, and send all of it to the model."""
    told = value if isinstance(value, list) else [{"role": "ROLE_USER", "parts": [{"text": value}]}]
    return Update([*snapshot.channels["talk"], *told], {"talk": told})


@handler
def keep_words(value: Any, snapshot: Snapshot) -> Update:
    """Add what the model said to the conversation."""
    said = value if isinstance(value, dict) else {"role": "ROLE_ASSISTANT", "parts": [{"text": value}]}
    return Update(value, {"talk": [said]})


@router
def by_calls(output: dict[str, Any], snapshot: Snapshot) -> str:
    """Run the calls of the model's message, if it has any."""
    return "act" if any("toolCall" in part for part in output["parts"]) else "answer"


@router
def three_rounds(output: str, snapshot: Snapshot) -> str:
    """End after three rounds."""
    return "END" if snapshot.visit == 2 else "polish"
