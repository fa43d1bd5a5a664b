"""The Python distribution: its name, its version, and the command that installs it.

Its name is not that of the package: `bough` on PyPI is another program.
"""

from typing import Final

DISTRIBUTION: Final = "bough-agents"


def version() -> str:
    """Return the installed version."""
    from importlib import metadata  # slow to import

    return metadata.version(DISTRIBUTION)


def install_command(*extras: str) -> str:
    """Return the command that installs the service with these extras."""
    return f'pip install "{DISTRIBUTION}[{",".join(("server", *extras))}]"'
