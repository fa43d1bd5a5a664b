"""How definitions refer to each other: composition of kinds, cycles, names of agents, tools and models."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import agent_pb2, error_pb2
from bough_server.agents.validation_bounds import FieldMistake
from bough_server.documents import suggestion
from bough_server.errors import Reason
from bough_server.functions import Condition, Function, InputBuilder, Rewriter
from bough_server.runtime.agent import Resolver, llm_of
from bough_server.session_state import is_key, is_path
from bough_server.templates import template_mistake

_MOST_ITERATIONS: Final = 10_000
_MOST_STEPS: Final = 1000
"""Of a plan: all that was done goes along with every step."""

NamingMistake: TypeAlias = tuple[str, str, Reason]
"""A field's path, what is wrong with it, and the kind of mistake."""

_KEY_WORDS: Final = "a letter, then up to 127 of letters, digits and _ - . :"
_INVALID: Final = error_pb2.ERROR_REASON_INVALID_REQUEST
_ALWAYS: Final = ("input", "user", "history")
_OF_PLANS: Final = ("plan", "step", "executed_steps")
_WITHOUT_CALLS: Final = ("sequence", "parallel", "loop")


def structure_mistakes(
    definition: agent_pb2.AgentDefinition,
    agents: Mapping[str, agent_pb2.AgentDefinition],
    circle_of: Mapping[str, str],
) -> Iterator[FieldMistake]:
    """Everything that is wrong with how a definition is put together.

    `agents` are all that it may link, by name, and `circle_of` is what `rule_circles` says of them.
    """
    if definition.HasField("supervisor") and not definition.sub_agents:
        yield "sub_agents", "is required: they are its members."
    if not is_composite(definition):
        return
    yield from _link_mistakes(definition)
    if definition.output_schema_json:
        yield "output_schema_json", _schema_mistake(definition)
    if definition.HasField("loop"):
        yield from _loop_mistakes(definition.loop)
    if definition.parallel.HasField("max_concurrency") and definition.parallel.max_concurrency < 1:
        yield "parallel.max_concurrency", "must be at least 1."
    if definition.HasField("swarm"):
        yield from _member_mistakes(definition.swarm.entry_agent, definition, "swarm.entry_agent")
    if definition.HasField("plan_execute"):
        yield from _plan_mistakes(definition, agents)
    certain = _run_in_any_case(definition)
    for index, link in enumerate(definition.sub_agents):
        is_itself = link.agent == definition.name
        if link.agent in certain and not is_itself and circle_of.get(link.agent) == circle_of[definition.name]:
            yield (
                f"sub_agents[{index}].agent",
                f"{link.agent!r} runs {definition.name!r} in turn: nothing would ever end that.",
            )


def rule_circles(agents: Mapping[str, agent_pb2.AgentDefinition]) -> dict[str, str]:
    """Who runs one another in turn whatever models say: the circle that each agent is in, by name."""
    return cycles({name: _run_in_any_case(each) if is_composite(each) else () for name, each in agents.items()})


def is_composite(definition: agent_pb2.AgentDefinition) -> bool:
    """Whether an agent runs its sub-agents by a rule, and not where a model or its code wants to."""
    return definition.WhichOneof("kind") not in (None, "function", "llm", "supervisor")


def _schema_mistake(definition: agent_pb2.AgentDefinition) -> str:
    """Nobody asks again for an answer that a rule hands on, so it is no place for a schema."""
    if definition.HasField("plan_execute"):
        return "is not for a plan_execute, which answers in words. Let an agent that has it follow in a sequence."
    kind = definition.WhichOneof("kind")
    return f"is not for a {kind}, which hands on what others say. Give the schema to who answers."


def _link_mistakes(definition: agent_pb2.AgentDefinition) -> Iterator[FieldMistake]:
    is_swarm = definition.HasField("swarm")
    for index, link in enumerate(definition.sub_agents):
        place = f"sub_agents[{index}].link_mode"
        if is_swarm and link.link_mode == agent_pb2.LINK_MODE_TOOL:
            yield place, "TOOL is for an agent's own links: members of a swarm hand over to one another."
        elif not is_swarm and link.link_mode == agent_pb2.LINK_MODE_TRANSFER:
            yield place, "TRANSFER is for models to choose by; here a rule runs the agent."
    if not definition.sub_agents:
        yield "sub_agents", f"is required: they are its {'members' if is_swarm else 'children, in order'}."


def _member_mistakes(name: str, definition: agent_pb2.AgentDefinition, place: str) -> Iterator[FieldMistake]:
    """What is wrong with the name of a sub-agent, where one is given."""
    names = [link.agent for link in definition.sub_agents]
    if name and name not in names:
        yield place, f"{name!r} is none of its sub_agents.{suggestion(name, names)}"


def _plan_mistakes(
    definition: agent_pb2.AgentDefinition, agents: Mapping[str, agent_pb2.AgentDefinition]
) -> Iterator[FieldMistake]:
    plan = definition.plan_execute
    for role, name in (("planner", plan.planner), ("executor", plan.executor)):
        if not name:
            yield f"plan_execute.{role}", "is required: it is one of the sub_agents."
    for role, name in (("planner", plan.planner), ("executor", plan.executor), ("replanner", plan.replanner)):
        missing = list(_member_mistakes(name, definition, f"plan_execute.{role}"))
        yield from missing
        found = None if missing or role == "executor" else agents.get(name)
        if found is not None and found.WhichOneof("kind") not in ("llm", "supervisor"):
            yield f"plan_execute.{role}", f"{name!r} asks no model that could call `plan`: give an llm or a supervisor."
    roles = (plan.planner, plan.executor, plan.replanner)
    for index, link in enumerate(definition.sub_agents):
        if link.agent and link.agent not in roles:
            yield f"sub_agents[{index}].agent", f"{link.agent!r} is no planner, executor or replanner: nothing runs it."
    if plan.HasField("max_iterations") and not 1 <= plan.max_iterations <= _MOST_STEPS:
        yield "plan_execute.max_iterations", f"must be between 1 and {_MOST_STEPS}."


