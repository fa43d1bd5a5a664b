"""The proxy that the environment, or the system, names for a URL, by the rules of the `openai` client's HTTP package.

`HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` name proxies; `NO_PROXY` lists, by commas, what is reached without one: `*`,
a host and its subdomains, `.domain` for the subdomains alone, an address, or a network; each but `*` with a port or
without.
"""

import base64
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A proxy. Its user and password are not part of `url`, which errors may name."""

    url: str
    authorization: str = ""
    """Value of Proxy-Authorization; empty if the proxy needs none."""

    def __repr__(self) -> str:
        return f"Proxy(url={self.url!r})"


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy for a URL, or None for a direct connection, as to this machine's loopback.

    Raises ValueError for a URL, or an entry of NO_PROXY, whose port is none.
    """
    named, parts = getproxies(), urlsplit(url)
    proxy = named.get(parts.scheme) or named.get("all")
    # A proxy named in the environment cannot reach this machine's loopback.
    if not proxy or _is_loopback(url):
        return None
    exceptions = (each.strip() for each in named.get("no", "").split(","))
    if any(_covers(each, parts) for each in exceptions if each):
        return None
    return _parse_proxy(proxy if "://" in proxy else f"http://{proxy}")


def _is_loopback(url: str) -> bool:
    """Return whether a URL is of this machine's loopback."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _parse_proxy(url: str) -> Proxy:
    parts = urlsplit(url)
    credentials, _, place = parts.netloc.rpartition("@")
    plain = parts._replace(netloc=place).geturl()
    if not credentials:
        return Proxy(url=plain)
    user, _, password = credentials.partition(":")
    encoded = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return Proxy(url=plain, authorization=f"Basic {encoded}")


def _covers(exception: str, url: SplitResult) -> bool:
    """Return whether an entry of NO_PROXY covers a URL."""
    if exception == "*":
        return True
    scheme, _, place = exception.lower().rpartition("://")
    if scheme not in ("", "all", url.scheme):
        return False
    host = url.hostname or ""
    if "/" in place:
        return _is_within(host, place)
    # An address of IPv6 may lack its brackets, and then has no port.
    parts = urlsplit(f"//{place}" if place.count(":") < 2 or "[" in place else f"//[{place}]")
    if parts.port not in (None, url.port):
        return False
    name = (parts.hostname or "").removeprefix("*")
    if name.startswith("."):
        return host.endswith(name)
    return host == name or (not _is_address(name) and host.endswith(f".{name}"))


def _is_within(host: str, network: str) -> bool:
    try:
        return ip_address(host) in ip_network(network.replace("[", "").replace("]", ""), strict=False)
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False
