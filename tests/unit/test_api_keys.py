"""The file of API keys: what it may hold, its mistakes with their lines, and files that change while they are used."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bough_server.auth.api_keys import PREFIX, build_key, check_key, hash_key, read_keys
from bough_server.auth.authentication import Authenticator
from bough_server.auth.sections import AuthSection
from bough_server.cli.program import make_program
from bough_server.clock import SystemClock
from bough_server.errors import ConfigurationError, Unauthenticated
from bough_server.identity import ADMIN, READ
from bough_server.watched_files import WatchedFile

HASH = "5" * 64


def entry(**changes: object) -> str:
    """An item of the file."""
    return json.dumps({"id": "ci", "sha256": HASH, "tenant": "acme", "user": "ci", **changes})


def file_of(folder: Path, *entries: str) -> Path:
    """A file with these items, one a line from line 2 on."""
    path = folder / "keys.yaml"
    path.write_text("\n".join(["keys:", *(f"  - {each}" for each in entries)]) + "\n", encoding="utf-8")
    return path


def test_every_mistake_of_the_file_has_its_line(tmp_path: Path) -> None:
    for line, words in (
        (entry(sha256="5" * 63), "keys[1].sha256: must be the SHA-256 of a key: 64 of 0-9 and a-f, in quotes"),
        (entry(sha256="g" * 64), "keys[1].sha256: must be the SHA-256 of a key: 64 of 0-9 and a-f, in quotes"),
        (entry(id="C I"), "keys[1].id: must be 1 to 63 of a-z, 0-9 and '-', beginning with a letter or a digit"),
        (entry(id="first"), "keys[1].id: the key first is also in line 2"),
        (entry(roles=["OWNER"]), "keys[1].roles[0]: must be 'RUN', 'READ', 'ADMIN' or 'BILLING'"),
        (
            entry(tenant="Acme"),
            "keys[1].tenant: must be 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter",
        ),
        (
            entry(user="bough/rules"),
            "keys[1].user: must be 1 to 128 printable characters that do not begin with bough/",
        ),
        (entry(groups=["a\nb"]), "keys[1].groups[0]: must be 1 to 128 printable characters"),
        (entry(expires="2027-01-31"), "keys[1].expires: must be a time with its zone, such as 2027-01-31T00:00:00Z"),
        (entry(acts_for="all"), "keys[1].acts_for: must be 'users' or 'tenants'"),
        (entry(secret="x"), "keys[1].secret: There is no such setting."),
        (json.dumps({"id": "ci"}), "keys[1].sha256: Field required"),
    ):
        path = file_of(tmp_path, entry(id="first"), line)
        with pytest.raises(ConfigurationError) as caught:
            read_keys(path)
        assert caught.value.message.startswith(f"{path}:3: {words}"), caught.value.message
        assert "x" * 20 not in caught.value.message
    for text in ("", "- a\n", "keys: {\n", "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=r"keys\.yaml"):
            read_keys(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_keys(tmp_path / "none.yaml")


def test_a_server_does_not_start_with_a_file_that_has_a_mistake(tmp_path: Path) -> None:
    section = AuthSection.model_validate({"keys_file": str(file_of(tmp_path, entry(roles=["OWNER"])))})
    with pytest.raises(ConfigurationError, match=r"keys\.yaml:2: keys\[0\]\.roles\[0\]"):
        Authenticator(section, {"*"}, clock=SystemClock())


def test_a_file_that_is_not_sound_is_not_used_and_the_next_one_is(tmp_path: Path) -> None:
    problems: list[str] = []
    path = file_of(tmp_path, entry())
    watched = WatchedFile(path, lambda _: read_keys(path), problems.append)
    whole = path.read_text()
    before = watched.value
    path.write_text(whole[: len(whole) // 2])
    os.utime(path, ns=(1, 1))
    assert [watched.poll() for _ in range(3)] == [False] * 3
    assert (watched.value is before, len(problems)) == (True, 1)
    path.unlink()
    assert [watched.poll() for _ in range(2)] == [False] * 2
    assert (watched.value is before, len(problems)) == (True, 2)
    file_of(tmp_path, entry(), entry(id="second"))
    assert watched.poll()
    assert watched.value.keys() == {"ci", "second"}


def test_keys_create_prints_a_key_that_its_entry_proves(tmp_path: Path) -> None:
    words = ["keys", "create", "ci", "--tenant", "acme", "--user", "c i", "--role", "READ", "--role", "ADMIN"]
    result = CliRunner().invoke(make_program(), words)
    key = result.stdout.strip()
    assert key.startswith(f"{PREFIX}ci_")
    keys = read_keys(file_of(tmp_path, result.stderr.splitlines()[1].removeprefix("  - ")))
    assert key not in result.stderr
    caller = check_key(key, lambda: keys, now_ns=0).caller
    assert (caller.principal.user_id, caller.roles) == ("c i", {READ, ADMIN})
    with pytest.raises(Unauthenticated):
        check_key(build_key("ci", b"0" * 32), lambda: keys, now_ns=0)
    assert hash_key(key) not in repr(keys)
    wrong = CliRunner().invoke(make_program(), ["keys", "create", "CI", "--tenant", "A", "--user", ""])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert [line.partition(":")[0] for line in wrong.stderr.splitlines()] == ["id", "tenant", "user"]
