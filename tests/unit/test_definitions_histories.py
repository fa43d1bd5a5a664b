"""The history policies of definitions and links: their bounds, and the models that they name."""

import pytest

from bough.v1 import agent_pb2, message_pb2
from bough_server.agents.definition import parse_definition
from bough_server.agents.validation import Known, validate_code_agent, violations
from bough_server.agents.validation_bounds import models_of
from bough_server.documents.yaml import parse_documents
from tests.support.teams import llm

KNOWN = Known(models=["default", "small"])


def mistakes(policy: agent_pb2.HistoryPolicy) -> list[tuple[str, str]]:
    """Of an agent with this policy, and of a caller whose link has it."""
    agent = llm("agent")
    agent.history.CopyFrom(policy)
    caller = llm("caller", links=[agent_pb2.AgentLink(agent="agent", history=policy)])
    found = [(each.agent, each.field, each.description) for each in violations([agent, caller], KNOWN)]
    own = [(field, description) for name, field, description in found if name == "agent"]
    linked = [(field, description) for name, field, description in found if name == "caller"]
    assert linked == [(f"sub_agents[0].{field}", description) for field, description in own]
    return own


def window(**fields: int) -> agent_pb2.HistoryPolicy:
    return agent_pb2.HistoryPolicy(sliding_window=agent_pb2.SlidingWindow(**fields))


def summarize(model: str = "", **fields: int) -> agent_pb2.HistoryPolicy:
    return agent_pb2.HistoryPolicy(summarize=agent_pb2.Summarization(model=model, **fields))


@pytest.mark.parametrize(
    ("policy", "field", "description"),
    [
        (window(), "history.sliding_window.max_tokens", "is required: the most tokens of a request."),
        (window(max_tokens=0), "history.sliding_window.max_tokens", "must be at least 1."),
        (window(max_tokens=-1), "history.sliding_window.max_tokens", "must be at least 1."),
        (window(max_tokens=9, reserve_tokens=-1), "history.sliding_window.reserve_tokens", "must not be negative."),
        (
            window(max_tokens=9, reserve_tokens=9),
            "history.sliding_window.reserve_tokens",
            "must be less than max_tokens",
        ),
        (summarize(), "history.summarize.max_tokens", "is required: the most tokens of a request."),
        (summarize(max_tokens=0), "history.summarize.max_tokens", "must be at least 1."),
        (
            summarize(max_tokens=9, keep_recent_exchanges=0),
            "history.summarize.keep_recent_exchanges",
            "must be at least 1: the last one has the agent's input.",
        ),
        (summarize("smal", max_tokens=9), "history.summarize.model", "There is no model 'smal'. Did you mean 'small'?"),
    ],
)
def test_a_history_policy_has_bounds(policy: agent_pb2.HistoryPolicy, field: str, description: str) -> None:
    found = mistakes(policy)
    assert [each[0] for each in found] == [field]
    assert found[0][1].startswith(description)


@pytest.mark.parametrize(
    "policy",
    [
        agent_pb2.HistoryPolicy(scope=message_pb2.HISTORY_SCOPE_BRANCH),
        window(max_tokens=1),
        window(max_tokens=9, reserve_tokens=8),
        summarize(max_tokens=1),
        summarize("small", max_tokens=4000, keep_recent_exchanges=3),
    ],
)
def test_sensible_history_policies_are_none_of_them_mistakes(policy: agent_pb2.HistoryPolicy) -> None:
    assert mistakes(policy) == []


def test_the_links_of_an_agent_in_code_have_the_same_bounds() -> None:
    link = agent_pb2.AgentLink(agent="agent", history=summarize("none"))
    code = agent_pb2.AgentDefinition(name="code", description="Code.", sub_agents=[link])
    found = [each.field for each in validate_code_agent(code, [], [llm("agent")], KNOWN)]
    assert found == ["sub_agents[0].history.summarize.max_tokens", "sub_agents[0].history.summarize.model"]


def test_models_that_summarize_are_named_by_their_definition() -> None:
    agent = llm("agent", model="large", links=[agent_pb2.AgentLink(agent="other", history=summarize("small"))])
    agent.history.CopyFrom(summarize("tiny"))
    assert models_of(agent) == {"large", "small", "tiny"}


def test_a_policy_is_written_in_yaml() -> None:
    text = """
name: writer
description: Writes.
llm: {model: default}
history:
  summarize: {max_tokens: 4000, keep_recent_exchanges: 3, model: small}
sub_agents:
  - agent: researcher
    history: {scope: BRANCH, sliding_window: {max_tokens: 2000, reserve_tokens: 500}}
"""
    [document] = parse_documents(text, path="writer.yaml")
    source, problems = parse_definition(document)
    assert problems == []
    written = source.definition
    assert written.history == summarize("small", max_tokens=4000, keep_recent_exchanges=3)
    window_of_link = window(max_tokens=2000, reserve_tokens=500)
    window_of_link.scope = message_pb2.HISTORY_SCOPE_BRANCH
    assert written.sub_agents[0].history == window_of_link
