"""Bounds of the numbers, sizes and histories in agent definitions."""

import json
import math
from collections.abc import Collection, Iterator
from typing import Final, TypeAlias

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from bough.v1 import agent_pb2, model_pb2, policy_pb2
from bough_server.documents.yaml import suggestion
from bough_server.runtime.agent import llm_of

FieldProblem: TypeAlias = tuple[str, str]
"""A field's path and the problem with it."""

_MOST_BYTES: Final = 256 * 1024

MAX_SCHEMA_BYTES: Final = 64 * 1024
"""The most bytes of a schema: checking one takes about a second per 160 KiB."""
_MOST_DESCRIPTION: Final = 4 * 1024
_MOST_ITEMS: Final = 128
_LONGEST_INTERVAL_NS: Final = 10_000_000_000
_COUNTS: Final = ("model_calls", "tool_calls", "tokens", "cost_nanos", "depth", "transfers")


def is_too_large(definition: agent_pb2.AgentDefinition) -> bool:
    """Return whether a definition has more bytes than any may have."""
    return definition.ByteSize() > _MOST_BYTES


def bound_problems(definition: agent_pb2.AgentDefinition) -> Iterator[FieldProblem]:
    """Yield every problem of a definition's numbers and sizes."""
    if is_too_large(definition):
        yield "", f"is larger than {_MOST_BYTES // 1024} KiB."
    if len(definition.description.encode()) > _MOST_DESCRIPTION:
        yield "description", f"must be at most {_MOST_DESCRIPTION // 1024} KiB; models read it with every call."
    for name, items in (("llm.tools", llm_of(definition).tools), ("sub_agents", definition.sub_agents)):
        if len(items) > _MOST_ITEMS:
            yield name, f"must be at most {_MOST_ITEMS}."
    yield from _enum_problems(definition, "")
    yield from _limits_problems(definition.limits, "limits")
    for index, link in enumerate(definition.sub_agents):
        yield from _limits_problems(link.limits, f"sub_agents[{index}].limits")
    yield from _delta_problems(definition.deltas.aggregated)
    yield from _llm_problems(llm_of(definition))
    yield from history_problems(definition)


def json_object_problem(text: str) -> str:
    """Return why a text is not a single JSON object; empty if it is one, or if the text is empty."""
    try:
        return "" if not text or isinstance(json.loads(text), dict) else "must be one JSON object."
    except (ValueError, RecursionError) as error:
        return f"must be JSON text: {error}."


def _llm_problems(llm: agent_pb2.LlmAgent) -> Iterator[FieldProblem]:
    if llm.HasField("max_steps") and llm.max_steps < 1:
        yield "llm.max_steps", "must be at least 1."
    for index, link in enumerate(llm.tools):
        yield from tool_link_problems(link, f"llm.tools[{index}]")
    yield from settings_problems(llm.settings, "llm.settings")


def tool_link_problems(link: agent_pb2.ToolLink, place: str) -> Iterator[FieldProblem]:
    """Yield every problem of the numbers of a link to a tool."""
    if link.max_calls_per_run < 0:
        yield f"{place}.max_calls_per_run", "must not be negative."
    if link.HasField("timeout"):
        yield from _positive_problems(link.timeout, f"{place}.timeout")


def settings_problems(settings: model_pb2.ModelSettings, place: str) -> Iterator[FieldProblem]:
    """Yield every problem of the parameters of model calls."""
    # NaN and infinity come over the wire and compare like numbers, but JSON, which providers take, has neither.
    if not (math.isfinite(settings.temperature) and settings.temperature >= 0):
        yield f"{place}.temperature", "must be 0 or more."
    if settings.HasField("top_p") and not 0 < settings.top_p <= 1:
        yield f"{place}.top_p", "must be more than 0 and at most 1."
    if settings.HasField("max_output_tokens") and settings.max_output_tokens < 1:
        yield f"{place}.max_output_tokens", "must be at least 1."
    if problem := json_object_problem(settings.extra_json):
        yield f"{place}.extra_json", problem


def _limits_problems(limits: policy_pb2.Limits, place: str) -> Iterator[FieldProblem]:
    for name in _COUNTS:
        if getattr(limits, name) < 0:
            yield f"{place}.{name}", "must not be negative."
    if limits.HasField("concurrency") and limits.concurrency < 1:
        yield f"{place}.concurrency", "must be at least 1."
    if limits.HasField("wall_duration"):
        yield from _positive_problems(limits.wall_duration, f"{place}.wall_duration")


