"""Who calls: the principal that everything a call creates belongs to, and what the caller may see and change."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from bough.v1 import input_pb2, options_pb2

Role: TypeAlias = options_pb2.AccessRole.ValueType

RUN: Final = options_pb2.ACCESS_ROLE_RUN
READ: Final = options_pb2.ACCESS_ROLE_READ
ADMIN: Final = options_pb2.ACCESS_ROLE_ADMIN
BILLING: Final = options_pb2.ACCESS_ROLE_BILLING

OWN_USERS: Final = "bough/"
"""How the users of the server itself begin; no caller is one."""


_TENANT: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_MOST_CHARACTERS: Final = 128
"""The most characters of a user or a group."""


def is_tenant(text: str) -> bool:
    """Return whether a text can be the id of a caller's tenant."""
    return _TENANT.fullmatch(text) is not None


def is_user(text: str) -> bool:
    """Return whether a text can be the id of a caller's user: `auth0|x` and addresses of mail are fine."""
    return is_group(text) and not text.startswith(OWN_USERS)


def is_group(text: str) -> bool:
    """Return whether a text can be the name of a group."""
    # Half a surrogate is not printable, so what is can be encoded as UTF-8.
    return 0 < len(text) <= _MOST_CHARACTERS and text.isprintable()


class Scope(Protocol):
    """The rows that a lookup finds: those of a tenant, and of one user unless `user_id` is None."""

    @property
    def tenant_id(self) -> str:
        """The tenant."""
        ...

    @property
    def user_id(self) -> str | None:
        """The user; None for all users of the tenant."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A user and the tenant that owns everything its calls create; as a Scope, the rows of this user."""

    tenant_id: str
    user_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTenant:
    """The rows of all users of a tenant."""

    tenant_id: str
    user_id: None = None


def includes(scope: Scope, principal: Principal) -> bool:
    """Return whether the rows of a principal are in a scope."""
    return scope.tenant_id == principal.tenant_id and scope.user_id in (None, principal.user_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The principal of one call, with what proved it and what it may do. Nothing of it is from a request."""

    principal: Principal
    roles: Collection[Role]
    groups: Collection[str] = frozenset()
    """The groups whose questions the caller may answer."""
    via: str
    """What proved the caller, as GetCallerResponse.via."""
    expire_time_ns: int | None = None
    """When the proof expires, in nanoseconds since the Unix epoch; None for one that does not."""

    @property
    def visible(self) -> Scope:
        """What the caller may see."""
        return self._scope(READ in self.roles or ADMIN in self.roles)

    @property
    def usage_scope(self) -> Scope:
        """The users whose usage and accounts the caller may see."""
        return self._scope(not {READ, ADMIN, BILLING}.isdisjoint(self.roles))

    @property
    def changeable(self) -> Scope:
        """What the caller may change."""
        return self._scope(ADMIN in self.roles)

    def _scope(self, is_whole: bool) -> Scope:
        return WholeTenant(tenant_id=self.principal.tenant_id) if is_whole else self.principal


def may_answer(caller: Caller, owner: Principal, request: input_pb2.InputRequest) -> bool:
    """Return whether a caller may answer what a run of a user of its tenant asks."""
    if caller.via == LOCAL.via:  # there is no other one
        return True
    is_owner = caller.principal == owner
    if request.four_eyes and is_owner:
        return False
    if request.approver_group:
        return request.approver_group in caller.groups
    return is_owner or ADMIN in caller.roles


LOCAL: Final = Caller(
    principal=Principal(tenant_id="local", user_id="local"),
    roles=frozenset({RUN, READ, ADMIN, BILLING}),
    via="none",
)
"""The caller of every call to a server that asks no one for a proof."""
