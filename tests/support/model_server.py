"""An OpenAI-compatible model server on loopback; a program, or a context inside a test. It has no mind.

python -m tests.support.model_server --port 0 --scenario desk --delta-interval-ms 10 --ready-file F

The ready file gets HOST:PORT once it serves. `GET /requests` tells how many requests came and how many are open.
"""

import argparse
import asyncio
import signal
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tests.support import response_scenarios
from tests.support.model_scenarios import Ending, Reply, Request, Scenario, names, scenario

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GEMINI = "/v1beta/models/{model}:streamGenerateContent"


class ModelServer:
    """Answers the requests of each path by its scenario and counts them; tests may read the latest."""

    def __init__(self, scenarios: Mapping[str, Scenario], *, delta_interval: float = 0.0, delay: float = 0.0) -> None:
        self.requests: deque[Request] = deque(maxlen=64)
        self.headers: deque[dict[str, str]] = deque(maxlen=64)
        self.count = 0
        self.open = 0
        self.most_open = 0
        self.base_url = ""
        self.left = asyncio.Event()
        """Set when a client leaves an answer that hangs."""
        self.arrived = asyncio.Event()
        """Set when a request is there."""
        self._peers: set[object] = set()
        self._scenarios = dict(scenarios)
        self._interval = delta_interval
        self._delay = delay

    @property
    def root(self) -> str:
        """The address without the version of OpenAI's APIs."""
        return self.base_url.removesuffix("/v1")

    @property
    def connections(self) -> int:
        """How many connections brought requests."""
        return len(self._peers)

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        for path in self._scenarios:
            app.router.add_post(path, self._complete)
        app.router.add_get("/requests", self._told)
        return app

    async def _told(self, request: web.Request) -> web.Response:
        return web.json_response({"count": self.count, "open": self.open, "most_open": self.most_open})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body: Request = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if request.transport is not None:
            self._peers.add(request.transport.get_extra_info("peername"))
        self.count += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.arrived.set()
        try:
            if self._delay:
                await asyncio.sleep(self._delay)
            return await self._reply(request, self._scenarios[_resource(request)](body))
        finally:
            self.open -= 1

    async def _reply(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.content_type = reply.content_type
        if reply.starts:
            await response.prepare(request)
            for piece in reply.pieces:
                await response.write(piece)
                if self._interval:
                    await asyncio.sleep(self._interval)
        if reply.ending is Ending.HANG:
            await self._hang()
        if reply.ending is Ending.DROP and request.transport is not None:
            request.transport.abort()
        return response

    async def _hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


def _resource(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


@asynccontextmanager
async def serving_model(
    answer: str | Scenario,
    *,
    delta_interval: float = 0.0,
    delay: float = 0.0,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[ModelServer]:
    """Serves a scenario on loopback in this event loop; a name means that of each of OpenAI's APIs.

    `delta_interval` and `delay`, before an answer, are seconds.
    """
    if isinstance(answer, str):
        is_common = answer not in response_scenarios.names()
        given = {CHAT: scenario(answer if is_common else "plain"), RESPONSES: response_scenarios.scenario(answer)}
    else:
        given = dict.fromkeys((CHAT, RESPONSES, MESSAGES, GEMINI), answer)
    server = ModelServer(given, delta_interval=delta_interval, delay=delay)
    # A handler is cancelled when its client leaves: that is how a hanging answer ends.
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=2048, ssl_context=tls)
        await site.start()
        host, bound = runner.addresses[0][:2]
        server.base_url = f"http{'s' if tls else ''}://{host}:{bound}/v1"
        yield server
    finally:
        await runner.cleanup()


async def _serve(arguments: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    interval, delay = arguments.delta_interval_ms / 1000, arguments.delay_ms / 1000
    async with serving_model(arguments.scenario, delta_interval=interval, delay=delay, port=arguments.port) as server:
        address = server.base_url.removeprefix("http://").removesuffix("/v1")
        if arguments.ready_file:
            await asyncio.to_thread(_tell, arguments.ready_file, address)
        await stopped.wait()


def _tell(path: Path, address: str) -> None:
    draft = path.with_name(path.name + ".draft")
    draft.write_text(address, encoding="utf-8")
    draft.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--scenario", choices=[*names(), *response_scenarios.names()], default="plain")
    parser.add_argument("--delta-interval-ms", type=float, default=0.0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--ready-file", type=Path)
    asyncio.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
