"""The synchronous client: runs, watching, trees and cancelling over one channel; it does not rejoin."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from bough import requests
from bough.channel import CALL_TIMEOUT, CHANNEL_OPTIONS, DEFAULT_ADDRESS, RUN_TIMEOUT
from bough.errors import from_rpc_error
from bough.requests import View, WatchUntil
from bough.stream import Response
from bough.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    eval_service_pb2_grpc,
    event_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
)

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")
ResponseType = TypeVar("ResponseType", bound=Response, covariant=True)


class _Stream(Protocol[ResponseType]):
    def __next__(self) -> ResponseType: ...
    def cancel(self) -> object: ...


class SyncRunStream(Iterator[event_pb2.AgentEvent]):
    """The events of a run, as they come. After a drop, watch `run_id` again after `through_sequence`."""

    def __init__(self, call: _Stream[Response], *, after: int = 0, run_id: str = "") -> None:
        self._call = call
        self._events: list[event_pb2.AgentEvent] = []
        self._received = after
        self.run_id = run_id

    @property
    def through_sequence(self) -> int:
        """Everything up to here has been given to the caller or is not in its view."""
        return self._events[-1].sequence - 1 if self._events else self._received

    def __next__(self) -> event_pb2.AgentEvent:
        while not self._events:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            # Kept the wrong way round: the next one is taken from the end.
            self._events = list(reversed(response.events))
            self._received = max([self._received, response.through_sequence, *(e.sequence for e in response.events)])
        event = self._events.pop()
        self.run_id = self.run_id or event.run_id
        return event

    def close(self) -> None:
        """Ends the call; the run goes on as its policy says."""
        self._events.clear()
        with suppress(grpc.RpcError):
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A client of one server for programs without an event loop; `channel` is the caller's own, if given.

    `timeout` bounds following a run and `call_timeout` every other call, both in seconds, None without an end.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = RUN_TIMEOUT,
        call_timeout: float | None = CALL_TIMEOUT,
        channel: grpc.Channel | None = None,
    ) -> None:
        self._owned = None if channel else grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        used = channel or self._owned
        assert used is not None, "one of the two is set"
        self._agents = agent_service_pb2_grpc.AgentServiceStub(used)
        self._eval = eval_service_pb2_grpc.EvalServiceStub(used)
        self._timeout, self._call_timeout = timeout, call_timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel, if it is the client's own."""
        if self._owned is not None:
            self._owned.close()

    def run(
        self,
        agent: str,
        content: str | message_pb2.Message,
        *,
        session_id: str = "",
        request_id: str = "",
        policy: policy_pb2.RunPolicy | None = None,
        view: View = agent_service_pb2.VIEW_UNSPECIFIED,
        labels: Mapping[str, str] | None = None,
    ) -> SyncRunStream:
        """Starts a turn and follows it. Without a request id it gets one."""
        request = requests.run_request(
            agent,
            content,
            session_id=session_id,
            request_id=request_id,
            policy=policy,
            follow=requests.follow_options(view=view),
            labels=labels,
        )
        return SyncRunStream(self._agents.Run(request, timeout=self._timeout))

    def watch(
        self,
        run_id: str,
        *,
        after: int = 0,
        until: WatchUntil = agent_service_pb2.WATCH_UNTIL_UNSPECIFIED,
        view: View = agent_service_pb2.VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
    ) -> SyncRunStream:
        """Follows a run, live or past, after a sequence."""
        follow = requests.follow_options(view=view, event_names=event_names)
        request = agent_service_pb2.WatchRunRequest(run_id=run_id, after_sequence=after, until=until, follow=follow)
        return SyncRunStream(self._agents.WatchRun(request, timeout=self._timeout), after=after, run_id=run_id)

    def cancel(self, run_id: str) -> agent_service_pb2.Run:
        """Asks a run to stop; its end follows as events."""
        return self._one(self._agents.CancelRun, agent_service_pb2.CancelRunRequest(run_id=run_id)).run

    def get_run(self, run_id: str) -> agent_service_pb2.Run:
        """One run."""
        return self._one(self._agents.GetRun, agent_service_pb2.GetRunRequest(run_id=run_id)).run

    def tree(
        self, run_id: str, *, options: invocation_pb2.InvocationOptions | None = None, as_of_sequence: int = 0
    ) -> invocation_pb2.Invocation:
        """The record of a run with its agent tree."""
        request = requests.tree_request(run_id, options=options, as_of_sequence=as_of_sequence)
        return self._one(self._eval.GetInvocation, request).invocation

    def _one(self, method: "grpc.UnaryUnaryMultiCallable[Asked, Answered]", request: Asked) -> Answered:
        try:
            return method(request, timeout=self._call_timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
