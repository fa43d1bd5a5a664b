"""How requests reach a provider: proxies, certificates, timeouts, redirects, headers; and what refusals say."""

import asyncio
import gzip
import socket
from pathlib import Path

import pytest
from aiohttp import web

from bough.v1 import error_pb2, event_pb2
from bough_server.models.endpoint import Timeouts
from bough_server.models.proxy import Proxy, proxy_of
from tests.support.certificates import certificate, server_context
from tests.support.http_proxy import proxying_http
from tests.support.model_calls import answer, asking, failure, text_of
from tests.support.model_scenarios import TEXT, Reply, Request, plain
from tests.support.model_server import serving_model
from tests.support.openai_models import OpenAIModel

TRANSPORT = event_pb2.RETRY_REASON_TRANSPORT


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.delenv(name, raising=False)


def model_at(base_url: str, *, key: str = "", timeouts: Timeouts | None = None) -> OpenAIModel:
    return OpenAIModel(name="large", model="scenario-1", base_url=base_url, key=key, timeouts=timeouts)


async def text_from(base_url: str, *, key: str = "") -> str:
    model = model_at(base_url, key=key)
    try:
        deltas, _ = await answer(model, asking())
    finally:
        await model.close()
    return text_of(deltas)


async def test_a_proxy_of_the_environment_is_sent_the_whole_url(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_model("plain") as server, proxying_http(server.base_url) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address)  # without a scheme, as curl takes it too
        assert await text_from("http://models.test/v1", key="sk-key") == TEXT
        assert server.headers[-1]["Host"] == "models.test"
        monkeypatch.setenv("HTTP_PROXY", f"user:hidden-password@{proxy.address}")
        assert await text_from("http://models.test/v1") == TEXT
    assert proxy.lines == ["POST http://models.test/v1/chat/completions HTTP/1.1"] * 2
    assert proxy.credentials == ["Basic dXNlcjpoaWRkZW4tcGFzc3dvcmQ="]


async def test_a_proxy_tunnels_to_a_server_with_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = certificate(tmp_path, "models.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    async with serving_model("plain", tls=server_context(file)) as server, proxying_http(server.base_url) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:hidden-password@{proxy.address}")
        assert await text_from("https://models.test/v1") == TEXT
    assert proxy.lines == ["CONNECT models.test:443 HTTP/1.1"]
    assert proxy.credentials == ["Basic dXNlcjpoaWRkZW4tcGFzc3dvcmQ="]


async def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_model("plain") as server, proxying_http(server.base_url) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.address}")
        assert await text_from(server.base_url) == TEXT
    assert proxy.lines == []


async def test_a_proxy_that_refuses_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_model("plain") as server, proxying_http(server.base_url, refuses=True) as proxy:
        monkeypatch.setenv("ALL_PROXY", f"http://user:hidden-password@{proxy.address}")
        for url in ("http://models.test/v1", "https://models.test/v1"):
            model = model_at(url, key="not-shaped-like-a-key")
            _, error = await failure(model, asking())
            await model.close()
            assert "407" in error.message
            assert "hidden-password" not in error.message
            assert "not-shaped-like-a-key" not in error.message
        assert server.count == 0


