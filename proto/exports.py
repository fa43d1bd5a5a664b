"""Write the `__init__.py` of bough.v1, which exports every message, enum and enum value of a descriptor set.

Usage: python proto/exports.py SET INIT_PY
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2

PACKAGE = "bough.v1"


def names(file: descriptor_pb2.FileDescriptorProto) -> list[str]:
    """The names that the Python module of a file has for its messages, enums and their values."""
    values = [value.name for enum in file.enum_type for value in enum.value]
    return sorted([*(message.name for message in file.message_type), *(enum.name for enum in file.enum_type), *values])


def module(files: dict[str, list[str]]) -> Iterator[str]:
    """The lines of the module; `files` has the names by proto file."""
    yield '"""The messages, enums and enum values of the schema; generated, as the modules beside it are."""'
    yield ""
    for path, exported in files.items():
        yield f"from {path.removesuffix('.proto').replace('/', '.')}_pb2 import ("
        yield from (f"    {name}," for name in exported)
        yield ")"
    yield ""
    yield "__all__ = ["
    yield from (f'    "{name}",' for name in sorted(name for exported in files.values() for name in exported))
    yield "]"


def main(source: Path, target: Path) -> None:
    """Write the module."""
    files = descriptor_pb2.FileDescriptorSet.FromString(source.read_bytes()).file
    ours = {file.name: names(file) for file in sorted(files, key=lambda file: file.name) if file.package == PACKAGE}
    target.write_text("\n".join([*module({path: exported for path, exported in ours.items() if exported}), ""]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
