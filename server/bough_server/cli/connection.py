"""Connections to a server, running or embedded, and lookup of runs and sessions by short ids."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bough import AsyncClient, CallFailed, NotFound, Rejoining
from bough.addresses import DEFAULT_ADDRESS, check_address, split_address
from bough.v1 import run_pb2
from bough_server.cli.access import Access, local_access, remote_access
from bough_server.cli.exit_codes import print_stderr
from bough_server.cli.options import Target
from bough_server.errors import ConfigurationError, DatabaseInUse
from bough_server.identity import LOCAL, Principal
from bough_server.settings import Settings
from bough_server.settings_sections import to_reachable_address
from bough_server.store.sqlite.database_path import database_path, is_postgres
from bough_server.store.sqlite.file_lock import find_serving_owner

_SERVICE = "bough.v1.AgentService"
_EXPLICIT_TIMEOUT = 5.0
_LOCAL_TIMEOUT = 1.0

_CONNECT_SECONDS: Final = 0.8
"""Seconds that a connection may take; the gRPC library makes it, also on a machine that is too busy to answer soon."""

_IN_USE_SECONDS: Final = 3.0
"""Seconds for which a command waits for a database that another process has, but does not serve."""

_AGAIN_SECONDS: Final = 0.1

_REJOINING_SECONDS: Final = 60.0
"""Seconds for which a command tries to rejoin its run."""

_FULL_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_MIN_SUFFIX: Final = 6
_PAGE_SIZE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An open connection to a server. `note` is a message that the user has not seen yet; default: none."""

    client: AsyncClient
    command: str
    """The beginning of a command line that reaches the same server."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A server that answers, and whether it has the configured database open."""

    address: str
    access: Access
    serves_database: bool = False


class NoServer(ConfigurationError):
    """No server answers at the address, or at any of those, that the caller named."""


@asynccontextmanager
async def connect(
    target: Target,
    *,
    default_model: str | None = None,
    is_silent: bool = False,
    is_reading: bool = False,
    needs_runs: bool = False,
    subject: str = "run",
) -> AsyncIterator[Connection]:
    """Connect to the server that the flags select, for as long as the context is open.

    A server named by its address is never replaced by another; of several the first that answers is used, and the next
    if that is lost. Without an address, the server that has the configured
    database open is used, also with --embedded; else the one at the configured port if it answers; else an embedded one
    is opened for as long as the command lasts, which --verbose says. Notes are printed on standard error; with
    `is_silent` the caller prints them. With `is_reading` the embedded server resumes no runs, and upgrades no database:
    looking at runs must neither execute them nor count as an attempt to recover them. A command that reads, or one that
    `needs_runs`, creates no database.
    `subject` is what the note about a lost connection says is rejoined. Raises ConfigurationError if the flags exclude
    each other, or if no server answers at the address.
    """
    if target.embedded and target.address is not None:
        raise ConfigurationError("--embedded and --address exclude each other: omit one of them.")
    async with AsyncExitStack() as stack:
        connection = await _connect(
            stack,
            target,
            default_model,
            recover=not is_reading,
            is_starting=not is_reading and not needs_runs,
            subject=subject,
        )
        if connection.note and not is_silent:
            print_stderr(connection.note)
        yield connection


async def _connect(
    stack: AsyncExitStack,
    target: Target,
    default_model: str | None,
    *,
    recover: bool,
    is_starting: bool,
    subject: str,
) -> Connection:
    give_up = time.monotonic() + _IN_USE_SECONDS
    while True:
        found = await running_server(target, default_model)
        if found is not None:
            return await _connect_to_server(stack, target, found, default_model, subject=subject)
        try:
            return await _open_embedded_server(stack, target, default_model, recover=recover, creates=is_starting)
        except DatabaseInUse:
            # A server that starts will publish its address, and a command that reads will end.
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(_AGAIN_SECONDS)


async def _connect_to_server(
    stack: AsyncExitStack, target: Target, found: FoundServer, default_model: str | None, *, subject: str
) -> Connection:
    if default_model is not None:
        way_out = "stop it first" if found.serves_database else "add --embedded"
        raise ConfigurationError(
            f"--default-model applies only to an embedded server, and a server runs at {found.address}: "
            f"{way_out}, or pass it to `bough serve`."
        )
    if target.as_caller is not None:
        raise ConfigurationError(
            f"--as applies only to a server inside the command, and a server runs at {found.address}, which knows its "
            "callers by their tokens: omit --as."
        )
    rejoining = Rejoining(timeout=_REJOINING_SECONDS, on_drop=partial(_report_drop, subject))
    client = await stack.enter_async_context(found.access.make_client(found.address, timeout=None, rejoining=rejoining))
    note = f"The server at {found.address} has this database open: using it." if target.embedded else ""
    return Connection(client=client, command=target.command, note=note)


