"""The readers' tool: a search in the files of notes/."""

from pathlib import Path

from bough_server import tool

NOTES = Path(__file__).with_name("notes")


@tool(timeout=10)
def search(source: str, words: str) -> str:
    """Find the paragraphs of a source that have one of some words.

    Args:
        source: The source: harbor, almanac or newspaper.
        words: The words to look for, separated by spaces.
    """
    wanted = words.casefold().split()
    # Whatever a model names, only files of this folder are read.
    files = {path.stem: path for path in NOTES.glob("*.txt")}
    if source not in files:
        raise LookupError(f"there is no source {source!r}; there are {', '.join(sorted(files))}")
    paragraphs = files[source].read_text(encoding="utf-8").split("\n\n")
    found = [text for text in paragraphs if any(word in text.casefold() for word in wanted)]
    return "\n\n".join(found) or f"Nothing in {source} about {words}."
