"""Synchronous client: one method for each call of the services, with the exceptions of `bough.errors`."""

# Generated from bough/client.py by `make proto`, which overwrites changes.

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Self

import grpc

from bough import requests
from bough.agent_tree import AgentTree
from bough.aggregation import sync_aggregate_messages
from bough.arguments import build
from bough.calls import PAGE_SIZE, USE_CLIENT_DEFAULT, SyncCalls, Timeout, seconds_of
from bough.channel import (
    CALL_TIMEOUT,
    DEFAULT_ADDRESS,
    RUN_TIMEOUT,
    ChannelOption,
    Token,
    sync_channel,
    token_metadata,
)
from bough.collection import answer_of, collect_sync
from bough.health import SERVING, check_request, sync_check
from bough.position import RunStreamRequest
from bough.rejoining import Rejoining
from bough.requests import EvaluationRole, MissingSession, State, View, WatchUntil
from bough.sync.catalog import SyncCatalog
from bough.sync.evaluations import SyncEvaluations
from bough.sync.sessions import SyncSessions
from bough.sync.stream import SyncRunStream
from bough.sync.usage import SyncLedger
from bough.v1 import (
    access_service_pb2,
    access_service_pb2_grpc,
    agent_pb2,
    agent_service_pb2,
    agent_service_pb2_grpc,
    catalog_service_pb2_grpc,
    eval_service_pb2_grpc,
    evaluation_ref_pb2,
    event_pb2,
    follow_pb2,
    fork_pb2,
    input_pb2,
    invocation_pb2,
    message_pb2,
    policy_pb2,
    run_pb2,
    session_service_pb2_grpc,
    usage_service_pb2_grpc,
)


