"""Prove the caller of a call by its metadata and the certificate of its connection."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final, TypeAlias

import structlog

from bough_server.auth.api_keys import PREFIX, Keys, check_key, is_key, read_keys
from bough_server.auth.certificates import Certificates, Peer
from bough_server.auth.issuers import Issuers
from bough_server.auth.proof import Proof, build_invalid_error, build_missing_error
from bough_server.auth.sections import AuthSection
from bough_server.clock import Clock
from bough_server.errors import FieldViolation, InvalidRequest
from bough_server.identity import Principal, is_tenant, is_user
from bough_server.watched_files import WatchedFile

USER_KEY: Final = "bough-user-id"
TENANT_KEY: Final = "bough-tenant-id"
"""The metadata by which a backend names for whom it calls."""

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
OnProblem: TypeAlias = Callable[[str], None]
"""Called with what has failed: `keys_file` or `issuer`."""

_log = structlog.get_logger(__name__)


class Authenticator:
    """Proves callers by the settings."""

    def __init__(
        self,
        section: AuthSection,
        tenants: Collection[str],
        *,
        clock: Clock,
        on_problem: OnProblem = lambda _: None,
    ) -> None:
        """`tenants` are those that are configured, with "*" for any. Raises ConfigurationError."""
        self._tenants, self._clock, self._on_problem = tenants, clock, on_problem
        self._issuers = Issuers(section.oidc, clock=clock, on_problem=lambda: on_problem("issuer"))
        self._certificates = Certificates(section.certificates) if section.certificates else None
        self._keys: WatchedFile[Keys] | None = None
        if section.keys_file is not None:
            path = section.keys_file
            # By its path, which mistakes name; a change between both reads is seen by the next poll.
            self._keys = WatchedFile(
                path, lambda _: read_keys(path), self._on_broken_keys, on_change=lambda: self.on_revocation()
            )
        self.on_revocation: Callable[[], None] = lambda: None
        """Called when proofs may have ceased to hold."""

    async def watch(self) -> None:
        """Follow the changes of the file of keys and of the issuers' keys, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for keys in self._issuers.keys:
                group.create_task(keys.refresh())
            if self._keys is not None:
                group.create_task(self._keys.watch())

    async def prove(self, metadata: Metadata, peer: Peer) -> Proof:
        """Return the caller of a call. Raises Unauthenticated, and InvalidRequest for whom it may not name."""
        metadata = list(metadata)
        certified = None
        if self._certificates is not None and peer.has_certificate:
            certified = self._certificates.check(peer)
        token = _find_token(metadata)
        if token is None:
            if certified is None:
                raise build_missing_error()
            proof = certified
        else:
            proof = await self._check_token(token)
            if certified is not None and _tenant_of(certified) != _tenant_of(proof):
                raise build_invalid_error("its token and its certificate are of different tenants")
        if not self._is_configured(_tenant_of(proof)):
            raise build_invalid_error(f"`tenants` does not have {_tenant_of(proof)}")
        return self._act_for(proof, metadata)

    async def _check_token(self, token: str) -> Proof:
        if not token.startswith(PREFIX):
            return await self._issuers.check(token)
        keys = self._keys
        if keys is None:
            raise build_invalid_error("it is an API key, and there is no auth.keys_file")
        return check_key(token, lambda: keys.value, now_ns=self._clock.now_ns())

    def _act_for(self, proof: Proof, metadata: Metadata) -> Proof:
        """Return a proof for whom a backend names in its place."""
        user, tenant = _find_one(metadata, USER_KEY), _find_one(metadata, TENANT_KEY)
        if user is None and tenant is None:
            return proof
        if proof.acts_for is None:
            raise _build_metadata_error(USER_KEY if user is not None else TENANT_KEY, "is for keys with acts_for")
        if tenant is not None and proof.acts_for != "tenants":
            raise _build_metadata_error(TENANT_KEY, "is for keys with acts_for: tenants")
        # A key in the wrong place would be written into logs and rows.
        if user is None or not is_user(user) or is_key(user):
            raise _build_metadata_error(USER_KEY, "must be the id of a user")
        if tenant is not None and not (is_tenant(tenant) and self._is_configured(tenant)):
            raise _build_metadata_error(TENANT_KEY, "must be the id of a tenant of this server")
        principal = Principal(tenant_id=tenant or _tenant_of(proof), user_id=user)
        return replace(proof, caller=replace(proof.caller, principal=principal))

    def _is_configured(self, tenant_id: str) -> bool:
        return tenant_id in self._tenants or "*" in self._tenants

    def _on_broken_keys(self, problem: str) -> None:
        _log.error("the file of API keys is not used as it is now", error=problem)
        self._on_problem("keys_file")


def _tenant_of(proof: Proof) -> str:
    return proof.caller.principal.tenant_id


def _find_token(metadata: Metadata) -> str | None:
    """Return the bearer token of a call, None without one. Raises Unauthenticated."""
    found = [value for key, value in metadata if key == "authorization"]
    if not found:
        return None
    if len(found) > 1:
        raise build_invalid_error("it has two tokens")
    value = found[0] if isinstance(found[0], str) else ""
    scheme, _, token = value.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise build_invalid_error("its authorization is no bearer token")
    return token.strip()


def _find_one(metadata: Metadata, key: str) -> str | None:
    """Return an entry of metadata, None without one. Raises InvalidRequest for two."""
    found = [value for name, value in metadata if name == key]
    if len(found) > 1 or any(not isinstance(value, str) for value in found):
        raise _build_metadata_error(key, "must be one text")
    # gRPC reads what is not UTF-8 as Latin-1: one user must not have two spellings.
    if not all(str(value).isascii() for value in found):
        raise _build_metadata_error(key, "must be ASCII")
    return str(found[0]) if found else None


def _build_metadata_error(key: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(field=f"metadata {key}", description=description)])
