"""The ports of a server and their certificates, which are replaced while it serves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeAlias

import grpc
import structlog
from grpc import aio

from bough_server.certificates import CertificateWithKey, is_readable_by_others, read_authorities, read_certificate
from bough_server.clock import Clock
from bough_server.documents.yaml import FieldPath
from bough_server.errors import ConfigurationError, Problem
from bough_server.settings_sections import MutualTlsSection, ServerSection, TlsSection
from bough_server.watched_files import WatchedFile

Locate: TypeAlias = Callable[[FieldPath, str], Problem]
"""Returns a problem at a setting, with its file and line."""

_WITHOUT_TLS: Final = (
    "Calls would not be encrypted: set server.tls, or pass --allow-no-tls if a proxy or a mesh encrypts them."
)
_WITHOUT_AUTH: Final = (
    "Every caller would be the same user: configure auth, or pass --allow-no-auth if only trusted callers reach it."
)

_log = structlog.get_logger(__name__)


class TlsFiles:
    """The certificate of a server and the authorities of its clients, as their files have them."""

    def __init__(self, section: ServerSection, locate: Locate, clock: Clock) -> None:
        """Read the files of a section that has `tls`. Raises ConfigurationError, located in the configuration."""
        assert section.tls is not None
        own, mtls = section.tls, section.mtls
        with _locating(locate, "tls"):
            self.certificate: WatchedFile[CertificateWithKey] = WatchedFile(
                (own.cert_file, own.key_file), partial(_read_pair, own, clock), _report
            )
        self.authorities: WatchedFile[bytes] | None = None
        if mtls is not None:
            with _locating(locate, "mtls"):
                self.authorities = WatchedFile(mtls.client_ca_file, partial(_read_authorities, mtls, clock), _report)
        if is_readable_by_others(own.key_file):
            _log.warning(
                "every user of this machine can read the server's private key: remove the right, as `chmod o-r` does",
                file=str(own.key_file),
            )

    @property
    def watched(self) -> tuple[WatchedFile[CertificateWithKey] | WatchedFile[bytes], ...]:
        """All files."""
        return (self.certificate,) if self.authorities is None else (self.certificate, self.authorities)

    def count_refused_files(self) -> int:
        """Return how many of the certificate and the authorities are not used as their files have them now."""
        return sum(bool(each.problem) for each in self.watched)

    def make_credentials(self, *, asks_clients: bool) -> grpc.ServerCredentials:
        """Return the credentials of a port: the present files at each handshake."""
        present = self._present(asks_clients)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            # gRPC calls this at every handshake, in one of its threads, one at a time.
            nonlocal present
            found = self._present(asks_clients)
            if found == present:
                return None  # it keeps what it has
            present = found
            return _configure(*found)

        return grpc.dynamic_ssl_server_credentials(
            _configure(*present),
            fetch,  # type: ignore[arg-type] # None is documented, and missing in the types
            asks_clients,
        )

    def _present(self, asks_clients: bool) -> tuple[CertificateWithKey, bytes | None]:
        asked = self.authorities if asks_clients else None
        return self.certificate.value, None if asked is None else asked.value


def bind_ports(server: aio.Server, section: ServerSection, tls: TlsFiles | None) -> tuple[str, str]:
    """Bind a server's port, and the one that asks for certificates; return their HOST:PORT, the second may be empty.

    Raises ConfigurationError.
    """
    own = grpc.insecure_server_credentials() if tls is None else tls.make_credentials(asks_clients=False)
    address = bind_port(server, section.host, section.port, own)
    if tls is None or section.mtls is None:
        return address, ""
    mutual = tls.make_credentials(asks_clients=True)
    return address, bind_port(server, section.host, section.mtls.port, mutual, setting="server.mtls.port")


def bind_port(
    server: aio.Server, host: str, port: int, credentials: grpc.ServerCredentials, *, setting: str = "--port"
) -> str:
    """Bind a port of a server and return HOST:PORT. Raises ConfigurationError if it cannot be bound."""
    name = f"[{host}]" if ":" in host else host
    try:
        bound = server.add_secure_port(f"{name}:{port}", credentials)
    except RuntimeError as error:
        raise ConfigurationError(
            f"Port {port} of {host} cannot be bound; it is probably in use. "
            f"Choose another with {setting}, or 0 for any free one."
        ) from error
    return f"{name}:{bound}"


def check_exposure(section: ServerSection, *, has_auth: bool) -> None:
    """Raise ConfigurationError for a server that others could reach without TLS or as anyone, unless that is allowed.

    What is allowed is logged as a warning.
    """
    if section.is_loopback():
        return
    missing = []
    if section.tls is None and not (section.allow_no_tls or section.allow_insecure):
        missing.append(_WITHOUT_TLS)
    if not has_auth and not (section.allow_no_auth or section.allow_insecure):
        missing.append(_WITHOUT_AUTH)
    if missing:
        raise ConfigurationError(f"{section.host} is not a loopback address. {' '.join(missing)}")
    if section.tls is None:
        _log.warning("calls are not encrypted: only a proxy or a mesh may reach this port", host=section.host)
    if not has_auth:
        _log.warning("callers are not authenticated: all that reach this port are one user", host=section.host)


@contextmanager
def _locating(locate: Locate, section: str) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(str(locate(("server", section), error.message))) from None


def _configure(own: CertificateWithKey, authorities: bytes | None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(own.key, own.chain)], authorities)


def _read_pair(tls: TlsSection, clock: Clock, chain: bytes, key: bytes) -> CertificateWithKey:
    files = {"cert_file": tls.cert_file, "key_file": tls.key_file}
    return read_certificate(chain, key, **files, now=_now(clock), is_server=True)


def _read_authorities(mtls: MutualTlsSection, clock: Clock, pem: bytes) -> bytes:
    return read_authorities(pem, file=mtls.client_ca_file, now=_now(clock))


def _now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.now_ns() / 1e9, UTC)


def _report(problem: str) -> None:
    _log.error("a changed file is not used: the server keeps what it had before", problem=problem)
