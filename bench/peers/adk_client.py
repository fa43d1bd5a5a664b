"""`adk api_server` and turns of the desk against it, as a client of its endpoint for server-sent events sees them."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.desk_team import QUESTION
from bench.peers.desk_turns import TURN_SECONDS, RunTurn, Turn

AGENTS: Final = Path(__file__).parent / "adk_agents"


def free_port() -> int:
    """Return a port of loopback that is free now; the command does not say which one it took."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def serve(port: int, sessions: str) -> list[str]:
    """Return the arguments of an interpreter that serves the desk; `sessions` is the URI of its session service."""
    return [
        *("-m", "google.adk.cli", "api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--no-reload", "--auto_create_session", "--log_level", "warning"),
        *("--session_service_uri", sessions, "--artifact_service_uri", "memory://"),
        str(AGENTS),
    ]


@asynccontextmanager
async def turns(address: str) -> AsyncIterator[RunTurn]:
    """Return what runs one turn, each in a new session."""
    numbers = count(1)
    timeout = aiohttp.ClientTimeout(total=TURN_SECONDS)
    async with aiohttp.ClientSession(f"http://{address}", timeout=timeout) as client:

        async def run_turn(turn: Turn) -> None:
            async with client.post("/run_sse", json=_request(next(numbers)), raise_for_status=True) as response:
                async for line in response.content:
                    if line.startswith(b"data:"):
                        take(json.loads(line[5:]), turn)

        yield run_turn


def _request(number: int) -> dict[str, Any]:
    return {
        "app_name": "desk",
        "user_id": "visitor",
        "session_id": f"session-{number}",
        "streaming": True,
        "new_message": {"role": "user", "parts": [{"text": QUESTION}]},
    }


def take(event: dict[str, Any], turn: Turn) -> None:
    """Count an event's text: a piece if the event is partial, else the whole. Raises RuntimeError for an error."""
    if error := event.get("error") or event.get("errorMessage"):
        raise RuntimeError(f"the server sent an error: {error}")
    text = "".join(part.get("text", "") for part in event.get("content", {}).get("parts", ()))
    if event.get("partial"):
        turn.take(text)
    elif event.get("author") == "lead" and text:
        turn.answer = text
