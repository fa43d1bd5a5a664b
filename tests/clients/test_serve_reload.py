"""`bough serve --reload`: a change of a file starts the server again, at the same port; a mistake is waited out."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.clients.cli_process import bough, started
from tests.support.processes import PATIENCE_SECONDS
from tests.support.projects import llm, write_project


@asynccontextmanager
async def reloading(config: Path, *options: str) -> AsyncIterator[Process]:
    """Run `bough serve --reload`; it has to stop cleanly."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BOUGH_", "OTEL_"))}
    command = (sys.executable, "-m", "bough_server.cli", "serve", "--reload", "--port", "0", "--config", str(config))
    process = await asyncio.create_subprocess_exec(*command, *options, env=kept, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            _, err = await process.communicate()
    assert (process.returncode, b"Traceback" in err) == (0, False), err.decode()


async def port_of(process: Process) -> int:
    """Wait until it serves again, and return the port."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        line = (await process.stdout.readline()).decode()
    assert line.startswith("serving "), line
    return int(line.rpartition(":")[2])


async def said(process: Process, words: str) -> str:
    """Wait for a line on standard error."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        while words not in (line := (await process.stderr.readline()).decode()):
            assert line, f"it ended and did not say {words!r}"
    return line


async def answer(port: int) -> str:
    return (await bough("run", "alone", "hi", "--output", "answer", port=port)).out


def write_script(folder: Path, text: str) -> None:
    (folder / "script.yaml").write_text(json.dumps({"agents": {"alone": [text]}}), encoding="utf-8")


async def test_a_changed_file_is_served_at_the_same_port(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    config = write_project(tmp_path, llm("alone"), script={"alone": ["First."]})
    async with reloading(config, "--ready-file", str(ready)) as server:
        port = await port_of(server)
        first = await answer(port)
        write_script(tmp_path, "The second.")
        assert await said(server, "has changed") == f"{tmp_path / 'script.yaml'} has changed: starting again.\n"
        again = await port_of(server)
        second = await answer(again)
        assert ready.read_text(encoding="utf-8") == f"127.0.0.1:{port}\n"
    assert (again, first, second) == (port, "First.\n", "The second.\n")


async def test_a_mistake_is_reported_while_what_was_right_is_served_on(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["First."]})
    right = config.read_text(encoding="utf-8")
    async with reloading(config) as server:
        port = await port_of(server)
        config.write_text("modles: {}", encoding="utf-8")
        assert "There is no such setting." in await said(server, "modles")
        assert (await said(server, "cannot be loaded")).endswith(": serving what was loaded before.\n")
        assert await answer(port) == "First.\n"
        write_script(tmp_path, "The second.")
        config.write_text(right, encoding="utf-8")
        await said(server, "has changed: starting again.")
        assert await port_of(server) == port
        assert await answer(port) == "The second.\n"


async def test_a_server_that_cannot_start_starts_when_the_mistake_is_mended(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["First."]})
    right = config.read_text(encoding="utf-8")
    config.write_text("modles: {}", encoding="utf-8")
    async with reloading(config) as server:
        await said(server, "The server ended with exit code 2; it starts again when a file changes.")
        config.write_text(right, encoding="utf-8")
        assert await answer(await port_of(server)) == "First.\n"


async def test_a_second_signal_ends_the_time_that_runs_have(tmp_path: Path) -> None:
    slow = [{"text": "One two.", "delay_ms": 600_000}]
    config = write_project(tmp_path, llm("alone"), script={"alone": slow}, server={"drain_grace": "10m"})
    async with reloading(config) as server:
        port = await port_of(server)
        run = await started("run", "alone", "hi", "--output", "plain", port=port)
        assert run.stdout is not None
        while b"llm.started" not in await run.stdout.readline():
            pass
        server.send_signal(signal.SIGINT)
        await said(server, "stopping")
    # Leaving the context has sent the second signal. The client would look for the next server for a minute.
    run.kill()
    await run.communicate()


async def test_a_new_file_of_python_or_of_agents_counts_and_others_do_not(tmp_path: Path) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["First."]}, agents=["agents/*.yaml"])
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "alone.yaml").write_text(json.dumps(llm("alone")), encoding="utf-8")
    async with reloading(config) as server:
        port = await port_of(server)
        (tmp_path / "notes.txt").write_text("Not of the configuration.", encoding="utf-8")
        (tmp_path / "agents" / "other.yaml").write_text(json.dumps(llm("other")), encoding="utf-8")
        assert (await said(server, "has changed")).startswith(str(tmp_path / "agents" / "other.yaml"))
        await port_of(server)
        listed = await bough("agents", "list", "--json", port=port)
    assert [json.loads(line)["definition"]["name"] for line in listed.out.splitlines()] == ["alone", "other"]
