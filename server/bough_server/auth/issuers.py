"""OpenID Connect: what an access token proves.

PyJWT checks the signature; what it accepts unless asked is checked here: times, the kind of the token, and claims that
no id can have.
"""

import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from bough_server.auth.issuer_keys import IssuerKeys
from bough_server.auth.proof import Proof, build_expired_error, build_invalid_error
from bough_server.auth.sections import MAX_NAMES, OidcSection, parse_roles
from bough_server.clock import Clock
from bough_server.identity import Caller, Principal, is_group, is_tenant, is_user

MAX_CACHED: Final = 4_096
"""The most tokens of an issuer that are not verified again while their keys stay the same."""

_REQUIRED: Final = ["exp", "iat", "iss", "sub", "aud"]
_TYPES: Final = frozenset({"jwt", "at+jwt", "application/at+jwt"})
"""The `typ` of access tokens, which may have none."""

_OF_ID_TOKENS: Final = frozenset({"nonce", "at_hash", "c_hash", "s_hash"})
"""Claims that only id tokens have: they tell a client who has logged in, and are no right to call anything."""

_SECONDS: Final = 1_000_000_000


class Issuers:
    """The issuers whose tokens are accepted."""

    def __init__(self, sections: Sequence[OidcSection], *, clock: Clock, on_problem: Callable[[], None]) -> None:
        self._issuers = {section.issuer: Issuer(section, clock=clock, on_problem=on_problem) for section in sections}

    @property
    def keys(self) -> Sequence[IssuerKeys]:
        """The keys of each, to be refreshed."""
        return [issuer.keys for issuer in self._issuers.values()]

    async def close(self) -> None:
        """Stop fetching keys."""
        for keys in self.keys:
            await keys.close()

    async def check(self, token: str) -> Proof:
        """Return what a token proves. Raises Unauthenticated."""
        if not token.isascii():
            raise build_invalid_error("it is no token: it is not ASCII")
        digest = hashlib.sha256(token.encode()).digest()
        for issuer in self._issuers.values():
            if (caller := issuer.find(digest)) is not None:
                return Proof(caller=caller)
        header, claims = _read_without_verifying(token)
        named = claims.get("iss")
        issuer_of = self._issuers.get(named) if isinstance(named, str) else None
        if issuer_of is None:
            raise build_invalid_error("auth.oidc does not have its issuer")
        return Proof(caller=await issuer_of.check(token, header, digest))


