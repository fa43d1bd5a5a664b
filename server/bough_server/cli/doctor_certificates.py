"""What `bough doctor` finds of certificates and keys: those of the server, of its clients, and of the commands."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from bough_server.certificates import is_readable_by_others, read_authorities, read_certificate
from bough_server.documents.yaml import FieldPath
from bough_server.errors import ConfigurationError
from bough_server.settings import Settings

SOON: Final = timedelta(days=14)
"""What expires within this time is reported."""

Judgment = tuple[str, bool, str, bool]
"""The name of a check, whether all is right, what to say, and whether it may be left as it is."""


def judge_certificates(settings: Settings) -> Iterator[Judgment]:
    """Judge every file of certificates and keys that the settings name."""
    server, client = settings.server, settings.client
    if server.tls is not None:
        files = server.tls.cert_file, server.tls.key_file
        yield from _judge_pair(settings, ("server", "tls"), *files, is_server=True)
    if server.mtls is not None:
        yield _judge_authorities(settings, ("server", "mtls", "client_ca_file"), server.mtls.client_ca_file)
    if client.ca_file is not None:
        yield _judge_authorities(settings, ("client", "ca_file"), client.ca_file)
    if client.cert_file is not None and client.key_file is not None:
        yield from _judge_pair(settings, ("client",), client.cert_file, client.key_file, is_server=False)


def _judge_pair(
    settings: Settings, section: FieldPath, cert_file: Path, key_file: Path, *, is_server: bool
) -> Iterator[Judgment]:
    name, now = f"certificate of the {section[0]}", datetime.now(UTC)
    try:
        chain, key = _read(cert_file), _read(key_file)
        found = read_certificate(chain, key, cert_file=cert_file, key_file=key_file, now=now, is_server=is_server)
    except ConfigurationError as error:
        yield name, False, str(settings.locate((*section, "cert_file"), error.message)), False
        return
    left = found.expires - now
    words = f"{cert_file}, for {', '.join(found.names)}" if found.names else str(cert_file)
    words = f"{words}; expires in {left.days} days"
    if left < SOON:
        yield name, False, f"{words}: renew it, unless that happens by itself", True
    else:
        yield name, True, words, False
    if is_readable_by_others(key_file):
        problem = f"every user of this machine can read {key_file}: remove the right, as `chmod o-r` does"
        yield f"key of the {section[0]}", False, str(settings.locate((*section, "key_file"), problem)), False


def _judge_authorities(settings: Settings, field: FieldPath, file: Path) -> Judgment:
    name = f"authorities in {field[0]}.{field[-1]}"
    try:
        read_authorities(_read(file), file=file, now=datetime.now(UTC))
    except ConfigurationError as error:
        return name, False, str(settings.locate(field, error.message)), False
    return name, True, str(file), False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from None
