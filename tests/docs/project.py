"""Try a page: its blocks are the files and commands of one folder, in their order."""

import asyncio
import os
import re
import shutil
import signal
import sqlite3
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from bough.v1 import error_pb2, event_pb2
from bough_server.log import events
from tests.docs import commands, pages
from tests.docs.pages import Block, Page
from tests.support import cli_forwarder, processes

ADDRESS: Final = "127.0.0.1:50051"
"""The address that pages show; blocks are tried at another."""

_YAML: Final = re.compile(r"(bough|eval|keys|kubernetes|(agents|evals)/[\w-]+|[\w-]*script[\w-]*)\.yaml")
_EXITS: Final = re.compile(r"^(.+?) +# exits with (\d+)\b.*$", re.MULTILINE)
_TIMES: Final = re.compile(r" *\b[0-9.]+ m?s\b")
_SERVED: Final = re.compile(
    r"\bbough (run|resume|fork|replay|watch|tree|events|runs|cancel|sessions|models|agents (list|show)"
    r"|eval (run|list|show|watch|cancel|score|diff|record))\b"
)


class Project:
    """The folder of a page while its blocks are tried."""

    def __init__(self, folder: Path, page: Page) -> None:
        self._folder = folder
        self._written: dict[str, str] = {}
        """The page of each file that a block is."""
        self._modules: list[str] = []
        self._module: Path | None = None
        """The module that a block without a name continues."""
        self._server = AsyncExitStack()
        self._address = ""
        self._printed = ""
        """What the block of commands before has printed; empty after another block."""
        if page.example:
            ignored = shutil.ignore_patterns("var", "__pycache__")
            shutil.copytree(pages.ROOT / page.example, folder / page.into, ignore=ignored, dirs_exist_ok=True)

    async def __aenter__(self) -> "Project":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stop()

    async def take(self, block: Block) -> None:
        """Write, run or compare a block. Fails with the place of what is wrong."""
        kinds: Mapping[str, Callable[[Block], Awaitable[None]]] = {
            "yaml": self._yaml,
            "python": self._python,
            "sh": self._sh,
            "console": self._console,
            "proto": self._proto,
            "go": self._compiled_elsewhere,
            "ts": self._compiled_elsewhere,
            "py": self._foreign_python,
        }
        if block.kind not in kinds:
            pytest.fail(f"{block.place}: a block is one of {', '.join(kinds)}, not {block.kind!r}.", pytrace=False)
        printed, self._printed = self._printed, ""
        if block.kind == "console" and not block.info and printed and not commands.typed(block.text).strip():
            self._compare(block, printed)
        else:
            await kinds[block.kind](block)

    async def judge(self) -> None:
        """Have everything written so far judged as a server would at its start."""
        if not self._written:
            return
        judged = await processes.run_program("tests.docs.judge", *self._modules, folder=self._folder)
        if judged.code != 0:
            pytest.fail(self._placed(judged.out or judged.err), pytrace=False)

    def failures(self) -> set[str]:
        """What failed in the runs of the page so far, as "agent: event: reason"."""
        found: set[str] = set()
        for database in self._folder.rglob("*.db"):
            with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
                rows = connection.execute("SELECT data FROM events").fetchall()
            found |= {failure for (data,) in rows if (failure := _failure(event_pb2.AgentEvent.FromString(data)))}
        return found

    async def _yaml(self, block: Block) -> None:
        name = block.name
        if not name or not _YAML.fullmatch(name):
            names = "`# bough.yaml`, `# agents/NAME.yaml`, `# script.yaml`, `# eval.yaml`, `# evals/NAME.yaml`"
            words = f"a yaml block begins with {names}, `# keys.yaml` or `# kubernetes.yaml`."
            pytest.fail(f"{block.place}: {words}", pytrace=False)
        await self._write(block, name)

    async def _python(self, block: Block) -> None:
        name = block.name
        if name:
            await self._write(block, name)
            if _is_of_the_server(block.text):
                self._module = self._folder / name
                self._modules = list(dict.fromkeys([*self._modules, name.removesuffix(".py")]))
            else:
                self._module = None
                if not _is_tool_server(block.text):  # those are started by what they serve
                    await self._run_script(block, name)
        elif self._module is not None:
            before = self._module.read_text(encoding="utf-8")
            self._module.write_text(before + block.padded(after=before.count("\n")), encoding="utf-8")
        else:
            words = "a python block begins with `# NAME.py`, or continues a module of the server before it."
            pytest.fail(f"{block.place}: {words}", pytrace=False)

    async def _sh(self, block: Block) -> None:
        if block.info:
            reason = block.info.removeprefix("skip:").strip()
            if not block.info.startswith("skip:") or not reason:
                pytest.fail(f"{block.place}: write ```sh, or ```sh skip: REASON.", pytrace=False)
            commands.check(block, block.text)
            return
        await self._run_commands(block)

    async def _console(self, block: Block) -> None:
        typed = commands.typed(block.text)
        commands.check(block, typed)
        if block.info == "run":
            await self._run_commands(replace(block, text=_expecting(typed)))
        elif block.info:
            pytest.fail(f"{block.place}: write ```console, or ```console run.", pytrace=False)

    def _compare(self, block: Block, printed: str) -> None:
        """Compare a block with what the commands before it have printed, but for times."""
        if missing := _first_line_missing(remove_times(block.text), [remove_times(printed)]):
            words = f"the commands before have not printed this line, after those before it: {missing!r}"
            pytest.fail(f"{block.place}: {words}\n{printed}", pytrace=False)

    async def _run_commands(self, block: Block) -> None:
        await self.judge()
        environment = {}
        if "--embedded" in block.text or not _SERVED.search(block.text):
            await self._stop()
        else:
            environment["BOUGH_ADDRESS"] = await self._serve()
        code, out = await self._shell(block, environment)
        if code != 0:
            pytest.fail(self._placed(out), pytrace=False)
        self._printed = out

    async def _proto(self, block: Block) -> None:
        files = sorted((pages.ROOT / "proto" / "bough").rglob("*.proto"))
        if missing := _first_line_missing(block.text, [file.read_text(encoding="utf-8") for file in files]):
            pytest.fail(f"{block.place}: no file of the schema has these lines in order: {missing!r}", pytrace=False)

    async def _compiled_elsewhere(self, block: Block) -> None:
        """Programs in other languages are compiled and run by tests/languages, where their toolchain is."""

    async def _foreign_python(self, block: Block) -> None:
        """Programs of other projects, which are not installed here, are Python at least."""
        compile(block.padded(), block.page, "exec")

    async def _write(self, block: Block, name: str) -> None:
        """Write a file whose lines have the numbers that they have in the page."""
        file = self._folder / name
        if name in self._written:
            await self.judge()
        await self._stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.padded(), encoding="utf-8")
        self._written[name] = block.page

    async def _run_script(self, block: Block, name: str) -> None:
        await self.judge()
        address = await self._serve()
        script = self._folder / name
        script.write_text(script.read_text(encoding="utf-8").replace(ADDRESS, address), encoding="utf-8")
        ended = await processes.run_program(str(script), folder=self._folder)
        if ended.code != 0:
            pytest.fail(f"{block.place}: it ends with {ended.code}:\n{self._placed(ended.err)}", pytrace=False)

    async def _serve(self) -> str:
        """The address of a server of the folder as it is now."""
        if not self._address:
            config = self._folder / "bough.yaml"
            environment = {"BOUGH_DATABASE": str(self._folder / "var" / "bough.db")}
            serving = processes.serving(config, environment=environment)
            self._address = (await self._server.enter_async_context(serving)).address
        return self._address

    async def _stop(self) -> None:
        self._address = ""
        await self._server.aclose()

    async def _shell(self, block: Block, environment: Mapping[str, str]) -> tuple[int, str]:
        """The exit code and the output of the commands of a block, each of which has to succeed."""
        script = self._folder / ".block.sh"
        script.write_text(f"trap 'echo \"{block.page}:$LINENO: exit code $?\"' ERR{block.padded()}", encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *("bash", "-Eeuo", "pipefail", script.name),
            cwd=self._folder,
            env={**self._environment(), **environment},
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            pass_fds=[processes.fork_server().fileno()],
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(processes.PATIENCE_SECONDS):
                out, _ = await process.communicate()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGTERM)
            pytest.fail(f"{block.place}: it did not end within {processes.PATIENCE_SECONDS:g} s.", pytrace=False)
        assert process.returncode is not None
        return process.returncode, out.decode()

    def _environment(self) -> dict[str, str]:
        folder = self._folder / ".bin"
        command = folder / "bough"
        if not command.exists():
            folder.mkdir()
            source = Path(cli_forwarder.__file__).read_text(encoding="utf-8")
            command.write_text(f"#!{sys.executable} -IS\n{source}", encoding="utf-8")
            command.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BOUGH_", "OTEL_"))}
        path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        return {**kept, "PATH": path, "COLUMNS": "80", "FORK_SERVER": str(processes.fork_server().fileno())}

    def _placed(self, text: str) -> str:
        """A text about files of the folder as one about the page, whose line numbers they have."""
        for name, page in self._written.items():
            for file in (self._folder / name, self._folder.resolve() / name):
                text = re.sub(rf'File "{re.escape(str(file))}", line (\d+)', rf"{page}:\1", text)
                text = text.replace(f"{file}:", f"{page}:")
        return text


