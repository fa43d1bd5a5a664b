"""Callers with API keys: the file of keys of a server, and stubs that call it as one of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpc import aio

from bough.v1.access_service_pb2_grpc import AccessServiceStub
from bough.v1.agent_service_pb2_grpc import AgentServiceStub
from bough.v1.catalog_service_pb2_grpc import CatalogServiceStub
from bough.v1.eval_service_pb2_grpc import EvalServiceStub
from bough.v1.session_service_pb2_grpc import SessionServiceStub
from bough.v1.usage_service_pb2_grpc import UsageServiceStub
from bough_server.auth.api_keys import build_key, hash_key


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The file of API keys of a server, and the keys themselves."""

    path: Path
    entries: dict[str, dict[str, object]] = field(default_factory=dict)

    def add(self, key_id: str, *, tenant: str = "acme", user: str = "", **fields: object) -> None:
        """Add a key to the file, of a user with the same name unless another one is given."""
        key = self.key(key_id)
        entry = {"id": key_id, "sha256": hash_key(key), "tenant": tenant, "user": user or key_id, **fields}
        self.entries[key_id] = entry
        self.write()

    def key(self, key_id: str) -> str:
        """Return the key with an id."""
        return build_key(key_id, key_id.encode().ljust(32, b"."))

    def remove(self, key_id: str) -> None:
        """Remove a key from the file."""
        del self.entries[key_id]
        self.write()

    def write(self) -> None:
        """Write the file, in one step."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"keys": list(self.entries.values())}))
        part.replace(self.path)

    @property
    def auth(self) -> dict[str, object]:
        """The section `auth` of a server that takes these keys."""
        return {"keys_file": str(self.path)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerStubs:
    """The services of a server, called with some metadata."""

    channel: aio.Channel
    access: Any
    agents: Any
    trees: Any
    catalog: Any
    sessions: Any
    usage: Any


def stubs(channel: aio.Channel, *metadata: tuple[str, str]) -> CallerStubs:
    """Return the services at the other end of a channel; every call has this metadata."""
    return CallerStubs(
        channel=channel,
        access=_WithMetadata(AccessServiceStub(channel), metadata),
        agents=_WithMetadata(AgentServiceStub(channel), metadata),
        trees=_WithMetadata(EvalServiceStub(channel), metadata),
        catalog=_WithMetadata(CatalogServiceStub(channel), metadata),
        sessions=_WithMetadata(SessionServiceStub(channel), metadata),
        usage=_WithMetadata(UsageServiceStub(channel), metadata),
    )


def bearer(token: str) -> tuple[str, str]:
    """Return the metadata that sends a token."""
    return ("authorization", f"Bearer {token}")


class _WithMetadata:
    """A stub that sends metadata with every call."""

    def __init__(self, stub: object, metadata: Sequence[tuple[str, str]]) -> None:
        self._stub, self._metadata = stub, metadata

    def __getattr__(self, method: str) -> Any:
        return partial(getattr(self._stub, method), metadata=self._metadata)
