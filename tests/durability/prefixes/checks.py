"""What must hold of a run that was finished from a prefix of another's log; it runs nothing."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bough.v1 import error_pb2, event_pb2, execution_pb2, invocation_pb2, message_pb2, usage_pb2
from bough_server.engine import keys
from bough_server.log import events
from bough_server.log.session_state import json_of
from bough_server.log.session_state_fold import StateFold
from bough_server.log.usage import Sums
from bough_server.tools.builtin import RESERVED
from tests.durability.prefixes.recovery import Finished
from tests.durability.prefixes.scenario import call_of_model, name_of
from tests.support.log_laws import check_laws
from tests.support.usages import summed


@dataclass(frozen=True, slots=True)
class Called:
    """A call that a run makes: its name, how many attempts it takes, and whether it is made whatever comes first."""

    name: str
    attempts: int
    is_certain: bool


def check_finished(finished: Finished, prefix: Sequence[event_pb2.AgentEvent], whole: Finished) -> None:
    """Asserts that a run that went on from a prefix ended as `whole` did, and that nothing was done twice."""
    check_kept(finished, prefix, whole)
    assert _end(finished) == _end(whole)
    assert _agents(finished.tree) == _agents(whole.tree)
    assert _tools(finished.tree) == _tools(whole.tree)
    assert finished.state_json == whole.state_json
    _check_calls(finished, whole, prefix)
    _check_words(finished, whole)
    _check_usage(finished, whole)


def check_kept(finished: Finished, prefix: Sequence[event_pb2.AgentEvent], whole: Finished) -> None:
    """Asserts what holds however a run ended: its log is whole, goes on from the prefix, and is its own."""
    assert finished.log[: len(prefix)] == prefix
    check_laws(finished.log)
    assert finished.replayed.divergence == ""
    assert finished.state_json == _folded_state(finished.log)
    wished = [event.cancel_requested.reason for event in finished.log if event.HasField("cancel_requested")]
    assert execution_pb2.CANCEL_REASON_SERVER not in wished, "no log is refused that was written by the same agents"
    assert summed(finished.ledger) == _of_models(_tree_usage(finished))
    assert list(finished.charges) == [charge for _, charge in _charged(finished.log)]
    assert finished.unaccounted == 0


def _folded_state(log: Sequence[event_pb2.AgentEvent]) -> str:
    fold = StateFold()
    for event in log:
        fold.apply(event)
    return json_of(fold.values)


def _end(finished: Finished) -> tuple[str | None, list[str], error_pb2.AgentError, execution_pb2.EndReason.ValueType]:
    kind = finished.log[-1].WhichOneof("payload")
    last = finished.log[-1]
    error = error_pb2.AgentError()
    error.CopyFrom(last.run_failed.error if last.HasField("run_failed") else last.run_cancelled.error)
    error.ClearField("invocation_id")
    said = [part.text for part in last.run_completed.final_answer.parts]
    return kind, said, error, getattr(last, kind or "").end_reason


def _agents(tree: invocation_pb2.Invocation) -> list[tuple[object, ...]]:
    """Who was called by whom and how each ended, in an order that no parallel call changes."""
    names = {one.invocation_id: one.name for one in tree.agents}
    return sorted(
        (
            names.get(one.parent_invocation_id, ""),
            one.name,
            one.depth,
            one.kind,
            one.trigger,
            one.state,
            one.end_reason,
            one.error.reason,
            one.step_count,
            one.usage.tool_calls,
            "".join(part.text for part in one.output.parts),
        )
        for one in tree.agents
    )


def _tools(tree: invocation_pb2.Invocation) -> list[tuple[object, ...]]:
    return sorted(
        (one.agent, one.name, one.arguments_json, one.state, one.result_json, one.error.reason) for one in tree.tools
    )


def _check_calls(finished: Finished, whole: Finished, prefix: Sequence[event_pb2.AgentEvent]) -> None:
    least, most = _left(whole, prefix)
    made = finished.world.calls()
    assert not least - made, "what has no result in the log is executed"
    assert not made - most, "what has one is not"
    promised = {event.effect_key: event.tool_started.idempotency_key for event in finished.log if _is_call(event)}
    for event in filter(_is_call, finished.log):
        assert event.tool_started.idempotency_key == promised[event.effect_key], "every attempt has the same key"
    assert finished.world.idempotency_keys <= {*promised.values()}


def _check_words(finished: Finished, whole: Finished) -> None:
    """What models receive, and what the session keeps, does not depend on which worker executed the run."""
    told = [(name_of(request), _words(request.messages)) for request in whole.world.heard]
    for request in finished.world.heard:
        assert (name_of(request), _words(request.messages)) in told
    assert [one.message.position for one in finished.messages] == [*range(1, len(finished.messages) + 1)]
    assert sorted(_words(one.message for one in finished.messages)) == sorted(
        _words(one.message for one in whole.messages)
    )


def _words(messages: Iterable[message_pb2.Message]) -> list[tuple[object, ...]]:
    """What messages say, without ids and times."""
    return [(one.role, one.kind, one.author, *map(_said, one.parts)) for one in messages]


def _said(part: message_pb2.Part) -> str:
    if part.HasField("tool_call"):
        return f"{part.tool_call.call_id} {part.tool_call.name} {part.tool_call.arguments_json}"
    result = part.tool_result
    said = "".join(each.text or each.data_json for each in result.parts)
    return f"{result.call.call_id} {said} {result.error.message}" if part.HasField("tool_result") else part.text


def _is_call(event: event_pb2.AgentEvent) -> bool:
    return event.HasField("tool_started")


def _left(whole: Finished, prefix: Sequence[event_pb2.AgentEvent]) -> tuple[Counter[str], Counter[str]]:
    """What is still to be called after a prefix, at least and at most."""
    have = _calls(prefix)
    cancelled = [event.cancel_requested.effect_scope for event in prefix if event.HasField("cancel_requested")]
    failed = Counter(event.effect_key for event in prefix if event.llm_retrying.HasField("error"))
    least: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for key, called in _calls(whole.log).items():
        if key in have or any(keys.covers(scope, key) for scope in cancelled):
            continue
        most[called.name] += called.attempts - failed[key]
        if called.is_certain:
            least[called.name] += called.attempts - failed[key]
    return least, most


def _calls(log: Sequence[event_pb2.AgentEvent]) -> Mapping[str, Called]:
    """The calls that have a result in a log and were not refused, by their effects."""
    return dict(_each_call(log))


def _each_call(log: Sequence[event_pb2.AgentEvent]) -> Iterator[tuple[str, Called]]:
    started: dict[str, event_pb2.AgentEvent] = {}
    not_run = {*RESERVED, *(mock.name for mock in log[0].run_started.mocks.tools)}
    for event in log:
        key = event.effect_key
        if event.HasField("llm_started") or event.HasField("tool_started"):
            started[key] = event
        elif event.HasField("llm_completed") or (event.HasField("llm_failed") and key in started):
            who = f"{event.agent}.summary" if events.is_summarizing(event) else event.agent
            yield (
                key,
                Called(call_of_model(who, event.step_index), event.attempt, not _is_cancelled(event.llm_failed.error)),
            )
        elif events.kind_of(event) in (events.TOOL_COMPLETED, events.TOOL_FAILED) and key in started:
            result = event.tool_completed.result if event.HasField("tool_completed") else event.tool_failed.result
            call = started[key].tool_started.call
            if not result.child_invocation_id and call.name not in not_run:
                name = " ".join([call.name, *map(str, json.loads(call.arguments_json).values())])
                yield key, Called(name, 1, not _is_cancelled(result.error))
        elif event.node_completed.node.startswith("counted"):
            yield key, Called(f"node {event.node_completed.node}", 1, True)
        elif event.value_recorded.kind == event_pb2.VALUE_KIND_STEP and (name := _step(event.value_recorded)):
            yield key, Called(f"step {name}", 1, True)


def _step(recorded: event_pb2.ValueRecorded) -> str:
    """The name of a step: its value, or in its error; empty for a refused child, which is no step."""
    if recorded.HasField("value_json"):
        return str(json.loads(recorded.value_json))
    said = recorded.error.message
    return said.split("'")[1] if said.startswith("The step ") else ""


def _is_cancelled(error: error_pb2.AgentError) -> bool:
    return error.reason == error_pb2.ERROR_REASON_CANCELLED


def _check_usage(finished: Finished, whole: Finished) -> None:
    used = _tree_usage(finished)
    assert finished.tree.tree_usage == used
    assert summed(one.usage for one in finished.tree.agents) == used
    assert summed(finished.ledger) == _of_models(used)
    assert list(finished.ledger) == [used for used, _ in _charged(finished.log)]
    lost = _lost(finished.log)
    expected = usage_pb2.Usage()
    expected.CopyFrom(_tree_usage(whole))
    expected.model_calls += lost - _lost(whole.log)
    expected.model_calls_without_usage += lost - _lost(whole.log)
    if expected.HasField("cost_nanos"):
        expected.model_calls_without_cost += lost - _lost(whole.log)
    assert used == expected


def _lost(log: Sequence[event_pb2.AgentEvent]) -> int:
    """How many attempts of models were lost with their servers."""
    return sum(event.llm_retrying.reason == event_pb2.RETRY_REASON_RECOVERED for event in log)


def _tree_usage(finished: Finished) -> usage_pb2.Usage:
    end = getattr(finished.log[-1], finished.log[-1].WhichOneof("payload") or "")
    assert isinstance(end.tree_usage, usage_pb2.Usage)
    return end.tree_usage


def _of_models(used: usage_pb2.Usage) -> usage_pb2.Usage:
    """What the ledger has of it: everything but the calls of tools."""
    charged = usage_pb2.Usage()
    charged.CopyFrom(used)
    charged.ClearField("tool_calls")
    return charged


def _charged(log: Sequence[event_pb2.AgentEvent]) -> Iterator[tuple[usage_pb2.Usage, int]]:
    """Yield what each attempt used that was sent to a model, and what it is charged: its cost or its reservation."""
    reserved: dict[str, int] = {}
    for event in log:
        payload = getattr(event, event.WhichOneof("payload") or "")
        if event.HasField("llm_started"):
            reserved[event.effect_key] = payload.reserved_cost_nanos
        elif event.HasField("llm_completed"):
            used = Sums.of_attempt(payload.response.usage).usage()
            yield used, used.cost_nanos if used.HasField("cost_nanos") else reserved[event.effect_key]
        elif (
            event.HasField("llm_retrying") or (event.HasField("llm_failed") and event.attempt)
        ) and not payload.not_sent:
            used = Sums.of_attempt(payload.lost_usage).usage()
            estimate = 0 if payload.unanswered else reserved[event.effect_key]
            yield used, used.cost_nanos if used.HasField("cost_nanos") else estimate