def _positive_problems(duration: Duration, path: str) -> Iterator[FieldProblem]:
    if not _is_in_range(duration):
        yield path, "is out of the range of a duration."
    elif duration.ToNanoseconds() <= 0:
        yield path, "must be longer than 0 s."


def _delta_problems(aggregated: policy_pb2.AggregatedDeltas) -> Iterator[FieldProblem]:
    if aggregated.HasField("max_chars") and aggregated.max_chars < 1:
        yield "deltas.aggregated.max_chars", "must be at least 1."
    if not _is_in_range(aggregated.max_interval):
        yield "deltas.aggregated.max_interval", "is out of the range of a duration."
    elif not 0 <= aggregated.max_interval.ToNanoseconds() <= _LONGEST_INTERVAL_NS:
        yield "deltas.aggregated.max_interval", "must be between 0 s and 10 s."


def _enum_problems(message: Message, place: str) -> Iterator[FieldProblem]:
    """Yield enum values that this server does not know; they can only come over the wire."""
    for descriptor, value in message.ListFields():
        inner = f"{place}.{descriptor.name}" if place else descriptor.name
        items = (
            [(f"{inner}[{i}]", each) for i, each in enumerate(value)] if descriptor.is_repeated else [(inner, value)]
        )
        for path, item in items:
            if descriptor.enum_type is not None and item not in descriptor.enum_type.values_by_number:
                yield path, f"has a value that this server does not know: {item}."
            elif descriptor.message_type is not None:
                yield from _enum_problems(item, path)


def _is_in_range(duration: Duration) -> bool:
    """Return whether a duration has a JSON form; over the wire it may be out of range or have mixed signs."""
    try:
        duration.ToJsonString()
    except ValueError:
        return False
    return True


def models_of(definition: agent_pb2.AgentDefinition) -> set[str]:
    """Return the models that a definition names: its own, empty if inherited, and those that summarize."""
    summarizing = {policy.summarize.model for _, policy in _policies(definition)} - {""}
    of_nodes = {node.model.model for node in definition.graph.nodes} - {""}
    return {llm_of(definition).model, *summarizing, *of_nodes}


def history_problems(definition: agent_pb2.AgentDefinition) -> Iterator[FieldProblem]:
    """Yield every problem of a definition's history policies."""
    for place, policy in _policies(definition):
        if policy.HasField("sliding_window"):
            window, path = policy.sliding_window, f"{place}.sliding_window"
            yield from _size_problems(window, path)
            if window.reserve_tokens < 0:
                yield f"{path}.reserve_tokens", "must not be negative."
            elif 1 <= window.max_tokens <= window.reserve_tokens:
                yield f"{path}.reserve_tokens", "must be less than max_tokens: nothing would be left for the request."
        if policy.HasField("summarize"):
            yield from _size_problems(policy.summarize, f"{place}.summarize")
            if policy.summarize.HasField("keep_recent_exchanges") and policy.summarize.keep_recent_exchanges < 1:
                yield (
                    f"{place}.summarize.keep_recent_exchanges",
                    "must be at least 1: the last one has the agent's input.",
                )


def unknown_models(definition: agent_pb2.AgentDefinition, models: Collection[str]) -> Iterator[FieldProblem]:
    """Yield the summarizing models that are not in `models`."""
    for place, policy in _policies(definition):
        name = policy.summarize.model
        if name and name not in models:
            yield f"{place}.summarize.model", f"There is no model {name!r}.{suggestion(name, models)}"


def _policies(definition: agent_pb2.AgentDefinition) -> Iterator[tuple[str, agent_pb2.HistoryPolicy]]:
    yield "history", definition.history
    for index, link in enumerate(definition.sub_agents):
        yield f"sub_agents[{index}].history", link.history


def _size_problems(policy: agent_pb2.SlidingWindow | agent_pb2.Summarization, path: str) -> Iterator[FieldProblem]:
    if not policy.HasField("max_tokens"):
        yield f"{path}.max_tokens", "is required: the most tokens of a request."
    elif policy.max_tokens < 1:
        yield f"{path}.max_tokens", "must be at least 1."