async def test_a_proxy_that_is_not_there_is_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_model("plain") as server:
        address = server.base_url.removesuffix("/v1").removeprefix("http://")
    monkeypatch.setenv("HTTP_PROXY", f"http://user:hidden-password@{address}")
    model = model_at("http://models.test/v1")
    _, error = await failure(model, asking())
    await model.close()
    assert error.retry == TRANSPORT
    assert "hidden-password" not in error.message


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "http://127.0.0.1:port", "://"])
async def test_a_proxy_that_cannot_be_used_is_a_model_error(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    model = model_at("http://models.test/v1")
    _, error = await failure(model, asking())
    await model.close()
    assert error.reason == error_pb2.ERROR_REASON_MODEL_UNAVAILABLE


@pytest.mark.parametrize(
    ("exceptions", "url", "is_direct"),
    [
        ("*", "https://models.test/v1", True),
        ("other.test, models.test", "https://models.test/v1", True),
        ("models.test", "https://eu.models.test/v1", True),
        ("models.test", "https://mymodels.test/v1", False),
        (".models.test", "https://eu.models.test/v1", True),
        (".models.test", "https://models.test/v1", False),
        ("MODELS.test", "https://models.test/v1", True),
        ("models.test:8443", "https://models.test:8443/v1", True),
        ("models.test:8443", "https://models.test/v1", False),
        ("10.1.2.3", "https://10.1.2.3/v1", True),
        ("10.0.0.0/8", "https://10.1.2.3:8000/v1", True),
        ("10.0.0.0/8", "https://11.1.2.3/v1", False),
        ("10.0.0.0/8", "https://models.test/v1", False),
        ("fd00::1", "https://[fd00::1]:8443/v1", True),
        ("[fd00::1]:8443", "https://[fd00::1]:8443/v1", True),
        ("[fd00::1]:8443", "https://[fd00::1]/v1", False),
        ("fd00::/8", "https://[fd00::1]/v1", True),
        ("https://models.test", "https://models.test/v1", True),
        ("http://models.test", "https://models.test/v1", False),
        ("", "https://models.test/v1", False),
        ("", "http://models.test/v1", True),
        ("", "https://localhost/v1", True),
        ("", "https://127.0.0.2/v1", True),
    ],
)
def test_no_proxy_names_what_is_reached_directly(
    monkeypatch: pytest.MonkeyPatch, exceptions: str, url: str, is_direct: bool
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.test:3128")
    monkeypatch.setenv("NO_PROXY", exceptions)
    assert proxy_of(url) == (None if is_direct else Proxy(url="http://proxy.test:3128"))


def test_a_proxys_password_is_not_in_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "user:hidden%20pass%3Aword@proxy.test:3128")
    proxy = proxy_of("https://models.test/v1")
    assert proxy == Proxy(url="http://proxy.test:3128", authorization="Basic dXNlcjpoaWRkZW4gcGFzczp3b3Jk")
    assert repr(proxy) == "Proxy(url='http://proxy.test:3128')"


async def test_a_server_with_an_unknown_certificate_is_a_transport_error(tmp_path: Path) -> None:
    file = certificate(tmp_path)
    async with serving_model("plain", tls=server_context(file)) as server:
        model = model_at(server.base_url)
        _, error = await failure(model, asking())
        await model.close()
        assert server.count == 0
    assert error.retry == TRANSPORT
    assert "CERTIFICATE_VERIFY_FAILED" in error.message


async def test_certificates_of_the_environment_are_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    async with serving_model("plain", tls=server_context(file)) as server:
        assert await text_from(server.base_url) == TEXT


async def test_a_file_of_certificates_that_is_missing_is_a_model_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    model = model_at("https://models.test/v1")
    _, error = await failure(model, asking())
    await model.close()
    assert (error.reason, error.retry) == (error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, None)
    assert "No such file" in error.message


async def test_a_connection_that_is_not_accepted_is_a_timeout() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):  # one more than the backlog: further connections wait
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        model = model_at(f"http://127.0.0.1:{full.getsockname()[1]}/v1", timeouts=Timeouts(start=0.3, idle=60))
        _, error = await failure(model, asking())
        await model.close()
    assert (error.reason, error.retry) == (error_pb2.ERROR_REASON_MODEL_TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT)
    assert "sent no response for 0.3 seconds" in error.message


def redirecting(status: int, location: str) -> Reply:
    return Reply(status=status, headers={"Location": location}, content_type="text/plain")


@pytest.mark.parametrize("status", [307, 308])
async def test_a_redirect_that_keeps_the_method_is_followed_without_the_key(status: int) -> None:
    async with serving_model("plain") as target:
        there = f"{target.base_url}/chat/completions"
        async with serving_model(lambda _: redirecting(status, there)) as server:
            assert await text_from(server.base_url, key="sk-key") == TEXT
            assert server.headers[-1]["Authorization"] == "Bearer sk-key"
        assert target.requests[-1] == server.requests[-1]
        assert "Authorization" not in target.headers[-1]
        assert target.headers[-1]["Host"] in there


