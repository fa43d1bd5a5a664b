"""The embedded model as it is: its process, its tool calls, its words. Only shapes are asserted: it promises no wit."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import jsonschema
import pytest

from bough.v1 import error_pb2, message_pb2, model_pb2, step_pb2
from bough_server.errors import ModelError
from bough_server.models.local.engine import LocalEngine, find_problem
from bough_server.models.local.model import MODEL, LocalModel
from bough_server.models.model import TextDelta, ToolCallDelta, ToolSpec
from bough_server.models.tokens import FILE_TOKENS, count_request_tokens, request_tokens
from tests.support.model_calls import LOOKUP, answer, asking, assistant, tool_result, user

pytestmark = pytest.mark.skipif(
    find_problem() is not None, reason=f"THE EMBEDDED MODEL IS NOT TESTED: {find_problem()}"
)

WRITER = ToolSpec(
    name="call_writer",
    description="Writes a short text from facts.",
    input_schema_json='{"type":"object","properties":{"message":{"type":"string"}},"required":["message"]}',
)


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[LocalModel]:
    """The embedded model, started by the first test that asks it."""
    model = LocalModel(name="local")
    yield model
    await model.close()


async def test_it_answers_in_words_and_counts_its_tokens(model: LocalModel) -> None:
    deltas, response = await answer(model, asking(user("Why is the sky blue?"), instruction="Answer in one sentence."))
    assert all(isinstance(delta, TextDelta) for delta in deltas)
    assert len(deltas) > 1
    assert (response.provider, response.model.startswith(MODEL)) == ("local", True)
    assert response.finish_reason in (step_pb2.FINISH_REASON_STOP, step_pb2.FINISH_REASON_LENGTH)
    assert response.usage.input_tokens > 0
    assert 0 < response.usage.output_tokens <= 160


async def test_it_answers_with_json_of_a_schema(model: LocalModel) -> None:
    schema = {
        "type": "object",
        "properties": {"topic": {"type": "string"}, "is_tree": {"type": "boolean"}},
        "required": ["topic", "is_tree"],
    }
    request = replace(asking(user("What is an oak?")), output_schema_json=json.dumps(schema))
    _, response = await answer(model, request)
    jsonschema.validate(json.loads(response.message.parts[0].text), schema)


async def test_it_calls_a_tool_with_arguments_that_fit_its_schema(model: LocalModel) -> None:
    request = asking(user("What is an oak?"), instruction="Find facts.", tools=[LOOKUP, WRITER])
    deltas, response = await answer(model, request)
    call = response.message.parts[0].tool_call
    schema = {tool.name: tool.input_schema_json for tool in request.tools}[call.name]
    jsonschema.validate(json.loads(call.arguments_json), json.loads(schema))
    assert deltas == [
        ToolCallDelta(0, "", call.provider_call_id, call.name),
        ToolCallDelta(0, call.arguments_json),
    ]
    assert (len(response.message.parts), call.call_id) == (1, "")
    assert response.finish_reason == step_pb2.FINISH_REASON_TOOL_CALLS
    assert response.usage.output_tokens > 0


async def test_it_calls_every_tool_once_and_then_answers_in_words(model: LocalModel) -> None:
    history = [user("What is an oak?")]
    called: list[str] = []
    for step in range(3):
        _, response = await answer(model, asking(*history, tools=[LOOKUP, WRITER]))
        calls = [part.tool_call for part in response.message.parts if part.HasField("tool_call")]
        if not calls:
            break
        calls[0].call_id = f"0.{step}"
        called.append(calls[0].name)
        history += [assistant("", calls[0]), tool_result(calls[0], "An oak is a tree with acorns.")]
    assert sorted(called) == ["call_writer", "lookup"]
    assert "".join(part.text for part in response.message.parts)


async def test_a_text_of_many_tokens_a_character_fits_its_context(model: LocalModel) -> None:
    text = "🌳" * 20_000
    settings = model_pb2.ModelSettings(max_output_tokens=1)
    _, response = await answer(model, asking(user(text), assistant(text), user(text), settings=settings))
    assert 400 < response.usage.input_tokens < 2048


async def test_calls_at_once_are_all_answered(model: LocalModel) -> None:
    settings = model_pb2.ModelSettings(max_output_tokens=8)
    answers = await asyncio.gather(*(answer(model, asking(settings=settings)) for _ in range(6)))
    assert all(response.usage.output_tokens <= 8 for _, response in answers)


async def test_a_process_that_died_is_started_again(model: LocalModel) -> None:
    settings = model_pb2.ModelSettings(max_output_tokens=2)
    await answer(model, asking(settings=settings))
    first = model.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    _, response = await answer(model, asking(settings=settings))
    assert response.message.role == message_pb2.ROLE_ASSISTANT
    assert model.process_id not in (None, first)


async def test_closing_ends_the_process_and_a_later_call_starts_one() -> None:
    model = LocalModel(name="local")
    settings = model_pb2.ModelSettings(max_output_tokens=2)
    await answer(model, asking(settings=settings))
    process = model.process_id
    assert process is not None
    await model.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert model.process_id is None


async def test_the_process_ends_when_its_parent_is_killed() -> None:
    program = (
        "import asyncio\n"
        "from bough_server.models.local.engine import LocalEngine\n"
        "async def main():\n"
        "    engine = LocalEngine(name='local')\n"
        "    await engine.base_url()\n"
        "    print(engine.process_id, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    watched = os.pidfd_open(child)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(watched, ended.set)
    parent.kill()
    await parent.wait()
    await asyncio.wait_for(ended.wait(), 10)
    asyncio.get_running_loop().remove_reader(watched)
    os.close(watched)


async def test_an_engine_that_is_too_slow_to_start_is_an_error_and_leaves_no_process() -> None:
    engine = LocalEngine(name="local", start_seconds=0.001)
    with pytest.raises(ModelError, match="did not start within") as raised:
        await engine.base_url()
    assert raised.value.reason == error_pb2.ERROR_REASON_MODEL_UNAVAILABLE
    assert engine.process_id is None


async def test_it_counts_a_request_by_its_own_tokenizer(model: LocalModel) -> None:
    short = asking(user("What is an oak?"), instruction="Answer in one sentence.")
    tokens = await count_request_tokens(model, short)
    assert 9 <= tokens <= 20
    assert await count_request_tokens(model, asking(user("ö" * 400))) > 1.5 * request_tokens(asking(user("ö" * 400)))
    with_tools = replace(short, tools=[LOOKUP, WRITER])
    assert await count_request_tokens(model, with_tools) > tokens + 20
    picture = message_pb2.Part(blob=message_pb2.Blob(uri="file:///oak.png"))
    shown = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[picture])
    assert (
        await count_request_tokens(model, asking(*short.messages, shown, instruction=short.instruction))
        >= tokens + FILE_TOKENS
    )


async def test_a_request_is_estimated_where_it_cannot_be_counted() -> None:
    broken = LocalModel(name="local", engine=Unreachable(name="local"))
    request = asking(user("What is an oak?"))
    assert await count_request_tokens(broken, request) == request_tokens(request)
    assert await count_request_tokens(None, request) == request_tokens(request)


class Unreachable(LocalEngine):
    """An engine whose address nothing serves."""

    async def base_url(self) -> str:
        return "http://127.0.0.1:1/v1"
