"""Map and reduce: a graph in Python, whose types are those of its functions."""

from bough_server import Graph

word_count = Graph("word_count", description="Counts the words of each line.", mode="DAG")


@word_count.function
def split(text: str) -> list[str]:
    """Return the lines."""
    return text.splitlines()


@word_count.function(map=True)
def count(line: str) -> int:
    """Count the words of one line; runs once for each."""
    return len(line.split())


@word_count.function
def report(counts: list[int]) -> str:
    """Say how many there are."""
    return f"{sum(counts)} words in {len(counts)} lines, {max(counts, default=0)} in the longest."


word_count.chain("START", split, count, report, "END")
