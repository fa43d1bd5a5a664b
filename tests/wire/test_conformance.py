"""What holds of every provider's API: the real client against a fake that keeps that provider's rules."""

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.v1 import error_pb2, event_pb2, message_pb2, model_pb2, step_pb2
from bough_server.models.model import AttemptMeter, ModelRequest, TextDelta, ToolSpec
from bough_server.models.registry import build_models
from tests.support.log_readings import answer_of, check_replay, failures, having
from tests.support.model_calls import LOOKUP, answer, asking, assistant, call, failure, text_of, tool_result, user
from tests.support.model_scenarios import Ending, Reply, refusing
from tests.support.model_server import serving_model
from tests.support.providers import ANTHROPIC, APIS, KEY, PROVIDERS, Fault, Provider, only, sent_events
from tests.support.run_harness import open_harness
from tests.support.teams import llm

every_api = pytest.mark.parametrize("api", APIS.values(), ids=APIS)
every_provider = pytest.mark.parametrize("provider", PROVIDERS.values(), ids=PROVIDERS)
FILTERS = (step_pb2.FINISH_REASON_CONTENT_FILTER, step_pb2.FINISH_REASON_REFUSAL)


COMMON = {"max_output_tokens": 64, "temperature": 0.5}
THINKING = {"extra_json": '{"thinking": {"type": "enabled", "budget_tokens": 2048}}'}
ADAPTIVE = {"extra_json": '{"thinking": {"type": "adaptive"}}'}


@pytest.mark.parametrize(
    ("provider", "settings"),
    [
        *(pytest.param(provider, COMMON, id=name) for name, provider in PROVIDERS.items()),
        pytest.param(ANTHROPIC, THINKING, id="anthropic-thinking"),
        pytest.param(ANTHROPIC, ADAPTIVE, id="anthropic-adaptive"),
    ],
)
async def test_two_turns_of_calls_are_answered_by_the_rules_of_the_provider(
    tmp_path: Path, provider: Provider, settings: Mapping[str, Any]
) -> None:
    async with provider.harness(tmp_path, **settings) as (harness, server):
        first = await harness.turn("p", "What is an oak?")
        logs = [first, await harness.turn("p", "What is an oak?", session_id=first[0].session_id)]
        for log in logs:
            await check_replay(harness, log)
    turn = provider.turn
    assert [(answer_of(log), failures(log)) for log in logs] == [(turn.answer, [])] * 2
    assert [len(having(log, "tool_completed")) for log in logs] == [turn.results] * 2
    assert server.count == 2 * turn.requests


def odd(*messages: message_pb2.Message, **fields: Any) -> ModelRequest:
    return replace(asking(*messages), **fields)


BROKEN, EMPTY = call("0.1", "lookup", "not json"), call("c2", "lookup", "{}")
IMAGE = message_pb2.Part(blob=message_pb2.Blob(data=b"png", media_type="image/png"))


HISTORIES = [
    odd(user("")),
    odd(user(" ")),
    odd(assistant("I said so.")),
    odd(assistant("I said so."), user("What?")),
    odd(user("a"), assistant(" "), user("b")),
    odd(user("a"), tools=[ToolSpec(name="t", description="", input_schema_json="")]),
    odd(user("a"), tools=[LOOKUP], tool_choice="required"),
    odd(user("a"), tools=[LOOKUP], output_schema_json='{"type": "object"}'),
    odd(user("a"), output_schema_json='{"type": "object", "minProperties": 1}'),
    odd(message_pb2.Message(role=message_pb2.ROLE_USER, parts=[IMAGE])),
    odd(message_pb2.Message(role=message_pb2.ROLE_SYSTEM, parts=[message_pb2.Part(text="Note.")])),
]
# Gemini's Chat Completions refuses calls that it has not signed.
HISTORIES_OF_CALLS = [
    odd(user("a"), assistant("", BROKEN), tool_result(BROKEN, "")),
    odd(user("a"), assistant("So."), assistant("", BROKEN), tool_result(BROKEN, "")),
    odd(user("a"), assistant("", BROKEN, EMPTY), tool_result(BROKEN, "x"), tool_result(EMPTY, "y"), user("b")),
]


