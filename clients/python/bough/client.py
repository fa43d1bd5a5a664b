"""The asynchronous client: one method for each call of the services, errors of this package; it keeps no state."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from types import TracebackType
from typing import Self

from grpc import aio

from bough import requests
from bough.calls import PAGE_SIZE, Calls
from bough.catalog import Catalog
from bough.channel import CALL_TIMEOUT, CHANNEL_OPTIONS, DEFAULT_ADDRESS, RUN_TIMEOUT, ChannelOption
from bough.collection import CollectedRun, collect
from bough.errors import RunCancelled, RunFailed, RunNotAnswered, from_rpc_error
from bough.rejoining import Rejoining
from bough.requests import RunQuery, View, WatchUntil
from bough.sessions import Sessions
from bough.stream import RunStream
from bough.v1 import (
    agent_service_pb2,
    agent_service_pb2_grpc,
    catalog_service_pb2_grpc,
    error_pb2,
    eval_service_pb2,
    eval_service_pb2_grpc,
    event_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
    session_service_pb2_grpc,
)

_EVENTS_PER_MESSAGE = 256
_BYTES_PER_MESSAGE = 1024 * 1024


class AsyncClient:
    """A client of one server, to be used as an asynchronous context manager, in one event loop.

    `timeout` bounds following a run and `call_timeout` every other call, both in seconds, None without an end.
    With `wait_for_ready` calls wait for a server that is not there yet instead of failing at once. `options` are added
    to those of `bough.channel`. A `channel` of the caller's own is used instead of the address and stays the caller's.
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
        self._owned = None if channel else aio.insecure_channel(address, options=(*CHANNEL_OPTIONS, *options))
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
        request_id: str = "",
        policy: policy_pb2.RunPolicy | None = None,
        view: View = agent_service_pb2.VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        labels: Mapping[str, str] | None = None,
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> RunStream:
        """Starts a turn and follows it. Without a request id it gets one, so that a drop never starts a second run.

        `timeout` (seconds; the client's where None) is the run's deadline as well, unless its policy says `background`.
        """
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        request = requests.run_request(
            agent,
            content,
            session_id=session_id,
            request_id=request_id,
            policy=policy,
            follow=follow,
            labels=labels,
        )
        return self._stream(request, timeout)

    def watch(
        self,
        run_id: str,
        *,
        after: int = 0,
        until: WatchUntil = agent_service_pb2.WATCH_UNTIL_UNSPECIFIED,
        view: View = agent_service_pb2.VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        timeout: float | None = None,
        heartbeat: float | None = None,
    ) -> RunStream:
        """Follows a run, live or past, after a sequence; `until` says whether to the run's end or to what there is."""
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        request = agent_service_pb2.WatchRunRequest(run_id=run_id, after_sequence=after, until=until, follow=follow)
        return self._stream(request, timeout)

    async def answer(
        self, agent: str, content: str | message_pb2.Message, *, session_id: str = "", timeout: float | None = None
    ) -> str:
        """Runs a turn and gives its final answer as text. Raises RunFailed or RunCancelled where there is none."""
        async with self.run(agent, content, session_id=session_id, timeout=timeout) as stream:
            return answer_of(await collect(stream))

    async def cancel(self, run_id: str) -> agent_service_pb2.Run:
        """Asks a run to stop; its end follows as events. On a run that has ended it changes nothing."""
        request = agent_service_pb2.CancelRunRequest(run_id=run_id)
        return (await self._calls.one(self._agents.CancelRun, request)).run

    async def get_run(self, run_id: str) -> agent_service_pb2.Run:
        """One run."""
        return (await self._calls.one(self._agents.GetRun, agent_service_pb2.GetRunRequest(run_id=run_id))).run

    def list_runs(
        self, query: RunQuery | None = None, *, page_size: int = PAGE_SIZE
    ) -> AsyncIterator[agent_service_pb2.Run]:
        """Runs, the newest first, page by page as they are asked for."""
        request = requests.list_runs_request(query or RunQuery(), page_size=page_size)
        return self._calls.pages(self._agents.ListRuns, request, lambda response: response.runs)

    async def tree(
        self, run_id: str, *, options: invocation_pb2.InvocationOptions | None = None, as_of_sequence: int = 0
    ) -> invocation_pb2.Invocation:
        """The record of a run with its agent tree; of the log up to a sequence where one is given."""
        request = requests.tree_request(run_id, options=options, as_of_sequence=as_of_sequence)
        return (await self._calls.one(self._eval.GetInvocation, request)).invocation

    def list_invocations(
        self, query: RunQuery | None = None, *, page_size: int = PAGE_SIZE
    ) -> AsyncIterator[invocation_pb2.Invocation]:
        """Records without agents, tools and steps, the newest first, page by page as they are asked for."""
        request = requests.list_invocations_request(query or RunQuery(), page_size=page_size)
        return self._calls.pages(self._eval.ListInvocations, request, lambda response: response.invocations)

    async def aggregate(
        self,
        events: Iterable[event_pb2.AgentEvent] | AsyncIterable[event_pb2.AgentEvent],
        *,
        options: invocation_pb2.InvocationOptions | None = None,
        timeout: float | None = None,
    ) -> invocation_pb2.Invocation:
        """The record that anybody's events make, in the order given; `timeout` in seconds."""
        messages = _aggregate_messages(events, options)
        call = self._eval.AggregateEvents(
            messages, timeout=timeout or self._timeout, wait_for_ready=self._calls.wait_for_ready
        )
        try:
            return (await call).invocation
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            await messages.aclose()

    def _stream(
        self, request: agent_service_pb2.RunRequest | agent_service_pb2.WatchRunRequest, timeout: float | None
    ) -> RunStream:
        return RunStream(
            self._agents,
            request,
            timeout=self._timeout if timeout is None else timeout,
            calls=self._calls,
            rejoining=self._rejoining,
        )


def answer_of(run: CollectedRun) -> str:
    """A run's final answer as text. Raises RunFailed or RunCancelled where there is none."""
    if run.state == event_pb2.STATE_SUCCEEDED:
        return run.answer
    failure: type[RunNotAnswered] = RunCancelled if run.state == event_pb2.STATE_CANCELLED else RunFailed
    raise failure(run.run_id, run.error or error_pb2.AgentError())


async def _aggregate_messages(
    events: Iterable[event_pb2.AgentEvent] | AsyncIterable[event_pb2.AgentEvent],
    options: invocation_pb2.InvocationOptions | None,
) -> AsyncGenerator[eval_service_pb2.AggregateEventsRequest, None]:
    message = eval_service_pb2.AggregateEventsRequest(options=options)
    size = 0
    async for event in _each(events):
        length = event.ByteSize()
        if message.events and (len(message.events) == _EVENTS_PER_MESSAGE or size + length > _BYTES_PER_MESSAGE):
            yield message
            message, size = eval_service_pb2.AggregateEventsRequest(), 0
        message.events.append(event)
        size += length
    yield message


async def _each(
    events: Iterable[event_pb2.AgentEvent] | AsyncIterable[event_pb2.AgentEvent],
) -> AsyncIterator[event_pb2.AgentEvent]:
    if isinstance(events, AsyncIterable):
        async for event in events:
            yield event
    else:
        for event in events:
            yield event
