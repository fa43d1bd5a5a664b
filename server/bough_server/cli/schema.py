"""`bough schema`: print the JSON Schema of a kind of file, for editors."""

from enum import StrEnum
from importlib import resources
from typing import Annotated

import typer


class SchemaKind(StrEnum):
    """The files that have a JSON Schema."""

    BOUGH = "bough.yaml"
    AGENT = "agent"
    EVAL = "eval"


def schema(
    kind: Annotated[SchemaKind, typer.Argument(help="The kind of file.")],
    path: Annotated[bool, typer.Option("--path", help="Print the path of the installed file instead.")] = False,
) -> None:
    """Print the JSON Schema of bough.yaml, of agent files or of eval sets.

    Name it in a file for the YAML language server: `# yaml-language-server: $schema=PATH`.
    """
    file = resources.files("bough_server") / "schemas" / f"{kind.removesuffix('.yaml')}.schema.json"
    print(file if path else file.read_text(encoding="utf-8").removesuffix("\n"))
