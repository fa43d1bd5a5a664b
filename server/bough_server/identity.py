"""Who calls: the principal that everything a call creates belongs to."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller: a user and the tenant that owns everything the call creates.

    Both come from the token, never from a request.
    """

    tenant_id: str
    user_id: str


LOCAL: Final = Principal(tenant_id="local", user_id="local")
"""The principal of every call to a server that does not authenticate its callers."""
