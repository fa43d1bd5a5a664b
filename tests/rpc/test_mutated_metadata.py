"""Metadata that no client sends: each call ends with a clear status, proves what the rules say, and leaks nothing."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import aio
from structlog.testing import capture_logs

from bough.v1 import access_service_pb2
from bough_server.auth.authentication import TENANT_KEY, USER_KEY, Authenticator
from bough_server.auth.certificates import Peer
from bough_server.auth.sections import AuthSection
from bough_server.clock import SystemClock
from bough_server.errors import InvalidRequest, Unauthenticated
from bough_server.identity import Principal, is_user
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, served, settings
from tests.support.callers import KeyRing, stubs

Entry: TypeAlias = tuple[str, str | bytes]

WHO: Final = access_service_pb2.GetCallerRequest()
PEER: Final = Peer()
KEYS: Final = {"anne": None, "backend": "users", "broker": "tenants"}
"""The keys, and for whom each may act."""

VALUES: Final = (
    "bert",
    "acme",
    "beta",
    "",
    " ",
    "bough/rules",
    "x" * 129,
    "ü",
    "a\0b",
    "a\ud800b",
    "a,b",
    "\x7f",
    "Bearer",
)
NAMES: Final = ("authorization", USER_KEY, TENANT_KEY)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    """A key without and two with the right to act for others."""
    made = KeyRing(tmp_path / "keys.yaml")
    for key_id, acts_for in KEYS.items():
        made.add(key_id, **({} if acts_for is None else {"acts_for": acts_for}))
    return made


@pytest.fixture
async def server(tmp_path: Path, ring: KeyRing) -> AsyncIterator[Served]:
    """A server that takes these keys."""
    async with served(settings(tmp_path, auth=ring.auth, tenants={"acme": {}, "beta": {}})) as serving:
        yield serving


def mutate(chance: random.Random, ring: KeyRing) -> list[Entry]:
    """Return the metadata of a call of a backend, changed in up to four ways."""
    key = ring.key(chance.choice(list(KEYS)))
    entries: list[Entry] = [("authorization", f"Bearer {key}"), (USER_KEY, "bert")]
    for _ in range(chance.randint(0, 4)):
        place = chance.randrange(len(entries)) if entries else 0
        name, value = entries[place] if entries else ("authorization", "")
        match chance.randrange(8):
            case 0:  # another value
                entries[place : place + 1] = [(name, chance.choice(VALUES))]
            case 1:  # twice
                entries.append((name, value))
            case 2:  # none
                entries[place : place + 1] = []
            case 3:  # a character of the value
                text = list(str(value)) or ["x"]
                text[chance.randrange(len(text))] = chance.choice("\0\t\n ,=%-_Aa0~\x80\u0100\ud800")
                entries[place : place + 1] = [(name, "".join(text))]
            case 4:  # another name
                entries[place : place + 1] = [(chance.choice(NAMES), value)]
            case 5:  # binary
                entries.append((f"{chance.choice(NAMES)}-bin", chance.randbytes(chance.randrange(40))))
            case 6:  # huge
                entries.append((chance.choice(NAMES), "x" * chance.choice([1_000, 4_000, 20_000])))
            case _:  # another scheme, or spaces
                scheme = chance.choice(["bearer", "BEARER ", "Basic", "Bearer  ", "", "Bearer\t"])
                entries.append(("authorization", f"{scheme} {key} "))
    return entries


def find_expected(entries: Sequence[Entry], ring: KeyRing) -> Principal | None:
    """Return whom metadata proves by the rules of docs/how-to/callers.md; None if the call is refused."""
    values = {name: [value for key, value in entries if key == name] for name in NAMES}
    is_usable = all(len(found) <= 1 and all(isinstance(each, str) for each in found) for found in values.values())
    if not is_usable or not values["authorization"]:
        return None
    scheme, _, token = str(values["authorization"][0]).partition(" ")
    key_id = next((each for each in KEYS if ring.key(each) == token.strip()), None)
    if scheme.lower() != "bearer" or key_id is None:
        return None
    user, tenant = ([*map(str, values[name]), None][0] for name in (USER_KEY, TENANT_KEY))
    if not (user or "").isascii():
        return None
    acts_for = KEYS[key_id]
    if user is None and tenant is None:
        return Principal(tenant_id="acme", user_id=key_id)
    is_allowed = acts_for is not None and (tenant is None or acts_for == "tenants")
    if not is_allowed or user is None or not is_user(user) or (tenant is not None and tenant not in ("acme", "beta")):
        return None
    return Principal(tenant_id=tenant or "acme", user_id=user)


def check_text(text: str, ring: KeyRing) -> None:
    """Fail if a text has the secret of a key."""
    for key_id in KEYS:
        assert ring.key(key_id)[-40:] not in text


async def prove_mutations(ring: KeyRing, *, count: int, seed: int) -> None:
    """Prove so many calls with mutated metadata, without a server."""
    section = AuthSection.model_validate(ring.auth)
    authenticator = Authenticator(section, {"acme", "beta"}, clock=SystemClock())
    chance = random.Random(seed)
    for _ in range(count):
        entries = mutate(chance, ring)
        found = None
        try:
            found = (await authenticator.prove(entries, PEER)).caller.principal
        except Unauthenticated as error:
            check_text(f"{error.message} {error.why}", ring)
        except InvalidRequest as error:
            check_text(error.message, ring)
        assert found == find_expected(entries, ring), entries


def is_sendable(entries: Sequence[Entry]) -> bool:
    """Return whether a client of gRPC sends metadata: text of printable ASCII, and bytes for names that end in -bin."""
    return all(
        isinstance(value, bytes) if name.endswith("-bin") else isinstance(value, str) and _is_plain(value)
        for name, value in entries
    )


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()


async def call(channel: aio.Channel, entries: Sequence[Entry]) -> tuple[Principal | None, aio.AioRpcError | None]:
    """Make a call with metadata; return whom the server takes the caller for, or the error."""
    try:
        known = await stubs(channel, *entries).access.GetCaller(WHO)  # type: ignore[arg-type] # bytes too
    except aio.AioRpcError as error:
        return None, error
    return Principal(tenant_id=known.tenant_id, user_id=known.user_id), None


async def call_mutations(server: Served, ring: KeyRing, *, count: int, seed: int) -> set[grpc.StatusCode]:
    """Make so many calls with mutated metadata, as far as gRPC sends them; return how they ended."""
    chance, ends = random.Random(seed), {grpc.StatusCode.OK}
    for _ in range(count):
        entries = mutate(chance, ring)
        if not is_sendable(entries):
            continue
        found, error = await call(server.channel, entries)
        if error is not None:
            ends.add(error.code())
            check_text(str(error), ring)
        if error is None or error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
            assert found == find_expected(entries, ring), entries
        else:  # gRPC's own, of metadata that is too large
            assert sum(len(value) for _, value in entries) > 8_000
        if error is not None and error.code() in REASONS:
            assert status_details(error)[0] == ErrorInfo(reason=REASONS[error.code()], domain="bough.dev")
    return ends


REASONS: Final = {
    grpc.StatusCode.UNAUTHENTICATED: "UNAUTHENTICATED",
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_REQUEST",
}


async def test_mutated_metadata_proves_a_caller_by_the_rules_or_is_refused(ring: KeyRing) -> None:
    await prove_mutations(ring, count=3_000, seed=26)


async def test_calls_with_mutated_metadata_end_with_a_clear_status(server: Served, ring: KeyRing) -> None:
    with capture_logs() as logged:
        ends = await call_mutations(server, ring, count=300, seed=26)
    assert ends == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, *REASONS}
    assert {line["log_level"] for line in logged} == {"info"}
    check_text(str(logged), ring)


# Frames of HTTP/2, for headers that a client of gRPC does not send.

SETTINGS, HEADERS, DATA = 0x4, 0x1, 0x0
END_STREAM, END_HEADERS = 0x1, 0x4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Return a header field in HPACK, as a literal that is not indexed."""
    return b"\0" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)])
    rest, octets = len(text) - 127, [127]
    while rest >= 128:
        octets.append(rest % 128 + 128)
        rest //= 128
    return bytes([*octets, rest])


