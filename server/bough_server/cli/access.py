"""How commands reach a server: plaintext or TLS, their certificate, and their token."""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio

from bough import AsyncClient
from bough.channel import ChannelOption, async_channel
from bough_server.errors import ConfigurationError
from bough_server.settings import Settings

_TOKEN: Final = re.compile("[!-~]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a connection to a server needs; by default it is in plaintext and without a token."""

    credentials: grpc.ChannelCredentials | None = None
    options: tuple[ChannelOption, ...] = ()
    token: str | None = field(default=None, repr=False)

    def open_channel(self, address: str) -> aio.Channel:
        """Return a channel without a token, for the calls that anyone may make. Raises ConfigurationError."""
        try:
            return async_channel(address, self.credentials, self.options)
        except ValueError as error:  # several hosts behind TLS
            raise ConfigurationError(str(error)) from None

    def make_client(self, address: str, **options: Any) -> AsyncClient:
        """Return a client. Raises ConfigurationError for a token that would travel unencrypted."""
        try:
            return AsyncClient(address, credentials=self.credentials, options=self.options, token=self.token, **options)
        except ValueError:
            if self.token is None or self.credentials is not None:
                raise
            raise ConfigurationError(
                f"The token would travel to {address} unencrypted: set client.tls to true in bough.yaml."
            ) from None


def remote_access(settings: Settings) -> Access:
    """Return the access to a server that is named, by the section `client`. Raises ConfigurationError."""
    section = settings.client
    if not section.is_encrypted:
        return Access(token=_find_token(settings))
    authorities = None if section.ca_file is None else _read_file(settings, "ca_file", section.ca_file)
    own = _read_own_certificate(settings)
    return Access(credentials=grpc.ssl_channel_credentials(authorities, *own), token=_find_token(settings))


def _read_own_certificate(settings: Settings) -> tuple[bytes | None, bytes | None]:
    """Return the key and the certificate of the commands, if they have one. Raises ConfigurationError."""
    from bough_server.certificates import read_certificate

    cert_file, key_file = settings.client.cert_file, settings.client.key_file
    if cert_file is None or key_file is None:
        return None, None
    chain, key = _read_file(settings, "cert_file", cert_file), _read_file(settings, "key_file", key_file)
    try:
        read_certificate(chain, key, cert_file=cert_file, key_file=key_file, now=datetime.now(UTC), is_server=False)
    except ConfigurationError as error:
        raise ConfigurationError(str(settings.locate(("client", "cert_file"), error.message))) from None
    return key, chain


def local_access(settings: Settings) -> Access:
    """Return the access to a server of these settings on this machine, whose own certificate is trusted.

    Its certificate need not name this machine. Raises ConfigurationError.
    """
    from bough_server.certificates import read_host_names

    section, token = settings.server.tls, _find_token(settings)
    if section is None:
        return Access(token=token)
    try:
        chain = section.cert_file.read_bytes()
        names = read_host_names(chain, file=section.cert_file)
    except OSError as error:
        raise ConfigurationError(f"{section.cert_file} cannot be read: {error.strerror}.") from None
    expected = names[0].replace("*", "bough") if names else "localhost"
    options = (("grpc.ssl_target_name_override", expected),)
    return Access(credentials=grpc.ssl_channel_credentials(chain), options=options, token=token)


def _find_token(settings: Settings) -> str | None:
    name = settings.client.token_env
    token = settings.secrets.get(name)
    if token is not None and _TOKEN.fullmatch(token) is None:
        raise ConfigurationError(
            f"The variable {name} holds no bearer token: such a token has no spaces or line breaks."
        )
    return token


def _read_file(settings: Settings, name: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        problem = settings.locate(("client", name), f"{path} cannot be read: {error.strerror}.")
        raise ConfigurationError(str(problem)) from None
    if b"-----BEGIN " not in content:
        problem = settings.locate(("client", name), f"{path} must be PEM, beginning with -----BEGIN.")
        raise ConfigurationError(str(problem))
    return content
