"""How long agents may hand over to one another before it goes in circles; who hands over to whom is theirs to say."""

from collections.abc import Sequence
from typing import Final

from bough.v1 import error_pb2
from bough_server.errors import RunError

WINDOW: Final = 8
"""How many of the last agents are looked at."""

LEAST: Final = 3
"""How many different ones there must be among so many."""


def check_hops(path: Sequence[str]) -> None:
    """Refuses the last hop of a path that goes back and forth between the same few. Raises RunError LIMIT_EXCEEDED."""
    last = path[-WINDOW:]
    if len(last) == WINDOW and len(set(last)) < LEAST:
        raise RunError(
            f"The agents hand over to one another in circles: {' > '.join(last)}. Among {WINDOW} in a row there must "
            f"be {LEAST} different ones.",
            reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED,
        )
