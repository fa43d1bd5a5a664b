"""Addresses of servers: one that gRPC resolves, or several of which the first that answers is used."""

import re
import socket
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import Final

from bough.arguments import wrong_type

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
"""Default address of a server."""

_HOST: Final = re.compile(r"(?:dns:(?://[^/]*/)?|ipv[46]:)?([^][:/,]+|\[[^]]*\])(:\d{1,5})?")
"""An address of one server by host, and by port if it is whole."""

_WITHOUT_PORT: Final = ("unix:", "unix-abstract:", "vsock:", "xds:", "google-c2p:")
"""How addresses begin that gRPC resolves without a port."""

_LISTS: Final = ("ipv4:", "ipv6:")
"""How lists begin that gRPC takes as they are."""

_SCHEMES: Final = ("dns:", *_LISTS)

_SEVERAL: Final = "HOST:PORT,HOST:PORT"


def check_address(address: str) -> None:
    """Raise ValueError for an address that is none, TypeError for no text.

    An address is HOST:PORT, several of these separated by commas, or another that gRPC knows.
    """
    if not isinstance(address, str):
        raise wrong_type("address", "a str", address)
    if address.startswith(_WITHOUT_PORT):
        return
    if problem := _find_problem(address):
        raise ValueError(f"The address {address!r} {problem}")


def _find_problem(address: str) -> str:
    """Return what is wrong with an address, as the end of a sentence; empty if nothing is."""
    parts = [part.strip() for part in address.split(",")]
    if len(parts) > 1 and "" in parts:
        return f"has an empty item: write {_SEVERAL}."
    if twice := next((part for number, part in enumerate(parts) if part in parts[:number]), ""):
        return f"names {twice!r} twice: name each server once."
    for part in parts:
        host, where = _HOST.fullmatch(part), "" if len(parts) == 1 else f": {part!r} is not one"
        if host is None and address.startswith(("http://", "https://")):
            return (
                f"is a URL: write HOST:PORT, such as {DEFAULT_ADDRESS}. For TLS pass credentials, such as "
                "grpc.ssl_channel_credentials()."
            )
        if host is None:
            wanted = f"HOST:PORT, such as {DEFAULT_ADDRESS}" if len(parts) == 1 else _SEVERAL
            return f"is not {wanted}{where}."
        if host[2] is None:
            which = "" if len(parts) == 1 else f" in {part!r}"
            return f"has no port{which}: write HOST:PORT, such as {DEFAULT_ADDRESS}."
        if len(parts) > 1 and part.startswith(_SCHEMES) and not address.startswith(_LISTS):
            return f"has {part!r} in a list: write {_SEVERAL}, without {part.partition(':')[0]}:."
    return ""


def split_address(address: str) -> Sequence[str]:
    """Return the servers of an address that lists several as HOST:PORT; the address itself if it is any other."""
    if address.startswith((*_LISTS, *_WITHOUT_PORT)):
        return [address]
    return [part.strip() for part in address.split(",")]


def resolve_target(address: str) -> str:
    """Return the target of a channel to an address that `check_address` accepts.

    gRPC connects to the first of several that answers, and to the next if that is lost, but takes only numbers: so the
    names among several are looked up here, which blocks, and again only for a new channel. Those that are unknown are
    left out.
    """
    servers = split_address(address)
    if len(servers) == 1:
        return address
    found = list(dict.fromkeys(each for server in servers for each in _look_up(server)))
    if not found:
        return servers[0]  # gRPC says why it is unknown
    if not any(host.startswith("[") for host, _ in found):
        return "ipv4:" + ",".join(f"{host}:{port}" for host, port in found)
    # One scheme has to name both kinds.
    mapped = [(host if host.startswith("[") else f"[::ffff:{host}]", port) for host, port in found]
    return "ipv6:" + ",".join(f"{host}:{port}" for host, port in mapped)


def _look_up(server: str) -> Iterator[tuple[str, int]]:
    """Yield the numeric hosts and the port of a server by name, nothing if it is unknown."""
    host, _, port = server.rpartition(":")
    try:
        known = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for family, _, _, _, where in known:
        yield (f"[{where[0]}]" if family is socket.AF_INET6 else str(where[0])), int(port)


def split_host(server: str) -> str:
    """Return the host of one server's address; empty if it has none."""
    found = _HOST.fullmatch(server)
    return "" if found is None else found[1]


def is_loopback(address: str) -> bool:
    """Return whether an address names this machine only: Unix sockets, localhost, or addresses of loopback."""
    return all(_is_local(server) for server in split_address(address))


def _is_local(server: str) -> bool:
    host = split_host(server)
    if host == "localhost" or not host:
        return host == "localhost" or server.startswith("unix:")
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
