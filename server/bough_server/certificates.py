"""Certificates and private keys as PEM, checked before a server or a command uses them.

gRPC keeps its old certificate if it is given one that it cannot use, and says so on standard error only; a few kinds it
takes and then fails every handshake. `cryptography` is imported where it is used: it takes longer to load than most
commands run, and most servers and commands need none of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bough_server.errors import ConfigurationError

if TYPE_CHECKING:
    from cryptography import x509

_MIN_RSA_BITS: Final = 2048
_CURVES: Final = ("secp256r1", "secp384r1")
"""The curves that clients of gRPC accept; their handshakes with P-521 and Ed25519 fail."""

_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"

_OTHERS_READ: Final = 0o004


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateWithKey:
    """A certificate with its key, which have been checked."""

    chain: bytes
    """PEM: the certificate, and those that issued it."""
    key: bytes
    """PEM: its private key."""
    names: Sequence[str]
    """The host names and IP addresses that it is for."""
    expires: datetime
    """When the first certificate of the chain expires."""

    def __repr__(self) -> str:
        return f"CertificateWithKey(names={self.names!r}, expires={self.expires!r})"


def read_certificate(
    chain: bytes, key: bytes, *, cert_file: Path, key_file: Path, now: datetime, is_server: bool
) -> CertificateWithKey:
    """Return a certificate and its key, if the other side will accept them now. Raises ConfigurationError."""
    with _reading(cert_file):
        return _check_certificate(chain, key, cert_file=cert_file, key_file=key_file, now=now, is_server=is_server)


def _check_certificate(
    chain: bytes, key: bytes, *, cert_file: Path, key_file: Path, now: datetime, is_server: bool
) -> CertificateWithKey:
    certificates = _read_certificates(chain, cert_file)
    for number, certificate in enumerate(certificates, start=1):
        _check_dates(certificate, f"{cert_file}: certificate {number}", now)
    _check_key(key, certificates[0], cert_file=cert_file, key_file=key_file)
    for number, (issued, issuer) in enumerate(pairwise(certificates), start=2):
        if not _is_issued_by(issued, issuer):
            raise ConfigurationError(
                f"{cert_file}: certificate {number} did not issue certificate {number - 1}. The one that the key "
                "belongs to comes first, then each one's issuer."
            )
    if is_server:
        _check_use(certificates[0], cert_file)
    expires = min(each.not_valid_after_utc for each in certificates)
    return CertificateWithKey(chain=chain, key=key, names=_read_names(certificates[0]), expires=expires)


def read_authorities(pem: bytes, *, file: Path, now: datetime) -> bytes:
    """Return the authorities that issue certificates of clients, as they are in their file.

    Raises ConfigurationError if none of them is valid now. Expired ones beside it do no harm: gRPC accepts no client by
    them.
    """
    with _reading(file):
        certificates = _read_certificates(pem, file)
    if not any(each.not_valid_before_utc <= now <= each.not_valid_after_utc for each in certificates):
        _check_dates(certificates[-1], f"{file}: the last certificate, as all others,", now)
    return pem


def read_host_names(chain: bytes, *, file: Path) -> Sequence[str]:
    """Return the host names and IP addresses that a server's certificate is for. Raises ConfigurationError."""
    with _reading(file):
        return _read_names(_read_certificates(chain, file)[0])


def is_readable_by_others(file: Path) -> bool:
    """Return whether every user of this machine may read a file."""
    return bool(file.stat().st_mode & _OTHERS_READ)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Make the errors of a certificate that no authority issues, such as one with two extensions of a kind, ours."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception:  # those of cryptography have no class in common
        raise ConfigurationError(f"{file} has a certificate with parts that cannot be read: issue another.") from None


def _read_certificates(pem: bytes, file: Path) -> "list[x509.Certificate]":
    from cryptography import x509

    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError:
        certificates = []
    # A file that is still being written can end in the middle of a certificate, or in that of its first line.
    last_line = pem.rstrip().rpartition(b"\n")[2]
    is_cut = last_line.startswith(b"-") and not last_line.startswith(b"-----END ")
    if is_cut or not certificates or len(certificates) != pem.count(_BEGIN):
        raise ConfigurationError(
            f"{file} has no certificates, or one that is damaged: it must be PEM, with {_BEGIN.decode()} before each."
        )
    return certificates


def _check_dates(certificate: "x509.Certificate", which: str, now: datetime) -> None:
    if now > certificate.not_valid_after_utc:
        raise ConfigurationError(f"{which} expired at {certificate.not_valid_after_utc}: renew it.")
    if now < certificate.not_valid_before_utc:
        raise ConfigurationError(
            f"{which} is not valid before {certificate.not_valid_before_utc}: wait, or correct this machine's clock."
        )


def _check_key(pem: bytes, certificate: "x509.Certificate", *, cert_file: Path, key_file: Path) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    # The exceptions are not shown: none of them may quote the key.
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise ConfigurationError(
            f"{key_file} is encrypted, and the server has no passphrase for it: decrypt it, for example with "
            "`openssl pkey -in FILE -out FILE`."
        ) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigurationError(
            f"{key_file} has no private key: it must be PEM, such as -----BEGIN PRIVATE KEY-----."
        ) from None
    is_rsa = isinstance(key, rsa.RSAPrivateKey) and key.key_size >= _MIN_RSA_BITS
    if not is_rsa and not (isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES):
        raise ConfigurationError(
            f"{key_file} has a key of a kind that not all clients and servers accept: use ECDSA with P-256 or P-384, "
            f"or RSA with {_MIN_RSA_BITS:,} bits or more."
        )
    encoded = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*encoded) != certificate.public_key().public_bytes(*encoded):
        raise ConfigurationError(
            f"{key_file} is not the key of the certificate in {cert_file}: take files that were made together. The "
            "certificate that the key belongs to comes first in its file."
        )


def _is_issued_by(issued: "x509.Certificate", issuer: "x509.Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        issued.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _check_use(certificate: "x509.Certificate", file: Path) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        usage = None
    if usage is not None and ExtendedKeyUsageOID.SERVER_AUTH not in usage:
        raise ConfigurationError(
            f"{file}: the certificate is not for servers: issue one with the extended key usage serverAuth."
        )
    if not _read_names(certificate):
        raise ConfigurationError(
            f"{file}: the certificate is for no host: issue one with a DNS name or an IP address as its subject "
            "alternative name, since clients ignore its common name."
        )


def _read_names(certificate: "x509.Certificate") -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return [*names.get_values_for_type(x509.DNSName), *addresses]
