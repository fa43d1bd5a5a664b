"""An OpenID Connect issuer on loopback, which signs tokens and can fail in many ways."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

Behavior = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Issuer:
    """An issuer with the key `first`, an RSA key of 2048 bits."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.add("first")
        self.url = ""
        self.fetches = 0
        """How often its keys were fetched."""
        self.behavior: Behavior | None = None
        """What answers instead of the keys."""

    def add(self, key_id: str, *, bits: int = 2048) -> None:
        """Publish another RSA key."""
        self.keys[key_id] = rsa.generate_private_key(public_exponent=65537, key_size=bits)

    def add_curve(self, key_id: str) -> None:
        """Publish a key for ES256."""
        self.keys[key_id] = ec.generate_private_key(ec.SECP256R1())

    def key_set(self) -> dict[str, Any]:
        """Return the published keys."""
        return {"keys": [{**_public(key), "kid": name} for name, key in self.keys.items()]}

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Return the claims of a valid token with some changes; None leaves a claim out."""
        now = int(time.time())
        claims = {"iss": self.url, "aud": "bough", "sub": "anne", "org": "acme", "iat": now, "exp": now + 600}
        return {name: value for name, value in (claims | changes).items() if value is not None}

    def token(self, *, key_id: str = "first", headers: dict[str, Any] | None = None, **changes: Any) -> str:
        """Return a token with these claims, signed by one of the keys."""
        key = self.keys[key_id]
        algorithm = "ES256" if isinstance(key, ec.EllipticCurvePrivateKey) else "RS256"
        return jwt.encode(self.claims(**changes), key, algorithm=algorithm, headers={"kid": key_id, **(headers or {})})

    def section(self, **changes: Any) -> dict[str, Any]:
        """Return the item of `auth.oidc` for this issuer."""
        claims = {"tenant_claim": "org", "roles_claim": "roles", "groups_claim": "groups"}
        return {"issuer": self.url, "audience": "bough", **claims, **changes}

    async def _configuration(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    async def _keys(self, request: web.Request) -> web.StreamResponse:
        self.fetches += 1
        if self.behavior is not None:
            return await self.behavior(request)
        return web.json_response(self.key_set())

    def app(self) -> web.Application:
        """Return the application that serves the issuer."""
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._configuration)
        app.router.add_get("/keys", self._keys)
        return app


def _public(key: Any) -> dict[str, Any]:
    algorithm = ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else RSAAlgorithm
    found: dict[str, Any] = json.loads(algorithm.to_jwk(key.public_key()))
    return found


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    """Serve an issuer."""
    issuer = Issuer()
    runner = web.AppRunner(issuer.app(), handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield issuer
    finally:
        await runner.cleanup()


async def hang(_: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def drip(request: web.Request) -> web.StreamResponse:
    """Answer in pieces that never end."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


async def flood(request: web.Request) -> web.StreamResponse:
    """Answer with 100 MB."""
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(100):
        await response.write(b" " * 1_000_000)
    return response
