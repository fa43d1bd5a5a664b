"""A tool that returns an image, for servers that load it by this module's name."""

from typing import Final

from bough_server import Part, file_part, tool

DRAWING: Final = b"\x89PNG drawing " + bytes(range(256)) * 4_000


@tool
def lookup(query: str) -> list[Part]:
    """Looks a word up."""
    return [Part(text=f"{query}: a tree"), file_part(DRAWING, "image/png", filename="tree.png")]
