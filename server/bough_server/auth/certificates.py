"""Clients' certificates: what the id of one proves.

The id is the only URI among the alternative names of a certificate, as SPIFFE has it; a common name or a DNS name,
which may be spelled like an id, proves nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bough_server.auth.proof import Proof, build_invalid_error
from bough_server.auth.sections import CertificateSection, is_spiffe_id, parse_roles
from bough_server.identity import Caller, Principal


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is known of the client at the other end of a connection."""

    has_certificate: bool = False
    uris: Sequence[bytes] = ()
    """The URIs among the alternative names of its certificate."""


class Certificates:
    """The table of the settings."""

    def __init__(self, sections: Sequence[CertificateSection]) -> None:
        self._exact: Mapping[str, CertificateSection] = {
            section.id: section for section in sections if not section.id.endswith("/")
        }
        prefixes = [section for section in sections if section.id.endswith("/")]
        self._prefixes = sorted(prefixes, key=lambda section: len(section.id), reverse=True)

    def check(self, peer: Peer) -> Proof:
        """Return what a certificate proves. Raises Unauthenticated."""
        if len(peer.uris) != 1:
            raise build_invalid_error(f"the certificate has {len(peer.uris)} URIs, and one is its id")
        found = peer.uris[0].decode("ascii", errors="replace")
        if not is_spiffe_id(found):
            raise build_invalid_error("the URI of the certificate is no SPIFFE id")
        section = self._find(found)
        if section is None:
            raise build_invalid_error(f"auth.certificates does not have {found}")
        caller = Caller(
            principal=Principal(tenant_id=section.tenant, user_id=section.user),
            roles=parse_roles(section.roles),
            groups=frozenset(section.groups),
            via=f"certificate/{found}",
        )
        return Proof(caller=caller, acts_for=section.acts_for)

    def _find(self, found: str) -> CertificateSection | None:
        if found in self._exact:
            return self._exact[found]
        return next((section for section in self._prefixes if found.startswith(section.id)), None)
