"""Fold logs and events that callers send into records, off the event loop."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from bough.v1 import event_pb2, invocation_pb2
from bough_server.errors import FieldViolation, InvalidRequest, SequenceOutOfRange
from bough_server.identity import Scope
from bough_server.log import events
from bough_server.log.session_state import json_of
from bough_server.log.session_state_fold import StateFold
from bough_server.runs.runs import Runs
from bough_server.store.ports.log import EventLog, StoredEvent
from bough_server.threads import run_in_thread
from bough_server.tree.fold import Tree

_LONG_COUNT: Final = 1_000
_LONG_SIZE: Final = 16 * 1024
"""So many events or bytes are folded in a thread: one event of 8 MiB may have 300,000 parts."""

MAX_ITEMS: Final = 1_000_000
"""The most parts, labels and other list items in events sent by callers that are folded together.

An empty item takes two bytes on the wire, a thousand times as many in memory, and microseconds each time the record is
traversed.
"""

_LARGEST: Final = 2**31 - 1

UNLIMITED: Final = invocation_pb2.InvocationOptions(
    include_steps=True,
    max_agents=_LARGEST,
    max_tools=_LARGEST,
    max_tool_args_bytes=_LARGEST,
    max_tool_result_bytes=_LARGEST,
    max_bytes=_LARGEST,
)
"""The options of records that are judged: scores must not depend on what fits an answer. Results show the steps."""

T = TypeVar("T")


_STATE_KINDS: Final = frozenset(
    {events.RUN_STARTED, events.RUN_DEQUEUED, events.TOOL_COMPLETED, events.SESSION_STATE_CHANGED}
)
"""Events that may change the session's values."""


class TreeBuilder:
    """A tree built from batches of events."""

    def __init__(self, tree: Tree, *, has_state: bool = False) -> None:
        """`has_state` says whether the record of stored events is to have the session's values after the run."""
        self._tree = tree
        self._state = StateFold() if has_state else None
        self.count = self.size = 0
        """Events added so far, and their bytes."""
        self._items = 0

    async def add(self, given: Sequence[event_pb2.AgentEvent], *, size: int) -> None:
        """Add events sent by a caller, which have `size` bytes together. Raises InvalidRequest beyond MAX_ITEMS."""
        add = self._count_and_add if size >= _LONG_SIZE else self._tree.add
        await self._add_batch(add, given, count=len(given), size=size)

    async def add_page(self, page: Sequence[StoredEvent]) -> None:
        """Add a page of a stored log."""
        if self._state is not None:
            for stored in page:
                if stored.kind in _STATE_KINDS:
                    self._state.apply(events.parse(stored.data))
        await self._add_batch(
            self._tree.add_stored_event, page, count=len(page), size=sum(len(stored.data) for stored in page)
        )

    async def invocation(self) -> invocation_pb2.Invocation:
        """Return the record of the events added so far."""
        is_long = _is_long(self.count, self.size)
        invocation = await run_in_thread(self._tree.invocation) if is_long else self._tree.invocation()
        if self._state is not None:
            invocation.session_state_json = json_of(self._state.values)
        return invocation

    def _count_and_add(self, event: event_pb2.AgentEvent) -> None:
        self._items += _items_of(event, MAX_ITEMS - self._items)
        if self._items > MAX_ITEMS:
            description = f"hold more than {MAX_ITEMS:,} items in their lists. Aggregate each run separately."
            raise InvalidRequest([FieldViolation(field="events", description=description)])
        self._tree.add(event)

    async def _add_batch(self, add: Callable[[T], None], items: Iterable[T], *, count: int, size: int) -> None:
        self.count, self.size = self.count + count, self.size + size
        if _is_long(count, size):
            await run_in_thread(_add_all, add, items)
        else:
            _add_all(add, items)


def _items_of(message: Message, most: int) -> int:
    """Count the items of all lists of a message, nested ones included; stop as soon as the count exceeds `most`."""
    count = 0
    waiting = [message]
    while waiting and count <= most:
        for field, value in waiting.pop().ListFields():
            if not field.is_repeated:
                if field.message_type is not None:
                    waiting.append(value)
                continue
            count += len(value)
            if count > most:
                break
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                waiting.extend(value)
    return count


def _is_long(count: int, size: int) -> bool:
    return count >= _LONG_COUNT or size >= _LONG_SIZE


def _add_all(add: Callable[[T], None], items: Iterable[T]) -> None:
    for item in items:
        add(item)


async def read_source(
    runs: Runs,
    log: EventLog,
    scope: Scope,
    source: invocation_pb2.InvocationSource,
    *,
    has_state: bool = False,
) -> invocation_pb2.Invocation:
    """Return the record that a source names in a scope, or brings. Raises NotFound and SequenceOutOfRange."""
    if source.WhichOneof("source") == "invocation":
        return source.invocation
    run = source.run
    return await read_invocation(runs, log, scope, run.run_id, as_of_sequence=run.as_of_sequence, has_state=has_state)


async def read_invocation(
    runs: Runs,
    log: EventLog,
    scope: Scope,
    run_id: str,
    *,
    as_of_sequence: int = 0,
    options: invocation_pb2.InvocationOptions = UNLIMITED,
    has_state: bool = False,
) -> invocation_pb2.Invocation:
    """Return the record of a run in a scope, up to the end of its log or a sequence.

    Only one page of the log is in memory. Raises NotFound and SequenceOutOfRange.
    """
    run = (await runs.get(scope, run_id)).run
    if as_of_sequence > run.last_sequence:
        raise SequenceOutOfRange(
            f"The log of run {run.run_id!r} ends at {run.last_sequence} so far.",
            details={"last_sequence": str(run.last_sequence)},
        )
    through = as_of_sequence or run.last_sequence
    builder = TreeBuilder(Tree(options, run_id=run.run_id, session_id=run.session_id), has_state=has_state)
    after = 0
    while page := await log.read(run_id, after=after, through=through, deltas=False):  # a tree does not use deltas
        await builder.add_page(page)
        after = page[-1].sequence
    # A log that is deleted meanwhile reads as one that ends early. This raises NotFound then.
    await runs.get(scope, run.run_id)
    invocation = await builder.invocation()
    invocation.as_of_sequence = through
    return invocation
