"""Certificates that no system trusts: authorities, and what they issue for servers and clients on loopback."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)
LOOPBACK = x509.IPAddress(ip_address("127.0.0.1"))
FOR_CLIENTS, FOR_SERVERS = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate with its key, as PEM."""

    chain: bytes
    """The certificate; issuers follow if there are some between it and the authority."""
    key: bytes

    def write(self, cert_file: Path, key_file: Path | None = None) -> None:
        """Write the certificate and its key into two files, or both into one."""
        if key_file is None:
            cert_file.write_bytes(self.key + self.chain)
            return
        cert_file.write_bytes(self.chain)
        key_file.write_bytes(self.key)
        key_file.chmod(0o600)


class Authority:
    """Issues certificates; without an issuer its own is self-signed."""

    def __init__(self, name: str = "authority", issuer: "Authority | None" = None, *, ends: timedelta = DAY) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name, self._issuer = _common_name(name), issuer
        signer, subject = (self._key, self._name) if issuer is None else (issuer._key, issuer._name)
        builder = _builder(self._name, subject, self._key, ends=ends)
        self._certificate = builder.add_extension(x509.BasicConstraints(True, None), critical=True).sign(
            signer, hashes.SHA256()
        )

    @property
    def pem(self) -> bytes:
        """Its own certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        *names: x509.GeneralName,
        key: CertificateIssuerPrivateKeyTypes | None = None,
        usage: Sequence[x509.ObjectIdentifier] = (),
        begins: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> Issued:
        """Issue a certificate for these names, by default for 127.0.0.1 and for any use."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_common_name("issued"), self._name, key, begins=begins, ends=ends)
        builder = builder.add_extension(x509.SubjectAlternativeName(names or [LOOPBACK]), critical=False)
        if usage:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        own = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return Issued(chain=own + (b"" if self._issuer is None else self.pem), key=_key_pem(key))


def certificate(folder: Path, *names: str) -> Path:
    """Write a certificate of these host names and of 127.0.0.1, with its key, into a folder; return the file.

    It is self-signed, so who trusts the file trusts the certificate.
    """
    key, subject = ec.generate_private_key(ec.SECP256R1()), _common_name("models")
    places = [*map(x509.DNSName, names), LOOPBACK]
    signed = (
        _builder(subject, subject, key)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "models.pem"
    Issued(chain=signed.public_bytes(serialization.Encoding.PEM), key=_key_pem(key)).write(file)
    return file


def server_context(file: Path) -> ssl.SSLContext:
    """Return what a server presents this certificate with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_pem(key: CertificateIssuerPrivateKeyTypes) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: CertificateIssuerPrivateKeyTypes,
    *,
    begins: timedelta = -DAY,
    ends: timedelta = DAY,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begins - (DAY if ends < timedelta() else timedelta()))
        .not_valid_after(now + ends)
    )
