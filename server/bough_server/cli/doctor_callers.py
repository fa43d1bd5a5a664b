"""What `bough doctor` finds of what proves callers: issuers, the file of API keys, and the table of certificates."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bough_server.auth.api_keys import read_key_sections
from bough_server.auth.issuer_keys import IssuerUnavailable, fetch_keys
from bough_server.auth.sections import AuthSection, KeySection, OidcSection
from bough_server.cli.doctor_certificates import SOON, Judgment
from bough_server.documents.yaml import Document, FieldPath
from bough_server.errors import ConfigurationError, Problem
from bough_server.settings import Settings

_KEYS = "API keys"


async def judge_callers(settings: Settings) -> list[Judgment]:
    """Judge all that `auth` names; fetch the keys of each issuer once."""
    auth = settings.auth
    if auth is None:
        return []
    issuers = await asyncio.gather(
        *(_judge_issuer(settings, section, index) for index, section in enumerate(auth.oidc))
    )
    keys = () if auth.keys_file is None else _judge_keys_file(settings, auth.keys_file)
    return [*issuers, *_judge_issuer_tenants(settings, auth), *keys, *_judge_certificates(settings, auth)]


async def _judge_issuer(settings: Settings, section: OidcSection, index: int) -> Judgment:
    name = f"issuer {section.issuer}"
    place: FieldPath = ("auth", "oidc", index, "jwks_url" if section.jwks_url else "issuer")
    try:
        keys = await fetch_keys(section)
    except IssuerUnavailable as error:
        words = f"its keys cannot be used, and no token of it is accepted: {error} Correct the address, or the issuer."
        return name, False, str(settings.locate(place, words)), False
    ids = sorted({key_id or "a key without an id" for key_id, _ in keys})
    words = f"{', '.join(ids)} for {', '.join(section.algorithms)}"
    if not (section.jwks_url or section.issuer).startswith("https://"):
        words = f"{words}; it is reached by http, so that who reads along on this machine sees its keys: use https"
        return name, False, str(settings.locate(place, words)), True
    return name, True, words, False


def _judge_keys_file(settings: Settings, path: Path) -> Iterator[Judgment]:
    if not path.is_file():
        words = f"{path} does not exist: make it with `keys: []`, and add what `bough keys create` prints."
        yield _KEYS, False, str(settings.locate(("auth", "keys_file"), words)), False
        return
    try:
        document, sections = read_key_sections(path)
    except ConfigurationError as error:
        yield _KEYS, False, error.message, False
        return
    yield _KEYS, True, f"{path}, {len(sections)} of them", False
    for index, section in enumerate(sections):
        yield from _judge_key(settings, document, section, index)


def _judge_key(settings: Settings, document: Document, section: KeySection, index: int) -> Iterator[Judgment]:
    name = f"API key {section.id}"
    if problem := _explain_tenant(settings, section.tenant):
        yield name, False, str(document.problem(("keys", index, "tenant"), problem)), False
    if section.expires is None:
        return
    left = section.expires - datetime.now(UTC)
    if left <= timedelta():
        words, is_optional = f"it expired at {section.expires}: make another key, or remove the entry", False
    elif left < SOON:
        words, is_optional = f"it expires in {left.days} days: make another key in time", True
    else:
        return
    yield name, False, str(document.problem(("keys", index, "expires"), words)), is_optional


def _judge_issuer_tenants(settings: Settings, auth: AuthSection) -> Iterator[Judgment]:
    for index, section in enumerate(auth.oidc):
        if section.tenant is not None and (problem := _explain_tenant(settings, section.tenant)):
            place = settings.locate(("auth", "oidc", index, "tenant"), problem)
            yield f"issuer {section.issuer}", False, str(place), False


def _judge_certificates(settings: Settings, auth: AuthSection) -> Iterator[Judgment]:
    problems: list[Problem] = []
    if auth.certificates and settings.server.mtls is None:
        words = "no port asks clients for a certificate: set server.mtls"
        problems.append(settings.locate(("auth", "certificates"), words))
    for index, section in enumerate(auth.certificates):
        if problem := _explain_tenant(settings, section.tenant):
            problems.append(settings.locate(("auth", "certificates", index, "tenant"), problem))
    return (("certificates of callers", False, str(problem), False) for problem in problems)


def _explain_tenant(settings: Settings, tenant: str) -> str:
    """Return why no caller of a tenant is accepted; empty if they are."""
    if tenant in settings.tenants or "*" in settings.tenants:
        return ""
    return f"`tenants` of bough.yaml does not have {tenant}, so that all its callers are refused: add it there"
