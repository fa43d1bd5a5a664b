"""Which run is meant: a full id, `last`, or the end of an id; nothing is guessed."""

import re
from typing import Final

from bough import AsyncClient
from bough_server.errors import ConfigurationError

_FULL: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_SHORTEST: Final = 6
_PAGE_SIZE: Final = 1000


async def resolve_run(client: AsyncClient, text: str) -> str:
    """The id of the run that is meant. Raises ConfigurationError where none is, or more than one."""
    if _FULL.fullmatch(text):
        return text.lower()
    if text == "last":
        async for run in client.list_runs(page_size=1):
            return run.run_id
        raise ConfigurationError("There is no run yet: start one with `bough run`.")
    if len(text) < _SHORTEST:
        raise ConfigurationError(f"{text!r} is too short for a run: use its id, `last`, or 6 characters of its end.")
    suffix = text.lower()
    found = [run.run_id async for run in client.list_runs(page_size=_PAGE_SIZE) if run.run_id.endswith(suffix)]
    if not found:
        raise ConfigurationError(f"There is no run that ends in {text!r}: `bough runs` lists them.")
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} runs end in {text!r}, such as {found[0]} and {found[1]}: say more.")
    return found[0]