def _report_wait() -> None:
    print_stderr("Another command uses the server in this one: waiting for its run to end. Ctrl-C does not wait.")


def _report_drop(subject: str, error: CallFailed) -> None:
    # With an ErrorReason it is a sentence of the server; without one, words of the gRPC library.
    what = error.message if error.reason else "The connection to the server was lost."
    print_stderr(f"{what} Rejoining the {subject} for up to {_REJOINING_SECONDS:g} s.")


async def running_server(target: Target, default_model: str | None = None) -> FoundServer | None:
    """Return the server that a command uses, None for an embedded one; see `connect`. Raises ConfigurationError."""
    # With --address only the section `client` is read: the rest may be invalid, or belong to another server.
    if target.address is not None:
        return await _find_server_at(target.address, remote_access(Settings.load_client(target.config)))
    settings = Settings.load(target.config, default_model=default_model)
    if settings.address is not None and not target.embedded:
        return await _find_server_at(settings.address, remote_access(settings))
    # Before the default address: a server there may serve another project.
    # Servers on PostgreSQL leave no address: the database is meant for many of them.
    url, access = settings.storage.url, local_access(settings)
    owner = None if is_postgres(url) else find_serving_owner(database_path(url))
    if owner is not None and (used := await _find_access(owner.address, access)) is not None:
        return FoundServer(address=owner.address, access=used, serves_database=True)
    address = find_local_address(settings)
    if not target.embedded and (used := await _find_access(address, access)) is not None:
        return FoundServer(address=address, access=used)
    return None


async def _find_access(address: str, access: Access) -> Access | None:
    """Return the access with which a server of Bough on this machine answers; None if none does.

    A server inside another command has the database without TLS, whatever the settings are.
    """
    for tried in (access, Access()) if access.credentials is not None else (access,):
        # Another gRPC server may use the default port; only Bough reports the health of this service.
        if not isinstance(await _health(address, tried, _LOCAL_TIMEOUT), grpc.StatusCode):
            return tried
    return None


def find_local_address(settings: Settings) -> str:
    """Return where `bough serve` listens with these settings, as this machine reaches it; the default for any port."""
    server = settings.server
    if server.port == 0 or not server.model_fields_set & {"host", "port"}:
        return DEFAULT_ADDRESS
    return to_reachable_address(
        f"[{server.host}]:{server.port}" if ":" in server.host else f"{server.host}:{server.port}"
    )


async def _find_server_at(address: str, access: Access) -> FoundServer:
    try:
        check_address(address)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    # Any other status, even UNIMPLEMENTED, was sent by a server.
    if await _health(address, access, _EXPLICIT_TIMEOUT) in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ):
        servers = split_address(address)
        where = "any of " if len(servers) > 1 else ""
        hint = await _explain_silence(servers[0], access)
        raise NoServer(f"No server answers at {where}{address}: start one there, or omit the address.{hint}")
    return FoundServer(address=address, access=access)


