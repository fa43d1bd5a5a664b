"""`bough tools` and `bough doctor` with a tool server."""

import json
import sys
from pathlib import Path

from bough_server.tool_servers.lock import LOCK_FILE
from tests.clients.cli_process import Finished, bough
from tests.support.projects import llm, write_project

FAULTS = Path(__file__).parents[1] / "support" / "mcp_faults.py"


def project(folder: Path, *, tools: list[dict[str, object]]) -> Path:
    """A project whose agent uses a tool server with these tools."""
    list_tools(folder, tools)
    command = {"command": sys.executable, "args": [str(FAULTS), "listed", str(folder / "tools.json")]}
    servers = {"notes": {"mcp": command, "connect_timeout": 30.0}}
    agent = llm("alone", tools=["notes_echo"])
    return write_project(folder, agent, script={"alone": ["Hi."]}, tool_servers=servers)


def list_tools(folder: Path, tools: list[dict[str, object]]) -> None:
    """Set the tools of the server."""
    (folder / "tools.json").write_text(json.dumps(tools), encoding="utf-8")


def tool(name: str, description: str = "Echoes.") -> dict[str, object]:
    """A tool as it is listed."""
    return {"name": name, "description": description, "inputSchema": {"type": "object"}}


async def embedded(config: Path, *arguments: str) -> Finished:
    """A command with a server inside."""
    return await bough("--config", str(config), "--embedded", *arguments)


async def test_tools_of_servers_are_called_locked_and_compared(tmp_path: Path) -> None:
    config = project(tmp_path, tools=[tool("echo"), tool("drop", "Drops.")])
    checked = await embedded(config, "agents", "validate")
    assert (checked.code, "the tool 'notes_echo' was not checked: run `bough tools lock`." in checked.err) == (0, True)
    called = await embedded(config, "tools", "call", "notes_echo", '{"text": "a"}')
    assert (called.code, called.out) == (0, "done\n")
    locked = await embedded(config, "tools", "lock")
    assert (locked.code, locked.out.splitlines()) == (
        0,
        ["+ notes_drop: It is not in tools.lock.json.", "+ notes_echo: It is not in tools.lock.json."],
    )
    assert (tmp_path / LOCK_FILE).exists()
    list_tools(tmp_path, [tool("echo", "Echoes, and tells others.")])
    differing = await embedded(config, "tools", "lock", "--check")
    assert (differing.code, differing.out.splitlines()) == (
        1,
        [
            "- notes_drop: It is locked, and its server does not offer it any more.",
            "~ notes_echo: Its description differs from tools.lock.json.",
        ],
    )
    doctor = await embedded(config, "doctor")
    line = next(line for line in doctor.out.splitlines() if "tool server notes" in line)
    assert line == (
        "!!  tool server notes: 0 tools offered; notes: 'echo' is not offered: Its description differs from "
        "tools.lock.json. Review it, then run `bough tools lock`."
    )
    refused = await embedded(config, "tools", "call", "notes_echo")
    assert (refused.code, "Its description differs" in refused.err) == (2, True)


async def test_locked_tools_are_listed_and_shown_without_their_server(tmp_path: Path) -> None:
    config = project(tmp_path, tools=[tool("echo")])
    await embedded(config, "tools", "lock")
    (tmp_path / "tools.json").unlink()
    listed = await embedded(config, "tools", "list", "--server", "notes")
    assert [line.split() for line in listed.out.splitlines()] == [
        ["tool", "runs", "in", "what", "it", "does"],
        ["notes_echo", "notes", "Echoes."],
    ]
    shown = await embedded(config, "tools", "show", "notes_echo")
    assert shown.out.splitlines()[:5] == [
        "notes_echo",
        "  runs in: mcp",
        "  server: notes, as 'echo'",
        "  if its outcome is unknown: fail",
        "  timeout: 60 s",
    ]
    as_json = json.loads((await embedded(config, "tools", "show", "notes_echo", "--json")).out)
    assert (as_json["server"], as_json["onRecovery"]) == ("notes", "TOOL_RECOVERY_FAIL")
    wrong = await embedded(config, "tools", "show", "notes_eko")
    assert (wrong.code, wrong.err) == (2, "There is no tool 'notes_eko'. Did you mean 'notes_echo'?\n")


async def test_a_run_of_a_command_connects_to_what_its_agents_name(tmp_path: Path) -> None:
    config = project(tmp_path, tools=[tool("echo")])
    assert (await embedded(config, "run", "alone", "hello")).code == 0
    list_tools(tmp_path, [tool("other")])
    refused = await embedded(config, "run", "alone", "hello")
    assert (refused.code, "names the tool 'notes_echo', which 'notes' does not offer now" in refused.err) == (2, True)
