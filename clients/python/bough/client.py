"""The asynchronous client: one method for each call of the services, errors of this package; it keeps no state."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Self

from grpc import aio

from bough import requests
from bough.aggregation import aggregate_messages
from bough.calls import PAGE_SIZE, Calls
from bough.catalog import Catalog
from bough.channel import CALL_TIMEOUT, DEFAULT_ADDRESS, RUN_TIMEOUT, ChannelOption, channel_options
from bough.collection import answer_of, collect
from bough.errors import from_rpc_error
from bough.position import Request
from bough.rejoining import Rejoining
from bough.requests import MissingSession, State, View, WatchUntil
from bough.sessions import Sessions
from bough.stream import RunStream
from bough.v1 import (
    agent_pb2,
    agent_service_pb2,
    agent_service_pb2_grpc,
    catalog_service_pb2_grpc,
    eval_service_pb2_grpc,
    event_pb2,
    follow_pb2,
    fork_pb2,
    input_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
    session_service_pb2_grpc,
)


class AsyncClient:
    """A client of one server, to be used as an asynchronous context manager, in one event loop.

    `timeout` bounds following a run and `call_timeout` every other call, both in seconds, None without an end.
    With `wait_for_ready` calls wait for a server that is not there yet instead of failing at once. Streams come back
    after a drop by themselves, as `rejoining` says; `NO_REJOINING` leaves that to the caller. `options` are added to
    those of `bough.channel` and win over them. A `channel` of the caller's own is used instead of the address and stays
    the caller's.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = RUN_TIMEOUT,
        call_timeout: float | None = CALL_TIMEOUT,
        wait_for_ready: bool | None = None,
        rejoining: Rejoining | None = None,
        options: Iterable[ChannelOption] = (),
        channel: aio.Channel | None = None,
    ) -> None:
        self.address = address
        self._owned = None if channel else aio.insecure_channel(address, options=channel_options(options))
        used = channel or self._owned
        assert used is not None, "one of the two is set"
        self._calls = Calls(timeout=call_timeout, wait_for_ready=wait_for_ready)
        self._agents = agent_service_pb2_grpc.AgentServiceStub(used)
        self._eval = eval_service_pb2_grpc.EvalServiceStub(used)
        self.catalog = Catalog(catalog_service_pb2_grpc.CatalogServiceStub(used), self._calls)
        self.sessions = Sessions(session_service_pb2_grpc.SessionServiceStub(used), self._calls)
        self._timeout, self._rejoining = timeout, rejoining

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel, if it is the client's own; calls in flight end."""
        if self._owned is not None:
            await self._owned.close()

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
    ) -> RunStream:
        """Starts a turn and follows it to its end, or to its first interruption.

        `on_missing_session` may have the session created if there is none of that id. `definitions` are agents that
        this run alone finds, before those of the catalog and in place of those of their names. Without a request id it
        gets one, so that a drop never starts a second run.
        `timeout` (seconds; the client's where None) is the run's deadline as well, unless its policy says `background`.
        """
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        request = requests.run_request(
            agent,
            content,
            session_id=session_id,
            on_missing_session=on_missing_session,
            request_id=request_id,
            definitions=definitions,
            policy=policy,
            follow=follow,
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
    ) -> RunStream:
        """Answers what a run asks and follows it on, to its end or to its next interruption.

        The events begin `after` a sequence, and with what the answers caused where that is None. Without a request id
        it gets one, so that a drop answers nothing twice. `timeout` (seconds; the client's where None) is the run's
        deadline from now on. The stream raises AlreadyAnswered, RunEnded, InvalidRequest or NotFound.
        """
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
    ) -> RunStream:
        """Starts a run that shares another's log up to a sequence, and follows it from there as `run` does.

        `allow_open_effects` forks although a tool is running there that must not simply be run again. A `policy`
        replaces the one of the other run as a whole. Without a request id it gets one. The stream raises ForkRefused,
        InvalidRequest or NotFound.
        """
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
    ) -> RunStream:
        """Follows a run, live or past, after a sequence.

        `until` says how far: to the run's end, to its next interruption, or to what there is.
        """
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        return self._stream(requests.watch_request(run_id, after=after, until=until, follow=follow), timeout)

    async def answer(
        self, agent: str, content: str | message_pb2.Message, *, session_id: str = "", timeout: float | None = None
    ) -> str:
        """Runs a turn and gives its final answer as text.

        Raises RunFailed, RunCancelled or RunInterrupted where there is none.
        """
        async with self.run(agent, content, session_id=session_id, timeout=timeout) as stream:
            return answer_of(await collect(stream))

    async def cancel(self, run_id: str, *, note: str = "") -> run_pb2.Run:
        """Ask a run to stop, with a note for the record; its end follows as events. An ended run is not changed."""
        request = agent_service_pb2.CancelRunRequest(run_id=run_id, note=note)
        return (await self._calls.one(self._agents.CancelRun, request)).run

    async def get_run(self, run_id: str) -> run_pb2.Run:
        """One run."""
        return (await self._calls.one(self._agents.GetRun, agent_service_pb2.GetRunRequest(run_id=run_id))).run

    async def final_answer(self, run_id: str) -> message_pb2.Message | None:
        """The final answer of a run, in the background or not; None until the run has succeeded."""
        response = await self._calls.one(self._agents.GetRun, agent_service_pb2.GetRunRequest(run_id=run_id))
        return response.final_answer if response.HasField("final_answer") else None

    def list_runs(
        self,
        *,
        session_id: str = "",
        agent: str = "",
        states: Iterable[State] = (),
        labels: Mapping[str, str] | None = None,
        create_time_from: datetime | None = None,
        create_time_before: datetime | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[run_pb2.Run]:
        """Runs that match every filter that is set, newest first; pages are fetched as they are needed.

        A run created exactly at `create_time_from` matches, one created at `create_time_before` does not; a time
        without a zone is this machine's local time.
        """
        wanted = requests.run_filter(
            session_id=session_id,
            agent=agent,
            states=states,
            labels=labels,
            create_time_from=create_time_from,
            create_time_before=create_time_before,
        )
        request = agent_service_pb2.ListRunsRequest(page_size=page_size, filter=wanted)
        return self._calls.pages(self._agents.ListRuns, request, lambda response: response.runs)

    async def tree(
        self, run_id: str, *, options: invocation_pb2.InvocationOptions | None = None, as_of_sequence: int = 0
    ) -> invocation_pb2.Invocation:
        """The record of a run with its agent tree; of the log up to a sequence where one is given."""
        request = requests.tree_request(run_id, options=options, as_of_sequence=as_of_sequence)
        return (await self._calls.one(self._eval.GetInvocation, request)).invocation

    async def aggregate(
        self,
        events: Iterable[event_pb2.AgentEvent] | AsyncIterable[event_pb2.AgentEvent],
        *,
        options: invocation_pb2.InvocationOptions | None = None,
        timeout: float | None = None,
    ) -> invocation_pb2.Invocation:
        """The record that anybody's events make, in the order given; `timeout` in seconds."""
        messages = aggregate_messages(events, options)
        call = self._eval.AggregateEvents(
            messages, timeout=timeout or self._timeout, wait_for_ready=self._calls.wait_for_ready
        )
        try:
            return (await call).invocation
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            await messages.aclose()

    def _stream(self, request: Request, timeout: float | None) -> RunStream:
        return RunStream(
            self._agents,
            request,
            timeout=self._timeout if timeout is None else timeout,
            calls=self._calls,
            rejoining=self._rejoining,
        )
