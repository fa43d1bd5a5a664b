"""The machine and the versions that figures were measured with; nothing that names a host or a user."""

import os
import platform
import sqlite3
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path

from tests.support.postgres import programs

_BUILDS = {"PGO": "--enable-optimizations", "LTO": "--with-lto"}
_PACKAGES = ("grpcio", "protobuf", "openai", "aiohttp", "sqlalchemy", "psycopg", "asyncpg", "pydantic")


def machine() -> dict[str, str]:
    """What the figures depend on: processor, cores, memory, system, and how busy it was at the start."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": str(os.cpu_count() or 0),
        "memory": f"{int((_field('/proc/meminfo', 'MemTotal') or '0 kB').split()[0]) / 1024**2:.0f} GiB",
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "load at the start": f"{os.getloadavg()[0]:.1f}",
    }


def versions() -> dict[str, str]:
    """Python, the databases and the packages whose speed counts."""
    return {
        "python": f"{platform.python_version()} ({_python_build()})",
        "sqlite": sqlite3.sqlite_version,
        "postgresql": _postgresql_version(),
        **{name: version(name) for name in _PACKAGES},
    }


def _python_build() -> str:
    """How Python was built: its own speed differs by a third with profile-guided and link-time optimization."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    used = [name for name, option in _BUILDS.items() if option in options]
    return " and ".join(used) if used else "neither PGO nor LTO"


def _postgresql_version() -> str:
    """The version of the installed PostgreSQL."""
    folder = programs()
    if folder is None:
        return "none"
    told = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True)
    return told.stdout.split()[2]


def _field(path: str, name: str) -> str:
    """The first value of a name in a file of `name: value` lines; empty where there is none."""
    file = Path(path)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")
