"""Names of agents and tools in eval sets: one with a typo would hold always, or never."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from typing import Final, Literal, TypeAlias

from bough.v1 import agent_pb2, eval_set_pb2
from bough_server.documents.yaml import suggestion
from bough_server.evals.metrics.judge_prompts import find_template_agents
from bough_server.evals.metrics.tool_names import ANY
from bough_server.evals.sets.expectation_validation import FieldProblem
from bough_server.tools.builtin import RESERVED

_Kind: TypeAlias = Literal["agent", "tool", "mock"]
"""An agent, a tool whose calls are expected or answered for, a tool that is mocked or has faults."""

_Named: TypeAlias = tuple[str, _Kind, str]
"""A field's path, what it names, and the name."""

_MOST_SUGGESTIONS: Final = 100
"""Finding a near name takes a millisecond, and a set may have a hundred thousand wrong ones."""


def unknown_names(
    eval_set: eval_set_pb2.EvalSet, *, agents: Collection[str], tools: Collection[str] | None = None
) -> Iterator[FieldProblem]:
    """Yield a problem for each name of an agent or a tool that there is not; tools are not checked if `tools` is None.

    Cases that begin with records are not checked: records may have other agents and tools.
    """
    known: dict[_Kind, Collection[str]] = {"agent": frozenset(agents)}
    if tools is not None:
        known["tool"] = {*tools, *RESERVED, *(f"call_{agent}" for agent in agents)}
        known["mock"] = {*tools, *RESERVED}
    suggested = count()
    for path, kind, name in _names(eval_set):
        if name in ("", ANY) or kind not in known or name in known[kind]:
            continue
        if kind == "mock" and name in known["tool"]:
            yield path, f"{name!r} calls an agent: mock that agent, in `mocks.agents`, or its tools."
            continue
        near = suggestion(name, known[kind]) if next(suggested) < _MOST_SUGGESTIONS else ""
        yield path, f"There is no {'tool' if kind == 'mock' else kind} {name!r}.{near}"


def find_root_mocks(eval_set: eval_set_pb2.EvalSet, *, agent: str, called: Collection[str]) -> Iterator[FieldProblem]:
    """Yield a problem for each mock of the evaluated agent, unless it is among those that some agent calls.

    Cases that begin with a fork are not checked: they evaluate the agent of that run.
    """
    for index, case in enumerate(eval_set.cases if agent not in called else ()):
        for number, mock in enumerate(case.mocks.agents if not _has_earlier_run(case) else ()):
            if mock.agent == agent:
                yield (
                    f"cases[{index}].mocks.agents[{number}].agent",
                    f"{agent!r} is the evaluated agent, and no agent calls it, so the mock can never answer: mock the "
                    "agents or tools that it calls.",
                )


def list_called_agents(definitions: Iterable[agent_pb2.AgentDefinition]) -> frozenset[str]:
    """Return the names of all agents that some agent links to."""
    return frozenset(link.agent for definition in definitions for link in definition.sub_agents)


def _names(eval_set: eval_set_pb2.EvalSet) -> Iterator[_Named]:
    if any(not _has_earlier_run(case) for case in eval_set.cases):
        yield from _metric_names(eval_set.defaults.metrics, "defaults.metrics")
        yield from _fault_names(eval_set.defaults.faults, "defaults.faults")
    for index, case in enumerate(eval_set.cases):
        if not _has_earlier_run(case):
            yield from _case_names(case, f"cases[{index}]")


def _has_earlier_run(case: eval_set_pb2.EvalCase) -> bool:
    return case.HasField("origin") or any(turn.HasField("recorded") for turn in case.turns)


def _case_names(case: eval_set_pb2.EvalCase, place: str) -> Iterator[_Named]:
    for index, turn in enumerate(case.turns):
        yield from _expectation_names(turn.expect, f"{place}.turns[{index}].expect")
    yield from _expectation_names(case.user.expect, f"{place}.user.expect")
    for index, mock in enumerate(case.mocks.tools):
        yield f"{place}.mocks.tools[{index}].name", "mock", mock.name
        yield f"{place}.mocks.tools[{index}].agent", "agent", mock.agent
    for index, agent_mock in enumerate(case.mocks.agents):
        yield f"{place}.mocks.agents[{index}].agent", "agent", agent_mock.agent
        yield f"{place}.mocks.agents[{index}].caller", "agent", agent_mock.caller
    yield from _fault_names(case.faults, f"{place}.faults")
    for index, answer in enumerate(case.answers):
        yield f"{place}.answers[{index}].agent", "agent", answer.agent
        yield f"{place}.answers[{index}].tool", "tool", answer.tool
    yield from _metric_names(case.metrics, f"{place}.metrics")


def _expectation_names(expect: eval_set_pb2.EvalExpectation, place: str) -> Iterator[_Named]:
    yield from _tool_names(expect.tools, f"{place}.tools")
    yield from _agent_names(expect.agents, f"{place}.agents")
    for number, handoff in enumerate(expect.run.handoffs):
        yield f"{place}.run.handoffs[{number}].from_agent", "agent", handoff.from_agent
        yield f"{place}.run.handoffs[{number}].to_agent", "agent", handoff.to_agent


def _metric_names(metrics: Sequence[eval_set_pb2.EvalMetric], place: str) -> Iterator[_Named]:
    for index, metric in enumerate(metrics):
        inner = f"{place}[{index}]"
        yield f"{inner}.tool_trajectory.agent", "agent", metric.tool_trajectory.agent
        yield f"{inner}.final_response.agent", "agent", metric.final_response.agent
        yield f"{inner}.budget.agent", "agent", metric.budget.agent
        for name in find_template_agents(metric.llm_judge.template):
            yield f"{inner}.llm_judge.template", "agent", name
        yield from _tool_names(metric.tool_trajectory.tools, f"{inner}.tool_trajectory.tools")


def _fault_names(faults: Sequence[eval_set_pb2.EvalFault], place: str) -> Iterator[_Named]:
    for index, fault in enumerate(faults):
        yield f"{place}[{index}].tool", "mock", fault.tool
        yield f"{place}[{index}].agent", "agent", fault.agent


def _agent_names(agents: Sequence[eval_set_pb2.ExpectedAgent], place: str) -> Iterator[_Named]:
    for index, agent in enumerate(agents):
        inner = f"{place}[{index}]"
        yield f"{inner}.name", "agent", agent.name
        for number, name in enumerate(agent.forbidden):
            yield f"{inner}.forbidden[{number}]", "agent", name
        yield from _tool_names(agent.tools, f"{inner}.tools")
        yield from _agent_names(agent.children, f"{inner}.children")


def _tool_names(tools: Sequence[eval_set_pb2.ExpectedTool], place: str) -> Iterator[_Named]:
    for index, tool in enumerate(tools):
        yield f"{place}[{index}].name", "tool", tool.name
