"""Bound the bytes of requests that the server holds: those that it receives, and those that it handles.

A call reserves the most that its method accepts before its message is read, so that what has to wait stays with its
sender. Connections take turns, so that one with thousands of calls delays those of others by one round.
"""

import asyncio
from typing import Final

from grpc import aio

from bough_server.clock import loop_time
from bough_server.errors import RequestBytesExhausted
from bough_server.interceptors.handlers import Context

WAIT_SECONDS: Final = 10.0
"""How long a call waits for room before it fails."""

SLOW_SECONDS: Final = 1.0
"""How long a request may take to arrive before its room is given to others, so that no sender holds them up."""

MAX_WAITING: Final = 10_000
"""The most calls that wait for room; further ones fail at once."""

MAX_SLOW_BUDGETS: Final = 4
"""How many times the budget the requests that arrive slowly may come to; beyond, the oldest of them are ended."""


class RequestReservation:
    """The room of one request."""

    def __init__(self, budget: "RequestBudget", size: int) -> None:
        self._budget = budget
        self.size = size

    def shrink(self, size: int) -> None:
        """Give back all room beyond `size` bytes."""
        if size < self.size:
            freed, self.size = self.size - size, size
            self._budget.give_back(freed)

    def release(self) -> None:
        """Give all room back; nothing if it has been given back."""
        self.shrink(0)


class RequestBudget:
    """The room for requests, and the calls that wait for some."""

    def __init__(self, most_bytes: int) -> None:
        self._most = self._free = most_bytes
        self._waiting: dict[str, dict[asyncio.Future[None], int]] = {}
        """By connection, in the order of their turns: its calls, and the bytes that each needs."""
        self._waiting_count = 0
        self._slow: dict[asyncio.Timeout, int] = {}
        """Requests that arrive slowly, by what can end them, oldest first; and the most bytes of each."""

    async def receive(self, context: Context, *, most: int) -> tuple[bytes | None, RequestReservation]:
        """Read the next request of a call, of at most `most` bytes; return it with its room, which the caller releases.

        It is None after the last one. Raises RequestBytesExhausted.
        """
        peer = context.peer()
        room = await self._reserve(most, peer)
        limit = asyncio.timeout(None)
        slow = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._give_room_to_others, limit, room)
        try:
            async with limit:
                # Not by the call's iterator, which keeps the bytes that it has returned.
                data = await context.read()
        except TimeoutError:
            raise RequestBytesExhausted(
                "The request arrived too slowly while others waited for its room. Try again."
            ) from None
        except BaseException:
            room.release()
            raise
        finally:
            slow.cancel()
            self._slow.pop(limit, None)
        if data is aio.EOF:
            room.release()
            return None, room
        if not room.size:  # others have it
            room = await self._reserve(len(data), peer)
        room.shrink(len(data))
        return data, room

    def give_back(self, size: int) -> None:
        """Take room back, and give it to the calls that wait: one of each connection in turn."""
        self._free += size
        while self._waiting:
            peer, calls = next(iter(self._waiting.items()))
            granted, wanted = next(iter(calls.items()))
            if not granted.cancelled():  # a call that has given up is still here until its task runs
                if wanted > self._free:
                    break
                self._free -= wanted
                granted.set_result(None)
            self._forget(peer, granted)
            if calls:  # behind all others
                self._waiting[peer] = self._waiting.pop(peer)

    async def _reserve(self, size: int, peer: str) -> RequestReservation:
        size = min(size, self._most)
        if not self._waiting and size <= self._free:
            self._free -= size
            return RequestReservation(self, size)
        if self._waiting_count >= MAX_WAITING:
            raise RequestBytesExhausted("Too many calls wait until there is room for their requests. Try again.")
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, {})[granted] = size
        self._waiting_count += 1
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self.give_back(size)
            else:
                self._forget(peer, granted)
                self.give_back(0)  # those behind it may need less
            if isinstance(error, TimeoutError):
                raise RequestBytesExhausted(
                    f"The server holds as many bytes of requests as it may: {self._most:,} (server.max_request_bytes). "
                    "Try again."
                ) from None
            raise
        return RequestReservation(self, size)

    def _forget(self, peer: str, granted: "asyncio.Future[None]") -> None:
        calls = self._waiting.get(peer, {})
        if calls.pop(granted, None) is not None:
            self._waiting_count -= 1
            if not calls:
                del self._waiting[peer]

    def _give_room_to_others(self, limit: asyncio.Timeout, room: RequestReservation) -> None:
        self._slow[limit] = room.size
        room.release()
        while sum(self._slow.values()) > MAX_SLOW_BUDGETS * self._most:
            oldest = next(iter(self._slow))
            del self._slow[oldest]
            oldest.reschedule(loop_time())
