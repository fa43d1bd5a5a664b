"""Judges of other tools, which they reach by provider, address and key: a configured model is asked in their place."""

from collections.abc import Sequence
from typing import Final

from bough.v1.model_pb2 import ModelSettings
from bough_server.evals.importers.metrics import NoCounterpart
from bough_server.evals.importers.values import JsonObject

_USER: Final = "The user said:\n{{user}}"
_ANSWER: Final = "The answer that is to be judged:\n{{answer}}"
_REFERENCE: Final = "The reference answer, which counts as right:\n{{expected}}"
_TOOLS: Final = "The tools that were called, in order:\n{{tools}}"

ANSWER_TEMPLATE: Final = "\n\n".join((_USER, _ANSWER))
"""For rubrics of the answer alone."""
REFERENCE_TEMPLATE: Final = "\n\n".join((_USER, _REFERENCE, _ANSWER))
"""For rubrics of the answer beside a reference answer."""
TOOLS_TEMPLATE: Final = "\n\n".join((_USER, _TOOLS))
"""For rubrics of the tool calls and their results."""
ANSWER_AND_TOOLS_TEMPLATE: Final = "\n\n".join((_USER, _TOOLS, _ANSWER))
"""For rubrics of the answer and how it was found."""

MATCHES_REFERENCE: Final = (
    "matches_reference",
    "The answer means the same as the reference answer: it has everything that the reference answer has, with equal "
    "numbers and units, and contradicts none of it. Other words, another order and another format are no difference. "
    "An answer that asks back, declines or evades does not match.",
)
"""The rubric of metrics that ask whether an answer matches the reference answer, by its id and its text."""

NO_MODEL: Final = (
    "it asks a judge by its own address; name a configured model by --judge, and the metric asks that one instead"
)

_LARGEST: Final = 2**31 - 1


def read_rubrics(sources: Sequence[JsonObject], *, id: str, content: str, text: str) -> list[tuple[str, str]]:
    """Return the ids and texts of rubrics, by the names that their members have. Raises ConfigurationError."""
    rubrics: list[tuple[str, str]] = []
    for source in sources:
        inner = source.child(content)
        if inner is not None:  # without a content there is nothing to ask
            rubrics.append((source.text(id), inner.text(text)))
    return rubrics


def read_samples(source: JsonObject, default: int) -> int:
    """Return how often a judge is asked. Raises ConfigurationError and NoCounterpart."""
    samples = float(source.number("numSamples", default))
    if not samples.is_integer():
        raise NoCounterpart(f"it asks {samples} times")
    return int(samples)


def read_settings(source: JsonObject | None, *, max_tokens: str) -> ModelSettings:
    """Return the parameters of a judge's calls; what else there is stays unread. Raises ConfigurationError."""
    settings = ModelSettings()
    if source is None:
        return settings
    if source.has("temperature"):
        settings.temperature = source.number("temperature")
    if source.has("topP"):
        settings.top_p = source.number("topP")
    if source.has(max_tokens):
        settings.max_output_tokens = int(min(max(source.number(max_tokens), 0), _LARGEST))
    return settings