@pytest.mark.parametrize(
    ("provider", "request_"),
    [
        pytest.param(provider, request, id=f"{name}-{number}")
        for name, provider in PROVIDERS.items()
        for number, request in enumerate(HISTORIES + (HISTORIES_OF_CALLS if name != "gemini-chat" else []))
    ]
    + [
        pytest.param(
            ANTHROPIC, replace(request, tools=[LOOKUP], tool_choice=choice, settings=thinks), id=f"thinks-{choice}"
        )
        for thinks in [model_pb2.ModelSettings(**THINKING)]
        for request, choice in [(odd(user("a")), "required"), (HISTORIES_OF_CALLS[0], "auto")]
    ],
)
async def test_whatever_a_history_is_like_the_rules_are_kept(
    tmp_path: Path, provider: Provider, request_: ModelRequest
) -> None:
    async with provider.talking(tmp_path) as (model, server):
        _, response = await answer(model, request_)
        assert server.count == 1
    assert response.message.parts


REASONS = [pytest.param(api, reason, id=f"{name}-{reason}") for name, api in APIS.items() for reason in api.reasons]


@pytest.mark.parametrize(("api", "reason"), REASONS)
async def test_why_it_stopped_is_told_in_one_vocabulary(tmp_path: Path, api: Provider, reason: str) -> None:
    reply = Reply(pieces=(*api.begun, *api.finish(reason)))
    async with api.talking(tmp_path, only(reply)) as (model, _):
        _, response = await answer(model, asking())
    assert (response.finish_reason, response.provider_finish_reason) == (api.reasons[reason], reason)
    assert bool(response.annotations.safety) == (response.finish_reason in FILTERS)


def common_faults(api: Provider) -> Sequence[Fault]:
    """Faults of what carries an answer; they are the same for every API."""
    page = Reply(status=502, content_type="text/html", pieces=(b"<html>Bad gateway</html>",))
    cut = Fault(
        reply=Reply(pieces=api.begun),
        reason="BAD_RESPONSE",
        retry="BAD_RESPONSE",
        said="before its answer was complete",
    )
    drop = Fault(
        reply=Reply(pieces=api.begun, ending=Ending.DROP),
        reason="UNAVAILABLE",
        retry="TRANSPORT",
        said="could not be reached",
    )
    return (
        cut,
        replace(cut, reply=Reply(pieces=(b"<html>Log in</html>",), content_type="text/html")),
        replace(cut, reply=Reply(pieces=(b"data: no\n\n",)), said="not JSON"),
        drop,
        replace(drop, reply=Reply(ending=Ending.DROP, starts=False)),
        Fault(reply=page, reason="UNAVAILABLE", retry="PROVIDER_ERROR", status=502, said="Bad gateway"),
    )


FAULTS = [
    pytest.param(api, fault, id=f"{name}-{fault.reason}-{fault.status}-{number}")
    for name, api in APIS.items()
    for number, fault in enumerate((*api.faults, *common_faults(api)))
]


@pytest.mark.parametrize(("api", "fault"), FAULTS)
async def test_a_fault_is_a_model_error_with_status_and_address_and_without_the_key(
    tmp_path: Path, api: Provider, fault: Fault
) -> None:
    async with api.talking(tmp_path, only(fault.reply)) as (model, server):
        deltas, error = await failure(model, asking())
        assert server.count == 1
    assert error_pb2.ErrorReason.Name(error.reason) == f"ERROR_REASON_MODEL_{fault.reason}"
    assert event_pb2.RetryReason.Name(error.retry or 0) == f"RETRY_REASON_{fault.retry}"
    assert error.provider_status == fault.status
    assert fault.said in error.message
    assert f"The model 'large' at {api.base_url(server)} " in error.message
    assert KEY not in error.message
    is_begun = [*fault.reply.pieces][: len(api.begun)] == [*api.begun]
    assert (text_of(deltas), error.lost_usage) == (("Well", api.used) if is_begun else ("", None))


@every_api
async def test_usage_is_known_while_an_answer_streams_and_leaving_closes_the_connection(
    tmp_path: Path, api: Provider
) -> None:
    meter = AttemptMeter()
    reply = Reply(pieces=[b"".join(api.begun)], ending=Ending.HANG)
    async with api.talking(tmp_path, only(reply)) as (model, server):
        async with aclosing(model.stream(asking(), meter=meter)) as items:  # type: ignore[type-var]
            assert (await anext(items))[0] == TextDelta("Well")
        await server.left.wait()
    assert meter == AttemptMeter(usage=api.used, is_sent=True)