class Client:
    """A client of one server for programs without an event loop, a context manager.

    Of several addresses, `HOST:PORT,HOST:PORT`, the first that answers is used, and the next if that is lost. Their
    host names are looked up in the constructor, which blocks, and not again.

    `timeout` bounds following a run and `call_timeout` every other call, both in seconds; None: unbounded. Each method
    has a `timeout` that overrides them, None again for no limit; that of a list bounds the fetch of each page.
    With `wait_for_ready` calls wait for a server that is not reachable yet instead of failing at once. Streams rejoin
    their run after a dropped connection as `rejoining` says; `NO_REJOINING` leaves that to the caller.

    `credentials` turn on TLS, such as `grpc.ssl_channel_credentials()` for a certificate that an authority signed.
    `token` is sent as bearer token with every call, over TLS or to this machine; anything else raises ValueError.
    `options` override those of `bough.channel`. A `channel` is used instead of address, credentials and options; the
    caller closes it.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = RUN_TIMEOUT,
        call_timeout: float | None = CALL_TIMEOUT,
        wait_for_ready: bool | None = None,
        rejoining: Rejoining | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: Token | None = None,
        options: Iterable[ChannelOption] = (),
        channel: grpc.Channel | None = None,
    ) -> None:
        self.address = address
        metadata = token_metadata(token, address, credentials)
        self._channel = channel or sync_channel(address, credentials, options)
        self._is_owned = channel is None
        self._calls = SyncCalls(timeout=call_timeout, wait_for_ready=wait_for_ready, metadata=metadata)
        self._access = access_service_pb2_grpc.AccessServiceStub(self._channel)
        self._agents = agent_service_pb2_grpc.AgentServiceStub(self._channel)
        self._eval = eval_service_pb2_grpc.EvalServiceStub(self._channel)
        self.catalog = SyncCatalog(catalog_service_pb2_grpc.CatalogServiceStub(self._channel), self._calls)
        self.sessions = SyncSessions(session_service_pb2_grpc.SessionServiceStub(self._channel), self._calls)
        self.evaluations = SyncEvaluations(self._eval, self._calls, rejoining)
        self.usage = SyncLedger(usage_service_pb2_grpc.UsageServiceStub(self._channel), self._calls)
        self._timeout, self._rejoining = timeout, rejoining

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel unless the caller provided it; calls in flight end."""
        if self._is_owned:
            self._channel.close()

    def run(
        self,
        agent: str,
        input: str | message_pb2.Message,
        *,
        session_id: str = "",
        on_missing_session: MissingSession = agent_service_pb2.MISSING_SESSION_POLICY_UNSPECIFIED,
        request_id: str = "",
        definitions: Iterable[agent_pb2.AgentDefinition] = (),
        policy: policy_pb2.RunPolicy | None = None,
        view: View = follow_pb2.EVENT_VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        labels: Mapping[str, str] | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
        heartbeat: float | None = None,
    ) -> SyncRunStream:
        """Start a run and follow it to its end or to its first interruption.

        `on_missing_session` may have the session created if there is none of that id. `definitions` are agents for this
        run alone; they override those of the catalog that have the same names. Default: a new request id, so that a
        dropped connection never starts a second run.
        `timeout` (seconds; default: the client's) is the run's deadline as well, unless its policy says `background`.
        """
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        request = requests.run_request(
            agent,
            input,
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
        after_sequence: int | None = None,
        view: View = follow_pb2.EVENT_VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        timeout: Timeout = USE_CLIENT_DEFAULT,
        heartbeat: float | None = None,
    ) -> SyncRunStream:
        """Answer input requests of a run and follow it to its end or to its next interruption.

        The events begin after `after_sequence`; default: with the first event that the answers caused. Default: a new
        request id, so that a dropped connection never sends the answers twice. `timeout` (seconds; default: the
        client's) is the run's deadline from now on. The stream raises AlreadyAnswered, RunEnded, InvalidRequest or
        NotFound.
        """
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        request = requests.resume_request(
            run_id, answers, request_id=request_id, after_sequence=after_sequence, follow=follow
        )
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
        timeout: Timeout = USE_CLIENT_DEFAULT,
        heartbeat: float | None = None,
    ) -> SyncRunStream:
        """Start a run that shares another run's log up to a sequence, and follow it from there as `run` does.

        `allow_open_effects` forks even if a tool call is open there whose tool must not be run again without
        permission. A `policy` replaces that of the other run as a whole. Default: a new request id. The stream raises
        ForkRefused, InvalidRequest or NotFound.
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
        after_sequence: int = 0,
        until: WatchUntil = follow_pb2.WATCH_UNTIL_UNSPECIFIED,
        view: View = follow_pb2.EVENT_VIEW_UNSPECIFIED,
        event_names: Iterable[str] = (),
        timeout: Timeout = USE_CLIENT_DEFAULT,
        heartbeat: float | None = None,
    ) -> SyncRunStream:
        """Follow a run, live or ended, after a sequence.

        `until` says how far. Default: to the run's end, also while it waits for answers. WATCH_UNTIL_CURRENT: to the
        current end of its log. WATCH_UNTIL_INTERRUPTED: to its end or until it waits for answers. Interruptions that
        have been answered do not end the stream, such as those of the run that a fork shares its beginning with; and
        if the run waits already and has no events after `after_sequence`, the stream has none.
        """
        follow = requests.follow_options(view=view, event_names=event_names, heartbeat=heartbeat)
        return self._stream(
            requests.watch_request(run_id, after_sequence=after_sequence, until=until, follow=follow), timeout
        )

    def ask(
        self,
        agent: str,
        input: str | message_pb2.Message,
        *,
        session_id: str = "",
        on_missing_session: MissingSession = agent_service_pb2.MISSING_SESSION_POLICY_UNSPECIFIED,
        request_id: str = "",
        definitions: Iterable[agent_pb2.AgentDefinition] = (),
        policy: policy_pb2.RunPolicy | None = None,
        labels: Mapping[str, str] | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> str:
        """Start a run, follow it to its end and return its final answer as text; the arguments are those of `run`.

        Raises RunFailedError, RunCancelledError or RunInterruptedError if there is none, or RunNotAnswered if the
        run has not ended.
        """
        stream = self.run(
            agent,
            input,
            session_id=session_id,
            on_missing_session=on_missing_session,
            request_id=request_id,
            definitions=definitions,
            policy=policy,
            labels=labels,
            timeout=timeout,
        )
        with stream:
            return answer_of(collect_sync(stream))

    def cancel(self, run_id: str, *, note: str = "", timeout: Timeout = USE_CLIENT_DEFAULT) -> run_pb2.Run:
        """Request cancellation of a run, with a note for the record; its end follows as events.

        A run that has ended stays as it is.
        """
        request = build(agent_service_pb2.CancelRunRequest, run_id=run_id, note=note)
        return self._calls.call(self._agents.CancelRun, request, timeout).run

    def get_run(self, run_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> run_pb2.Run:
        """Return a run. Raises NotFound."""
        return self._calls.call(self._agents.GetRun, build(agent_service_pb2.GetRunRequest, run_id=run_id), timeout).run

    def get_final_answer(self, run_id: str, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> message_pb2.Message | None:
        """Return the final answer of a run, None unless the run has succeeded."""
        response = self._calls.call(self._agents.GetRun, build(agent_service_pb2.GetRunRequest, run_id=run_id), timeout)
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
        evaluation_id: str = "",
        case_id: str = "",
        evaluation_role: EvaluationRole = evaluation_ref_pb2.EVALUATION_ROLE_UNSPECIFIED,
        include_evaluation_runs: bool = False,
        page_size: int = PAGE_SIZE,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> Iterator[run_pb2.Run]:
        """List the runs that match every filter that is set, newest first; pages are fetched as they are needed.

        `create_time_from` is inclusive, `create_time_before` exclusive; a time without a zone is local time.
        Runs of evaluations are left out unless a filter asks for their session, evaluation, case or role, or
        `include_evaluation_runs` is set.
        """
        wanted = requests.run_filter(
            session_id=session_id,
            agent=agent,
            states=states,
            labels=labels,
            create_time_from=create_time_from,
            create_time_before=create_time_before,
            evaluation_id=evaluation_id,
            case_id=case_id,
            evaluation_role=evaluation_role,
            include_evaluation_runs=include_evaluation_runs,
        )
        request = build(agent_service_pb2.ListRunsRequest, page_size=page_size, filter=wanted)
        return self._calls.pages(self._agents.ListRuns, request, lambda response: response.runs, timeout=timeout)

    def tree(
        self,
        run_id: str,
        *,
        options: invocation_pb2.InvocationOptions | None = None,
        as_of_sequence: int = 0,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> AgentTree:
        """Return the agents of a run, as they called one another; the arguments are those of `get_invocation`."""
        return AgentTree(self.get_invocation(run_id, options=options, as_of_sequence=as_of_sequence, timeout=timeout))

    def get_invocation(
        self,
        run_id: str,
        *,
        options: invocation_pb2.InvocationOptions | None = None,
        as_of_sequence: int = 0,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> invocation_pb2.Invocation:
        """Return the record of a run, of its log up to a sequence if one is given. Raises NotFound or OutOfRange."""
        request = requests.invocation_request(run_id, options=options, as_of_sequence=as_of_sequence)
        return self._calls.call(self._eval.GetInvocation, request, timeout).invocation

    def aggregate(
        self,
        events: Iterable[event_pb2.AgentEvent],
        *,
        options: invocation_pb2.InvocationOptions | None = None,
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> invocation_pb2.Invocation:
        """Return the invocation that events from any source make, in their order; `timeout` in seconds."""
        messages, seconds = sync_aggregate_messages(events, options), seconds_of(timeout, self._timeout)
        return self._calls.send(self._eval.AggregateEvents, messages, seconds).invocation

    def list_input_requests(
        self, *, page_size: int = PAGE_SIZE, timeout: Timeout = USE_CLIENT_DEFAULT
    ) -> Iterator[input_pb2.OpenInput]:
        """List the open requests of all runs that the caller may answer; pages are fetched as they are needed."""
        request = build(agent_service_pb2.ListInputRequestsRequest, page_size=page_size)
        listing = self._agents.ListInputRequests
        return self._calls.pages(listing, request, lambda response: response.requests, timeout=timeout)

    def answer_input(
        self,
        run_id: str,
        answers: Iterable[input_pb2.InputAnswer],
        *,
        request_id: str = "",
        timeout: Timeout = USE_CLIENT_DEFAULT,
    ) -> State:
        """Answer input requests of a run without following it, which the caller need not see; return its state.

        Raises AlreadyAnswered, RunEnded, InvalidRequest, NotFound, or CallFailed for who may not answer.
        """
        request = build(agent_service_pb2.AnswerInputRequest, run_id=run_id, answers=answers, request_id=request_id)
        return self._calls.call(self._agents.AnswerInput, request, timeout).state

    def get_caller(self, *, timeout: Timeout = USE_CLIENT_DEFAULT) -> access_service_pb2.GetCallerResponse:
        """Return who calls, as the server sees it: tenant, user, roles and groups."""
        return self._calls.call(self._access.GetCaller, access_service_pb2.GetCallerRequest(), timeout)

    def is_serving(self, service: str = "", *, timeout: Timeout = USE_CLIENT_DEFAULT) -> bool:
        """Return whether the server, or one of its services such as `bough.v1.AgentService`, accepts calls now.

        Raises NotFound for a service that it does not have, and Unavailable if there is no server.
        """
        request = check_request(service)
        return self._calls.call(sync_check(self._channel), request, timeout).value == SERVING

    def _stream(self, request: RunStreamRequest, timeout: Timeout) -> SyncRunStream:
        return SyncRunStream(
            self._agents,
            request,
            timeout=seconds_of(timeout, self._timeout),
            calls=self._calls,
            rejoining=self._rejoining,
        )
