"""Servers that cannot start: exit code 2, one sentence for each mistake, and nothing touched."""

import asyncio
import sqlite3
from pathlib import Path

from tests.support.processes import finished, serving
from tests.support.projects import llm, write_project


async def _refused(config: Path, *arguments: str) -> list[str]:
    """The lines that a server says which does not start."""
    ended = await finished("--config", str(config), "serve", *(arguments or ("--port", "0")))
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    return ended.err.splitlines()


def _folder(path: Path, name: str) -> Path:
    folder = path / name
    folder.mkdir()
    return folder


async def test_definitions_that_make_no_sense_are_refused_with_file_line_and_field(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "team")
    team = (llm("narcissus", calls=["narcissus"]), llm("lonely", calls=["absent"]))
    config = write_project(folder, *team)
    typos = tmp_path / "typos.yaml"
    typos.write_text("name: typist\ndescription: Types.\nllm:\n  instruktion: Type.\n", encoding="utf-8")
    (folder / "empty").mkdir()
    sound = write_project(_folder(tmp_path, "sound"), llm("alone"))
    refused, validated = await asyncio.gather(
        _refused(config), finished("--config", str(sound), "agents", "validate", str(typos))
    )
    agents = folder / "agents.yaml"
    assert [line.partition(": ")[0] for line in refused] == [f"{agents}:2", f"{agents}:4"]
    assert [line.split(": ")[1] for line in refused] == ["sub_agents[0].agent"] * 2
    assert "itself" in refused[0]
    assert "'absent'" in refused[1]
    assert not (folder / "bough.db").exists()
    assert validated.code == 1
    assert validated.out.startswith(f"{typos}:4: llm.instruktion: ")
    assert "instruction" in validated.out
    assert validated.err == "1 problem in 1 file.\n"


async def test_a_port_or_a_database_that_another_server_has_is_refused_and_that_one_goes_on(tmp_path: Path) -> None:
    config = write_project(_folder(tmp_path, "first"), llm("alone"), script={"alone": ["Yes."]})
    other = write_project(_folder(tmp_path, "other"), llm("alone"))
    async with serving(config) as server:
        port = server.address.rpartition(":")[2]
        on_the_port, on_the_file = await asyncio.gather(_refused(other, "--port", port), _refused(config))
        asked = await finished("--address", server.address, "run", "alone", "Still there?", "--output", "answer")
    # gRPC's own library says a line before it.
    assert on_the_port[-1] == (
        f"Port {port} of 127.0.0.1 cannot be bound; it is probably in use. "
        "Choose another with --port, or 0 for any free one."
    )
    database = config.parent / "bough.db"
    assert on_the_file == [
        f"The database {str(database)!r} is in use by process {server.pid}: stop that process, "
        "reach it with --address, or name another database; only one process may use a file."
    ]
    assert (asked.code, asked.out) == (0, "Yes.\n")


async def test_a_database_that_cannot_be_used_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    foreign = write_project(_folder(tmp_path, "foreign"), llm("alone"))
    locked = write_project(_folder(tmp_path, "locked"), llm("alone"))
    diary = foreign.parent / "bough.db"
    diary.write_bytes(b"dear diary, " * 1_000)
    intruder = sqlite3.connect(locked.parent / "bough.db", isolation_level=None)
    intruder.execute("BEGIN EXCLUSIVE")
    try:
        of_foreign, of_locked = await asyncio.gather(_refused(foreign), _refused(locked))
    finally:
        intruder.close()
    assert of_foreign == [f"The database {str(diary)!r} is not a database: move it away, or name another one."]
    database = locked.parent / "bough.db"
    assert of_locked == [
        f"The database {str(database)!r} is locked by another program: close that program, and try again."
    ]
    assert diary.read_bytes() == b"dear diary, " * 1_000
