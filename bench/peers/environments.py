"""Virtual environments of the peers: made when they are first needed, and again if their requirements change."""

import subprocess
import sys
from pathlib import Path
from typing import Final

REQUIREMENTS: Final = Path(__file__).parent / "requirements"
CACHE: Final = Path(".bench/peers")
_STAMP: Final = ".requirements"


class EnvironmentFailed(Exception):
    """An environment could not be made; says what pip wrote last."""


def names() -> list[str]:
    """The environments that there are requirements for."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def pins(name: str) -> dict[str, str]:
    """The exact versions of an environment's packages."""
    lines = _requirements(name).splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def python_of(name: str, cache: Path = CACHE) -> str:
    """Return the interpreter of an environment, made if it is not there. Raises EnvironmentFailed."""
    folder = (cache / name).absolute()
    python, stamp = folder / "bin" / "python", folder / _STAMP
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == _requirements(name):
        return str(python)
    print(f"installing {name} into {cache / name}", file=sys.stderr, flush=True)
    _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
    requirements = str(REQUIREMENTS / f"{name}.txt")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--retries",
        "1",
    )
    _run(*pip, "--requirement", requirements)
    stamp.write_text(_requirements(name), encoding="utf-8")
    return str(python)


def _requirements(name: str) -> str:
    return (REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise EnvironmentFailed(f"{' '.join(command[1:4])} failed: {' '.join(said[-3:])}")
