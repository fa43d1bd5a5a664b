"""What scenarios are played on: a server that can be killed, a gate for its tool, and a driver behind a proxy."""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from tests.contract.driver_process import DriverProcess, driving
from tests.contract.languages import command_of
from tests.contract.newer_server import NewerProcess, serving_newer
from tests.contract.operator_calls import Operator
from tests.contract.scenario_files import Server, TokenKind
from tests.support.certificates import Authority
from tests.support.cutting_proxy import Proxy, proxying
from tests.support.issuer import Issuer, issuing
from tests.support.processes import Serving, serving
from tests.support.projects import write_project
from tests.support.tool_gate import Gate, standing_gate

TOOLS: Final = '''"""Tools of the scenarios."""

import asyncio

from bough_server import Context, agent, tool


@tool
async def hold() -> str:
    """Return when the scenario opens the gate."""
    reader, writer = await asyncio.open_connection("127.0.0.1", {port})
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()


@tool
def look_up(topic: str) -> str:
    """Look a topic up."""
    return f"There is a note on {{topic}}."


@tool(approval=True)
def pay(amount: int) -> str:
    """Pay an amount, once it is approved."""
    return f"{{amount}} are paid."


@tool
def fill(kilobytes: int) -> str:
    """Return a text of that length."""
    return "0123456789abcdef" * (64 * kilobytes)


@agent
async def interviewer(ctx: Context, input: str) -> str:
    """Asks for the reason."""
    reason = await ctx.ask("May we ask why?", schema={{"type": "string", "enum": ["broken", "late"]}})
    return f"The reason is: {{reason}}."
'''


class Certificates:
    """Those of a server, and of a driver that calls it, in the files of a folder."""

    def __init__(self, folder: Path) -> None:
        authority = Authority()
        authority.issue().write(folder / "server.crt", folder / "server.key")
        authority.issue().write(folder / "driver.crt", folder / "driver.key")
        (folder / "authority.crt").write_bytes(authority.pem)
        self.environment = {
            "DRIVER_CA_FILE": str(folder / "authority.crt"),
            "DRIVER_CERT_FILE": str(folder / "driver.crt"),
            "DRIVER_KEY_FILE": str(folder / "driver.key"),
            "DRIVER_TOKEN": "secret",
        }
        self.section = {
            "tls": {"cert_file": "server.crt", "key_file": "server.key"},
            "mtls": {"port": 0, "client_ca_file": "authority.crt"},
        }
        self.credentials = grpc.ssl_channel_credentials(authority.pem)


class Tokens:
    """An issuer's tokens for a driver, which reads the present one from a file."""

    def __init__(self, folder: Path, issuer: Issuer) -> None:
        self._file, self._issuer = folder / "token", issuer
        self._expire_time = 0.0
        self.environment = {"DRIVER_TOKEN_FILE": str(self._file)}
        self.section = {"oidc": [issuer.section(leeway=0)]}

    def use(self, kind: TokenKind) -> None:
        """Replace the token of the next calls."""
        now = time.time()
        self._expire_time = now + {"brief": 3.0, "expired": -1.0}.get(kind, 600.0)
        token = "x.y.z" if kind == "invalid" else self._issuer.token(iat=now - 10, exp=self._expire_time)
        self._file.write_text(token, encoding="utf-8")

    async def renew(self) -> None:
        """Wait until the present token has expired and the server has noticed, by the same clock; replace it before."""
        remaining = self._expire_time - time.time()
        self.use("valid")
        await asyncio.sleep(remaining + 0.3)

    def add_to(self, credentials: grpc.ChannelCredentials) -> grpc.ChannelCredentials:
        """Return credentials of a channel with a valid token."""
        return grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(self._issuer.token()))


