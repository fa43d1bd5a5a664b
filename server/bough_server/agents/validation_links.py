"""Validation of how definitions refer to each other: composites, cycles, and names of agents and functions."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import agent_pb2, error_pb2
from bough_server.agents.validation_bounds import FieldProblem
from bough_server.documents.yaml import suggestion
from bough_server.errors import Reason
from bough_server.functions import (
    Condition,
    Function,
    Handler,
    InputBuilder,
    NodeFunction,
    Reducer,
    Rewriter,
    Router,
)
from bough_server.log.session_state import is_key, is_path
from bough_server.runtime.agent import llm_of
from bough_server.templates import template_mistake

_MOST_ITERATIONS: Final = 10_000
_MOST_STEPS: Final = 1000
"""The most steps of a plan: every step's input repeats all executed ones."""

NamingProblem: TypeAlias = tuple[str, str, Reason]
"""A field's path, the problem with it and the reason of the error."""

_KEY_WORDS: Final = "a letter, then up to 127 of letters, digits and _ - . :"
_INVALID: Final = error_pb2.ERROR_REASON_INVALID_REQUEST
_ALWAYS: Final = ("input", "user", "history")
_OF_PLANS: Final = ("plan", "step", "executed_steps")
_WITHOUT_CALLS: Final = ("sequence", "parallel", "loop")


def structure_problems(
    definition: agent_pb2.AgentDefinition,
    agents: Mapping[str, agent_pb2.AgentDefinition],
    circle_of: Mapping[str, str],
) -> Iterator[FieldProblem]:
    """Yield every problem of how a definition is composed.

    `agents` are all that it may link, by name, and `circle_of` is the result of `rule_circles` for them.
    """
    if definition.HasField("supervisor") and not definition.sub_agents:
        yield "sub_agents", "is required: they are its members."
    if not is_composite(definition) or definition.HasField("graph"):
        return
    yield from _link_problems(definition)
    if definition.output_schema_json:
        yield "output_schema_json", _schema_problem(definition)
    if definition.HasField("loop"):
        yield from _loop_problems(definition.loop)
    if definition.parallel.HasField("max_concurrency") and definition.parallel.max_concurrency < 1:
        yield "parallel.max_concurrency", "must be at least 1."
    if definition.HasField("swarm"):
        yield from _member_problems(definition.swarm.entry_agent, definition, "swarm.entry_agent")
    if definition.HasField("plan_execute"):
        yield from _plan_problems(definition, agents)
    certain = _run_in_any_case(definition)
    for index, link in enumerate(definition.sub_agents):
        # Links to itself and to missing agents are reported by validation.py.
        is_itself = link.agent == definition.name
        if link.agent in certain and not is_itself and circle_of.get(link.agent) == circle_of[definition.name]:
            yield (
                f"sub_agents[{index}].agent",
                f"{link.agent!r} runs {definition.name!r} in turn: that would never end.",
            )


def rule_circles(agents: Mapping[str, agent_pb2.AgentDefinition]) -> dict[str, str]:
    """Return the cycle that each agent is in through composites, which run their children whatever models say.

    Agents of one cycle have the same value; an agent in no cycle has its own.
    """
    return cycles({name: _run_in_any_case(each) if is_composite(each) else () for name, each in agents.items()})


def is_composite(definition: agent_pb2.AgentDefinition) -> bool:
    """Return whether an agent runs its sub-agents by a rule rather than by the choice of a model or of code."""
    return definition.WhichOneof("kind") not in (None, "function", "llm", "supervisor")


def _schema_problem(definition: agent_pb2.AgentDefinition) -> str:
    """Return why a composite has no output schema: nothing would repair an answer that it passes on."""
    if definition.HasField("plan_execute"):
        return (
            "is not for a plan_execute, which answers in text. Put an agent that has it after this one in a sequence."
        )
    kind = definition.WhichOneof("kind")
    return f"is not for a {kind}, which passes on the answers of its children. Set the schema on those agents."


def _link_problems(definition: agent_pb2.AgentDefinition) -> Iterator[FieldProblem]:
    is_swarm = definition.HasField("swarm")
    for index, link in enumerate(definition.sub_agents):
        place = f"sub_agents[{index}].link_mode"
        if is_swarm and link.link_mode == agent_pb2.LINK_MODE_TOOL:
            yield place, "TOOL is for an agent's own links: members of a swarm transfer to each other."
        elif not is_swarm and link.link_mode == agent_pb2.LINK_MODE_TRANSFER:
            yield place, "TRANSFER is for agents that a model chooses; here a rule runs the agent."
    if not definition.sub_agents:
        yield "sub_agents", f"is required: they are its {'members' if is_swarm else 'children, in order'}."


def _member_problems(name: str, definition: agent_pb2.AgentDefinition, place: str) -> Iterator[FieldProblem]:
    """Yield the problem of a sub-agent's name, if one is given."""
    names = [link.agent for link in definition.sub_agents]
    if name and name not in names:
        yield place, f"{name!r} is not one of its sub_agents.{suggestion(name, names)}"


