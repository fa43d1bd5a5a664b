"""Sections of the settings, and of the file of API keys, that say who may call."""

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, ValidationInfo, model_validator

from bough.v1 import options_pb2
from bough_server.documents.yaml import FieldPath, suggestion
from bough_server.identity import OWN_USERS, RUN, Role, is_group, is_tenant, is_user
from bough_server.quotas import TenantQuotas
from bough_server.settings_sections import QuotaSection, Seconds, Section

RoleName: TypeAlias = Literal["RUN", "READ", "ADMIN", "BILLING"]
ActsFor: TypeAlias = Literal["users", "tenants"]


def _check_algorithm(name: object) -> object:
    if isinstance(name, str) and (name.startswith("HS") or name.lower() == "none"):
        raise ValueError(
            f"{name} would let others than the issuer make tokens: name a signature by its private key, such as RS256"
        )
    return name


Algorithm = Annotated[
    Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"],
    BeforeValidator(_check_algorithm),
]
"""Signatures by a key that only the issuer has; with HS256 who checks a token could sign one too."""

MAX_NAMES: Final = 64
"""The most roles, and the most groups, of one caller."""

KEY_ID: Final = "[a-z0-9][a-z0-9-]{0,62}"
"""The pattern of the id of an API key, as a regular expression."""

SPIFFE_ID: Final = re.compile(r"spiffe://[a-z0-9][a-z0-9._-]{0,254}(?:/[A-Za-z0-9._-]+)*")
"""An id of a client's certificate: ASCII, without escapes."""


def parse_roles(names: Iterable[str]) -> frozenset[Role]:
    """Return the roles with these names; RUN if none of them is one."""
    found = {role for name in names if (role := _ROLES.get(name)) is not None}
    return frozenset(found or {RUN})


_ROLES: Final[Mapping[str, Role]] = {
    name.removeprefix("ACCESS_ROLE_"): role for name, role in options_pb2.AccessRole.items() if role
}


def is_spiffe_id(text: str) -> bool:
    """Return whether a text is an id of a client's certificate, without a segment that stands for another one."""
    is_id = len(text) <= 2048 and SPIFFE_ID.fullmatch(text) is not None
    return is_id and not {".", ".."} & set(text.split("/"))


def _check_tenant(text: str) -> str:
    if not is_tenant(text):
        raise ValueError("must be 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or a digit")
    return text


def _check_configured_tenant(text: str) -> str:
    return text if text == "*" else _check_tenant(text)


def _check_user(text: str) -> str:
    if not is_user(text):
        raise ValueError(f"must be 1 to 128 printable characters that do not begin with {OWN_USERS}")
    return text


def _check_group(text: str) -> str:
    if not is_group(text):
        raise ValueError("must be 1 to 128 printable characters")
    return text


def _check_certificate_id(text: str) -> str:
    if not is_spiffe_id(text.removesuffix("/")) or text.endswith("//"):
        raise ValueError("must be as spiffe://acme.example/ns/jobs; a path that ends in / is a prefix")
    return text


def check_address(text: str) -> str:
    """Return an address of an issuer. Raises ValueError for one that is not encrypted, or not of one server."""
    parts = urlsplit(text)
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        raise ValueError("must begin with https://; http:// is for this machine only")
    if not parts.hostname or parts.username or parts.query or parts.fragment:
        raise ValueError("must be an address such as https://login.acme.example, without user, ? and #")
    return text


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _resolve_path(path: Path, info: ValidationInfo) -> Path:
    folder: Path = (info.context or {}).get("folder", Path.cwd())
    return folder / path


Tenant = Annotated[str, AfterValidator(_check_tenant)]
ConfiguredTenant = Annotated[str, AfterValidator(_check_configured_tenant)]
User = Annotated[str, AfterValidator(_check_user)]
Groups = Annotated[tuple[Annotated[str, AfterValidator(_check_group)], ...], Field(max_length=MAX_NAMES)]
Address = Annotated[str, AfterValidator(check_address)]
Claim = Annotated[str, Field(min_length=1, max_length=256)]


