"""All tool servers of this process, and what they offer together."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

import structlog

from bough.v1 import message_pb2, tool_pb2
from bough_server.clock import Clock, SystemClock
from bough_server.tool_servers.config import ToolServerSection
from bough_server.tool_servers.connection import Emit, ServerCall
from bough_server.tool_servers.lock import ToolLock
from bough_server.tool_servers.offers import Offers, ServerOffer, limit_refusals, merge_offers
from bough_server.tool_servers.server import Connect, ToolServer

Connector: TypeAlias = Callable[[str, ToolServerSection], Connect]
"""Returns what opens connections to a tool server, of its name and its section."""

SETTLE_SECONDS: Final = 30.0
"""How long the start of a run waits for the first lists of the tool servers that it needs."""

_log = structlog.get_logger(__name__)


class ToolServers:
    """The tool servers that are configured. They are connected to when they are first needed, or by `start`."""

    def __init__(
        self,
        sections: Mapping[str, ToolServerSection],
        connector: Connector | None = None,
        *,
        lock: ToolLock | None = None,
        taken: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`taken` are names of other tools, each with what has it; a connector is needed if there are sections."""
        self._lock, self._taken = lock, taken or {}
        self._sections = dict(sorted(sections.items()))
        self._servers: dict[str, ToolServer] = {}
        for name, section in self._sections.items():
            assert connector is not None, "what is configured can be connected to"
            connect = connector(name, section)
            clock = clock or SystemClock()
            self._servers[name] = ToolServer(name, section, connect, clock=clock, on_list=self._on_list)
        self.offers = self._merge(0)
        """What they offer now."""

    @classmethod
    def none(cls, taken: Mapping[str, str]) -> "ToolServers":
        """Return no tool servers."""
        return cls({}, taken=taken)

    @property
    def names(self) -> Collection[str]:
        """The names of all tool servers."""
        return self._sections.keys()

    def start(self) -> None:
        """Begin to connect to all of them."""
        for server in self._servers.values():
            server.start()

    async def close(self) -> None:
        """End all connections, and all child processes."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    async def wait_until_settled(self, names: Iterable[str]) -> None:
        """Wait until each of these has listed its tools once, or could not be reached; for SETTLE_SECONDS at most."""
        waiting = [self._servers[name] for name in names if name in self._servers]
        for server in waiting:
            server.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                for server in waiting:
                    await server.wait_until_settled()

    async def call(self, server: str, call: ServerCall, emit: Emit, *, timeout: float) -> Sequence[message_pb2.Part]:
        """Call a tool; see ToolServer.call. Raises KeyError for a server that is not configured."""
        return await self._servers[server].call(call, emit, timeout=timeout)

    def problem(self, name: str) -> str:
        """Return why a server's tools are not known, in a sentence; empty if nothing is wrong."""
        return self._servers[name].problem

    def describe(self, tenant_id: str | None) -> Sequence[tool_pb2.ToolServerInfo]:
        """Return the state of the tool servers that a tenant may use, by name; None for all."""
        return [self._describe(offer) for offer in self.offers.visible_to(tenant_id).values()]

    def _describe(self, offer: ServerOffer) -> tool_pb2.ToolServerInfo:
        server = self._servers[offer.name]
        info = tool_pb2.ToolServerInfo(
            name=offer.name,
            kind=offer.section.kind,
            state=server.state,
            problem=server.problem,
            tool_count=len(offer.tools),
            refused=limit_refusals(offer.refused),
        )
        if server.list_time_ns is not None:
            info.list_time.FromNanoseconds(server.list_time_ns)
        return info

    def _on_list(self) -> None:
        """Offer what the lists have now; unchanged lists keep the version, and what was computed for it."""
        offers = self._merge(self.offers.version + 1)
        if offers.servers != self.offers.servers:
            _log_refusals(self.offers, offers)
            self.offers = offers

    def _merge(self, version: int) -> Offers:
        return merge_offers(version, map(self._offer, self._servers.values()), taken=self._taken)

    def _offer(self, server: ToolServer) -> ServerOffer:
        return server.offer if self._lock is None else self._lock.apply(server.offer)


def _log_refusals(before: Offers, after: Offers) -> None:
    for name, offer in after.servers.items():
        known = {refused.name: refused.reason for refused in before.servers[name].refused}
        for refused in limit_refusals(offer.refused):
            if known.get(refused.name) != refused.reason:
                _log.warning("tool is not offered", server=name, tool=refused.name, reason=refused.reason)
