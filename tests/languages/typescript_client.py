"""The TypeScript client as its users have it: npm's commands, and programs, built once for each state of sources."""

import asyncio
import json
import os
import shutil
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from tests.support.processes import PATIENCE_SECONDS, Finished
from tests.support.toolchains import ROOT, built

PACKAGE: Final = ROOT / "clients" / "typescript"

_BUILDING_SECONDS: Final = 600.0
"""The first build downloads packages; later ones take seconds."""


def package() -> Path:
    """Return a copy of the package with its dependencies, in which everything is compiled."""
    return built("typescript", [PACKAGE], _build)


def bundle() -> Path:
    """Return the folder of `run.mjs`, the example bundled into one file, with nothing beside it."""
    return built("typescript-bundle", [PACKAGE], _bundle)


def npx(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package's dependencies in a folder to its end; its exit code is the caller's business."""
    return _run(folder, str(package() / "node_modules" / ".bin" / command), *arguments)


def npm(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run npm in the built package to its end, with more environment; its exit code is the caller's business."""
    return _run(package(), "npm", *arguments, **variables)


def depend(folder: Path) -> None:
    """Make a folder that of a program which depends on the package."""
    packages = package() / "node_modules"
    modules = folder / "node_modules"
    (modules / "@bough-dev").mkdir(parents=True)
    (modules / "@bough-dev" / "bough").symlink_to(package())
    for name in ("@bufbuild", "@connectrpc", "@types", "undici-types"):
        (modules / name).symlink_to(packages / name)
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    options = json.loads((PACKAGE / "tsconfig.json").read_text(encoding="utf-8"))["compilerOptions"]
    options = {name: value for name, value in options.items() if name not in {"rootDir", "outDir", "declaration"}}
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": options}), encoding="utf-8")


def _build(folder: Path) -> None:
    sources = shutil.ignore_patterns("node_modules", "dist")
    shutil.copytree(PACKAGE, folder, ignore=sources, dirs_exist_ok=True)
    # A link to what was downloaded once: other sources need no other packages.
    (folder / "node_modules").symlink_to(built("typescript-packages", _PACKAGES, _install) / "node_modules")
    compiled = _run(folder, "npm", "run", "build")
    assert compiled.returncode == 0, compiled.stdout + compiled.stderr


_PACKAGES: Final = [PACKAGE / name for name in ("package.json", "package-lock.json", ".npmrc")]


def _install(folder: Path) -> None:
    for file in _PACKAGES:
        shutil.copy(file, folder)
    installed = _run(folder, "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
    assert installed.returncode == 0, installed.stdout + installed.stderr


def _bundle(folder: Path) -> None:
    example = package() / "dist" / "dev" / "examples" / "run.js"
    options = ("--bundle", "--platform=node", "--format=esm", f"--outfile={folder / 'run.mjs'}")
    bundled = npx(folder, "esbuild", str(example), *options, "--log-level=warning")
    assert (bundled.returncode, bundled.stderr) == (0, "")


def _run(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**_environment(), **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_BUILDING_SECONDS
    )


@asynccontextmanager
async def running(program: Path | str, *arguments: str) -> AsyncIterator[Process]:
    """A program in JavaScript, or one of the package by its name such as `examples/run`; killed if it still runs."""
    file = program if isinstance(program, Path) else package() / "dist" / "dev" / f"{program}.js"
    process = await asyncio.create_subprocess_exec(
        "node", file, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=16 * 1024 * 1024, env=_environment()
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}


async def finished(program: Path | str, *arguments: str, lines: Sequence[str] = ()) -> Finished:
    """Run such a program to its end, with these lines on its standard input."""
    async with running(program, *arguments) as process, asyncio.timeout(PATIENCE_SECONDS):
        out, err = await process.communicate("".join(f"{line}\n" for line in lines).encode())
        return Finished(code=process.returncode, out=out.decode(), err=err.decode())
