"""One address for several servers: Envoy as deploy/envoy.yaml configures it, or a forwarder that takes turns."""

import asyncio
import itertools
import json
import shutil
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.cutting_proxy import Proxy
from tests.support.processes import PATIENCE_SECONDS
from tests.support.toolchains import skip_or_fail

ENVOY: Final = Path(__file__).parents[2] / "deploy" / "envoy.yaml"

Balancing = Callable[[Sequence[str], Path], AbstractAsyncContextManager[str]]
"""Opens a balancer of some servers, with a folder for its files; yields its address."""

_POLL_SECONDS: Final = 0.05


class _Forwarder(Proxy):
    """Passes each connection on to the next of its targets."""

    def __init__(self, targets: Sequence[str]) -> None:
        super().__init__(targets[0])
        self._targets = itertools.cycle(targets)

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.target = next(self._targets)
        await super().admit(reader, writer)


@asynccontextmanager
async def forwarding(targets: Sequence[str], _: Path) -> AsyncIterator[str]:
    """Forward connections to each of the targets in turn."""
    forwarder = _Forwarder(targets)
    server = await asyncio.start_server(forwarder.admit, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        forwarder.cut()
        await server.wait_closed()


@asynccontextmanager
async def envoy(targets: Sequence[str], folder: Path, certificate: Path | None = None) -> AsyncIterator[str]:
    """Run Envoy with the project's configuration, but for the addresses; it has found all targets healthy.

    Without a file with a certificate and its key it is reached in plaintext.
    """
    program = Path(sys.executable).with_name("envoy")
    found = str(program) if program.exists() else shutil.which("envoy")
    if found is None:
        skip_or_fail("envoy", ["envoy (the extra `cluster`)"])
    config, admin = folder / "envoy.yaml", folder / "envoy.admin"
    config.write_text(json.dumps(_placed(targets, certificate)), encoding="utf-8")
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(found, "--config-path", str(config), "--admin-address-path", str(admin), "--base-id-path"),
            *(str(folder / "envoy.id"), "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not admin.exists() or await _healthy(admin) < len(targets):
                assert process.returncode is None, (folder / "envoy.log").read_text()
                await asyncio.sleep(_POLL_SECONDS)
            (listener,) = (await _read(admin, "listeners?format=json"))["listener_statuses"]
        yield f"127.0.0.1:{listener['local_address']['socket_address']['port_value']}"
    finally:
        process.terminate()
        await process.wait()


def _placed(targets: Sequence[str], certificate: Path | None) -> dict[str, Any]:
    """The project's configuration with any free port of this machine, and with targets in place of a name."""
    made: dict[str, Any] = yaml.safe_load(ENVOY.read_text(encoding="utf-8"))
    (listener,), (cluster,) = made["static_resources"]["listeners"], made["static_resources"]["clusters"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
    (chain,) = listener["filter_chains"]
    if certificate is None:
        del chain["transport_socket"]
    else:
        (used,) = chain["transport_socket"]["typed_config"]["common_tls_context"]["tls_certificates"]
        for file in used.values():
            file["filename"] = str(certificate)
    cluster["type"] = "STATIC"
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [_endpoint(target) for target in targets]}]
    return made | {"admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}}


def _endpoint(target: str) -> dict[str, Any]:
    host, _, port = target.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}


async def _healthy(admin: Path) -> int:
    (cluster,) = (await _read(admin, "clusters?format=json"))["cluster_statuses"]
    hosts = cluster.get("host_statuses", [])
    return sum(host["health_status"] == {"eds_health_status": "HEALTHY"} for host in hosts)


async def _read(admin: Path, path: str) -> Any:
    def read() -> Any:
        with urllib.request.urlopen(f"http://{admin.read_text()}/{path}", timeout=PATIENCE_SECONDS) as answer:
            return json.load(answer)

    return await asyncio.to_thread(read)