class OidcSection(Section):
    """An OpenID Connect issuer whose access tokens are accepted."""

    issuer: Address
    """The issuer, as the `iss` of its tokens."""
    audience: Annotated[str, Field(min_length=1)]
    """What the `aud` of its tokens must have: the name of this server at the issuer."""
    # Not min_length: an item that is wrong would then be reported twice, once as missing.
    algorithms: Annotated[tuple[Algorithm, ...], Field(json_schema_extra={"minItems": 1})] = ("RS256",)
    """The signatures that are accepted."""
    jwks_url: Address | None = None
    """Where the issuer's keys are. Unset: the address that its `/.well-known/openid-configuration` names."""
    tenant_claim: Claim | None = None
    """The claim with the tenant. A dot leads into an object, as in `resource.tenant`."""
    tenant: Tenant | None = None
    """The tenant of all its tokens; exactly one of `tenant` and `tenant_claim` is set."""
    user_claim: Claim = "sub"
    """The claim with the user."""
    roles_claim: Claim | None = None
    """The claim with the roles: a list, or a text with spaces between. Names that are no roles are ignored."""
    roles: tuple[RoleName, ...] | None = None
    """The roles of all its tokens, in place of `roles_claim`. With neither, and without any role: RUN."""
    groups_claim: Claim | None = None
    """The claim with the groups, in the same form."""
    token_type: Claim | None = None
    """What the header `typ` of its tokens must be, such as `at+jwt`. Unset: any that access tokens have."""
    max_lifetime: Annotated[Seconds, Field(gt=0)] = 86_400.0
    """How far ahead the `exp` of a token may be."""
    leeway: Annotated[Seconds, Field(le=60)] = 30.0
    """By how much the issuer's clock and this one may differ; at most 60 s."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.algorithms:
            raise ValueError("needs at least one of algorithms")
        if (self.tenant is None) == (self.tenant_claim is None):
            raise ValueError("needs exactly one of tenant and tenant_claim")
        if self.roles is not None and self.roles_claim is not None:
            raise ValueError("takes roles or roles_claim, not both")
        return self


class CertificateSection(Section):
    """Clients whose certificate has an id, at the port of `server.mtls`."""

    id: Annotated[str, AfterValidator(_check_certificate_id)]
    """The certificate's only URI: a SPIFFE id. A path that ends in / is a prefix; the longest one applies."""
    tenant: Tenant
    """The tenant."""
    user: User
    """The user."""
    roles: tuple[RoleName, ...] = ()
    """The roles; none for RUN."""
    groups: Groups = ()
    """The groups whose questions the caller may answer."""
    acts_for: ActsFor | None = None
    """`users`: each call may name its user by the metadata `bough-user-id`. `tenants`: its tenant too, by
    `bough-tenant-id`.
    """


class AuthSection(Section):
    """Who may call. Without it every call is the local user's, with every role."""

    oidc: tuple[OidcSection, ...] = ()
    """Issuers whose access tokens are accepted."""
    keys_file: Annotated[Path, AfterValidator(_resolve_path)] | None = None
    """The file of API keys, which holds their hashes; `bough keys create` makes its entries. It is read again when it
    changes.
    """
    certificates: tuple[CertificateSection, ...] = ()
    """Clients by the ids of their certificates."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.oidc or self.keys_file or self.certificates):
            raise ValueError("needs oidc, keys_file or certificates: nothing could prove a caller")
        issuers = [each.issuer for each in self.oidc]
        if len(set(issuers)) < len(issuers):
            raise ValueError("names an issuer twice")
        ids = [each.id for each in self.certificates]
        if len(set(ids)) < len(ids):
            raise ValueError("names the id of a certificate twice")
        return self


class TenantSection(Section):
    """A tenant: the models that exist for it, and its quotas."""

    models: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The models that exist for the tenant, with the aliases of them. Unset: all."""
    quotas: QuotaSection = QuotaSection()
    """Quotas of the tenant: all of its users together."""
    user_quotas: QuotaSection = QuotaSection()
    """Quotas of each user of the tenant."""

    def limits(self) -> TenantQuotas:
        """Return the quotas as a plain value."""
        return TenantQuotas(of_tenant=self.quotas.limits(), of_user=self.user_quotas.limits())


def list_tenant_problems(tenants: Mapping[str, TenantSection], models: Collection[str]) -> list[tuple[FieldPath, str]]:
    """Return a problem for each model of a tenant that is not configured."""
    return [
        (("tenants", tenant, "models", index), f"There is no model {name!r}.{suggestion(name, models)}")
        for tenant, section in tenants.items()
        for index, name in enumerate(section.models or ())
        if name not in models
    ]


class KeySection(Section):
    """An API key in its file: its hash, whom it proves, and what that caller may do."""

    id: Annotated[str, Field(pattern=f"^{KEY_ID}$")]
    """The id of the key, which is a part of it."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """The SHA-256 of the whole key, in hexadecimal digits."""
    tenant: Tenant
    """The tenant."""
    user: User
    """The user."""
    roles: tuple[RoleName, ...] = ()
    """The roles; none for RUN."""
    groups: Groups = ()
    """The groups whose questions the caller may answer."""
    expires: AwareDatetime | None = None
    """When the key expires. Unset: never."""
    acts_for: ActsFor | None = None
    """Whom the caller may name in its place, as that of a certificate."""

    @property
    def expire_time_ns(self) -> int | None:
        """When the key expires, in nanoseconds since the Unix epoch."""
        return None if self.expires is None else _nanoseconds(self.expires)


class KeysFile(Section):
    """A file of API keys."""

    keys: Annotated[tuple[KeySection, ...], Field(max_length=10_000)] = ()
    """The keys."""


def _nanoseconds(time: datetime) -> int:
    return int(time.timestamp()) * 1_000_000_000