def call_frames(stream: int, *headers: tuple[bytes, bytes]) -> bytes:
    """Return the frames of a call of GetCaller."""
    path = b"/bough.v1.AccessService/GetCaller"
    fixed = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"localhost"))
    fields = (*fixed, (b"content-type", b"application/grpc"), (b"te", b"trailers"), *headers)
    block = b"".join(header(*field) for field in fields)
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, b"\0" * 5)


async def call_raw(address: str, *headers: tuple[bytes, bytes]) -> int:
    """Make a call with headers as they are; return the code of its status."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"") + call_frames(1, *headers))
    try:
        while True:
            begin = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(begin[:3]))
            if begin[3] == HEADERS and begin[4] & END_STREAM:
                # The first of the connection, so that gRPC spells it out: the name, the length of the value, the value.
                _, _, status = payload.partition(b"grpc-status")
                return int(status[1 : 1 + status[0]])
    finally:
        writer.close()


async def test_headers_that_are_no_text_are_refused_as_what_they_stand_for(server: Served, ring: KeyRing) -> None:
    address, proof = server.app.address, b"Bearer " + ring.key("backend").encode()
    ends = {}
    with capture_logs() as logged:
        for value in (b"bert", b"a\0b", b"\xff\xfe", "ü".encode(), b"a\r\nb: c", b"\xed\xa0\x80"):
            named = await call_raw(address, (b"authorization", proof), (USER_KEY.encode(), value))
            ends[value] = named, await call_raw(address, (b"authorization", proof + value))
    refused = grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.UNAUTHENTICATED.value[0]
    assert ends == {**dict.fromkeys(ends, refused), b"bert": (0, refused[1])}
    check_text(str(logged), ring)
    found, _ = await call(server.channel, [("authorization", proof.decode())])
    assert found == Principal(tenant_id="acme", user_id="backend")
