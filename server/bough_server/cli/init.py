"""`bough init`: write the files of a new project."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish

FolderArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The folder of the project; it is created if it does not exist.")
]


def init(folder: FolderArgument = Path()) -> None:
    """Write a small project that runs at once: settings, two agents, a tool, a script and a test.

    A script answers in place of a model, so that it needs no key. Files that exist are never changed: if one of these
    exists, nothing is written.
    """
    finish(_init(folder))


async def _init(folder: Path) -> ExitCode:
    from bough_server.cli.exit_codes import print_stderr
    from bough_server.cli.output import print_line
    from bough_server.cli.project_files import PROJECT_FILES
    from bough_server.errors import ConfigurationError

    if existing := [name for name in PROJECT_FILES if (folder / name).exists()]:
        raise ConfigurationError(f"{folder / existing[0]} exists: name another folder, or move the file away.")
    for name, text in PROJECT_FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print_line(str(path))
    print_stderr("Try it:")
    if folder != Path():
        place = str(folder)
        print_stderr(f"  cd {shlex.quote(f'./{place}' if place.startswith('-') else place)}")
    print_stderr("  bough chat")
    print_stderr("  python -m pytest    # needs the package pytest")
    return ExitCode.YES
