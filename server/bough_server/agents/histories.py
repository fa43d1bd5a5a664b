"""The history policies of a definition, its own and its links': their bounds, and the models that they name."""

from collections.abc import Collection, Iterator

from bough.v1 import agent_pb2
from bough_server.documents import suggestion
from bough_server.runtime.agent import llm_of

FieldMistake = tuple[str, str]
"""A field's path, and what is wrong with it."""


def models_of(definition: agent_pb2.AgentDefinition) -> set[str]:
    """The models that a definition names: the one it asks, empty where that is inherited, and those that summarize."""
    summarizing = {policy.summarize.model for _, policy in _policies(definition)} - {""}
    return {llm_of(definition).model, *summarizing}


def history_mistakes(definition: agent_pb2.AgentDefinition) -> Iterator[FieldMistake]:
    """Everything of its history policies that is out of bounds."""
    for place, policy in _policies(definition):
        if policy.HasField("sliding_window"):
            window, path = policy.sliding_window, f"{place}.sliding_window"
            yield from _size_mistakes(window.max_tokens, path)
            if window.reserve < 0:
                yield f"{path}.reserve", "must not be negative."
            elif 1 <= window.max_tokens <= window.reserve:
                yield f"{path}.reserve", "must be less than max_tokens: nothing would be left for the request."
        if policy.HasField("summarize"):
            yield from _size_mistakes(policy.summarize.max_tokens, f"{place}.summarize")
            if policy.summarize.keep_recent < 0:
                yield f"{place}.summarize.keep_recent", "must not be negative."


def unknown_models(definition: agent_pb2.AgentDefinition, models: Collection[str]) -> Iterator[FieldMistake]:
    """The summarizing models that are none of these."""
    for place, policy in _policies(definition):
        name = policy.summarize.model
        if name and name not in models:
            yield f"{place}.summarize.model", f"There is no model {name!r}.{suggestion(name, models)}"


def _policies(definition: agent_pb2.AgentDefinition) -> Iterator[tuple[str, agent_pb2.HistoryPolicy]]:
    yield "history", definition.history
    for index, link in enumerate(definition.sub_agents):
        yield f"sub_agents[{index}].history", link.history


def _size_mistakes(max_tokens: int, path: str) -> Iterator[FieldMistake]:
    if max_tokens < 1:
        yield f"{path}.max_tokens", "is required: the most tokens of a request, at least 1."
