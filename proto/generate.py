"""Generate the server's schema, the stubs of Python, Go and TypeScript, and Python's synchronous client.

python -m proto.generate [--check]            write the files, or show what the committed ones are not
python -m proto.generate --descriptors DIR    write bough.binpb and bough-stripped.binpb, without the validation rules

The server keeps the whole schema; stubs are made without the rules, so that none needs buf.validate. Both have
google.rpc's details of errors, of which there are no stubs in every language.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from proto import sync_client

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"
BIN = Path(sys.executable).parent
PROTOS = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.glob("bough/v1/*.proto"))
ERROR_DETAILS = "google/rpc/error_details.proto"
HEALTH = "grpc/health/v1/health.proto"
RULES = "buf/validate/"
SCHEMA = "server/bough_server/bough.binpb"
CLIENT = "clients/python/bough"
SYNC_CLIENT = f"{CLIENT}/sync"
GO = "clients/go"
TYPESCRIPT = "clients/typescript"


@dataclass(frozen=True, slots=True)
class Target:
    """The stubs of a language: `make` writes them below a folder as they stand below the repository."""

    language: str
    command: str
    """What has to be installed; without it the committed stubs stay as they are."""
    paths: tuple[str, ...]
    """Every file and folder that is made; nothing else stands in these folders."""
    make: Callable[[Path, Path], None]
    """Called with the file of the stripped set and the folder."""


def main() -> int:
    """Do what the command line says; return 1 if a check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m proto.generate", description="Generate the schema and the stubs.")
    parser.add_argument("--check", action="store_true", help="show what the committed files are not")
    parser.add_argument("--descriptors", metavar="DIR", type=Path, help="write both descriptor sets into a folder")
    options = parser.parse_args()
    whole = compile_schema()
    if options.descriptors:
        write_descriptors(whole, options.descriptors)
        return 0
    with TemporaryDirectory() as folder:
        made = Path(folder)
        if not options.check:
            replace(made, generate(whole, made, "MADE"), ROOT)
            return 0
        differences = [
            each for path in generate(whole, made, "CHECKED") for each in find_stale(made / path, ROOT / path)
        ]
    for difference in differences:
        print(f"not what `make proto` makes: {difference}", file=sys.stderr)
    return 1 if differences else 0


def generate(whole: FileDescriptorSet, made: Path, done: str) -> list[str]:
    """Make the schema, all stubs and the synchronous client below a folder; return their paths. A language without its
    command is said to be not `done`."""
    write(made / SCHEMA, encode(whole))
    stripped = made / "stripped.binpb"
    write(stripped, encode(with_health(without_rules(whole))))
    paths = [SCHEMA]
    for target in TARGETS:
        if shutil.which(target.command) is None:
            missing = f"because {target.command} is missing"
            print(f"NOT {done}: THE STUBS OF {target.language.upper()}, {missing}", flush=True)
            continue
        target.make(stripped, made)
        paths += target.paths
    sync_client.generate(ROOT / CLIENT, made / SYNC_CLIENT)
    return [*paths, SYNC_CLIENT]


def replace(made: Path, paths: Iterable[str], repository: Path) -> None:
    """Put what was made below a folder in the place of what stands below the repository."""
    for path in paths:
        if (repository / path).is_dir():
            shutil.rmtree(repository / path)
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made / path, repository / path)


def find_stale(made: Path, committed: Path) -> Iterator[str]:
    """Return the path of each file in which two files or folders differ, with the first lines that do in a folder."""
    right, there = read_contents(made), read_contents(committed)
    for name in sorted(right.keys() | there.keys()):
        if right.get(name) != there.get(name):
            before, after = (files.get(name, b"").decode(errors="replace").splitlines() for files in (there, right))
            lines = unified_diff(before, after, "committed", "generated", lineterm="") if made.is_dir() else ()
            yield "\n".join([str(committed / name), *islice(lines, 20)])


def read_contents(path: Path) -> Mapping[str, bytes]:
    """Return what a file or the files below a folder hold, by their paths below it."""
    files = path.rglob("*") if path.is_dir() else [path]
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in files
        if file.is_file() and file.parent.name != "__pycache__"
    }


def write_descriptors(whole: FileDescriptorSet, folder: Path) -> None:
    """Write both sets into a folder."""
    write(folder / "bough.binpb", encode(whole))
    write(folder / "bough-stripped.binpb", encode(without_rules(whole)))


def compile_schema() -> FileDescriptorSet:
    """Compile the schema with its comments; positions in the source that have none are dropped."""
    with TemporaryDirectory() as folder:
        made = Path(folder) / "all.binpb"
        includes = (f"-I{PROTO / 'vendor'}", f"-I{PROTO}", "--include_imports", "--include_source_info")
        protoc(*includes, f"--descriptor_set_out={made}", *PROTOS, ERROR_DETAILS)
        files = parse_set(made.read_bytes())
    for file in files.file:
        commented = [place for place in file.source_code_info.location if place.leading_comments]
        # No source_code_info at all if it would be empty: generators that read it expect every element in it.
        file.ClearField("source_code_info")
        if file.package.startswith("bough."):
            file.source_code_info.location.extend(commented)
    return files


