"""Toolchains of other languages: which are here, which are required, and what was built with them once.

A toolchain that is absent skips its tests with one loud line; where BOUGH_REQUIRE names it, they fail.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import pytest

ROOT: Final = Path(__file__).parents[2]

BUILT: Final = ROOT / "build" / "toolchains"
"""What was built, in a folder for each digest of its sources; `make clean` removes it."""

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "go": ("go",),
    "typescript": ("node", "npm"),
    "java": ("java", "mvn"),
    "grpcurl": ("go",),
    "rust": ("protoc-gen-prost", "protoc-gen-tonic"),
}
"""The commands that each toolchain consists of."""


def require(name: str) -> None:
    """Skip the test unless every command of a toolchain is here; fail it if BOUGH_REQUIRE names the toolchain."""
    if missing := [command for command in COMMANDS[name] if shutil.which(command) is None]:
        skip_or_fail(name, missing)


def skip_or_fail(name: str, missing: Sequence[str]) -> NoReturn:
    """Skip the test because of what is missing, or fail it if BOUGH_REQUIRE names what it is missing for."""
    reason = (
        f"NOT TESTED WITH {name.upper()}: missing {' and '.join(missing)}; BOUGH_REQUIRE={name} makes this a failure"
    )
    if name in os.environ.get("BOUGH_REQUIRE", "").split(","):
        pytest.fail(reason)
    pytest.skip(reason)


def built(name: str, sources: Iterable[Path], build: Callable[[Path], None]) -> Path:
    """Return the folder of what `build` made of `sources`, files or whole folders; it is called once for each digest.

    `build` receives an empty folder and fills it; a folder whose build failed is removed, and built anew the next time.
    Processes that want the same folder wait for the one that builds it.
    """
    digest = hashlib.sha256()
    for path in sorted(file for source in sources for file in _files(source)):
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    folder = BUILT / f"{name}-{digest.hexdigest()[:16]}"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                build(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            (folder / ".complete").touch()
    return folder


def _files(source: Path) -> Iterable[Path]:
    """Return a file, or the files below a folder but for what package managers and builds put there."""
    if source.is_file():
        return [source]
    return [
        file for file in source.rglob("*") if file.is_file() and not {"node_modules", "target", "dist"} & {*file.parts}
    ]
