"""The model server as a program: its ready file, its pace, its counts."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from bough_server.models.model import ToolSpec
from tests.support.model_calls import answer, asking, assistant, call, tool_result, user
from tests.support.model_scenarios import desk
from tests.support.openai_models import OpenAIModel


async def test_the_program_serves_the_desk_until_it_is_told_to_stop(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    command = ["-m", "tests.support.model_server", "--scenario", "desk", "--delta-interval-ms", "0.1"]
    program = await asyncio.create_subprocess_exec(sys.executable, *command, "--ready-file", str(ready))
    async with asyncio.timeout(30):
        while not ready.exists():  # noqa: ASYNC110  another process makes it: there is no event to wait for
            await asyncio.sleep(0.01)
    address = ready.read_text(encoding="utf-8")
    model = OpenAIModel(name="large", model="m", base_url=f"http://{address}/v1")
    agents = [ToolSpec(name=f"call_{name}", description="", input_schema_json="{}") for name in "abc"]
    lookup = ToolSpec(name="lookup", description="", input_schema_json="{}")
    _, asked = await answer(model, asking(user("Go."), tools=agents))
    assert [part.tool_call.name for part in asked.message.parts] == ["call_a", "call_b", "call_c"]
    _, looked = await answer(model, asking(user("What do you know?"), tools=[lookup]))
    assert [part.tool_call.name for part in looked.message.parts] == ["lookup"]
    made = call("c1", "lookup", "{}")
    deltas, _ = await answer(model, asking(user("Go."), assistant("", made), tool_result(made, "x"), tools=[lookup]))
    assert len(deltas) == 50
    await model.close()
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/requests") as response:
        assert json.loads(await response.text()) == {"count": 3, "open": 0, "most_open": 1}
    program.send_signal(signal.SIGTERM)
    assert await program.wait() == 0


ASKED = {"role": "user", "content": "Go."}
CALLING = {"role": "assistant", "tool_calls": [{"id": "c1"}, {"id": "c2"}]}
FIRST, SECOND = ({"role": "tool", "tool_call_id": call_id, "content": "x"} for call_id in ("c1", "c2"))


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([ASKED], 200),
        ([ASKED, CALLING, SECOND, FIRST], 200),
        ([ASKED, CALLING, FIRST], 400),
        ([ASKED, CALLING, FIRST, ASKED, SECOND], 400),
        ([ASKED, CALLING, FIRST, SECOND, SECOND], 400),
        ([ASKED, FIRST], 400),
    ],
)
def test_the_desk_refuses_calls_without_results_and_results_without_calls_as_openai_does(
    messages: list[dict[str, object]], status: int
) -> None:
    assert desk({"messages": messages}).status == status
