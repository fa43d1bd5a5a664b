"""Toolchains in tests: skipped loudly, required where CI says so, and built once for each digest."""

from pathlib import Path

import pytest

from tests.support import toolchains


@pytest.fixture
def _absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.usefixtures("_absent")
def test_an_absent_toolchain_skips_with_one_loud_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_REQUIRE", "java")
    with pytest.raises(pytest.skip.Exception, match="NOT TESTED WITH GO: missing go; BOUGH_REQUIRE=go makes"):
        toolchains.require("go")


@pytest.mark.usefixtures("_absent")
def test_an_absent_toolchain_that_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_REQUIRE", "go,java")
    with pytest.raises(pytest.fail.Exception, match="NOT TESTED WITH JAVA: missing java and mvn"):
        toolchains.require("java")


def test_what_is_built_is_built_once_for_each_digest_of_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchains, "ROOT", tmp_path)
    monkeypatch.setattr(toolchains, "BUILT", tmp_path / "built")
    source = tmp_path / "source.txt"
    builds: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "copy.txt").write_bytes(source.read_bytes())

    source.write_text("one", encoding="ascii")
    first = toolchains.built("copy", [source], build)
    assert toolchains.built("copy", [source], build) == first
    source.write_text("two", encoding="ascii")
    second = toolchains.built("copy", [source], build)
    assert builds == [first, second]
    assert [(folder / "copy.txt").read_text(encoding="ascii") for folder in builds] == ["one", "two"]


def test_a_build_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchains, "BUILT", tmp_path / "built")

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("the compiler failed")

    with pytest.raises(RuntimeError, match="the compiler failed"):
        toolchains.built("copy", [], fail)
    folder = toolchains.built("copy", [], lambda folder: (folder / "whole").touch())
    assert sorted(path.name for path in folder.iterdir()) == [".complete", "whole"]
