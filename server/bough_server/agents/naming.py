"""What a definition names in words of its own: the operator's functions and code, placeholders, paths of the state.

Which agents, tools and models it names is validation.py's.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from bough.v1 import agent_pb2, error_pb2
from bough_server.documents import suggestion
from bough_server.errors import Reason
from bough_server.functions import Condition, Function, InputBuilder, Rewriter
from bough_server.runtime.agent import Resolver, llm_of
from bough_server.state import is_key
from bough_server.state_paths import is_path
from bough_server.templates import template_mistake

NamingMistake: TypeAlias = tuple[str, str, Reason]
"""A field's path, what is wrong with it, and the kind of mistake."""

_KEY_WORDS: Final = "a letter, then up to 127 of letters, digits and _ - . :"
_INVALID: Final = error_pb2.ERROR_REASON_INVALID_REQUEST
_ALWAYS: Final = ("input", "user", "history")
_OF_PLANS: Final = ("plan", "step", "executed_steps")
_WITHOUT_CALLS: Final = ("sequence", "parallel", "loop")


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
        yield from _code_mistakes(definition.function.code, [each.name for each in code_agents])
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
        yield "function.code", "is required: the name of an agent in code.", _INVALID
    elif code not in known:
        reason = error_pb2.ERROR_REASON_UNKNOWN_AGENT
        yield "function.code", f"There is no agent in code named {code!r}.{suggestion(code, known)}", reason


def _until_mistakes(loop: agent_pb2.LoopAgent) -> Iterator[NamingMistake]:
    if not loop.HasField("until"):
        return
    if loop.until.WhichOneof("condition") is None:
        yield "loop.until", "needs a `predicate` or a path in the `state`.", _INVALID
    elif loop.until.HasField("state") and not is_path(loop.until.state):
        yield "loop.until.state", "must be a path such as `approved` or `review.approved`.", _INVALID


def _function(resolver: Resolver, name: str) -> Function | None:
    try:
        return resolver.function(name)
    except KeyError:
        return None
