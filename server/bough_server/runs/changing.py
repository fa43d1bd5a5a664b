"""Lets sessions be changed one thing at a time: by a call that changes values, or by a run that begins.

A run begins with what it has read of its session. Whoever changes values without pause would change them between the
two at every try; here both wait in one line. Other processes do not stand in it: what was read is checked all the same.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from bough_server.store.ports import Principal


class Changing:
    """One line for each session, first come, first served; there is none where nobody waits."""

    def __init__(self) -> None:
        self._lines: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def alone(self, principal: Principal, session_id: str) -> AsyncIterator[None]:
        """While this is open, nobody else of the tenant's is here for the session; other tenants hold up nobody."""
        line = self._lines.setdefault((principal.tenant_id, session_id), asyncio.Lock())
        async with line:
            yield
