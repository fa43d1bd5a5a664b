"""The client's stubs: they need no other package's descriptors, and bough.v1 exports all of their names."""

import subprocess
import sys
from pathlib import Path

from google.protobuf import descriptor_pb2

import bough.v1
from bough_server import __file__ as server_package
from proto.generate import find_stale, names, render_exports, replace

ROOT = Path(__file__).parents[2]
WHOLE = Path(server_package).with_name("bough.binpb")

USES_STUBS = """
import sys
from pathlib import Path

sys.modules["buf"] = None  # importing it raises, whatever is installed

from google.protobuf import descriptor_pool

from bough import v1
from bough.v1 import event_pb2, options_pb2

folder = Path(sys.argv[1])
assert Path(v1.__file__).is_relative_to(folder), v1.__file__
request = v1.RunRequest(agent="lead", input=v1.Message(role=v1.ROLE_USER, parts=[v1.Part(text="hi")]))
assert v1.RunRequest.FromString(request.SerializeToString()) == request
options = event_pb2.AgentEvent.DESCRIPTOR.fields_by_name["run_started"].GetOptions()
assert options.Extensions[options_pb2.event_options].name
for proto in sys.argv[2:]:
    file = descriptor_pool.Default().FindFileByName(proto)
    assert not [each.name for each in file.dependencies if each.name.startswith("buf/")], file.name
    assert b"buf.validate" not in file.serialized_pb, file.name
    assert b"buf/validate" not in file.serialized_pb, file.name
"""


def run(*arguments: object, **options: object) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, done.stderr


def files_of(schema: Path) -> list[descriptor_pb2.FileDescriptorProto]:
    return list(descriptor_pb2.FileDescriptorSet.FromString(schema.read_bytes()).file)


def descriptors(folder: Path) -> Path:
    """Write both sets into a folder; return the one without the rules."""
    run("-m", "proto.generate", "--descriptors", folder, cwd=ROOT)
    return folder / "bough-stripped.binpb"


def test_stubs_made_without_the_rules_are_used_without_any_package_named_buf(tmp_path: Path) -> None:
    stripped = descriptors(tmp_path)
    protos = [file.name for file in files_of(stripped) if file.package == "bough.v1"]
    out = tmp_path / "out"
    (out / "bough" / "v1").mkdir(parents=True)
    (out / "bough" / "__init__.py").touch()
    run("-m", "grpc_tools.protoc", f"--descriptor_set_in={stripped}", f"--python_out={out}", *protos)
    lines = render_exports({file.name: names(file) for file in files_of(stripped) if file.package == "bough.v1"})
    (out / "bough" / "v1" / "__init__.py").write_text("\n".join(lines), encoding="utf-8")
    assert "bough/v1/agent_service.proto" in protos
    run("-c", USES_STUBS, out, *protos, env={"PYTHONPATH": str(out)}, cwd=tmp_path)
    assert (tmp_path / "bough.binpb").read_bytes() == WHOLE.read_bytes()


def test_the_rules_are_in_the_servers_schema_alone(tmp_path: Path) -> None:
    stripped = descriptors(tmp_path)
    assert b"buf.validate" in WHOLE.read_bytes()
    assert b"buf.validate" not in stripped.read_bytes()
    without_rules = {file.name for file in files_of(WHOLE)} - {file.name for file in files_of(stripped)}
    assert without_rules == {"buf/validate/validate.proto"}


def test_every_message_enum_and_enum_value_is_exported() -> None:
    held = {
        name
        for file in files_of(WHOLE)
        if file.package == "bough.v1"
        for name in [
            *(message.name for message in file.message_type),
            *(enum.name for enum in file.enum_type),
            *(value.name for enum in file.enum_type for value in enum.value),
        ]
    }
    assert sorted(held) == bough.v1.__all__
    assert all(hasattr(bough.v1, name) for name in held)


def test_without_their_commands_the_stubs_of_other_languages_are_not_compared_and_it_is_said() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "proto.generate", "--check"],
        cwd=ROOT,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.splitlines() == [
        "NOT CHECKED: THE STUBS OF GO, because go is missing",
        "NOT CHECKED: THE STUBS OF TYPESCRIPT, because npm is missing",
    ]


def test_what_is_changed_missing_or_too_much_in_a_committed_folder_is_shown(tmp_path: Path) -> None:
    made, committed = tmp_path / "made", tmp_path / "committed"
    written = {
        made: {"same": "1", "changed": "a\nnew", "v1/missing": "2"},
        committed: {"same": "1", "changed": "a\nold", "old": "3", "__pycache__/same.pyc": "4"},
    }
    for folder, texts in written.items():
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    changed, old, missing = find_stale(made, committed)
    assert changed.splitlines()[:1] + changed.splitlines()[-2:] == [str(committed / "changed"), "-old", "+new"]
    assert missing.splitlines()[:1] == [str(committed / "v1/missing")]
    assert old.splitlines()[:1] == [str(committed / "old")]


def test_a_file_that_is_no_longer_made_is_removed(tmp_path: Path) -> None:
    for path in ("made/v1/new.py", "there/v1/old.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    replace(tmp_path / "made", ["v1"], tmp_path / "there")
    assert [path.name for path in (tmp_path / "there" / "v1").iterdir()] == ["new.py"]
