"""Field masks of definitions: what they take over, and which are no masks."""

from collections.abc import Sequence
from typing import Final

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_pb2, message_pb2, model_pb2, policy_pb2
from bough_server.agents.editing import apply_mask, mask_problems

PATHS: Final = (
    "description",
    "llm",
    "llm.model",
    "llm.tools",
    "llm.max_steps",
    "llm.settings",
    "llm.settings.temperature",
    "sub_agents",
    "history",
    "history.scope",
    "limits",
    "limits.depth",
    "limits.wall_duration",
    "limits.wall_duration.seconds",
    "deltas.aggregated.max_chars",
    "input_schema_json",
)

names = st.sampled_from(["", "a", "b"])
counts = st.none() | st.integers(0, 2)


@st.composite
def definitions(draw: st.DrawFn) -> agent_pb2.AgentDefinition:
    """A definition with some of its fields."""
    made = agent_pb2.AgentDefinition(name="lead", description=draw(names), input_schema_json=draw(names))
    if draw(st.booleans()):
        made.llm.CopyFrom(agent_pb2.LlmAgent(model=draw(names), max_steps=draw(counts)))
        made.llm.tools.extend(agent_pb2.ToolLink(name=name) for name in draw(st.lists(names, max_size=2)))
        if draw(st.booleans()):
            made.llm.settings.CopyFrom(model_pb2.ModelSettings(temperature=draw(counts), extra_json=draw(names)))
    made.sub_agents.extend(agent_pb2.AgentLink(agent=name) for name in draw(st.lists(names, max_size=2)))
    if draw(st.booleans()):
        made.limits.CopyFrom(policy_pb2.Limits(depth=draw(counts), model_calls=draw(counts)))
    if draw(st.booleans()):
        made.limits.wall_duration.seconds = draw(st.integers(0, 2))
    if draw(st.booleans()):
        made.history.scope = draw(st.sampled_from(message_pb2.HistoryScope.values()))
    if draw(st.booleans()):
        made.deltas.aggregated.CopyFrom(policy_pb2.AggregatedDeltas(max_chars=draw(counts)))
    return made


def _value(message: Message, path: str) -> object:
    """What a path leads to; None where something on the way, or a field that knows absence, is not there."""
    *outer, leaf = path.split(".")
    for name in outer:
        message = getattr(message, name)
    value = getattr(message, leaf)
    descriptor = message.DESCRIPTOR.fields_by_name[leaf]
    if descriptor.is_repeated:
        return list(value)
    return value if not descriptor.has_presence or message.HasField(leaf) else None


def _touches(path: str, others: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.") for other in others)


@given(definitions(), definitions(), st.lists(st.sampled_from(PATHS), min_size=1, max_size=4))
def test_fields_of_the_mask_are_taken_over_and_all_others_stay(
    current: agent_pb2.AgentDefinition, asked: agent_pb2.AgentDefinition, paths: list[str]
) -> None:
    before = current.SerializeToString(deterministic=True)
    merged = apply_mask(current, asked, paths)
    for path in PATHS:
        if path in paths:
            assert _value(merged, path) == _value(asked, path)
        elif not _touches(path, paths):
            assert _value(merged, path) == _value(current, path)
    assert apply_mask(merged, asked, paths) == merged
    assert current.SerializeToString(deterministic=True) == before


@given(definitions(), definitions(), st.sampled_from([[], ["*"]]))
def test_no_mask_takes_all(
    current: agent_pb2.AgentDefinition, asked: agent_pb2.AgentDefinition, paths: list[str]
) -> None:
    assert apply_mask(current, asked, paths) == asked


@pytest.mark.parametrize("paths", [[], ["*"], list(PATHS)])
def test_paths_of_fields_are_masks(paths: list[str]) -> None:
    assert mask_problems(FieldMask(paths=paths)) == []


@pytest.mark.parametrize(
    "path", ["", "name", "revision", "create_time", "wings", "llm.wings", "sub_agents.agent", "llm."]
)
def test_other_paths_are_told_by_their_place(path: str) -> None:
    problems = mask_problems(FieldMask(paths=["description", path]))
    assert [problem.field for problem in problems] == ["update_mask.paths[1]"]


def test_the_star_stands_alone() -> None:
    assert [problem.field for problem in mask_problems(FieldMask(paths=["*", "llm"]))] == ["update_mask.paths[0]"]
