"""Certificates and keys are checked before a server uses them; every refusal names the file and what to do."""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from ssl import DER_cert_to_PEM_cert, PEM_cert_to_DER_cert

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from bough_server.certificates import (
    CertificateWithKey,
    is_readable_by_others,
    read_authorities,
    read_certificate,
)
from bough_server.errors import ConfigurationError
from tests.support.certificates import DAY, FOR_CLIENTS, FOR_SERVERS, Authority, Issued

AUTHORITY = Authority()
BETWEEN = Authority("between", AUTHORITY)


@cache
def good() -> Issued:
    return BETWEEN.issue(x509.DNSName("bough.example"), x509.IPAddress(ip_address("127.0.0.1")), usage=[FOR_SERVERS])


def read(issued: Issued, *, is_server: bool = True) -> CertificateWithKey:
    """Check a certificate as it would be in the files server.crt and server.key."""
    files = {"cert_file": Path("server.crt"), "key_file": Path("server.key")}
    return read_certificate(issued.chain, issued.key, **files, now=datetime.now(UTC), is_server=is_server)


def other(*, chain: bytes | None = None, key: bytes | None = None) -> Issued:
    """The good certificate with another chain or another key."""
    return Issued(chain=good().chain if chain is None else chain, key=good().key if key is None else key)


def encrypted() -> bytes:
    key = load_pem_private_key(good().key, None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


def test_a_certificate_that_clients_accept_is_returned_with_its_names_and_its_end() -> None:
    found = read(good())
    assert (found.chain, found.key, found.names) == (good().chain, good().key, ["bough.example", "127.0.0.1"])
    ends = [each.not_valid_after_utc for each in x509.load_pem_x509_certificates(good().chain)]
    assert found.expires == min(ends)
    assert "PRIVATE" not in repr(found)


@pytest.mark.parametrize(
    "make", [lambda: ec.generate_private_key(ec.SECP384R1()), lambda: rsa.generate_private_key(65537, 2048)]
)
def test_the_kinds_of_keys_that_all_clients_accept_are_taken(make: Callable[[], rsa.RSAPrivateKey]) -> None:
    assert read(AUTHORITY.issue(key=make())).names == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: other(chain=b""), "server.crt has no certificates, or one that is damaged"),
        (lambda: other(chain=b"\xff" * 99), "server.crt has no certificates, or one that is damaged"),
        (lambda: other(chain=good().key), "server.crt has no certificates, or one that is damaged"),
        (lambda: other(chain=good().chain[:-200]), "server.crt has no certificates, or one that is damaged"),
        (lambda: other(key=b""), "server.key has no private key"),
        (lambda: other(key=good().chain), "server.key has no private key"),
        (lambda: other(key=good().key[:-60]), "server.key has no private key"),
        (lambda: other(key=encrypted()), "server.key is encrypted"),
        (lambda: other(key=AUTHORITY.issue().key), "server.key is not the key of the certificate in server.crt"),
        (
            lambda: other(chain=BETWEEN.pem + good().chain),
            "server.key is not the key of the certificate in server.crt",
        ),
        (
            lambda: other(chain=good().chain.removesuffix(BETWEEN.pem) + AUTHORITY.pem),
            "server.crt: certificate 2 did not issue certificate 1",
        ),
        (lambda: AUTHORITY.issue(ends=-DAY), "server.crt: certificate 1 expired at "),
        (lambda: Authority("old", AUTHORITY, ends=-DAY).issue(), "server.crt: certificate 2 expired at "),
        (lambda: AUTHORITY.issue(begins=DAY, ends=2 * DAY), "server.crt: certificate 1 is not valid before "),
        (lambda: AUTHORITY.issue(usage=[FOR_CLIENTS]), "server.crt: the certificate is not for servers"),
        (
            lambda: AUTHORITY.issue(x509.UniformResourceIdentifier("spiffe://a/b")),
            "server.crt: the certificate is for no host",
        ),
        (lambda: AUTHORITY.issue(key=ed25519.Ed25519PrivateKey.generate()), "server.key has a key of a kind"),
        (lambda: AUTHORITY.issue(key=ec.generate_private_key(ec.SECP521R1())), "server.key has a key of a kind"),
        (lambda: AUTHORITY.issue(key=rsa.generate_private_key(65537, 1024)), "server.key has a key of a kind"),
    ],
)
def test_what_clients_would_not_accept_is_refused(make: Callable[[], Issued], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(problem)}") as refused:
        read(make())
    assert good().key.decode().splitlines()[1] not in refused.value.message


def test_a_certificate_of_a_client_needs_no_host_and_not_the_use_of_servers() -> None:
    issued = AUTHORITY.issue(x509.UniformResourceIdentifier("spiffe://a/b"), usage=[FOR_CLIENTS])
    assert read(issued, is_server=False).names == []
    with pytest.raises(ConfigurationError, match=r"^server\.key is not the key"):
        read(Issued(chain=issued.chain, key=good().key), is_server=False)


def test_a_file_that_is_still_being_written_is_never_used() -> None:
    whole = good()
    cuts = [Issued(chain=whole.chain[:end], key=whole.key) for end in range(len(whole.chain.rstrip()))]
    cuts += [Issued(chain=whole.chain, key=whole.key[:end]) for end in range(len(whole.key.rstrip()))]
    own = whole.chain.removesuffix(BETWEEN.pem).rstrip()
    taken = []
    for cut in cuts:
        try:
            taken.append(read(cut).chain.rstrip())
        except ConfigurationError:
            continue
    assert set(taken) <= {own}  # a whole certificate without its issuer is one of another authority


def test_a_certificate_of_which_any_byte_is_wrong_is_read_or_refused_and_nothing_else() -> None:
    issued = AUTHORITY.issue(usage=[FOR_SERVERS])
    der = PEM_cert_to_DER_cert(issued.chain.decode())
    for place in range(len(der)):
        for value in (0x00, 0xFF, der[place] ^ 0x01):
            broken = der[:place] + bytes([value]) + der[place + 1 :]
            with suppress(ConfigurationError):
                read(Issued(chain=DER_cert_to_PEM_cert(broken).encode(), key=issued.key))


def test_authorities_are_valid_if_one_of_them_is() -> None:
    now, file = datetime.now(UTC), Path("clients.crt")
    old = Authority("old", ends=-DAY).pem
    assert read_authorities(old + AUTHORITY.pem, file=file, now=now) == old + AUTHORITY.pem
    for pem, problem in ((old, "clients.crt: the last certificate"), (b"?", "clients.crt has no certificates")):
        with pytest.raises(ConfigurationError, match=f"^{problem}"):
            read_authorities(pem, file=file, now=now)


def test_a_key_that_every_user_can_read_is_noticed(tmp_path: Path) -> None:
    key = tmp_path / "server.key"
    key.write_bytes(good().key)
    key.chmod(0o640)
    assert not is_readable_by_others(key)
    key.chmod(0o644)
    assert is_readable_by_others(key)
