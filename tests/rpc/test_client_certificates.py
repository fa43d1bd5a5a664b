"""Callers by the certificates of their connections: the id of one, and what is no id."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc import aio

from bough.v1 import access_service_pb2
from bough.v1.access_service_pb2_grpc import add_AccessServiceServicer_to_server
from bough_server.api.access_service import AccessService
from bough_server.auth.authentication import Authenticator
from bough_server.auth.certificates import Certificates, Peer
from bough_server.auth.sections import AuthSection, CertificateSection
from bough_server.clock import SystemClock
from bough_server.errors import Unauthenticated
from bough_server.interceptors.auth import current_caller
from bough_server.interceptors.chain import interceptors
from tests.rpc.test_callers import INVALID, MISSING, refusal
from tests.support.callers import CallerStubs, KeyRing, bearer, stubs

TABLE: Final[Sequence[dict[str, Any]]] = (
    {"id": "spiffe://acme.example/ns/jobs/", "tenant": "acme", "user": "jobs", "roles": ["RUN"]},
    {"id": "spiffe://acme.example/ns/jobs/nightly/", "tenant": "acme", "user": "nightly"},
    {"id": "spiffe://acme.example/ns/ops", "tenant": "acme", "user": "ops", "roles": ["ADMIN"], "groups": ["finance"]},
    {"id": "spiffe://acme.example/mesh", "tenant": "acme", "user": "mesh", "acts_for": "users"},
)
WHO: Final = access_service_pb2.GetCallerRequest()


class Authority:
    """An authority that signs certificates."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.certificate = self._sign(self._key, self._name, None)

    def issue(self, *names: x509.GeneralName, common_name: str = "client") -> tuple[bytes, bytes]:
        """Return a key and its certificate with these alternative names, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return pem, self._sign(key, subject, names)

    def _sign(
        self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, names: Sequence[x509.GeneralName] | None
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder(subject_name=subject, issuer_name=self._name, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=names is None, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@asynccontextmanager
async def connected(authority: Authority, address: str, *names: x509.GeneralName, **named: str) -> AsyncIterator[Any]:
    """Connect with a certificate of these names."""
    key, chain = authority.issue(*names, **named)
    credentials = grpc.ssl_channel_credentials(authority.certificate, key, chain)
    async with aio.secure_channel(address, credentials) as channel:
        yield channel


@pytest.fixture(scope="module")
def authority() -> Authority:
    """The authority that the server and its clients trust."""
    return Authority()


@pytest.fixture
async def address(tmp_path: Path, authority: Authority) -> AsyncIterator[str]:
    """A port that asks every client for a certificate."""
    ring = KeyRing(tmp_path / "keys.yaml")
    ring.add("anne")
    ring.add("beta", tenant="beta")
    section = AuthSection.model_validate({"certificates": TABLE, **ring.auth})
    authenticator = Authenticator(section, {"*"}, clock=SystemClock())
    server = aio.server(interceptors=interceptors(None, authenticator=authenticator))
    add_AccessServiceServicer_to_server(AccessService(caller=current_caller), server)
    key, chain = authority.issue(x509.IPAddress(ip_address("127.0.0.1")), common_name="server")
    pairs = [(key, chain)]
    credentials = grpc.ssl_server_credentials(pairs, authority.certificate, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


def uri(text: str) -> x509.GeneralName:
    """Return an alternative name that is a URI."""
    return x509.UniformResourceIdentifier(text)


async def who(caller: CallerStubs) -> tuple[str, str, str]:
    """Return tenant, user and proof of a caller."""
    known = await caller.access.GetCaller(WHO)
    return known.tenant_id, known.user_id, known.via


async def test_the_only_uri_of_a_certificate_is_its_id(authority: Authority, address: str) -> None:
    for path, user in (("ns/jobs/daily", "jobs"), ("ns/jobs/nightly/x", "nightly"), ("ns/ops", "ops")):
        spiffe_id = f"spiffe://acme.example/{path}"
        async with connected(authority, address, uri(spiffe_id), x509.DNSName("jobs.example")) as channel:
            assert await who(stubs(channel)) == ("acme", user, f"certificate/{spiffe_id}")


async def test_what_is_no_id_proves_nothing(authority: Authority, address: str) -> None:
    ops = "spiffe://acme.example/ns/ops"
    for names, common_name in (
        ((uri(ops), uri("spiffe://acme.example/ns/jobs/a")), "client"),
        ((x509.DNSName(ops),), "client"),
        ((x509.RFC822Name("spiffe@acme.example"),), "client"),
        ((), ops),
        ((uri("spiffe://acme.example/ns/other"),), "client"),
        ((uri("spiffe://acme.example/ns/jobs"),), "client"),
        ((uri("spiffe://beta.example/ns/ops"),), "client"),
        ((uri("https://acme.example/ns/ops"),), "client"),
        ((uri("spiffe://acme.example/ns/jobs/../ops"),), "client"),
        ((uri("spiffe://acme.example/ns/jobs/%2e%2e"),), "client"),
        ((uri("spiffe://acme.example/ns/jobs//x"),), "client"),
        ((uri("SPIFFE://acme.example/ns/ops"),), "client"),
    ):
        async with connected(authority, address, *names, common_name=common_name) as channel:
            assert await refusal(stubs(channel).access.GetCaller(WHO)) == INVALID, names


async def test_a_token_beside_a_certificate_is_of_its_tenant(
    authority: Authority, address: str, tmp_path: Path
) -> None:
    ring = KeyRing(tmp_path / "keys.yaml")
    async with connected(authority, address, uri("spiffe://acme.example/ns/ops")) as channel:
        assert await who(stubs(channel, bearer(ring.key("anne")))) == ("acme", "anne", "key/anne")
        assert await refusal(stubs(channel, bearer(ring.key("beta"))).access.GetCaller(WHO)) == INVALID
    async with connected(authority, address, uri("spiffe://acme.example/mesh")) as channel:
        named = stubs(channel, ("bough-user-id", "bert"))
        assert await who(named) == ("acme", "bert", "certificate/spiffe://acme.example/mesh")


async def test_a_connection_without_a_certificate_needs_a_token(tmp_path: Path) -> None:
    section = AuthSection.model_validate({"certificates": TABLE})
    authenticator = Authenticator(section, {"*"}, clock=SystemClock())
    with pytest.raises(Unauthenticated) as caught:
        await authenticator.prove([], Peer())
    assert caught.value.message == MISSING[1]


def test_the_table_names_what_is_wrong() -> None:
    for wrong in ("https://a/b", "spiffe://A/b", "spiffe://a/b%20", "spiffe://a/../b", "spiffe://a//", "spiffe://"):
        with pytest.raises(ValueError, match="must be as spiffe://"):
            CertificateSection.model_validate({"id": wrong, "tenant": "acme", "user": "u"})
    twice = [TABLE[0], TABLE[0]]
    with pytest.raises(ValueError, match="names the id of a certificate twice"):
        AuthSection.model_validate({"certificates": twice})
    whole = Certificates([CertificateSection.model_validate({"id": "spiffe://a/", "tenant": "acme", "user": "u"})])
    peer = Peer(has_certificate=True, uris=[b"spiffe://a/x"])
    assert whole.check(peer).caller.principal.user_id == "u"
