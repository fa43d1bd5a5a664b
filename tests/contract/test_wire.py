"""Messages on the wire: each client reads every sample in binary and in JSON, and writes back the same."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from bough import v1
from tests.contract.driver_process import DriverProcess, driving
from tests.contract.languages import BUILD_SECONDS, LANGUAGES, command_of
from tests.contract.newer_schema import newer_type
from tests.contract.wire_samples import FOLDER, UNKNOWN, all_written, missing_fields

# The first of these tests may build a driver.
pytestmark = pytest.mark.timeout(BUILD_SECONDS)

SECONDS = 60.0


@asynccontextmanager
async def driver_of(language: str, folder: Path) -> AsyncIterator[DriverProcess]:
    """A driver that makes no call."""
    errors = folder / "driver.stderr"
    async with driving(command_of(language), "127.0.0.1:1", errors) as driver, asyncio.timeout(SECONDS):
        yield driver


def test_the_files_are_what_the_generator_makes() -> None:
    made = all_written()
    held = {path.name: path.read_bytes() for path in FOLDER.iterdir()}
    assert sorted(held) == sorted(made)
    assert [name for name in made if made[name] != held[name]] == [], "run python -m tests.contract.wire_samples"


def test_every_field_that_a_request_or_an_event_can_have_is_in_a_sample() -> None:
    assert missing_fields() == []


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_client_writes_back_what_it_reads(language: str, tmp_path: Path) -> None:
    problems = []
    async with driver_of(language, tmp_path) as driver:
        for path in sorted(FOLDER.glob("*.json")):
            name, document = path.stem, json.loads(path.read_text(encoding="utf-8"))
            binary = path.with_suffix(".binpb").read_bytes()
            for sent in ({"binary": base64.b64encode(binary).decode()}, {"json": document}):
                back = await transcoded(driver, name, **sent)
                problems += [
                    f"{name} from {', '.join(sent)}: {one}" for one in differences(name, binary, document, back)
                ]
    assert problems == []


def differences(name: str, binary: bytes, document: Any, back: dict[str, Any]) -> Iterator[str]:
    """Return what differs. The order of fields and of a map's keys may: messages are compared, and their sizes."""
    written = base64.b64decode(back["binary"])
    if len(written) != len(binary) or message_of(name, written) != message_of(name, binary):
        yield f"another message in binary: {message_of(name, written)}"
    if back["json"] != document:
        yield f"another document: {json.dumps(back['json'], ensure_ascii=False)}"


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_client_keeps_fields_that_it_does_not_know(language: str, tmp_path: Path) -> None:
    async with driver_of(language, tmp_path) as driver:
        for path in sorted(FOLDER.glob(f"{UNKNOWN}*.binpb")):
            name, binary = path.stem.removeprefix(UNKNOWN), path.read_bytes()
            back = await transcoded(driver, name, binary=base64.b64encode(binary).decode())
            kind = newer_type(f"bough.v1.{name.partition('.')[0]}")
            assert kind.FromString(base64.b64decode(back["binary"])) == kind.FromString(binary), name
            assert "dream" not in json.dumps(back["json"]), name


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_line_that_a_driver_cannot_understand_ends_it_with_code_2(language: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="ended with code 2: "):
        async with driver_of(language, tmp_path) as driver:
            await transcoded(driver, "NoSuchMessage", binary="")


async def transcoded(driver: DriverProcess, name: str, **sent: Any) -> dict[str, Any]:
    """Have a driver write a message back."""
    line = {"transcode": f"bough.v1.{name.partition('.')[0]}", **sent}
    [printed] = [printed async for printed in driver.perform(line)]
    back: dict[str, Any] = printed["transcoded"]
    return back


def message_of(name: str, binary: bytes) -> Message:
    """Parse a sample."""
    message: Message = getattr(v1, name.partition(".")[0]).FromString(binary)
    return message
