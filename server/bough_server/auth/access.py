"""What a caller may call: the roles that each method of the schema needs."""

from collections.abc import Mapping, Sequence
from typing import Final

from google.protobuf.descriptor import ServiceDescriptor

from bough.v1 import (
    access_service_pb2,
    agent_service_pb2,
    catalog_service_pb2,
    eval_service_pb2,
    options_pb2,
    session_service_pb2,
    usage_service_pb2,
)
from bough_server.errors import PermissionDenied
from bough_server.identity import Caller, Role

SERVICES: Final[Sequence[ServiceDescriptor]] = tuple(
    service
    for module in (
        access_service_pb2,
        agent_service_pb2,
        catalog_service_pb2,
        eval_service_pb2,
        session_service_pb2,
        usage_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
"""The services of the schema."""

ROLES: Final[Mapping[str, frozenset[Role]]] = {
    f"/{service.full_name}/{method.name}": frozenset(method.GetOptions().Extensions[options_pb2.access_options].roles)
    for service in SERVICES
    for method in service.methods
    if method.GetOptions().HasExtension(options_pb2.access_options)
}
"""The roles of which a caller of a method needs one, none for any caller; a method that is missing is not served."""


def check_roles(caller: Caller, method: str) -> None:
    """Raise PermissionDenied if a caller may not call a method at all."""
    needed = ROLES[method]
    if needed and needed.isdisjoint(caller.roles):
        names = " or ".join(role_name(role) for role in sorted(needed))
        raise PermissionDenied(f"This call needs the role {names}, which the caller does not have.")


def role_name(role: Role) -> str:
    """Return the name of a role in settings and messages, such as RUN."""
    return options_pb2.AccessRole.Name(role).removeprefix("ACCESS_ROLE_")