async def test_a_redirect_on_the_same_server_keeps_the_key() -> None:
    replies = iter([redirecting(307, "/v1/responses"), plain({})])
    async with serving_model(lambda _: next(replies)) as server:
        assert await text_from(server.base_url, key="sk-key") == TEXT
        assert [headers["Authorization"] for headers in server.headers] == ["Bearer sk-key"] * 2


async def test_a_redirect_to_a_page_is_refused_as_that_server_says() -> None:
    async with serving_model("plain") as target:
        there = f"{target.base_url}/chat/completions"
        async with serving_model(lambda _: redirecting(302, there)) as server:
            model = model_at(server.base_url)
            _, error = await failure(model, asking())
            await model.close()
        assert target.count == 0
    assert error.provider_status == 405


async def test_redirects_without_end_are_a_transport_error() -> None:
    async with serving_model(lambda _: redirecting(307, "/v1/chat/completions")) as server:
        model = model_at(server.base_url)
        _, error = await failure(model, asking())
        await model.close()
        assert server.count == 20
    assert error.retry == TRANSPORT


async def test_the_client_addresses_and_signs_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-1")
    async with serving_model("plain") as server:
        model = model_at(f"{server.base_url}/", key="sk-key")
        await answer(model, asking())
        await answer(model, asking())
        await model.close()
        first, second = ({name.lower(): value for name, value in headers.items()} for headers in server.headers)
    assert first == second
    assert first["authorization"] == "Bearer sk-key"
    assert (first["openai-organization"], first["openai-project"]) == ("org-1", "project-1")
    assert first["user-agent"].startswith("AsyncOpenAI/")
    assert (first["content-type"], first["accept"]) == ("application/json", "text/event-stream")


async def test_an_answer_may_be_compressed() -> None:
    def reply(_: Request) -> Reply:
        body = gzip.compress(b"".join(plain({}).pieces))
        return Reply(pieces=(body[:100], body[100:]), headers={"Content-Encoding": "gzip"})

    async with serving_model(reply) as server:
        assert await text_from(server.base_url) == TEXT


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "No."}}', "No."),
        (b'{"detail": "Not that way."}', "Not that way."),
        (b'[{"error": {"message": "In a list."}}]', "In a list."),
        (b"  plain words\n", "plain words"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[" * 100_000, "[[["),
        (b"x" * 5_000_000, "xxx"),
        (b"", ""),
    ],
    ids=["error", "detail", "list", "text", "bytes", "nested", "large", "empty"],
)
async def test_a_refusal_says_what_its_body_says(body: bytes, said: str) -> None:
    async with serving_model(lambda _: Reply(status=418, pieces=(body,), content_type="text/plain")) as server:
        model = model_at(server.base_url)
        _, error = await failure(model, asking())
        await model.close()
    assert f"refused with status 418: {said}" in error.message
    assert (error.provider_status, error.retry) == (418, None)
    assert len(error.message) < 500


async def test_a_refusal_leaves_its_connection_for_the_next_call() -> None:
    replies = iter([Reply(status=429, pieces=(b"{}",), headers={"Retry-After": "7"}), plain({})])
    async with serving_model(lambda _: next(replies)) as server:
        model = model_at(server.base_url)
        _, error = await failure(model, asking())
        await answer(model, asking())
        await model.close()
        assert server.connections == 1
    assert (error.retry_after, error.retry) == (7.0, event_pb2.RETRY_REASON_RATE_LIMITED)


async def test_a_body_that_is_shorter_than_announced_is_a_transport_error() -> None:
    begun = b"".join(plain({}).pieces[:4])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9999\r\n\r\n" + begun)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        model = model_at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        deltas, error = await failure(model, asking())
        await model.close()
    assert text_of(deltas) == "word0 word1 word2 "
    assert error.retry == TRANSPORT


async def test_a_request_of_many_megabytes_is_sent_whole() -> None:
    received: list[int] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        received.append(len((await request.json())["messages"][0]["content"]))
        return web.Response(body=b"".join(plain({}).pieces), content_type="text/event-stream")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/chat/completions", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    model = model_at(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    await answer(model, asking(instruction="a" * 2**24))
    await model.close()
    await runner.cleanup()
    assert received == [2**24]
