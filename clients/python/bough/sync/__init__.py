"""Client for programs without an event loop; generated, as the modules beside it are."""

from bough.sync.client import Client

__all__ = ["Client"]
