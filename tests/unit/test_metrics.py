"""Metrics: few names, a queue entry for each event, and all of them visible when metrics are collected."""

from bough.v1 import usage_pb2
from bough_server.observability.metrics import MAX_NAMES, OTHER, BoundedNames, Metrics, ModelCallEnd
from tests.support.metric_values import Counted


def tell_of(metrics: Metrics, agent: str) -> None:
    metrics.on_agent_end(agent, kind="llm", state="succeeded", end_reason="completed", seconds=0.5)


def test_only_so_many_names_are_told_apart() -> None:
    names = BoundedNames(2)
    assert [names(name) for name in ("a", "b", "c", "a", "d", "b")] == ["a", "b", OTHER, "a", OTHER, "b"]


def test_agents_that_requests_bring_do_not_grow_the_metrics_without_bound() -> None:
    counted = Counted()
    for number in range(MAX_NAMES + 50):
        tell_of(counted.metrics, f"agent-{number}")
    by_agent = counted.of("bough.agent.invocations", "agent")
    assert len(by_agent) == MAX_NAMES + 1
    assert by_agent[(OTHER,)] == 50


def test_what_is_not_collected_is_bounded_and_is_not_lost() -> None:
    counted = Counted()
    for _ in range(10_000):
        tell_of(counted.metrics, "a")
    assert counted.metrics.pending <= 4097
    assert counted.of("bough.agent.invocations", "agent", "kind", "state", "end_reason") == {
        ("a", "llm", "succeeded", "completed"): 10_000
    }
    assert counted.times("bough.agent.duration", "agent", "kind", "state") == {("a", "llm", "succeeded"): 10_000}
    assert counted.metrics.pending == 0


def test_a_model_call_is_told_of_in_the_words_of_the_conventions() -> None:
    counted = Counted()
    used = usage_pb2.Usage(
        input_tokens=7, cached_input_tokens=5, output_tokens=3, reasoning_tokens=0, cost_nanos=13, currency_code="EUR"
    )
    counted.metrics.on_model_call(ModelCallEnd("a", "openai", "default", "large-2", 2.0, "", used))
    counted.metrics.on_model_call(ModelCallEnd("a", "", "default", "", 1.0, "MODEL_TIMEOUT", None))
    by = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model")
    usage = "gen_ai.client.inference.usage"
    numbers = ("input_tokens", "cache_read.input_tokens", "cache_write.input_tokens", "output_tokens")
    names = [f"{usage}.{name}" for name in (*numbers, "reasoning.output_tokens")]
    told = ("chat", "openai", "default", "large-2", "unknown", "a")
    assert [counted.of(name, *by, "gen_ai.token.modality", "gen_ai.agent.name") for name in names] == [
        {told: 7},
        {told: 5},
        {},
        {told: 3},
        {told: 0},
    ]
    assert counted.of("gen_ai.client.inference.duration", *by, "error.type") == {
        ("chat", "openai", "default", "large-2", ""): 2.0,
        ("chat", "unknown", "default", "", "MODEL_TIMEOUT"): 1.0,
    }
    assert counted.of("bough.agent.cost", "agent", "currency") == {("a", "EUR"): 13}


def test_tools_are_told_of_by_name_and_outcome() -> None:
    counted = Counted()
    counted.metrics.on_tool_end("look", outcome="succeeded", error="", seconds=0.25)
    counted.metrics.on_tool_end("look", outcome="failed", error="TOOL_TIMEOUT", seconds=1.0)
    assert counted.of("bough.tool.duration", "tool", "outcome", "error.type") == {
        ("look", "succeeded", ""): 0.25,
        ("look", "failed", "TOOL_TIMEOUT"): 1.0,
    }


def test_active_runs_are_those_of_this_moment() -> None:
    counted = Counted()
    with counted.metrics.run_active(), counted.metrics.run_active():
        assert counted.of("bough.runs.active") == {(): 2}
    assert counted.of("bough.runs.active") == {(): 0}


def test_followed_logs_are_counted_by_how_their_events_were_found() -> None:
    counted, found = Counted(), {"notification": 2, "look": 0}
    counted.metrics.watch_followed_logs(lambda: found)
    assert counted.of("bough.followed_logs.reads", "found_by") == {("notification",): 2, ("look",): 0}
    found["look"] += 1
    assert counted.of("bough.followed_logs.reads", "found_by") == {("notification",): 2, ("look",): 1}


def test_commits_are_counted_with_their_writes_and_their_duration() -> None:
    counted = Counted()
    counted.metrics.on_commit(3, 0.002)
    counted.metrics.on_commit(1, 0.004)
    assert counted.of("bough.store.batch.size") == {(): 4}
    assert counted.times("bough.store.batch.size") == {(): 2}
    assert counted.of("bough.store.commit.duration") == {(): 0.006}


def test_runs_that_are_taken_over_and_leases_that_are_lost_are_counted() -> None:
    counted = Counted()
    for cause in ("lost", "released", "lost"):
        counted.metrics.on_takeover(cause)
    counted.metrics.on_lease_loss()
    assert counted.of("bough.run.takeovers", "cause") == {("lost",): 2, ("released",): 1}
    assert counted.of("bough.leases.lost") == {(): 1}
