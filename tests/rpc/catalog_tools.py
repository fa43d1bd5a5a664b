"""A tool that stored agents may name."""

from bough_server import tool


@tool
def look_up(topic: str) -> str:
    """Looks a topic up."""
    return f"There is a note on {topic}."
