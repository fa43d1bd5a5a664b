"""What an operator's command is told of a database."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStatus:
    """A database and the revision of its schema; None for one that is missing or empty."""

    name: str
    """The path of a file; a URL without its password."""
    revision: str | None
    head: str
    size_bytes: int

    @property
    def is_current(self) -> bool:
        """True if this version reads and writes it without an upgrade."""
        return self.revision == self.head