class ServerProcess:
    """A server on a database that stays, behind one address over its restarts."""

    def __init__(self, config: Path, stack: AsyncExitStack, proxies: list[Proxy]) -> None:
        self._config, self._stack, self._proxies = config, stack, proxies
        self._server: Serving | None = None

    @property
    def address(self) -> str:
        """HOST:PORT of the present process."""
        assert self._server is not None, "it was started"
        return self._server.address

    async def start(self) -> None:
        """Start a process; connections that begin from now on are for it."""
        self._server = await self._stack.enter_async_context(serving(self._config))
        mutual = re.findall(r" mtls=(\S+)", self._server.said)
        for proxy in self._proxies:
            proxy.target = mutual[-1] if mutual else self._server.address

    async def restart(self, number: signal.Signals) -> None:
        """End the process by a signal and start the next one."""
        assert self._server is not None, "it was started"
        self._server.send(number)
        await self._server.end()
        await self.start()


class Stage:
    """A server, and the driver of one language at a time."""

    def __init__(
        self,
        folder: Path,
        server: ServerProcess | NewerProcess,
        *,
        gate: Gate,
        proxy: Proxy,
        certificates: Certificates | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self._folder, self.server, self.gate, self.proxy = folder, server, gate, proxy
        self._certificates, self.tokens = certificates, tokens
        self._drivers, self._language = AsyncExitStack(), ""
        self._driver: DriverProcess | None = None

    async def driver(self, language: str) -> DriverProcess:
        """Return the driver of a language; that of another one is ended."""
        if self._driver is None or self._driver.is_killed or self._language != language:
            await self.end_driver()
            command = command_of(language)
            errors = self._folder / f"{language}.stderr"
            environment: dict[str, str] = {}
            for each in (self._certificates, self.tokens):
                environment |= {} if each is None else each.environment
            self._driver = await self._drivers.enter_async_context(
                driving(command, self.proxy.address, errors, environment)
            )
            self._language = language
        return self._driver

    async def end_driver(self) -> None:
        """End the driver. Raises DriverFailed if it does not end well."""
        self._driver = None
        await self._drivers.aclose()

    @asynccontextmanager
    async def astray(self, language: str) -> AsyncIterator[DriverProcess]:
        """A driver with the address of a server that is not there."""
        errors = self._folder / f"{language}.stderr"
        async with proxying("127.0.0.1:1") as proxy:
            address = proxy.address
        async with driving(command_of(language), address, errors) as driver:
            yield driver

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Operator]:
        """A channel of the tests to the present process."""
        credentials = None if self._certificates is None else self._certificates.credentials
        if credentials is not None and self.tokens is not None:
            credentials = self.tokens.add_to(credentials)
        operator = Operator(self.server.address, credentials)
        try:
            yield operator
        finally:
            await operator.close()


@asynccontextmanager
async def staged(described: Server, folder: Path) -> AsyncIterator[Stage]:
    """Start the server that a group of scenarios describes, in an empty folder."""
    async with AsyncExitStack() as stack, standing_gate() as gate, proxying("") as proxy:
        server: ServerProcess | NewerProcess
        certificates = Certificates(folder) if described.tls else None
        tokens = Tokens(folder, await stack.enter_async_context(issuing())) if described.auth else None
        if described.newer is not None:
            server = await stack.enter_async_context(serving_newer(described.newer, gate))
            proxy.target = server.address
        else:
            config = _configured(described, folder, gate, certificates=certificates, tokens=tokens)
            server = ServerProcess(config, stack, [proxy])
            await server.start()
        stage = Stage(folder, server, gate=gate, proxy=proxy, certificates=certificates, tokens=tokens)
        try:
            yield stage
        finally:
            gate.open()
            await stage.end_driver()


def _configured(
    described: Server, folder: Path, gate: Gate, *, certificates: Certificates | None, tokens: Tokens | None
) -> Path:
    (folder / "contract_tools.py").write_text(TOOLS.format(port=gate.port), encoding="utf-8")
    settings: dict[str, Any] = {"python": ["contract_tools"], **described.settings}
    if certificates is not None:
        settings["server"] = {**certificates.section, **described.settings.get("server", {})}
    if tokens is not None:
        settings["auth"] = tokens.section
    return write_project(folder, *described.agents, script=described.script, **settings)
