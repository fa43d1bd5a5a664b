"""Quotas and models of tenants on a whole server: what a refusal says, GetQuotas, and models that do not exist."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from grpc import aio

from bough import v1
from tests.rpc.interceptor_server import status_details
from tests.rpc.run_server import Served, Turn, said, served
from tests.rpc.test_metrics import desk, scraped
from tests.support.callers import CallerStubs, KeyRing, bearer, stubs

TENANTS: dict[str, Any] = {
    "acme": {
        "models": ["small"],
        "quotas": {"runs_per_minute": 2, "cost_nanos_per_month": 100_000_000},
        "user_quotas": {"concurrent_runs": 5, "tokens_per_day": 4_000},
    },
    "beta": {},
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with callers of two tenants, one of which has quotas and one of three models."""
    ring = KeyRing(tmp_path / "keys.yaml")
    for user, roles in (("anne", ["RUN", "ADMIN"]), ("bert", ["RUN"]), ("rita", ["READ"])):
        ring.add(user, roles=roles)
    ring.add("carl", tenant="beta", roles=["RUN", "READ"])
    made = desk(tmp_path, auth=ring.auth, tenants=TENANTS, telemetry={"prometheus_port": 0})
    models = {**made.models, "small": made.models["default"], "large": made.models["default"]}
    models["default"] = made.models["default"].model_copy(
        update={"alias": "small", "provider": None, "script": None, "price": None}
    )
    async with served(made.model_copy(update={"models": models})) as serving:
        yield serving


def as_(server: Served, user: str) -> CallerStubs:
    return stubs(server.channel, bearer(KeyRing(Path("unused")).key(user)))


async def turn(server: Served, user: str, **fields: Any) -> v1.AgentEvent:
    request = v1.RunRequest(**{"agent": "desk", "input": said("hi"), **fields})
    return (await Turn(call=as_(server, user).agents.Run(request)).to_the_end()).events[-1]


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, dict[str, Message]]:
    """Return the code and the details of a call that fails, by the names of their types."""
    with pytest.raises(aio.AioRpcError) as refused:
        await call
    return refused.value.code(), {type(detail).__name__: detail for detail in status_details(refused.value)}


async def test_a_refusal_names_whose_quota_it_is_and_when_to_try_again(server: Served) -> None:
    for user in ("anne", "bert"):
        assert (await turn(server, user)).HasField("run_completed")
    code, details = await refusal(turn(server, "bert"))
    retry = details.pop("RetryInfo")
    assert isinstance(retry, RetryInfo)
    assert 0 < retry.retry_delay.ToTimedelta().total_seconds() <= 60
    failure = details.pop("QuotaFailure")
    assert isinstance(failure, QuotaFailure)
    (violation,) = failure.violations
    assert violation.description.startswith("Nothing is left of the quota of 2 runs a minute of the tenant 'acme'.")
    violation.ClearField("description")
    assert violation == QuotaFailure.Violation(subject="tenant:acme", quota_id="runs_per_minute", quota_value=2)
    info = ErrorInfo(reason="QUOTA_EXCEEDED", domain="bough.dev", metadata={"quota": "runs_per_minute"})
    assert (code, details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, {"ErrorInfo": info})
    assert (await turn(server, "carl")).HasField("run_completed")
    page = await asyncio.to_thread(scraped, server.app.metrics_address)
    assert page['bough_quota_refusals_total{quota="runs_per_minute"}'] == 1


async def test_quotas_are_listed_with_what_is_used_of_them(server: Served) -> None:
    assert (await turn(server, "bert")).HasField("run_completed")

    async def quotas(user: str, of: str = "") -> list[v1.QuotaStatus]:
        return list((await as_(server, user).usage.GetQuotas(v1.GetQuotasRequest(user_id=of))).quotas)

    own = await quotas("bert")
    assert all(status.HasField("reset_time") for status in own[1:])
    for status in own:
        status.ClearField("reset_time")
    assert own == [
        v1.QuotaStatus(kind=v1.QUOTA_KIND_CONCURRENT_RUNS, user_id="bert", limit=5, used=0),
        v1.QuotaStatus(kind=v1.QUOTA_KIND_TOKENS_PER_DAY, user_id="bert", limit=4_000, used=own[1].used),
    ]
    assert own[1].used > 0
    assert [(status.user_id, status.used) for status in await quotas("rita")] == [
        ("", 1),
        ("", 4_000_000),
        ("rita", 0),
        ("rita", 0),
    ]
    assert [status.used for status in await quotas("rita", "bert")][2:] == [0, own[1].used]
    assert await quotas("carl") == []
    code, _ = await refusal(quotas("bert", "anne"))
    assert code == grpc.StatusCode.PERMISSION_DENIED


def writer(model: str) -> v1.AgentDefinition:
    """Return an agent with a model."""
    return v1.AgentDefinition(name="writer", description="Writes.", llm=v1.LlmAgent(model=model, instruction="Write."))


async def test_models_that_a_tenant_does_not_have_do_not_exist_for_it(server: Served) -> None:
    listed = {
        user: [model.name for model in (await as_(server, user).catalog.ListModels(v1.ListModelsRequest())).models]
        for user in ("anne", "carl")
    }
    assert listed == {"anne": ["default", "small"], "carl": ["default", "large", "small"]}
    code, details = await refusal(turn(server, "anne", agent="writer", definitions=[writer("large")]))
    bad = details["BadRequest"]
    assert isinstance(bad, BadRequest)
    assert (code, bad.field_violations[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, "definitions[0].llm.model")
    assert bad.field_violations[0].description.startswith("There is no model 'large'.")
    code, _ = await refusal(as_(server, "anne").catalog.CreateAgent(v1.CreateAgentRequest(definition=writer("large"))))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    end = await turn(server, "anne")
    changes = v1.ForkChanges(agents={"desk": v1.AgentOverride(model="large")})
    fork = v1.ForkRunRequest(run_id=end.run_id, after_sequence=1, changes=changes)
    code, details = await refusal(Turn(call=as_(server, "anne").agents.ForkRun(fork)).to_the_end())
    bad = details["BadRequest"]
    assert isinstance(bad, BadRequest)
    assert bad.field_violations[0].description == "There is no model 'large'."
    judged = v1.EvalSet(name="s", agent="desk", cases=[v1.EvalCase(id="c", turns=[v1.EvalTurn(user="hi")])])
    judge = v1.LlmJudgeMetric(model="large", rubrics=[v1.JudgeRubric(id="kind", text="Is it kind?")])
    judged.cases[0].metrics.add(llm_judge=judge)
    evaluate = v1.EvaluateRequest(eval_set=judged)
    code, details = await refusal(as_(server, "anne").trees.Evaluate(evaluate).read())
    bad = details["BadRequest"]
    assert isinstance(bad, BadRequest)
    assert "There is no model 'large'" in bad.field_violations[0].description
