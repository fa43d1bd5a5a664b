"""Connections to a server, running or embedded, and lookup of runs and sessions by short ids."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bough import AsyncClient, NotFound
from bough.channel import DEFAULT_ADDRESS
from bough_server.cli.exit_codes import print_stderr
from bough_server.cli.options import Target
from bough_server.errors import ConfigurationError
from bough_server.settings import Settings

_SERVICE = "bough.v1.AgentService"
_EXPLICIT_TIMEOUT = 5.0
_LOCAL_TIMEOUT = 1.0

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


@asynccontextmanager
async def connected(
    target: Target, *, default_model: str | None = None, is_silent: bool = False, is_reading: bool = False
) -> AsyncIterator[Connection]:
    """Connect to the server that the flags select, for as long as the context is open.

    A server named by its address is never replaced by another. Without an address, the server at 127.0.0.1:50051 is
    used if it answers, else an embedded one is opened for as long as the command lasts. A note about that is printed
    on standard error; with `is_silent` the caller prints it. With `is_reading` the embedded server resumes no runs:
    looking at runs must neither execute them nor count as an attempt to recover them. Raises ConfigurationError if
    the flags exclude each other, or if no server answers at the address.
    """
    if target.embedded and target.address is not None:
        raise ConfigurationError("--embedded and --address exclude each other: omit one of them.")
    address = None if target.embedded else await _running_server(target, default_model)
    if address is None:
        async with _embedded(target, default_model, recover=not is_reading) as connection:
            if connection.note and not is_silent:
                print_stderr(connection.note)
            yield connection
        return
    if default_model is not None:
        raise ConfigurationError(
            f"--default-model applies only to an embedded server, and a server runs at {address}: "
            "add --embedded, or pass it to `bough serve`."
        )
    async with AsyncClient(address, timeout=None) as client:
        yield Connection(client=client, command=target.command)


async def _running_server(target: Target, default_model: str | None) -> str | None:
    # With --address the configuration is not read: it may be invalid, or belong to another server.
    address = target.address
    if address is None:
        address = Settings.load(target.config, default_model=default_model).address
    if address is None:
        return DEFAULT_ADDRESS if await _is_ours(DEFAULT_ADDRESS) else None
    if not await answers(address, timeout=_EXPLICIT_TIMEOUT):
        raise ConfigurationError(f"No server answers at {address}: start one there, or omit the address.")
    return address


async def answers(address: str, *, timeout: float) -> bool:
    """Return whether a gRPC server answers at an address within `timeout` seconds."""
    # Any other status, even UNIMPLEMENTED, was sent by a server.
    return await _health(address, timeout) not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def _is_ours(address: str) -> bool:
    # Another gRPC server may use the default port; only Bough reports the health of this service.
    return await _health(address, _LOCAL_TIMEOUT) is grpc.StatusCode.OK


async def _health(address: str, timeout: float) -> grpc.StatusCode:
    async with aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=timeout)
        except aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@asynccontextmanager
async def _embedded(target: Target, default_model: str | None, *, recover: bool) -> AsyncIterator[Connection]:
    from bough_server.app import configure_logging, serving

    # A free port on loopback: a `bough serve` with the same configuration may use the configured one.
    settings = Settings.load(target.config, host="127.0.0.1", port=0, default_model=default_model)
    # The server's log would mix with the command's output: only warnings, unless the level is configured.
    configure_logging(settings.log_level if "log_level" in settings.model_fields_set else "warning")
    note = "" if target.embedded else f"No server answers at {DEFAULT_ADDRESS}: using one embedded in this command."
    async with serving(settings, recover=recover) as address, AsyncClient(address, timeout=None) as client:
        yield Connection(client=client, command=target.command, note=note)


async def resolve_run(client: AsyncClient, text: str) -> str:
    """Return the id of the run that a full id, `last` or a unique suffix of an id names.

    Raises ConfigurationError if there is no such run, or more than one.
    """
    if _FULL_ID.fullmatch(text):
        return text.lower()
    if text == "last":
        async for run in client.list_runs(page_size=1):
            return run.run_id
        raise ConfigurationError("There is no run yet: start one with `bough run`.")
    if len(text) < _MIN_SUFFIX:
        raise ConfigurationError(
            f"{text!r} is too short to name a run: use its id, `last`, or at least the last 6 characters of its id."
        )
    suffix = text.lower()
    found = [run.run_id async for run in client.list_runs(page_size=_PAGE_SIZE) if run.run_id.endswith(suffix)]
    if not found:
        raise ConfigurationError(f"There is no run whose id ends in {text!r}: `bough runs` lists runs.")
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} run ids end in {text!r}, such as {found[0]} and {found[1]}: use more characters."
        )
    return found[0]


async def resolve_session(client: AsyncClient, text: str) -> str:
    """Return the id of the session that an id, `last` or a unique suffix of an id names.

    `last` is the session of the newest run. Raises ConfigurationError if there is no such session, or more than one.
    """
    if text == "last":
        return await _last_session(client)
    # Callers choose ids of sessions: a short text can only be a whole id.
    if _FULL_ID.fullmatch(text) or len(text) < _MIN_SUFFIX:
        return text
    with suppress(NotFound):
        return (await client.sessions.get(text)).session_id
    ids = [session.session_id async for session in client.sessions.list(page_size=_PAGE_SIZE)]
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


async def _last_session(client: AsyncClient) -> str:
    async for run in client.list_runs(page_size=1):
        return run.session_id
    raise ConfigurationError("There is no session yet: `bough run` and `bough chat` begin one.")