@pytest.mark.parametrize(("timeout", "starts"), [("start", False), ("idle", True)])
@every_api
async def test_an_answer_that_does_not_begin_or_go_on_is_a_timeout(
    tmp_path: Path, api: Provider, timeout: str, starts: bool
) -> None:
    reply = Reply(pieces=api.begun, ending=Ending.HANG, starts=starts)
    async with api.talking(tmp_path, only(reply), timeouts={timeout: 0.3}) as (model, server):
        deltas, error = await failure(model, asking())
        await server.left.wait()
    assert (error.reason, error.retry) == (error_pb2.ERROR_REASON_MODEL_TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT)
    assert ("for 0.3 seconds" in error.message, text_of(deltas)) == (True, "Well" if starts else "")


@every_api
async def test_calls_one_after_the_other_share_a_connection(tmp_path: Path, api: Provider) -> None:
    async with api.talking(tmp_path) as (model, server):
        for _ in range(3):
            await answer(model, asking())
        assert server.connections == 1


@every_provider
async def test_the_configured_key_is_sent_and_no_key_sends_none(
    tmp_path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "GEMINI_API_KEY", "GOOGLE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(variable, "from-the-environment")
    monkeypatch.setenv("GOOGLE_GENAI_USE_VERTEXAI", "true")
    async with provider.talking(tmp_path) as (model, server):
        await answer(model, asking())
    async with provider.talking(tmp_path, api_key_env="") as (model, without):
        await answer(model, asking())
    assert [value.removeprefix("Bearer ") for value in server.headers[0].values() if KEY in value] == [KEY]
    sent = {name.lower(): value for name, value in without.headers[0].items()}
    assert not {"authorization", "x-api-key", "x-goog-api-key"} & sent.keys()
    assert "from-the-environment" not in str(server.headers + without.headers)


@every_api
async def test_events_are_kept_as_they_came_if_configured(tmp_path: Path, api: Provider) -> None:
    pieces = [*api.begun, *api.finish(next(iter(api.reasons)))]
    async with api.talking(tmp_path, only(Reply(pieces=pieces)), keep_raw=True) as (model, _):
        _, response = await answer(model, asking())
    assert json.loads(response.raw_events_json) == sent_events(pieces)


@every_api
async def test_a_tool_must_be_called_if_the_request_says_so(tmp_path: Path, api: Provider) -> None:
    async with api.talking(tmp_path) as (model, server):
        for tool_choice in ("required", "auto"):
            await answer(model, replace(asking(tools=[LOOKUP]), tool_choice=tool_choice))
    name, value = api.forced
    assert [sent.get(name) for sent in server.requests] == [value, None]


@every_api
async def test_settings_may_choose_no_other_model(tmp_path: Path, api: Provider) -> None:
    settings = model_pb2.ModelSettings(extra_json='{"model": "another"}')
    async with api.talking(tmp_path) as (model, server):
        _, error = await failure(model, asking(settings=settings))
    assert (server.count, error.retry, "may not set model" in error.message) == (0, None, True)


@every_api
async def test_a_provider_that_fails_repeatedly_is_not_called(tmp_path: Path, api: Provider) -> None:
    async with serving_model(only(refusing(500, "Broken."))) as server:
        models = build_models({"m": api.section(server, retries=0)}, secrets={"KEY": KEY}, folder=tmp_path)
        async with open_harness(tmp_path, models=models, definitions=[llm("p", model="m")]) as harness:
            logs = [await harness.turn("p") for _ in range(7)]
        await models.close()
        assert server.count == 5
    assert "circuit breaker is open" in logs[-1][-1].run_failed.error.message


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("name", ["anthropic", "gemini"])
async def test_a_redirect_is_a_failure_and_nothing_is_sent_to_where_it_leads(
    tmp_path: Path, name: str, status: int
) -> None:
    """OpenAI's client follows those that keep the method, without the key (`test_openai_connections`)."""
    api = APIS[name]
    async with serving_model(api.rules) as other:
        elsewhere = other.root.replace("127.0.0.1", "localhost")
        moved = Reply(status=status, headers={"Location": elsewhere + api.path})
        async with api.talking(tmp_path, only(moved)) as (model, server):
            _, error = await failure(model, asking())
    assert (server.count, other.count, list(other.headers)) == (1, 0, [])
    assert (error.retry, error.provider_status) == (None, status)
    assert error.message == (
        f"The model 'large' at {server.root} redirects to {elsewhere + api.path}, and redirects are not followed: "
        "correct its base_url in the server's configuration."
    )