class Issuer:
    """An issuer, and the tokens of it that were seen before."""

    def __init__(self, section: OidcSection, *, clock: Clock, on_problem: Callable[[], None]) -> None:
        self._section, self._clock = section, clock
        self.keys = IssuerKeys(section, clock=clock, on_problem=on_problem)
        """Its keys."""
        self._seen: OrderedDict[bytes, Caller] = OrderedDict()
        self._seen_version = 0

    def find(self, digest: bytes) -> Caller | None:
        """Return the caller of a token that was verified before, by its SHA-256. Raises Unauthenticated if expired."""
        if self._seen_version != self.keys.version:
            self._seen.clear()
            self._seen_version = self.keys.version
        caller = self._seen.get(digest)
        if caller is None:
            return None
        assert caller.expire_time_ns is not None, "every token expires"
        if caller.expire_time_ns <= self._clock.now_ns():
            del self._seen[digest]
            raise build_expired_error()
        self._seen.move_to_end(digest)
        return caller

    async def check(self, token: str, header: Mapping[str, object], digest: bytes) -> Caller:
        """Return the caller of a token by its unverified header. Raises Unauthenticated."""
        claims = await self._verify(token, header)
        expire_time_ns = self._check_times(claims)
        caller = self._to_caller(claims, expire_time_ns)
        self._seen[digest] = caller
        if len(self._seen) > MAX_CACHED:
            self._seen.popitem(last=False)
        return caller

    async def _verify(self, token: str, header: Mapping[str, object]) -> Mapping[str, object]:
        """Return the claims of a token whose signature, issuer, audience and kind are right."""
        import jwt

        algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ")
        if algorithm not in self._section.algorithms or not isinstance(algorithm, str):
            raise build_invalid_error("its signature is of a kind that auth.oidc does not have for the issuer")
        if key_id is not None and not isinstance(key_id, str):
            raise build_invalid_error("its kid is no text")
        key = await self.keys.find(key_id, algorithm)
        if key is None:
            raise build_invalid_error("its key is not among those of the issuer")
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                issuer=self._section.issuer,
                audience=self._section.audience,
                options={
                    "require": _REQUIRED,
                    "enforce_minimum_key_length": True,
                    # By the clock of the server, below.
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                },
            )
        except jwt.PyJWTError as error:
            raise build_invalid_error(type(error).__name__) from None
        if not self._is_access_token(kind, claims):
            raise build_invalid_error("it is no access token")
        return claims

    def _is_access_token(self, kind: object, claims: Mapping[str, object]) -> bool:
        if self._section.token_type is not None:
            return isinstance(kind, str) and kind.lower() == self._section.token_type.lower()
        if kind is not None and not (isinstance(kind, str) and kind.lower() in _TYPES):
            return False
        # Keycloak and Cognito name the kind in a claim.
        is_id_token = claims.get("typ") == "ID" or claims.get("token_use") == "id"
        return not is_id_token and _OF_ID_TOKENS.isdisjoint(claims)

    def _check_times(self, claims: Mapping[str, object]) -> int:
        """Return when a token expires here, in nanoseconds since the Unix epoch."""
        now, leeway = self._clock.now_ns() / _SECONDS, self._section.leeway
        expires, issued = _seconds(claims, "exp"), _seconds(claims, "iat")
        if expires + leeway <= now:
            raise build_expired_error()
        if expires > now + leeway + self._section.max_lifetime:
            raise build_invalid_error("it expires later than the max_lifetime of auth.oidc allows")
        begins = _seconds(claims, "nbf") if "nbf" in claims else issued
        if max(issued, begins) > now + leeway:
            raise build_invalid_error("it is not valid yet")
        return int((expires + leeway) * _SECONDS)

    def _to_caller(self, claims: Mapping[str, object], expire_time_ns: int) -> Caller:
        section = self._section
        tenant = section.tenant or _text(claims, section.tenant_claim or "")
        if not is_tenant(tenant):
            raise build_invalid_error("its tenant is no id of a tenant")
        user = _text(claims, section.user_claim)
        if not is_user(user):
            raise build_invalid_error("its user is no id of a user")
        roles = section.roles if section.roles is not None else _names(claims, section.roles_claim)
        return Caller(
            principal=Principal(tenant_id=tenant, user_id=user),
            roles=parse_roles(roles),
            groups=frozenset(_names(claims, section.groups_claim)),
            via=f"oidc/{section.issuer}",
            expire_time_ns=expire_time_ns,
        )


def _read_without_verifying(token: str) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the header and the claims of a token that nothing has verified. Raises Unauthenticated.

    PyJWT would check each character of the token in Python, as it does again when it verifies it: that costs more than
    the signature. What this accepts and PyJWT does not, that refuses.
    """
    parts = token.split(".")
    if len(parts) != 3:
        raise build_invalid_error("it is no token: it has not three parts")
    return _read_part(parts[0]), _read_part(parts[1])


def _read_part(part: str) -> Mapping[str, object]:
    try:
        read = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, RecursionError):
        raise build_invalid_error("it is no token: a part of it is not base64 of JSON") from None
    if not isinstance(read, dict):
        raise build_invalid_error("it is no token: a part of it is no JSON object")
    return read


def _seconds(claims: Mapping[str, object], name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LATEST:
        raise build_invalid_error(f"its {name} is no time")
    return float(value)


_LATEST: Final = 2**40
"""A time that no token has, in seconds; infinity and what is no number are not below it either."""


def _find_claim(claims: Mapping[str, object], name: str) -> object:
    """Return a claim; a dot leads into an object, unless a claim has it in its name."""
    if name in claims:
        return claims[name]
    value: object = claims
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _text(claims: Mapping[str, object], name: str) -> str:
    value = _find_claim(claims, name)
    return value if isinstance(value, str) else ""


def _names(claims: Mapping[str, object], name: str | None) -> Sequence[str]:
    """Return the names in a claim: a list of texts, or a text with spaces between. Raises Unauthenticated."""
    value = None if name is None else _find_claim(claims, name)
    if value is None:
        return ()
    names = value.split() if isinstance(value, str) else value
    if not isinstance(names, list) or len(names) > MAX_NAMES:
        raise build_invalid_error(f"its {name} is no list of at most {MAX_NAMES} names")
    if not all(isinstance(each, str) and is_group(each) for each in names):
        raise build_invalid_error(f"its {name} has what is no name")
    return names
