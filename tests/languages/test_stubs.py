"""Stubs without our help: the commands and programs of clients/README.md, in an empty folder each."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from bough_server.schema_rules import schema_files
from tests.languages import stub_page
from tests.languages.programs import finished_program
from tests.support.processes import serving
from tests.support.toolchains import ROOT, built, require

EXAMPLES = ROOT / "examples"
STRANGERS = Path(__file__).parent / "strangers"
SOURCES = (stub_page.SCHEMA, stub_page.PAGE, Path(stub_page.__file__), STRANGERS)
LANGUAGES = {"go": "Go", "typescript": "TypeScript", "java": "Java", "rust": "Rust", "csharp": "C#"}
"""The templates and their sections."""

pytestmark = pytest.mark.timeout(1_800)


def _go(folder: Path) -> None:
    stub_page.follow("Go", folder)
    (folder / "stranger").mkdir()
    shutil.copy(STRANGERS / "main.go", folder / "stranger" / "main.go")
    stub_page.run("go build -o stranger-program ./stranger && go vet ./...", folder)


def _typescript(folder: Path) -> None:
    shutil.copy(STRANGERS / "stranger.ts", folder)  # `npx tsc` of the page compiles it too
    stub_page.follow("TypeScript", folder)


@pytest.fixture
def go_folder() -> Path:
    """The folder in which the section on Go was followed."""
    require("go")
    return built("stubs-go", SOURCES, _go)


@pytest.fixture
def typescript_folder() -> Path:
    """The folder in which the section on TypeScript was followed."""
    require("typescript")
    return built("stubs-typescript", SOURCES, _typescript)


@pytest.fixture
def java_folder() -> Path:
    """The folder in which the section on Java was followed, without the part that needs a clone."""
    require("java")
    return built("stubs-java", SOURCES, lambda folder: stub_page.follow("Java", folder))


def test_the_page_shows_the_templates() -> None:
    for language, heading in LANGUAGES.items():
        name = f"buf.gen.{language}.yaml"
        shown = [block.text for block in stub_page.blocks(heading) if block.info == name]
        assert shown == [(stub_page.CLIENTS / name).read_text(encoding="utf-8")]


def test_the_templates_use_local_plugins_only() -> None:
    templates = sorted(stub_page.CLIENTS.glob("buf.gen.*.yaml"))
    assert [path.name.split(".")[2] for path in templates] == sorted(LANGUAGES)
    for path in templates:
        plugins = yaml.safe_load(path.read_text(encoding="utf-8"))["plugins"]
        assert all({"local", "protoc_builtin"} & plugin.keys() for plugin in plugins), path


def test_one_set_is_whole_and_one_needs_nothing_but_protobuf(tmp_path: Path) -> None:
    stub_page.descriptors(tmp_path)
    whole = FileDescriptorSet.FromString((tmp_path / "bough.binpb").read_bytes()).file
    data = (tmp_path / stub_page.STRIPPED).read_bytes()
    stripped = FileDescriptorSet.FromString(data).file
    ours = [file.name for file in whole if file.package == "bough.v1"]
    assert list(whole) == list(schema_files())
    assert [file.name for file in stripped if file.package == "bough.v1"] == ours
    assert {file.package for file in stripped} == {"bough.v1", "google.protobuf", "google.rpc"}
    assert b"buf.validate" not in data
    assert all(file.source_code_info.location for file in stripped if file.package == "bough.v1")


def test_a_clone_generates_without_the_rules(tmp_path: Path, go_folder: Path) -> None:
    (block,) = [one for one in stub_page.blocks("The schema as a file") if one.info == "clone"]
    for name in ("proto", "clients"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = stub_page.environment(go_folder)
    subprocess.run(("sh", "-euc", block.text), cwd=tmp_path, env=environment, check=True)
    generated = {path.name: _code(path) for path in (tmp_path / "build" / "gen" / "bough" / "v1").iterdir()}
    expected = {path.name: _code(path) for path in (go_folder / "gen" / "bough" / "v1").iterdir()}
    assert generated.keys() == expected.keys()
    assert not any("validate" in text for text in generated.values())
    assert all("protoc-gen-go" in text for text in generated.values())


def _code(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("language", ["go", "typescript"])
async def test_the_program_of_the_page_follows_a_run(
    language: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(f"{language}_folder")
    (console,) = [one for one in stub_page.blocks(LANGUAGES[language]) if one.kind == "console"]
    desk = shutil.copytree(EXAMPLES / "desk", tmp_path / "desk")
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db"), "BOUGH_DEFAULT_MODEL": "scripted"}
    async with serving(desk / "bough.yaml", environment=environment) as server:
        command = console.text.removeprefix("$ ").replace("127.0.0.1:50051", server.address)
        code, lines = await finished_program("sh", "-c", command, folder=folder)
    sequences = [int(line.split()[0]) for line in lines]
    assert code == 0
    assert sequences == sorted(set(sequences))
    assert any(re.fullmatch(r"\d+ lead/researcher starts", line) for line in lines), lines
    assert lines[-1].endswith(" completed")


@pytest.mark.parametrize("language", ["go", "typescript"])
async def test_a_newcomers_program_answers_rejoins_and_reads_the_tree(
    language: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(f"{language}_folder")
    command = ("./stranger-program",) if language == "go" else ("node", "dist/stranger.js")
    shop = shutil.copytree(EXAMPLES / "approvals", tmp_path / "approvals")
    environment = {"BOUGH_DATABASE": str(tmp_path / "bough.db")}
    async with serving(shop / "bough.yaml", environment=environment) as server:
        code, lines = await finished_program(*command, server.address, folder=folder)
    sequences = [int(line.removeprefix("event ")) for line in lines if line.startswith("event ")]
    assert code == 0, lines
    assert sequences == list(range(1, len(sequences) + 1))
    assert [line for line in lines if line.startswith("answered ")] == [
        "answered client_tool",
        "answered question",
        "answered approval",
    ]
    assert [line for line in lines if line.startswith("agent ")] == [
        "agent lead SUCCEEDED",
        "agent   interviewer SUCCEEDED",
        "agent   refunds SUCCEEDED",
    ]
    assert lines[-1] == "error INVALID_REQUEST agent"


def test_java_is_generated_by_protoc_and_the_plugin(java_folder: Path) -> None:
    package = java_folder / "gen" / "dev" / "bough" / "v1"
    assert {"AgentServiceGrpc.java", "AgentEvent.java"} <= {path.name for path in package.iterdir()}
    assert not any("buf.validate" in _code(path) for path in package.iterdir())


def test_rust_is_generated(tmp_path: Path) -> None:
    require("rust")
    stub_page.follow("Rust", tmp_path)
    package = tmp_path / "gen" / "bough" / "v1"
    assert 'include!("bough.v1.tonic.rs");' in _code(package / "bough.v1.rs")
    assert "pub struct AgentServiceClient<T>" in _code(package / "bough.v1.tonic.rs")


def test_messages_of_csharp_are_generated(java_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").symlink_to(java_folder / "bin")
    stub_page.follow("C#", tmp_path)
    names = {path.name for path in (tmp_path / "gen").iterdir()}
    assert {"Event.cs", "AgentService.cs"} <= names
    assert "namespace Bough.V1 {" in _code(tmp_path / "gen" / "Event.cs")
