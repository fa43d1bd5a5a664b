"""The public keys of an issuer: fetched in the background, and kept while the issuer cannot be reached."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Final

import structlog

from bough_server.auth.sections import OidcSection, check_address
from bough_server.clock import Clock

if TYPE_CHECKING:
    import aiohttp
    from jwt import PyJWK

MAX_BYTES: Final = 1024 * 1024
"""The most bytes of an answer of an issuer."""

MAX_KEYS: Final = 64
"""The most keys of an issuer."""

_TOTAL_SECONDS: Final = 5.0
"""How long one request to an issuer may take in all, in whatever pieces its answer arrives."""

_REFRESH_SECONDS: Final = 300.0
RETRY_SECONDS: Final = 30.0
"""After a failure, and between two requests because of a key that is not known."""

WAIT_SECONDS: Final = 2.0
"""How long a call waits for the keys to be fetched because of the one that it needs."""

_STALE_SECONDS: Final = 24 * 3600.0
"""How long keys are used while the issuer cannot be reached."""

_KEY_TYPES: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
"""The types of the keys of signatures, by how their names begin."""

_CURVES: Final = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}

_PUBLIC: Final = frozenset({"kty", "n", "e", "crv", "x", "y"})
"""What is read of a key, so that a private one that was published by mistake is not."""

_log = structlog.get_logger(__name__)


class IssuerUnavailable(Exception):
    """An issuer whose keys could not be fetched; the message says why."""


class IssuerKeys:
    """The keys of one issuer, by their ids and the signatures that they make."""

    def __init__(self, section: OidcSection, *, clock: Clock, on_problem: Callable[[], None]) -> None:
        """`on_problem` is called whenever the keys could not be fetched."""
        self._section, self._clock, self._on_problem = section, clock, on_problem
        self._keys: Mapping[tuple[str, str], PyJWK] = {}
        self._fetch_time = -inf
        self._next_fetch = -inf
        self._fetching: asyncio.Task[None] | None = None
        self.version = 0
        """Counts the changes of the keys."""

    async def refresh(self) -> None:
        """Fetch the keys every few minutes, until cancelled."""
        try:
            while True:
                await self._fetch_once()
                has_failed = self._fetch_time < self._clock.monotonic() - RETRY_SECONDS
                await self._clock.sleep(RETRY_SECONDS if has_failed else _REFRESH_SECONDS)
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop fetching."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait({self._fetching})

    async def find(self, key_id: str | None, algorithm: str) -> "PyJWK | None":
        """Return a key; None if the issuer has none of that id for that signature.

        One that is not known is fetched, but only once in a while: issuers publish a key before they use it.
        """
        found = self._find(key_id, algorithm)
        if found is None and self._clock.monotonic() >= self._next_fetch:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._fetch_once(), WAIT_SECONDS)
            found = self._find(key_id, algorithm)
        return found

    def _find(self, key_id: str | None, algorithm: str) -> "PyJWK | None":
        if self._clock.monotonic() > self._fetch_time + _STALE_SECONDS:
            return None
        if key_id is not None:
            return self._keys.get((key_id, algorithm))
        fitting = [key for (_, signs), key in self._keys.items() if signs == algorithm]
        return fitting[0] if len(fitting) == 1 else None

    async def _fetch_once(self) -> None:
        """Fetch the keys, together with all who wait for it; return however that ends."""
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.create_task(self._fetch())
        await asyncio.shield(self._fetching)

    async def _fetch(self) -> None:
        issuer = self._section.issuer
        try:
            keys = await fetch_keys(self._section)
        except IssuerUnavailable as error:
            _log.warning("the keys of an issuer could not be fetched", issuer=issuer, error=str(error))
            self._on_problem()
        except Exception:  # of a package: the task that fetches must not end with it
            _log.exception("the keys of an issuer could not be fetched", issuer=issuer)
            self._on_problem()
        else:
            self._fetch_time = self._clock.monotonic()
            if {name: key.key for name, key in keys.items()} != {name: key.key for name, key in self._keys.items()}:
                _log.info("the keys of an issuer have changed", issuer=issuer, keys=sorted({name for name, _ in keys}))
                self._keys = keys
                self.version += 1
        finally:
            self._next_fetch = self._clock.monotonic() + RETRY_SECONDS


async def fetch_keys(section: OidcSection) -> "Mapping[tuple[str, str], PyJWK]":
    """Fetch the usable keys of an issuer, by their ids and algorithms. Raises IssuerUnavailable."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_TOTAL_SECONDS)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            address = section.jwks_url or await _discover(session, section.issuer)
            document = await _get(session, address)
    except TimeoutError:
        raise IssuerUnavailable(f"It did not answer within {_TOTAL_SECONDS:g} s.") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise IssuerUnavailable(f"{type(error).__name__}: {error}") from error
    return parse_keys(document, section.algorithms)


async def _discover(session: "aiohttp.ClientSession", issuer: str) -> str:
    """Return the address of an issuer's keys."""
    document = await _get(session, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    if not isinstance(document, dict) or document.get("issuer") != issuer:
        raise IssuerUnavailable("Its openid-configuration is not that of this issuer.")
    address = document.get("jwks_uri")
    if not isinstance(address, str):
        raise IssuerUnavailable("Its openid-configuration has no jwks_uri.")
    try:
        return check_address(address)
    except ValueError as error:
        raise IssuerUnavailable(f"Its jwks_uri {error}.") from None


async def _get(session: "aiohttp.ClientSession", address: str) -> object:
    """Return the JSON at an address. Raises IssuerUnavailable, and what aiohttp raises."""
    async with session.get(address, allow_redirects=False) as response:
        if response.status != 200:
            raise IssuerUnavailable(f"{address} answered with status {response.status}.")
        data = bytearray()
        async for piece in response.content.iter_any():
            data += piece
            if len(data) > MAX_BYTES:
                raise IssuerUnavailable(f"{address} answered with more than {MAX_BYTES // 1024} KiB.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise IssuerUnavailable(f"{address} did not answer with JSON.") from None


def parse_keys(document: object, algorithms: Sequence[str]) -> "Mapping[tuple[str, str], PyJWK]":
    """Return the usable keys of a key set by their ids and algorithms. Raises IssuerUnavailable if it is not sound."""
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise IssuerUnavailable("Its key set has no list of keys.")
    if len(entries) > MAX_KEYS:
        raise IssuerUnavailable(f"Its key set has more than {MAX_KEYS} keys.")
    keys: dict[tuple[str, str], PyJWK] = {}
    seen: set[str] = set()
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
            continue
        key_id = entry.get("kid", "")
        if not isinstance(key_id, str) or key_id in seen:
            raise IssuerUnavailable("Its key set has two keys of one kid." if key_id in seen else "A kid is no text.")
        seen.add(key_id)
        for algorithm in algorithms:
            if (key := _read_key(entry, algorithm)) is not None:
                keys[key_id, algorithm] = key
    if not keys:
        raise IssuerUnavailable("Its key set has no key that makes the signatures of auth.oidc.")
    return keys


def _read_key(entry: Mapping[str, object], algorithm: str) -> "PyJWK | None":
    """Return an entry of a key set as a key for a signature; None if it is for others, or broken."""
    import jwt

    kind = entry.get("kty")
    if kind != _KEY_TYPES[algorithm[:2]] or entry.get("alg", algorithm) != algorithm:
        return None
    if kind == "EC" and entry.get("crv") != _CURVES[algorithm]:
        return None
    public = {name: value for name, value in entry.items() if name in _PUBLIC}
    try:
        return jwt.PyJWK(public, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        return None
