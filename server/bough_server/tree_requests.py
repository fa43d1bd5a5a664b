"""The requests of a fold that nobody has answered: which invocations and calls wait; what is asked is not kept."""

from collections.abc import Iterable, KeysView
from typing import TypeAlias

from bough.v1 import input_pb2

CallKey: TypeAlias = tuple[str, str]
"""An invocation's id and the id of a call of it; the call's is empty where none is meant."""


class Requests:
    """The open requests of a run, each with who waits for it."""

    def __init__(self) -> None:
        self._asker_of: dict[str, CallKey] = {}
        self._open_of: dict[CallKey, dict[str, None]] = {}

    @property
    def calls(self) -> KeysView[CallKey]:
        """The calls that wait."""
        return self._open_of.keys()

    def invocations(self) -> frozenset[str]:
        """The invocations that wait, for a call of theirs or for themselves."""
        return frozenset(invocation_id for invocation_id, _ in self._open_of)

    def ask(self, request: input_pb2.InputRequest, invocation_id: str) -> None:
        """Takes in a request that an invocation makes."""
        self.answer(request.request_id)
        asker = (invocation_id, request.call_id)
        self._asker_of[request.request_id] = asker
        self._open_of.setdefault(asker, {})[request.request_id] = None

    def answer(self, request_id: str) -> None:
        """Takes in that a request is answered."""
        asker = self._asker_of.pop(request_id, None)
        if asker is not None:
            waiting = self._open_of[asker]
            del waiting[request_id]
            if not waiting:
                del self._open_of[asker]

    def end(self, call: CallKey) -> None:
        """Takes in that a call has ended: what it asked is asked no more."""
        for request_id in self._open_of.pop(call, ()):
            del self._asker_of[request_id]

    def replace(self, requests: Iterable[input_pb2.InputRequest]) -> None:
        """Takes in what an interruption says: these requests are open and no others.

        What was asked by a part of the run that was left behind, as the loser of a race, has no end of its own.
        """
        self._asker_of, self._open_of = {}, {}
        for request in requests:
            self.ask(request, request.invocation_id)
