"""The client against whole servers and runs that ask: over cut connections and restarts, every sequence once."""

from pathlib import Path

import pytest

from bough import (
    AlreadyAnswered,
    AsyncClient,
    CollectedRun,
    ForkRefused,
    InvalidRequest,
    OutOfRange,
    Rejoining,
    RunEnded,
    RunInterruptedError,
    collect,
    reply,
)
from bough.v1 import execution_pb2, follow_pb2
from bough_server.settings import Settings
from tests.rpc.run_server import served, settings
from tests.support.cutting_proxy import proxying
from tests.support.log_laws import check_laws
from tests.support.log_readings import failures

SOON = Rejoining(first_delay=0.01, longest_delay=0.05, timeout=30.0)


def _client(address: str) -> AsyncClient:
    return AsyncClient(address, timeout=30, rejoining=SOON)


def _settings(folder: Path) -> Settings:
    return settings(folder, python=["tests.rpc.question_agents"])


def _sequences(run: CollectedRun) -> list[int]:
    return [event.sequence for event in run.events]


async def test_a_run_is_answered_over_restarts_and_its_streams_make_its_log(tmp_path: Path) -> None:
    async with served(_settings(tmp_path)) as server, _client(server.app.address) as client:
        run = await collect(client.run("chief", "Ask."))
    prompts = [[request.prompt for request in run.open_requests]]
    while run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED:
        async with served(_settings(tmp_path)) as server, _client(server.app.address) as client:
            request = run.open_requests[0]
            answers = client.resume(
                run.run_id, [reply(request, f"to {request.prompt}")], after_sequence=run.last_sequence
            )
            run = await collect(answers, earlier=run.events)
            prompts.append([request.prompt for request in run.open_requests])
            log = await collect(client.watch(run.run_id, until=follow_pb2.WATCH_UNTIL_CURRENT))
            assert run == log
    assert prompts == [["first?", "second?"], ["second?"], ["third?"], []]
    assert (run.state, run.answer) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, "to first?, to second?, to third?")
    assert failures(run.events) == []
    check_laws(run.events)


async def test_answers_over_connections_that_are_cut_are_taken_once(tmp_path: Path) -> None:
    async with (
        served(_settings(tmp_path)) as server,
        proxying(server.app.address) as proxy,
        _client(proxy.address) as client,
    ):
        run = await collect(client.run("chief", "Ask."))
        for _ in range(2):
            answers = [reply(request, request.prompt) for request in run.open_requests]
            stream = client.resume(run.run_id, answers, after_sequence=run.last_sequence)
            first = await anext(stream)
            proxy.cut()
            run = await collect(stream, earlier=[*run.events, first])
        log = await collect(client.watch(run.run_id))
    assert run == log
    assert run.answer == "first?, second?, third?"
    kinds = [event.WhichOneof("payload") for event in run.events]
    assert (kinds.count("input_received"), kinds.count("run_resumed")) == (3, 2)


async def test_a_resume_that_is_repeated_follows_from_the_same_place_even_when_the_run_has_ended(
    tmp_path: Path,
) -> None:
    async with served(_settings(tmp_path)) as server, _client(server.app.address) as client:
        run = await collect(client.run("asker", "what?"))
        answers = [reply(run.open_requests[0], "this")]
        streams = [await collect(client.resume(run.run_id, answers, request_id="mine")) for _ in range(2)]
    assert streams[0] == streams[1]
    assert streams[0].answer == "this"
    assert _sequences(streams[0])[0] == run.last_sequence + 1


async def test_what_cannot_be_answered_says_why(tmp_path: Path) -> None:
    async with served(_settings(tmp_path)) as server, _client(server.app.address) as client:
        with pytest.raises(RunInterruptedError, match=r"what\?") as raised:
            await client.ask("asker", "what?")
        run_id, request = raised.value.run_id, raised.value.requests[0]
        with pytest.raises(InvalidRequest, match="has no request with this id"):
            await collect(client.resume(run_id, [reply("absent", "this")]))
        assert (await collect(client.resume(run_id, [reply(request, "this")]))).answer == "this"
        with pytest.raises(AlreadyAnswered, match="another answer"):
            await collect(client.resume(run_id, [reply(request, "that")]))
        cancelled = await collect(client.run("asker", "why?"))
        await client.cancel(cancelled.run_id)
        with pytest.raises(RunEnded, match="has ended"):
            await collect(client.resume(cancelled.run_id, [reply(cancelled.open_requests[0], "so")]))


async def test_a_fork_begins_where_it_forks_and_is_made_once(tmp_path: Path) -> None:
    async with served(_settings(tmp_path)) as server, _client(server.app.address) as client:
        origin = await collect(client.run("chief", "Ask."))
        forks = [await collect(client.fork(origin.run_id, origin.last_sequence, request_id="mine")) for _ in range(2)]
        log = await collect(client.watch(forks[0].run_id, until=follow_pb2.WATCH_UNTIL_CURRENT))
        await client.cancel(origin.run_id)
        ended = await collect(client.watch(origin.run_id))
        with pytest.raises(ForkRefused, match="was cancelled"):
            await collect(client.fork(origin.run_id, ended.last_sequence))
    assert forks[0] == forks[1]
    assert forks[0].run_id != origin.run_id
    assert _sequences(forks[0])[0] == origin.last_sequence + 1
    assert (forks[0].state, forks[0].open_requests) == (
        execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
        origin.open_requests,
    )
    assert _sequences(log) == list(range(1, log.last_sequence + 1))


async def test_a_resume_after_an_earlier_sequence_tells_older_interruptions_again_and_ends_at_none(
    tmp_path: Path,
) -> None:
    async with served(_settings(tmp_path)) as server, _client(server.app.address) as client:
        run = await collect(client.run("chief", "Ask."))
        answers = [reply(request, request.prompt) for request in run.open_requests]
        run = await collect(client.resume(run.run_id, answers, after_sequence=run.last_sequence), earlier=run.events)
        whole = await collect(client.resume(run.run_id, [reply(run.open_requests[0], "third")], after_sequence=0))
    assert (whole.state, whole.events[: len(run.events)]) == (execution_pb2.EXECUTION_STATE_SUCCEEDED, run.events)


async def test_a_watch_until_an_interruption_ends_where_a_fork_waits_and_not_at_what_was_answered_before(
    tmp_path: Path,
) -> None:
    until = follow_pb2.WATCH_UNTIL_INTERRUPTED
    async with served(_settings(tmp_path)) as server, _client(server.app.address) as client:
        run = await collect(client.run("chief", "Ask."))
        answers = [reply(request, request.prompt) for request in run.open_requests]
        run = await collect(client.resume(run.run_id, answers), earlier=run.events)
        fork = await collect(client.fork(run.run_id, run.last_sequence))
        watched = await collect(client.watch(fork.run_id, until=until))
        again = await collect(client.watch(fork.run_id, after_sequence=watched.last_sequence, until=until))
        with pytest.raises(OutOfRange):
            await collect(client.watch(fork.run_id, after_sequence=watched.last_sequence + 1, until=until))
    assert (watched.last_sequence, watched.open_requests) == (fork.last_sequence, fork.open_requests)
    assert again.events == ()