def parse_set(data: bytes) -> FileDescriptorSet:
    """Parse a set as a message of the set's own pool: it knows the options of the rules, others do not."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    made = GetMessageClass(pool.FindMessageTypeByName("google.protobuf.FileDescriptorSet"))
    return cast(FileDescriptorSet, made.FromString(data))


def encode(message: Message) -> bytes:
    """Return the bytes of a message, always the same ones."""
    return message.SerializeToString(deterministic=True)


def without_rules(whole: FileDescriptorSet) -> FileDescriptorSet:
    """Return a set without the validation rules and their import, which stubs can do without."""
    files = parse_set(encode(whole))
    kept = [file for file in files.file if not file.name.startswith(RULES)]
    for file in kept:
        strip(file)
        file.dependency[:] = [name for name in file.dependency if not name.startswith(RULES)]
    return type(files)(file=kept)


def strip(message: Message) -> None:
    """Remove from a descriptor, and from all that it holds, the options that the files of the rules define."""
    for field, value in message.ListFields():
        if field.is_extension and field.full_name.startswith("buf.validate."):
            message.ClearExtension(field)  # type: ignore[arg-type]
        elif field.message_type is not None and not field.is_extension:
            for part in value if field.is_repeated else [value]:
                strip(part)
            if field.name == "options" and not value.ByteSize():
                message.ClearField("options")


def with_health(files: FileDescriptorSet) -> FileDescriptorSet:
    """Return a set with the health service beside the schema, as grpcio-health-checking has it."""
    health = FileDescriptorProto.FromString(health_pb2.DESCRIPTOR.serialized_pb)
    health.name = HEALTH
    added = FileDescriptorSet.FromString(encode(files))
    added.file.append(health)
    return added


def make_python(stripped: Path, made: Path) -> None:
    """Make the modules of Python and what exports them."""
    out = made / "clients/python"
    out.mkdir(parents=True)
    source = f"--descriptor_set_in={stripped}"
    mypy = f"--plugin=protoc-gen-mypy={BIN / 'protoc-gen-mypy'}"
    protoc(source, mypy, f"--python_out={out}", f"--mypy_out=quiet:{out}", *PROTOS)
    grpc = f"--plugin=protoc-gen-mypy_grpc={BIN / 'protoc-gen-mypy_grpc'}"
    services = [name for name in PROTOS if name.endswith("_service.proto")]
    protoc(source, grpc, f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}", *services)
    files = {file.name: file for file in FileDescriptorSet.FromString(stripped.read_bytes()).file}
    lines = render_exports({name: names(files[name]) for name in PROTOS})
    write(out / "bough/v1/__init__.py", "\n".join([*lines, ""]).encode())


def names(file: FileDescriptorProto) -> list[str]:
    """Return the names that the Python module of a file has for its messages, enums and their values."""
    values = [value.name for enum in file.enum_type for value in enum.value]
    return sorted([*(message.name for message in file.message_type), *(enum.name for enum in file.enum_type), *values])


def render_exports(files: Mapping[str, list[str]]) -> Iterator[str]:
    """Return the lines of the module that exports every message, enum and enum value; `files` has them by file."""
    yield '"""The messages, enums and enum values of the schema; generated, as the modules beside it are."""'
    yield ""
    for path, exported in files.items():
        if exported:
            yield f"from {path.removesuffix('.proto').replace('/', '.')}_pb2 import ("
            yield from (f"    {name}," for name in exported)
            yield ")"
    yield ""
    yield "__all__ = ["
    yield from (f'    "{name}",' for name in sorted(name for exported in files.values() for name in exported))
    yield "]"


def make_go(stripped: Path, made: Path) -> None:
    """Make the package of Go. The plugins are those of a separate module: users of the client do not depend on them."""
    out = made / GO
    out.mkdir(parents=True)
    subprocess.run(["go", "-C", ROOT / GO / "internal/tools", "build", "-o", f"{made}/", "tool"], check=True)
    module = "module=github.com/bough-dev/bough/clients/go"
    plugins = [f"--plugin=protoc-gen-{name}={made}/protoc-gen-{name}" for name in ("go", "go-grpc")]
    outputs = [f"--go_out={out}", f"--go_opt={module}", f"--go-grpc_out={out}", f"--go-grpc_opt={module}"]
    protoc(f"--descriptor_set_in={stripped}", *plugins, *outputs, *PROTOS)


def make_typescript(stripped: Path, made: Path) -> None:
    """Make the modules of TypeScript and what exports them; the plugin's version is in package-lock.json."""
    package, out = ROOT / TYPESCRIPT, made / TYPESCRIPT / "src"
    installed, locked = package / "node_modules/.package-lock.json", package / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime <= locked.stat().st_mtime:
        quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
        subprocess.run(["npm", "ci", "--prefix", package, *quiet], check=True)
    out.mkdir(parents=True)
    plugin = f"--plugin=protoc-gen-es={package / 'node_modules/.bin/protoc-gen-es'}"
    outputs = (plugin, "--es_opt=target=ts,import_extension=js", f"--es_out={out}")
    protoc(f"--descriptor_set_in={stripped}", *outputs, *PROTOS, HEALTH)
    protoc(f"-I{PROTO / 'vendor'}", *outputs, ERROR_DETAILS)  # from its source, which has the comments
    lines = [f'export * from "./{Path(name).stem}_pb.js";\n' for name in PROTOS]
    first = "// Every message, enum and service of the schema; generated, as the modules beside it are.\n"
    write(out / "bough/v1/index.ts", "".join([first, *lines]).encode())


def protoc(*arguments: str) -> None:
    """Run the compiler of grpcio-tools. Raises CalledProcessError; it says itself what is wrong."""
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)


def write(path: Path, data: bytes) -> None:
    """Write a file and the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


TARGETS = (
    Target("Python", sys.executable, ("clients/python/bough/v1",), make_python),
    Target("Go", "go", ("clients/go/bough/v1",), make_go),
    Target(
        "TypeScript",
        "npm",
        tuple(f"clients/typescript/src/{name}" for name in ("bough", "google", "grpc")),
        make_typescript,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
