"""A tool server that speaks MCP of 2025-11-25 by hand, and misbehaves as its first argument says.

It starts in an instant, and can say what the `mcp` package does not. Notes are lines of a file: a text, and the key of
the call that made it. Usage: python mcp_faults.py FAULT [FILE]
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FAULT = sys.argv[1]
FILE = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(os.devnull)
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}


def tool(name: str, **rest: object) -> dict[str, object]:
    """A tool as it is listed."""
    return {"name": name, "description": f"Does {name}.", "inputSchema": SCHEMA, **rest}


def tools() -> list[dict[str, object]]:
    """The tools of FILE if that is what it has, else some."""
    if FAULT == "listed":
        return list(json.loads(FILE.read_text(encoding="utf-8")))
    if FAULT == "many":
        return [tool(f"t{number}") for number in range(5_000)]
    safe = tool("add_and_die", annotations={"idempotentHint": True})
    return [tool("echo"), tool("add"), safe, tool("add_and_die_unsafely"), tool("wait")]


def send(message: dict[str, Any]) -> None:
    """Write a line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def answer(request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request."""
    match request["method"]:
        case "initialize":
            return {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "faults", "version": "1"},
            }
        case "tools/list":
            page = {"tools": tools()}
            return {**page, "nextCursor": "again"} if FAULT == "endless" else page
        case "tools/call":
            return call(request)
    return {}


def write(text: str, request: dict[str, Any]) -> int:
    """Add a line with the key of a call, and return how many lines there are."""
    key = request["params"].get("_meta", {}).get("bough.dev/idempotency-key", "")
    with FILE.open("a", encoding="utf-8") as file:
        file.write(f"{text} {key}\n")
    return len(FILE.read_text(encoding="utf-8").splitlines())


def take_note(request: dict[str, Any]) -> dict[str, Any] | None:
    """Answer a call of a tool that takes notes; None if no answer ever comes."""
    name, text = request["params"]["name"], request["params"]["arguments"].get("text", "")
    count = write(text, request)
    if name == "add_and_die_unsafely" or (name == "add_and_die" and count == 1):
        os._exit(3)
    if name == "wait" and count == 1:
        token = request["params"]["_meta"]["progressToken"]
        progress = {"progressToken": token, "progress": 1, "message": "half way"}
        send({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress})
        return None
    return {"content": [{"type": "text", "text": f"noted {text}"}]}


def call(request: dict[str, Any]) -> dict[str, Any] | None:
    """Answer a call, or misbehave."""
    if request["params"]["name"] != "echo":
        return take_note(request)
    if FAULT == "die":
        os._exit(1)
    if FAULT == "huge":
        sys.stdout.write('"' + "x" * (33 * 1024 * 1024) + "\n")
        sys.stdout.flush()
    if FAULT == "surrogate":
        sys.stdout.write(
            f'{{"jsonrpc":"2.0","id":{request["id"]},"result":{{"content":[{{"type":"text","text":"\\ud800"}}]}}}}\n'
        )
        sys.stdout.flush()
        time.sleep(60)
    if FAULT == "flood":
        token = request["params"]["_meta"]["progressToken"]
        progress = {"progressToken": token, "progress": 1, "message": "x" * 100_000}
        for _ in range(30):
            send({"jsonrpc": "2.0", "method": "notifications/progress", "params": progress})
    if FAULT == "nonsense":
        return {"content": "nothing"}
    environment = " ".join(sorted(os.environ)) if FAULT == "environment" else "done"
    return {"content": [{"type": "text", "text": environment}]}


def main() -> None:
    """Serve until the input ends, or for ever."""
    if FAULT in ("stubborn", "forks"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"]) if FAULT == "forks" else None
        FILE.write_text(f"{os.getpid()} {child.pid if child is not None else ''}", encoding="utf-8")
    if FAULT == "chatty":
        print("Welcome!", flush=True)
    if FAULT == "silent":
        time.sleep(600)
    for line in sys.stdin:
        request = json.loads(line)
        if request["method"] == "notifications/cancelled":
            write("cancelled", request)
        if "id" not in request:
            continue
        if request["method"] == "server/discover":
            send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "unknown"}})
        elif (result := answer(request)) is not None:
            send({"jsonrpc": "2.0", "id": request["id"], "result": result})
    if FAULT == "stubborn":
        time.sleep(600)


if __name__ == "__main__":
    main()
