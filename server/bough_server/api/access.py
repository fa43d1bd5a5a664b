"""What a caller may change: all that it sees, or a part of it."""

from collections.abc import Awaitable, Callable

from bough_server.errors import PermissionDenied
from bough_server.identity import Caller, Scope


async def find_changeable(caller: Caller, find_user: Callable[[Scope], Awaitable[str]]) -> Scope:
    """Return the scope in which a caller changes a resource.

    `find_user` returns the user of the resource if it is in a scope, and raises NotFound if it is not. Raises
    PermissionDenied if the caller sees the resource but may not change it.
    """
    # A caller who may change all that it sees needs no look: the change itself finds the resource, or does not.
    if caller.visible != caller.changeable and await find_user(caller.visible) != caller.principal.user_id:
        raise PermissionDenied("It belongs to another user: to change it, the caller needs the role ADMIN.")
    return caller.changeable
