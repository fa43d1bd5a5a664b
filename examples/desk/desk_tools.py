"""The desk's tools: plain Python functions. A model sees their type hints and docstrings, and nothing else."""

from bough_server import tool

NOTES = {
    "leaves": "In autumn trees stop making chlorophyll. The green fades, and yellow carotenoids show. "
    "Some trees then make anthocyanins, which are red.",
    "tides": "The moon's pull raises two bulges of water. The earth turns beneath them, so most coasts see two high "
    "tides a day. When sun and moon pull in one line, the tides are highest.",
    "bridges": "An arch turns a load into pressure, which stone bears well. A suspension bridge turns it into tension, "
    "which steel bears well.",
    "trees": "A bough is a main branch of a tree. Wood grows in rings, one a year, below the bark.",
}


@tool
def search_notes(topic: str) -> str:
    """Search the desk's notes for a topic.

    Args:
        topic: One or two words, such as "leaves".
    """
    words = {word.strip(".,?!").casefold() for word in topic.split()}
    keywords = {word for word in words if len(word) > 3}
    found = [f"{title}: {note}" for title, note in NOTES.items() if keywords & {title, *note.casefold().split()}]
    return "\n".join(found) or f"No note on {topic!r}. There are notes on {', '.join(NOTES)}."