def remove_times(text: str) -> str:
    """Return lines that a command printed without times, which are others each time."""
    return "\n".join(_TIMES.sub("", line).rstrip() for line in text.splitlines())


def _expecting(typed: str) -> str:
    """Commands, of which those that say so in a comment have to end with another exit code than 0."""
    return _EXITS.sub(r"code=0; \1 || code=$?; test $code = \2", typed)


def _is_of_the_server(text: str) -> bool:
    """Whether it is a module that a server imports, and not a script of a client."""
    return re.search(r"^(from|import) bough_server\b", text, re.MULTILINE) is not None


def _is_tool_server(text: str) -> bool:
    """Whether a program is one that a server starts and that serves tools to it."""
    return "from mcp.server import" in text or "from bough.tools import" in text


def _first_line_missing(excerpt: str, files: Sequence[str]) -> str:
    """The first line of an excerpt that no file has after the lines before it; empty if one file has them all."""
    longest: list[str] = []
    wanted = [line.strip() for line in excerpt.splitlines() if line.strip() not in ("", "...", "// ...")]
    for text in files:
        lines = iter([line.strip() for line in text.splitlines()])
        found = [line for line in wanted if line in lines]
        if len(found) == len(wanted):
            return ""
        prefix = [line for line, there in zip(wanted, found, strict=False) if line == there]
        longest = max(longest, prefix, key=len)
    return wanted[len(longest)]


def _failure(event: event_pb2.AgentEvent) -> str:
    name = events.name_of(event)
    if not name.endswith(".failed"):
        return ""
    payload = getattr(event, str(event.WhichOneof("payload")))
    error = payload.result.error if event.HasField("tool_failed") else payload.error
    return f"{event.agent}: {name}: {error_pb2.ErrorReason.Name(error.reason).removeprefix('ERROR_REASON_')}"
