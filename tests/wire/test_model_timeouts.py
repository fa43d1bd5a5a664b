"""What counts as an answer's beginning and as its next piece, on the wire: an event does, a comment does not."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bough.v1 import error_pb2, event_pb2
from bough_server.errors import ModelError
from bough_server.models.endpoint import AnswerTimeout, Timeouts
from tests.support.model_calls import answer, asking, failure, text_of
from tests.support.model_scenarios import DONE, TEXT, Ending, Reply, Request, chunk, ending, plain
from tests.support.model_server import serving_model
from tests.support.openai_models import OpenAIModel

COMMENT = b": keep-alive\n\n"
COMMENTS = (COMMENT,) * 10_000
WORDS = (chunk({"content": "one "}), chunk({"content": "two"}))


@asynccontextmanager
async def answering(*pieces: bytes, ends: Ending = Ending.CLOSE, **seconds: float) -> AsyncIterator[OpenAIModel]:
    """A model whose server sends these pieces, a few milliseconds apart."""

    def reply(request: Request) -> Reply:
        return Reply(pieces=pieces, ending=ends)

    async with serving_model(reply, delta_interval=0.005) as server:
        timeouts = Timeouts(**{"start": 60.0, "idle": 60.0, **seconds})
        model = OpenAIModel(name="large", model="scenario-1", base_url=server.base_url, timeouts=timeouts)
        try:
            yield model
        finally:
            await model.close()


def timeout(error: ModelError) -> tuple[bool, str]:
    """Whether an error is a timeout that may be tried again, and its first sentence without the port."""
    is_timeout = (error.reason, error.retry) == (error_pb2.ERROR_REASON_MODEL_TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT)
    return is_timeout, re.sub(r"http://127\.0\.0\.1:\d+/v1", "URL", error.message.partition(". ")[0])


@pytest.mark.parametrize("noise", [COMMENT, b": ", b"\n", b"event: ping\n\n", b"retry: 10\n\n"])
async def test_an_answer_of_comments_alone_never_begins(noise: bytes) -> None:
    async with answering(*((noise,) * 10_000), start=0.05) as model:
        deltas, error = await failure(model, asking())
    assert timeout(error) == (True, "The model 'large' at URL sent no response for 0.05 seconds")
    assert deltas == []


async def test_comments_do_not_keep_an_answer_that_has_begun_alive() -> None:
    async with answering(b"".join(WORDS), *COMMENTS, idle=0.05) as model:
        deltas, error = await failure(model, asking())
    assert timeout(error) == (True, "The model 'large' at URL sent nothing more of its response for 0.05 seconds")
    assert text_of(deltas) == "one two"


async def test_comments_between_the_pieces_of_an_answer_change_nothing() -> None:
    pieces = [piece for word in plain({}).pieces for piece in (COMMENT, word)]
    async with answering(*pieces) as model:
        _, response = await answer(model, asking())
    assert response.message.parts[0].text == TEXT


@pytest.mark.parametrize("rest", [(), COMMENTS], ids=["silence", "comments"])
async def test_a_whole_answer_counts_although_nobody_says_that_it_was_all(rest: tuple[bytes, ...]) -> None:
    finish, usage, done = ending("stop")
    assert done == DONE
    # In one piece: what is between its events is not to be taken for silence on a busy machine.
    whole = b"".join((*WORDS, finish, usage))
    async with answering(whole, *rest, ends=Ending.HANG, idle=0.05) as model:
        _, response = await answer(model, asking())
    assert (response.message.parts[0].text, response.provider_finish_reason) == ("one two", "stop")
    assert response.usage.total_tokens == 70


async def test_the_wait_for_the_head_of_an_answer_counts_toward_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    real, passed = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + passed)
    asked, head = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await head.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + COMMENT)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        model = OpenAIModel(name="large", model="m", base_url=f"http://127.0.0.1:{port}/v1")
        failing = asyncio.create_task(failure(model, asking()))
        await asked.wait()
        passed += 40
        head.set()
        for _ in range(50):
            await asyncio.sleep(0)  # until the head has come; where it has not, the rest of the minute passes as well
        passed += 30
        _, error = await failing
        await model.close()
    assert timeout(error) == (True, "The model 'large' at URL sent no response for 60 seconds")


async def test_a_read_that_ends_a_timeout_by_another_error_leaves_no_cancellation_behind() -> None:
    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("the connection is gone") from None

    task = asyncio.current_task()
    assert task is not None
    limit = AnswerTimeout(Timeouts(start=0.01, idle=0.01))
    with pytest.raises(ConnectionError):
        await limit.limit(fail_when_cancelled())
    assert task.cancelling() == 0