def _plan_problems(
    definition: agent_pb2.AgentDefinition, agents: Mapping[str, agent_pb2.AgentDefinition]
) -> Iterator[FieldProblem]:
    plan = definition.plan_execute
    for role, name in (("planner", plan.planner), ("executor", plan.executor)):
        if not name:
            yield f"plan_execute.{role}", "is required: it is one of the sub_agents."
    for role, name in (("planner", plan.planner), ("executor", plan.executor), ("replanner", plan.replanner)):
        missing = list(_member_problems(name, definition, f"plan_execute.{role}"))
        yield from missing
        # The executor may be an agent of any kind: it ends with an answer, not with a call of `plan`.
        found = None if missing or role == "executor" else agents.get(name)
        if found is not None and found.WhichOneof("kind") not in ("llm", "supervisor"):
            yield f"plan_execute.{role}", f"{name!r} has no model that could call `plan`: use an llm or a supervisor."
    roles = (plan.planner, plan.executor, plan.replanner)
    for index, link in enumerate(definition.sub_agents):
        if link.agent and link.agent not in roles:
            yield (
                f"sub_agents[{index}].agent",
                f"{link.agent!r} is not the planner, executor or replanner, so it would never run.",
            )
    if plan.HasField("max_iterations") and not 1 <= plan.max_iterations <= _MOST_STEPS:
        yield "plan_execute.max_iterations", f"must be between 1 and {_MOST_STEPS}."


def _run_in_any_case(definition: agent_pb2.AgentDefinition) -> set[str]:
    """Return the agents that a composite always runs: of a swarm its entry member, of a graph none, else all."""
    if definition.HasField("graph"):
        return set()  # its branches decide
    if definition.HasField("swarm") and definition.sub_agents:
        return {definition.swarm.entry_agent or definition.sub_agents[0].agent}
    return {link.agent for link in definition.sub_agents}


def _loop_problems(loop: agent_pb2.LoopAgent) -> Iterator[FieldProblem]:
    if not loop.HasField("max_iterations"):
        yield "loop.max_iterations", "is required: a loop without a bound may never end."
    elif not 1 <= loop.max_iterations <= _MOST_ITERATIONS:
        yield "loop.max_iterations", f"must be between 1 and {_MOST_ITERATIONS}."


def find_call_cycles(agents: Mapping[str, agent_pb2.AgentDefinition]) -> Iterator[Sequence[str]]:
    """Yield a shortest path from an agent back to itself for each group of agents whose models can call one another.

    Transfers are left out: members of a swarm or a supervisor hand over to each other, and a limit bounds that.
    """
    called = {name: [each.agent for each in one.sub_agents if _is_call(each, one)] for name, one in agents.items()}
    circle_of = cycles(called)
    for first in sorted(name for name in called if circle_of[name] == name):
        if any(circle_of.get(other) == first for other in called if other != first):
            yield _find_path_back(first, called)


def _is_call(link: agent_pb2.AgentLink, definition: agent_pb2.AgentDefinition) -> bool:
    if link.link_mode == agent_pb2.LINK_MODE_UNSPECIFIED:
        return definition.WhichOneof("kind") not in ("swarm", "supervisor")
    return link.link_mode == agent_pb2.LINK_MODE_TOOL


def _find_path_back(first: str, called: Mapping[str, Collection[str]]) -> Sequence[str]:
    """Return a shortest path from a name to itself, in a cycle that has one."""
    paths = deque([[first]])
    seen: set[str] = set()
    while True:
        path = paths.popleft()
        for name in called.get(path[-1], ()):
            if name == first:
                return [*path, name]
            if name not in seen:
                seen.add(name)
                paths.append([*path, name])


