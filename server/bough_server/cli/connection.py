"""The server that a command calls, in this process or elsewhere, and the ids of its runs."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bough import AsyncClient
from bough.channel import DEFAULT_ADDRESS
from bough_server.cli.exit_codes import say
from bough_server.cli.options import Target
from bough_server.errors import ConfigurationError
from bough_server.settings import Settings

_SERVICE = "bough.v1.AgentService"
_EXPLICIT_PATIENCE = 5.0
_LOCAL_PATIENCE = 1.0

_FULL: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_SHORTEST: Final = 6
_PAGE_SIZE: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A server to speak to. `note` is what the user has yet to hear of it, empty for nothing."""

    client: AsyncClient
    command: str
    """What a command to the same server begins with."""
    note: str = ""


@asynccontextmanager
async def connected(
    target: Target, *, default_model: str | None = None, is_silent: bool = False, is_reading: bool = False
) -> AsyncIterator[Connection]:
    """A client of the server that the flags mean.

    An address that is named is never replaced. Where none is, the server on 127.0.0.1:50051 is taken if it answers,
    else one is opened in this process for as long as the command lasts; that is said on standard error, unless it
    `is_silent` and leaves the note to its caller. A command that `is_reading` opens one that goes on with no run: to
    look at runs must neither execute them nor count as another try of theirs. Raises ConfigurationError.
    """
    if target.embedded and target.address is not None:
        raise ConfigurationError("--embedded and --address exclude each other: leave one out.")
    address = None if target.embedded else await _running_server(target, default_model)
    if address is None:
        async with _embedded(target, default_model, goes_on=not is_reading) as connection:
            if connection.note and not is_silent:
                say(connection.note)
            yield connection
        return
    if default_model is not None:
        raise ConfigurationError(
            f"--default-model is for a server that this command opens itself, and one runs at {address}: "
            "add --embedded, or give it to `bough serve`."
        )
    async with AsyncClient(address, timeout=None) as client:
        yield Connection(client=client, command=target.command)


async def _running_server(target: Target, default_model: str | None) -> str | None:
    # A named address needs no configuration, which may be broken or somebody else's.
    address = target.address
    if address is None:
        address = Settings.load(target.config, default_model=default_model).address
    if address is None:
        return DEFAULT_ADDRESS if await _is_ours(DEFAULT_ADDRESS) else None
    if not await answers(address, patience=_EXPLICIT_PATIENCE):
        raise ConfigurationError(f"No server answers at {address}: start one there, or leave the address out.")
    return address


async def answers(address: str, *, patience: float) -> bool:
    """Whether a gRPC server answers there within that many seconds."""
    return await _health(address, patience) not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def _is_ours(address: str) -> bool:
    return await _health(address, _LOCAL_PATIENCE) is grpc.StatusCode.OK


async def _health(address: str, patience: float) -> grpc.StatusCode:
    async with aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=patience)
        except aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@asynccontextmanager
async def _embedded(target: Target, default_model: str | None, *, goes_on: bool) -> AsyncIterator[Connection]:
    from bough_server.app import configure_logging, serving

    settings = Settings.load(target.config, host="127.0.0.1", port=0, default_model=default_model)
    # Its log would stand between the lines of the command, so it says less unless it was asked to say more.
    configure_logging(settings.log_level if "log_level" in settings.model_fields_set else "warning")
    note = "" if target.embedded else f"No server answers at {DEFAULT_ADDRESS}: using one inside this command."
    async with serving(settings, goes_on=goes_on) as address, AsyncClient(address, timeout=None) as client:
        yield Connection(client=client, command=target.command, note=note)


async def resolve_run(client: AsyncClient, text: str) -> str:
    """The id of the run that is meant. Raises ConfigurationError where none is, or more than one."""
    if _FULL.fullmatch(text):
        return text.lower()
    if text == "last":
        async for run in client.list_runs(page_size=1):
            return run.run_id
        raise ConfigurationError("There is no run yet: start one with `bough run`.")
    if len(text) < _SHORTEST:
        raise ConfigurationError(f"{text!r} is too short for a run: use its id, `last`, or 6 characters of its end.")
    suffix = text.lower()
    found = [run.run_id async for run in client.list_runs(page_size=_PAGE_SIZE) if run.run_id.endswith(suffix)]
    if not found:
        raise ConfigurationError(f"There is no run that ends in {text!r}: `bough runs` lists them.")
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} runs end in {text!r}, such as {found[0]} and {found[1]}: say more.")
    return found[0]
