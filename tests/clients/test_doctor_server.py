"""Which server `bough doctor` reports: the one that a command would use."""

from pathlib import Path

import pytest
from grpc import aio

from bough_server.cli.doctor import Finding, examine
from bough_server.cli.options import Target
from tests.support.projects import llm, write_project


async def test_another_grpc_server_at_the_default_address_is_no_server_for_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_project(tmp_path, llm("alone"), script={"alone": ["Hm."]})
    server = aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    for module in ("bough.channel", "bough_server.cli.connection"):
        monkeypatch.setattr(f"{module}.DEFAULT_ADDRESS", address)
    *_, found = await examine(Target(config=config))
    *_, named = await examine(Target(config=config, address=address))
    await server.stop(0)
    *_, gone = await examine(Target(config=config, address=address))
    words = f"no server of Bough answers at {address}; commands use an embedded one"
    assert found == Finding(name="server", is_right=False, words=words, is_optional=True)
    assert named == Finding(name="server", is_right=True, words=f"{address} answers")
    sentence = f"No server answers at {address}: start one there, or omit the address."
    assert gone == Finding(name="server", is_right=False, words=sentence)
