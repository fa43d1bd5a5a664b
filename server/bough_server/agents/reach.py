"""What a run of an agent can reach by links, what that comes to in hashes, and what of it is gone; it keeps nothing."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict

from bough.v1 import agent_pb2
from bough_server.agents.histories import models_of
from bough_server.agents.naming import functions_gone
from bough_server.models.model import Model
from bough_server.runtime.agent import Resolver, RunVersions
from bough_server.state import is_key
from bough_server.tools.builtin import SPECS


def reachable(resolver: Resolver, root: str) -> Sequence[agent_pb2.AgentDefinition]:
    """The definitions that a run of `root` can reach, sorted by name, the root's among them.

    Links that lead nowhere are left out. Raises KeyError where there is no `root`.
    """
    found = {root: resolver.agent(root).definition}
    pending = [root]
    while pending:
        for link in found[pending.pop()].sub_agents:
            if link.agent not in found and _has(resolver.agent, link.agent):
                found[link.agent] = resolver.agent(link.agent).definition
                pending.append(link.agent)
    return [found[name] for name in sorted(found)]


def versions_of(resolver: Resolver, root: str) -> RunVersions:
    """Hashes of the tools, models and fallbacks that those definitions name, of prices, and agents' code versions.

    Raises KeyError where there is no `root`, or a tool is gone.
    """
    definitions = reachable(resolver, root)
    agents = [resolver.agent(definition.name) for definition in definitions]
    names = {link.name for agent in agents for link in agent.tool_links} - SPECS.keys()
    tools = {name: resolver.tool(name).digest for name in names}
    models = _models(resolver, {name for definition in definitions for name in models_of(definition)})
    code = {each.name: each for each in definitions if each.WhichOneof("kind") is None}
    named = {each.function.code for each in definitions if each.HasField("function")}
    code |= {name: resolver.agent(name).definition for name in named}
    prices = [(name, asdict(model.price)) for name, model in sorted(models.items()) if model.price]
    return RunVersions(
        tools=dict(sorted(tools.items())),
        models={name: model.config_digest for name, model in sorted(models.items())},
        agents={name: each.revision for name, each in sorted(code.items())},
        prices=hashlib.sha256(json.dumps(prices).encode()).hexdigest(),
    )


def _models(resolver: Resolver, names: Collection[str]) -> dict[str, Model]:
    """The models of these names with their fallbacks, by their own names; those that are not there are left out."""
    found: dict[str, Model] = {}
    for name in names:
        if _has(resolver.model, name):
            model = resolver.model(name)
            found[model.name] = model
            found |= {each: resolver.model(each) for each in model.fallbacks if _has(resolver.model, each)}
    return found


def gone(resolver: Resolver, root: str) -> Iterator[str]:
    """What those definitions name and nobody finds, each in a sentence. Raises KeyError where there is no `root`.

    A stored agent was judged when it was stored: where rules came since, its runs are refused before they begin.
    """
    for definition in reachable(resolver, root):
        if definition.output_key and not is_key(definition.output_key):
            key = definition.output_key
            yield f"The agent {definition.name!r} has the output_key {key!r}, which no state can hold."
        if definition.HasField("function") and not is_code(resolver, definition.function.code):
            code = definition.function.code
            yield f"The agent {definition.name!r} names the code {code!r}, which is not there any more."
            continue
        for function in functions_gone(definition, resolver):
            yield f"The agent {definition.name!r} names {function}, which is not there any more."
        agent = resolver.agent(definition.name)
        for link in definition.sub_agents:
            if not _has(resolver.agent, link.agent):
                yield f"The agent {definition.name!r} links to the agent {link.agent!r}, which is not there any more."
        for tool in agent.tool_links:
            if tool.name not in SPECS and not _has(resolver.tool, tool.name):
                yield f"The agent {definition.name!r} names the tool {tool.name!r}, which is not there any more."
        for model in sorted(models_of(definition) - {""}):
            if _has(resolver.model, model):
                continue
            yield f"The agent {definition.name!r} names the model {model!r}, which is not there any more."


def is_code(resolver: Resolver, name: str) -> bool:
    """Whether an agent of this name is there and is code."""
    return _has(resolver.agent, name) and resolver.agent(name).definition.WhichOneof("kind") is None


def _has(find: Callable[[str], object], name: str) -> bool:
    try:
        find(name)
    except KeyError:
        return False
    return True
