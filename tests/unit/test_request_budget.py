"""The room for requests: who gets it, who waits, and who is ended."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from grpc import aio

from bough_server.errors import RequestBytesExhausted
from bough_server.interceptors import request_budget
from bough_server.interceptors.request_budget import RequestBudget, RequestReservation

Received = tuple[bytes | None, RequestReservation]


class Sender:
    """A call of a connection, whose request arrives when the test says so."""

    def __init__(self, peer: str = "one") -> None:
        self._peer = peer
        self.request: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_read = False

    def peer(self) -> str:
        return self._peer

    async def read(self) -> Any:
        self.is_read = True
        return await self.request

    def send(self, data: Any) -> "Sender":
        self.request.set_result(data)
        return self


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def receive(budget: RequestBudget, sender: Sender, *, most: int = 6) -> asyncio.Task[Received]:
    return asyncio.create_task(budget.receive(sender, most=most))  # type: ignore[arg-type] # as much of it as is used


async def test_a_call_waits_until_there_is_room_before_its_request_is_read() -> None:
    budget = RequestBudget(10)
    data, room = await receive(budget, Sender().send(b"123456"))
    waiting = Sender().send(b"654321")
    second = receive(budget, waiting)
    await settle()
    assert (data, waiting.is_read) == (b"123456", False)
    room.release()
    assert (await second)[0] == b"654321"


async def test_a_request_keeps_only_the_room_that_it_needs() -> None:
    budget = RequestBudget(10)
    await receive(budget, Sender().send(b"1234"))
    assert (await receive(budget, Sender().send(b"1")))[0] == b"1"


async def test_the_end_of_requests_and_a_failed_read_give_their_room_back() -> None:
    budget = RequestBudget(6)
    assert (await receive(budget, Sender().send(aio.EOF)))[0] is None
    broken = Sender()
    broken.request.set_exception(ConnectionError())
    with pytest.raises(ConnectionError):
        await receive(budget, broken)
    assert (await receive(budget, Sender().send(b"123456")))[0] == b"123456"


async def test_connections_take_turns() -> None:
    budget = RequestBudget(6)
    _, room = await receive(budget, Sender().send(b"123456"))
    order: list[str] = []

    async def take(peer: str) -> None:
        _, taken = await receive(budget, Sender(peer).send(b"123456"))
        order.append(peer)
        taken.release()

    tasks = [asyncio.create_task(take(peer)) for peer in ("many", "many", "many", "other", "third")]
    await settle()
    room.release()
    await asyncio.gather(*tasks)
    assert order == ["many", "other", "third", "many", "many"]


async def test_a_call_that_gives_up_leaves_the_room_to_those_behind_it() -> None:
    budget = RequestBudget(6)
    _, room = await receive(budget, Sender().send(b"123456"))
    given_up, behind = receive(budget, Sender()), receive(budget, Sender().send(b"1"))
    await settle()
    given_up.cancel()
    room.release()
    assert (await behind)[0] == b"1"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def shorten(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(request_budget, name, value)

    return shorten


async def refusal(call: Awaitable[Received]) -> str:
    with pytest.raises(RequestBytesExhausted) as refused:
        await call
    return refused.value.message


async def test_a_call_that_waits_for_too_long_is_refused(at_once: Callable[..., None]) -> None:
    at_once(WAIT_SECONDS=0.0)
    budget = RequestBudget(6)
    await receive(budget, Sender().send(b"123456"))
    assert "(server.max_request_bytes)" in await refusal(receive(budget, Sender()))


async def test_a_call_beyond_those_that_may_wait_is_refused_at_once(at_once: Callable[..., None]) -> None:
    at_once(MAX_WAITING=1)
    budget = RequestBudget(6)
    await receive(budget, Sender().send(b"123456"))
    waiting = receive(budget, Sender())
    await settle()
    assert "Too many calls wait" in await refusal(receive(budget, Sender()))
    waiting.cancel()


async def test_a_sender_that_is_slow_gives_its_room_to_others_and_needs_room_when_its_request_has_arrived(
    at_once: Callable[..., None],
) -> None:
    at_once(SLOW_SECONDS=0.0)
    budget = RequestBudget(6)
    slow, quick = Sender(), Sender().send(b"123456")
    first, second = receive(budget, slow), receive(budget, quick)
    data, room = await second
    slow.send(b"654321")
    await settle()
    assert (data, first.done()) == (b"123456", False)
    room.release()
    assert (await first)[0] == b"654321"


async def test_of_too_many_slow_senders_the_oldest_is_ended(at_once: Callable[..., None]) -> None:
    at_once(SLOW_SECONDS=0.0, MAX_SLOW_BUDGETS=2)
    budget = RequestBudget(6)
    senders = [receive(budget, Sender(str(number))) for number in range(3)]
    assert "too slowly" in await refusal(senders[0])
    assert [one.done() for one in senders] == [True, False, False]
    for one in senders[1:]:
        one.cancel()
