"""The synchronous client is generated from the asynchronous one."""

import shutil
from pathlib import Path

import pytest

from proto.generate import CLIENT, ROOT, SYNC_CLIENT, read_contents
from proto.sync_client import MODULES, generate


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of the asynchronous modules that a test may change."""
    folder = tmp_path / "bough"
    folder.mkdir()
    for name in MODULES:
        shutil.copy(ROOT / CLIENT / f"{name}.py", folder)
    return folder


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_committed_synchronous_client_is_what_the_asynchronous_one_generates(source: Path, tmp_path: Path) -> None:
    generate(source, tmp_path / "sync")
    assert read_contents(tmp_path / "sync") == read_contents(ROOT / SYNC_CLIENT)


def test_a_method_that_is_added_to_the_asynchronous_client_is_added_to_the_synchronous_one(
    source: Path, tmp_path: Path
) -> None:
    added = """
    async def count(self, calls: Calls) -> AsyncIterator[int]:
        found = (
            await calls.call(self._stub.GetAgent, None)
        ).agent
        async for each in self.list_agents():
            yield (await self.get_agent(each)).size + found
"""
    with (source / "catalog.py").open("a", encoding="utf-8") as file:
        file.write(added)
    generate(source, tmp_path / "sync")
    generated = (tmp_path / "sync" / "catalog.py").read_text(encoding="utf-8")
    assert generated.endswith("""
    def count(self, calls: SyncCalls) -> Iterator[int]:
        found = calls.call(self._stub.GetAgent, None).agent
        for each in self.list_agents():
            yield self.get_agent(each).size + found
""")


def test_a_replacement_that_replaces_nothing_any_more_is_refused(source: Path, tmp_path: Path) -> None:
    change(source / "stream.py", "Awaitable[", "Iterable[")
    with pytest.raises(ValueError, match=r"nothing matches .*Awaitable"):
        generate(source, tmp_path / "sync")
    assert not (tmp_path / "sync").exists()
