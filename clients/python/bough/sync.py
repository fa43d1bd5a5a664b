"""The synchronous client: runs, watching, answers, forks, trees and cancelling over one channel; it keeps no state."""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self, TypeVar

import grpc

from bough import requests
from bough.channel import CALL_TIMEOUT, DEFAULT_ADDRESS, RUN_TIMEOUT, ChannelOption, channel_options
from bough.errors import from_rpc_error
from bough.position import Request
from bough.rejoining import Rejoining
from bough.requests import MissingSession, View, WatchUntil
from bough.sync_stream import SyncRunStream
from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    agent_service_pb2_grpc,
    eval_service_pb2_grpc,
    follow_pb2,
    fork_pb2,
    input_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
)

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


class Client:
    """A client of one server for programs without an event loop.

    `timeout` bounds following a run and `call_timeout` every other call, both in seconds, None without an end. Streams
    come back after a drop by themselves, as `rejoining` says; `NO_REJOINING` leaves that to the caller. `options` are
    added to those of `bough.channel` and win over them. A `channel` of the caller's own is used instead of the address
    and stays the caller's.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = RUN_TIMEOUT,
        call_timeout: float | None = CALL_TIMEOUT,
        rejoining: Rejoining | None = None,
        options: Iterable[ChannelOption] = (),
        channel: grpc.Channel | None = None,
    ) -> None:
        self._owned = None if channel else grpc.insecure_channel(address, options=channel_options(options))
        used = channel or self._owned
        assert used is not None, "one of the two is set"
        self._agents = agent_service_pb2_grpc.AgentServiceStub(used)
        self._eval = eval_service_pb2_grpc.EvalServiceStub(used)
        self._timeout, self._call_timeout, self._rejoining = timeout, call_timeout, rejoining

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
        on_missing_session: MissingSession = agent_service_pb2.MISSING_SESSION_POLICY_UNSPECIFIED,
        request_id: str = "",
        definitions: Iterable[agent_pb2.AgentDefinition] = (),
        policy: policy_pb2.RunPolicy | None = None,
        view: View = follow_pb2.EVENT_VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        labels: Mapping[str, str] | None = None,
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> SyncRunStream:
        """Starts a turn and follows it to its end, or to its first interruption, as AsyncClient.run does."""
        request = requests.run_request(
            agent,
            content,
            session_id=session_id,
            on_missing_session=on_missing_session,
            request_id=request_id,
            definitions=definitions,
            policy=policy,
            follow=requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat),
            labels=labels,
        )
        return self._stream(request, timeout)

    def resume(
        self,
        run_id: str,
        answers: Iterable[input_pb2.InputAnswer],
        *,
        request_id: str = "",
        after: int | None = None,
        view: View = follow_pb2.EVENT_VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> SyncRunStream:
        """Answers what a run asks and follows it on, as AsyncClient.resume does."""
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        request = requests.resume_request(run_id, answers, request_id=request_id, after=after, follow=follow)
        return self._stream(request, timeout)

    def fork(
        self,
        run_id: str,
        after_sequence: int,
        *,
        changes: fork_pb2.ForkChanges | None = None,
        allow_open_effects: bool = False,
        request_id: str = "",
        policy: policy_pb2.RunPolicy | None = None,
        labels: Mapping[str, str] | None = None,
        view: View = follow_pb2.EVENT_VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> SyncRunStream:
        """Starts a run that shares another's log up to a sequence, and follows it, as AsyncClient.fork does."""
        request = requests.fork_request(
            run_id,
            after_sequence,
            changes=changes,
            allow_open_effects=allow_open_effects,
            request_id=request_id,
            policy=policy,
            follow=requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat),
            labels=labels,
        )
        return self._stream(request, timeout)

    def watch(
        self,
        run_id: str,
        *,
        after: int = 0,
        until: WatchUntil = follow_pb2.WATCH_UNTIL_UNSPECIFIED,
        view: View = follow_pb2.EVENT_VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> SyncRunStream:
        """Follows a run, live or past, after a sequence; `until` says how far."""
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        return self._stream(requests.watch_request(run_id, after=after, until=until, follow=follow), timeout)

    def cancel(self, run_id: str, *, note: str = "") -> run_pb2.Run:
        """Ask a run to stop, with a note for the record; its end follows as events. An ended run is not changed."""
        return self._one(self._agents.CancelRun, agent_service_pb2.CancelRunRequest(run_id=run_id, note=note)).run

    def get_run(self, run_id: str) -> run_pb2.Run:
        """One run."""
        return self._one(self._agents.GetRun, agent_service_pb2.GetRunRequest(run_id=run_id)).run

    def final_answer(self, run_id: str) -> message_pb2.Message | None:
        """The final answer of a run, in the background or not; None until the run has succeeded."""
        response = self._one(self._agents.GetRun, agent_service_pb2.GetRunRequest(run_id=run_id))
        return response.final_answer if response.HasField("final_answer") else None

    def tree(
        self, run_id: str, *, options: invocation_pb2.InvocationOptions | None = None, as_of_sequence: int = 0
    ) -> invocation_pb2.Invocation:
        """The record of a run with its agent tree."""
        request = requests.tree_request(run_id, options=options, as_of_sequence=as_of_sequence)
        return self._one(self._eval.GetInvocation, request).invocation

    def _stream(self, request: Request, timeout: float | None) -> SyncRunStream:
        timeout = self._timeout if timeout is None else timeout
        return SyncRunStream(self._agents, request, timeout=timeout, rejoining=self._rejoining)

    def _one(self, method: "grpc.UnaryUnaryMultiCallable[Asked, Answered]", request: Asked) -> Answered:
        try:
            return method(request, timeout=self._call_timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
