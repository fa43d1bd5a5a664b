"""Watched files: a change is read, a problem is reported once and keeps the last value."""

import asyncio
import os
from pathlib import Path

import pytest

from bough_server import watched_files
from bough_server.errors import ConfigurationError
from bough_server.watched_files import WatchedFile


def parse_pair(first: bytes, second: bytes) -> str:
    """Parse two files that have to be equal."""
    if first != second:
        raise ConfigurationError(f"{first.decode()} is not {second.decode()}.")
    return first.decode()


class Pair:
    """Two files that belong together, and what is said of them."""

    def __init__(self, folder: Path) -> None:
        self.paths = folder / "a", folder / "b"
        self.write("old", "old")
        self.problems: list[str] = []
        self.file = WatchedFile(self.paths, parse_pair, self.problems.append)

    def write(self, *texts: str) -> None:
        """Replace the first files by these texts."""
        for path, text in zip(self.paths, texts, strict=False):
            path.with_suffix(".new").write_text(text)
            path.with_suffix(".new").replace(path)

    @property
    def state(self) -> tuple[str, str, list[str]]:
        """The value, the present problem and the reported ones, after a poll."""
        self.file.poll()
        return self.file.value, self.file.problem, self.problems


def test_a_changed_file_is_read_at_the_next_poll(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.write("new", "new")
    assert pair.state == ("new", "", [])


def test_files_that_do_not_fit_together_yet_are_waited_for_in_silence(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.write("new")
    assert pair.state == ("old", "new is not old.", [])
    pair.write("new", "new")
    assert pair.state == ("new", "", [])


def test_a_problem_that_stays_is_reported_once_and_the_last_value_is_used(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.write("new")
    states = [pair.state[:2] for _ in range(4)]
    assert (states, pair.problems) == ([("old", "new is not old.")] * 4, ["new is not old."])
    pair.write("newer")
    assert [pair.state[:2] for _ in range(3)] == [("old", "newer is not old.")] * 3
    assert pair.problems == ["new is not old.", "newer is not old."]


def test_a_file_that_is_gone_is_a_problem_until_it_is_back(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.paths[1].unlink()
    problem = f"{pair.paths[1]} cannot be read: No such file or directory."
    assert [pair.state[:2] for _ in range(2)] == [("old", problem)] * 2
    assert pair.problems == [problem]
    pair.write("old", "old")
    assert pair.state[:2] == ("old", "")


def test_what_could_not_be_used_is_tried_again_although_it_has_not_changed(tmp_path: Path) -> None:
    path, is_early = tmp_path / "a", False

    def parse(content: bytes) -> bytes:
        if is_early:
            raise ConfigurationError("It is too early.")
        return content

    path.write_text("old")
    file = WatchedFile(path, parse, print)
    path.write_text("newer")
    is_early = True
    file.poll()
    assert (file.value, file.problem) == (b"old", "It is too early.")
    is_early = False
    file.poll()
    assert (file.value, file.problem) == (b"newer", "")


def test_a_link_that_is_swapped_is_a_change(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "secret").write_text(name)
        os.utime(tmp_path / name / "secret", ns=(1, 1))
    link = tmp_path / "mounted"
    link.symlink_to("one")
    file = WatchedFile(link / "secret", bytes.decode, print)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(link)
    file.poll()
    assert file.value == "two"


def test_files_that_cannot_be_used_at_first_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing cannot be read: No such file or directory\.$"):
        WatchedFile(tmp_path / "missing", bytes.decode, print)


async def test_files_are_polled_until_the_watch_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "POLL_SECONDS", 0.01)
    pair = Pair(tmp_path)
    watching = asyncio.create_task(pair.file.watch())
    pair.write("new", "new")
    while pair.file.value != "new":  # noqa: ASYNC110 # a file has no event to wait for
        await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait({watching})
    assert watching.cancelled()