def _run_in_any_case(definition: agent_pb2.AgentDefinition) -> set[str]:
    """Whom a composite runs whatever models say: of a swarm the member that begins, of any other all."""
    if definition.HasField("swarm") and definition.sub_agents:
        return {definition.swarm.entry_agent or definition.sub_agents[0].agent}
    return {link.agent for link in definition.sub_agents}


def _loop_mistakes(loop: agent_pb2.LoopAgent) -> Iterator[FieldMistake]:
    if not loop.HasField("max_iterations"):
        yield "loop.max_iterations", "is required: a loop without a bound may never end."
    elif not 1 <= loop.max_iterations <= _MOST_ITERATIONS:
        yield "loop.max_iterations", f"must be between 1 and {_MOST_ITERATIONS}."


def cycles(runs: Mapping[str, Collection[str]]) -> dict[str, str]:
    """For each name one that it runs in circles with, the same for all of a circle; a name in none has its own.

    `runs` says whom each name runs; who is named there alone runs nobody. Kosaraju's two walks, without recursion.
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
    """All names in the order in which a walk in depth leaves them."""
    ended: list[str] = []
    seen: set[str] = set()
    for root in runs:
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
        ended.pop()  # where the walk began is nobody
    return ended


def _mark(root: str, run_by: Mapping[str, Collection[str]], first: dict[str, str]) -> None:
    """Marks all that reach the root and are in no circle yet as its circle."""
    pending = [root]
    while pending:
        name = pending.pop()
        if name not in first:
            first[name] = root
            pending.extend(run_by.get(name, ()))


@dataclass(frozen=True, slots=True)
class Named:
    """A function that a definition names: in which field, by which name, as which kind."""

    field: str
    name: str
    kind: str


def functions_named(definition: agent_pb2.AgentDefinition) -> Iterator[Named]:
    """The operator's functions that a definition names."""
    if rewriter := llm_of(definition).history_rewriter:
        yield Named("llm.history_rewriter", rewriter, Rewriter.kind)
    if definition.loop.until.HasField("predicate"):
        yield Named("loop.until.predicate", definition.loop.until.predicate, Condition.kind)
    for index, link in enumerate(definition.sub_agents):
        if link.input.HasField("function"):
            yield Named(f"sub_agents[{index}].input.function", link.input.function, InputBuilder.kind)


def functions_gone(definition: agent_pb2.AgentDefinition, resolver: Resolver) -> Iterator[str]:
    """The functions that a definition names and nobody finds, each in words."""
    for named in functions_named(definition):
        found = _function(resolver, named.name)
        if found is None or found.kind != named.kind:
            yield f"the {named.kind} {named.name!r}"


def naming_mistakes(
    definition: agent_pb2.AgentDefinition,
    functions: Mapping[str, str],
    code_agents: Sequence[agent_pb2.AgentDefinition],
) -> Iterator[NamingMistake]:
    """Everything of a definition that names nothing; `functions` are those there are, with what they are."""
    for named in functions_named(definition):
        if problem := _function_problem(named, functions):
            yield named.field, problem, _INVALID
    if definition.HasField("function"):
        yield from _code_mistakes(definition.function.function, [each.name for each in code_agents])
    if wrong := template_mistake(llm_of(definition).instruction, ()):
        yield "llm.instruction", wrong, _INVALID
    yield from _until_mistakes(definition.loop)
    if definition.output_key and not is_key(definition.output_key):
        yield "output_key", f"must be a name of the state: {_KEY_WORDS}", _INVALID
    for index, link in enumerate(definition.sub_agents):
        if not link.HasField("input"):
            continue
        if link.input.WhichOneof("builder") is None:
            yield f"sub_agents[{index}].input", "needs a `template` or a `function`.", _INVALID
        if wrong := template_mistake(link.input.template, _placeholders(definition)):
            yield f"sub_agents[{index}].input.template", wrong, _INVALID


def _placeholders(definition: agent_pb2.AgentDefinition) -> Sequence[str]:
    """What the templates of a definition's links can name, besides the state."""
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
        return f"{named.name!r} is a function of another kind, a {found}; give a {named.kind}."
    of_this_kind = [name for name, kind in functions.items() if kind == named.kind]
    return f"There is no {named.kind} {named.name!r}.{suggestion(named.name, of_this_kind)}"


def _code_mistakes(code: str, known: Collection[str]) -> Iterator[NamingMistake]:
    if not code:
        yield "function.function", "is required: the name of an agent in code.", _INVALID
    elif code not in known:
        reason = error_pb2.ERROR_REASON_UNKNOWN_AGENT
        yield "function.function", f"There is no agent in code named {code!r}.{suggestion(code, known)}", reason


def _until_mistakes(loop: agent_pb2.LoopAgent) -> Iterator[NamingMistake]:
    if not loop.HasField("until"):
        return
    if loop.until.WhichOneof("condition") is None:
        yield "loop.until", "needs a `predicate` or a `state_path`.", _INVALID
    elif loop.until.HasField("state_path") and not is_path(loop.until.state_path):
        yield "loop.until.state_path", "must be a path such as `approved` or `review.approved`.", _INVALID


def _function(resolver: Resolver, name: str) -> Function | None:
    try:
        return resolver.function(name)
    except KeyError:
        return None