async def _explain_silence(address: str, access: Access) -> str:
    """Return what may be wrong if something listens at an address, and no server answers there; else nothing."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        return ""
    writer.close()
    if access.credentials is None:
        return " Something listens there: for a server with TLS, set client.tls or client.ca_file in bough.yaml."
    return (
        " Something listens there: if that is the server, check that client.ca_file has the authority of its "
        "certificate, that this names the host, and that client.cert_file is one that it accepts."
    )


async def is_serving(found: FoundServer) -> bool:
    """Return whether a server says that it serves."""
    status = await _health(found.address, found.access, _EXPLICIT_TIMEOUT)
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


async def _health(address: str, access: Access, timeout: float) -> int | grpc.StatusCode:
    """Return the health of our service at an address, or the status with which the call failed."""
    async with access.open_channel(address) as channel:
        if not await _connects(channel):
            return grpc.StatusCode.UNAVAILABLE
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = await check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=timeout)
        except aio.AioRpcError as error:
            return error.code()
    return int(answer.status)


async def _connects(channel: aio.Channel) -> bool:
    """Return whether a channel reaches a server of gRPC, at the first attempt."""
    state = channel.get_state(try_to_connect=True)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            while state not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
                await channel.wait_for_state_change(state)
                state = channel.get_state()
    except TimeoutError:
        return False
    return state is grpc.ChannelConnectivity.READY


async def _open_embedded_server(
    stack: AsyncExitStack, target: Target, default_model: str | None, *, recover: bool, creates: bool
) -> Connection:
    from bough_server.app import open_server
    from bough_server.observability.logs import configure_logging

    # A free port on loopback: a `bough serve` with the same configuration may use the configured one.
    settings = Settings.load(target.config, host="127.0.0.1", port=0, default_model=default_model)
    url = settings.storage.url
    if not creates and not is_postgres(url) and not database_path(url).exists():
        # Without a database there are no runs; an empty one that vanishes says so in the words of each command.
        folder = stack.enter_context(TemporaryDirectory(prefix="bough-"))
        settings = Settings.load(
            target.config, host="127.0.0.1", port=0, default_model=default_model, database=f"{folder}/bough.db"
        )
    # The server's log would mix with the command's output: only warnings, unless the level is configured.
    level = settings.log_level if "log_level" in settings.model_fields_set else "warning"
    configure_logging(level, settings.log_format)
    is_said = target.verbose and not target.embedded
    note = (
        f"No server answers at {find_local_address(settings)}: using one embedded in this command." if is_said else ""
    )
    opening = open_server(
        settings.for_embedded_server(),
        recover=recover,
        is_embedded=True,
        on_wait=_report_wait,
        principal=_find_principal(target),
    )
    address = await stack.enter_async_context(opening)
    client = await stack.enter_async_context(AsyncClient(address, timeout=None))
    return Connection(client=client, command=target.command, note=note)


def _find_principal(target: Target) -> Principal:
    if target.as_caller is None:
        return LOCAL.principal
    tenant, _, user = target.as_caller.partition("/")
    return Principal(tenant_id=tenant, user_id=user)


async def resolve_run(client: AsyncClient, text: str) -> str:
    """Return the id of the run that a full id, `last`, or a unique beginning or end of an id names.

    `last` is the newest run that is no part of an evaluation. Raises ConfigurationError if there is no such run, or
    more than one.
    """
    if _FULL_ID.fullmatch(text):
        return text.lower()
    if text == "last":
        return (await _last_run(client, "There is no run yet: start one with `bough run`.")).run_id
    if len(text) < _MIN_SUFFIX:
        raise ConfigurationError(
            f"{text!r} is too short to name a run: use its id, `last`, or at least the first or last 6 characters of "
            "its id."
        )
    part = text.lower()
    every = client.list_runs(include_evaluation_runs=True, page_size=_PAGE_SIZE)
    found = [run.run_id async for run in every if run.run_id.startswith(part) or run.run_id.endswith(part)]
    if not found:
        raise ConfigurationError(f"There is no run whose id begins or ends with {text!r}: `bough runs` lists runs.")
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} run ids begin or end with {text!r}, such as {found[0]} and {found[1]}: use more characters. "
            "Ids of runs that started in the same minutes begin alike."
        )
    return found[0]


async def resolve_session(client: AsyncClient, text: str) -> str:
    """Return the id of the session that an id, `last` or a unique suffix of an id names.

    `last` is the session of the newest run that is no part of an evaluation. Raises ConfigurationError if there is no
    such session, or more than one.
    """
    if text == "last":
        return (await _last_run(client, "There is no session yet: `bough run` and `bough chat` begin one.")).session_id
    # Callers choose ids of sessions: a short text can only be a whole id.
    if _FULL_ID.fullmatch(text) or len(text) < _MIN_SUFFIX:
        return text
    with suppress(NotFound):
        return (await client.sessions.get(text)).session_id
    ids = [
        session.session_id
        async for session in client.sessions.list(include_evaluation_sessions=True, page_size=_PAGE_SIZE)
    ]
    found = [each for each in ids if each.endswith(text)]
    if not found:
        raise ConfigurationError(
            f"There is no session whose id is {text!r} or ends in it: `bough sessions list` lists sessions."
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} session ids end in {text!r}, such as {found[0]} and {found[1]}: use more characters."
        )
    return found[0]


async def _last_run(client: AsyncClient, none: str) -> run_pb2.Run:
    """Return the newest run that is no part of an evaluation. Raises ConfigurationError with the sentence `none`."""
    async for run in client.list_runs(page_size=1):
        return run
    raise ConfigurationError(none)