def cycles(runs: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return for each name a representative of its cycle, the same for all of one cycle; a name in no cycle is its own.

    `runs` maps each name to those it runs; names that are only values run none. Kosaraju's algorithm, without
    recursion.
    """
    run_by: dict[str, list[str]] = {}
    for name, others in runs.items():
        for other in others:
            run_by.setdefault(other, []).append(name)
    first: dict[str, str] = {}
    for root in reversed(_by_end(runs)):
        if root not in first:
            _mark(root, run_by, first)
    return first


def _by_end(runs: Mapping[str, Collection[str]]) -> list[str]:
    """Return all names in the order in which a depth-first search finishes them."""
    ended: list[str] = []
    seen: set[str] = set()
    for root in runs:
        # Its own stack: links may form a chain that is deeper than Python's recursion limit.
        path = [("", iter((root,)))]
        while path:
            name, others = path[-1]
            following = next(others, None)
            if following is None:
                ended.append(name)
                path.pop()
            elif following not in seen:
                seen.add(following)
                path.append((following, iter(runs.get(following, ()))))
        ended.pop()  # the empty name that the search starts from
    return ended


def _mark(root: str, run_by: Mapping[str, Collection[str]], first: dict[str, str]) -> None:
    """Mark every unmarked name that reaches the root as part of its cycle."""
    pending = [root]
    while pending:
        name = pending.pop()
        if name not in first:
            first[name] = root
            pending.extend(run_by.get(name, ()))


@dataclass(frozen=True, slots=True)
class Named:
    """A function that a definition names: the field, the function's name and its expected kind."""

    field: str
    name: str
    kind: str


def find_function_references(definition: agent_pb2.AgentDefinition) -> Iterator[Named]:
    """Yield the operator's functions that a definition names."""
    if rewriter := llm_of(definition).history_rewriter:
        yield Named("llm.history_rewriter", rewriter, Rewriter.kind)
    if definition.loop.until.HasField("predicate"):
        yield Named("loop.until.predicate", definition.loop.until.predicate, Condition.kind)
    for index, link in enumerate(definition.sub_agents):
        if link.input.HasField("function"):
            yield Named(f"sub_agents[{index}].input.function", link.input.function, InputBuilder.kind)
    yield from _find_graph_functions(definition.graph)


def _find_graph_functions(graph: agent_pb2.GraphAgent) -> Iterator[Named]:
    for index, node in enumerate(graph.nodes):
        if node.HasField("function") and node.function:
            yield Named(f"graph.nodes[{index}].function", node.function, NodeFunction.kind)
        for field, name in (("before", node.before), ("after", node.after)):
            if name:
                yield Named(f"graph.nodes[{index}].{field}", name, Handler.kind)
    for index, branch in enumerate(graph.branches):
        if branch.HasField("function"):
            yield Named(f"graph.branches[{index}].function", branch.function, Router.kind)
    for index, channel in enumerate(graph.channels):
        if channel.reducer_function:
            yield Named(f"graph.channels[{index}].reducer_function", channel.reducer_function, Reducer.kind)


def find_missing_functions(definition: agent_pb2.AgentDefinition, functions: Mapping[str, Function]) -> Iterator[str]:
    """Yield a description of each function that a definition names and that is missing or of another kind."""
    for named in find_function_references(definition):
        found = functions.get(named.name)
        if found is None or found.kind != named.kind:
            yield f"the {named.kind} {named.name!r}"


def naming_problems(
    definition: agent_pb2.AgentDefinition,
    functions: Mapping[str, str],
    code_agents: Sequence[agent_pb2.AgentDefinition],
) -> Iterator[NamingProblem]:
    """Yield every reference of a definition that resolves to nothing; `functions` maps the known names to kinds."""
    for named in find_function_references(definition):
        if problem := _function_problem(named, functions):
            yield named.field, problem, _INVALID
    if definition.HasField("function"):
        yield from _code_problems(definition.function.function, [each.name for each in code_agents])
    if wrong := template_mistake(llm_of(definition).instruction, ()):
        yield "llm.instruction", wrong, _INVALID
    yield from _until_problems(definition.loop)
    if definition.output_key and not is_key(definition.output_key):
        yield "output_key", f"must be a key of session state: {_KEY_WORDS}", _INVALID
    for index, link in enumerate(definition.sub_agents):
        if not link.HasField("input"):
            continue
        if link.input.WhichOneof("builder") is None:
            yield f"sub_agents[{index}].input", "needs a `template` or a `function`.", _INVALID
        if wrong := template_mistake(link.input.template, _placeholders(definition)):
            yield f"sub_agents[{index}].input.template", wrong, _INVALID


def _placeholders(definition: agent_pb2.AgentDefinition) -> Sequence[str]:
    """Return the names that templates of a definition's links can use, besides session state."""
    kind = definition.WhichOneof("kind")
    if kind in _WITHOUT_CALLS:
        return _ALWAYS
    return (*_ALWAYS, "message", *_OF_PLANS) if kind == "plan_execute" else (*_ALWAYS, "message")


def _function_problem(named: Named, functions: Mapping[str, str]) -> str:
    if not named.name:
        return f"is required: the name of a {named.kind}."
    found = functions.get(named.name)
    if found == named.kind:
        return ""
    if found is not None:
        return f"{named.name!r} is a function of another kind, {found}; use one of kind {named.kind}."
    of_this_kind = [name for name, kind in functions.items() if kind == named.kind]
    return f"There is no {named.kind} {named.name!r}.{suggestion(named.name, of_this_kind)}"


def _code_problems(code: str, known: Collection[str]) -> Iterator[NamingProblem]:
    if not code:
        yield "function.function", "is required: the name of an agent in code.", _INVALID
    elif code not in known:
        reason = error_pb2.ERROR_REASON_UNKNOWN_AGENT
        yield "function.function", f"There is no agent in code named {code!r}.{suggestion(code, known)}", reason


def _until_problems(loop: agent_pb2.LoopAgent) -> Iterator[NamingProblem]:
    if not loop.HasField("until"):
        return
    if loop.until.WhichOneof("condition") is None:
        yield "loop.until", "needs a `predicate` or a `state_path`.", _INVALID
    elif loop.until.HasField("state_path") and not is_path(loop.until.state_path):
        yield "loop.until.state_path", "must be a path such as `approved` or `review.approved`.", _INVALID
