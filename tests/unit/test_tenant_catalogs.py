"""The catalogs of tenants: made once for each version, kept within bounds, never changed."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bough.v1 import agent_pb2, execution_pb2
from bough_server.agents.catalog import AgentCatalog
from bough_server.agents.definition import drop_unknown_fields, kind_of, revision
from bough_server.agents.registry import Registry, find_reachable, versions_of
from bough_server.errors import AgentUnusable, ConfigurationError, NotFound
from bough_server.models.registry import ConfiguredModels
from bough_server.models.scripted.model import ScriptedModel
from bough_server.models.scripted.script import parse_script
from bough_server.store.opening import open_store
from bough_server.store.ports.workers import AgentStore, StoredAgents

MODELS = ConfiguredModels({"m": ScriptedModel(name="m", script=parse_script("agents: {'*': [a]}"))}, {}, default="m")


@dataclass(frozen=True, slots=True)
class Shelf:
    """The agents of a store, and how often they were read."""

    agents: AgentStore
    reads: list[str] = field(default_factory=list)

    async def version(self, tenant_id: str) -> int:
        return await self.agents.version(tenant_id)

    async def read(self, tenant_id: str) -> StoredAgents:
        self.reads.append(tenant_id)
        return await self.agents.read(tenant_id)

    async def put(self, tenant_id: str, agent: agent_pb2.Agent, *, version: int) -> None:
        await self.agents.put(tenant_id, agent, version=version)

    async def remove(self, tenant_id: str, name: str, *, version: int) -> None:
        await self.agents.remove(tenant_id, name, version=version)


@pytest.fixture
async def shelf(tmp_path: Path) -> AsyncIterator[Shelf]:
    """An empty store."""
    async with open_store(f"sqlite:///{tmp_path}/bough.db", durability="process") as store:
        yield Shelf(store.agents)


def define(name: str, *links: str, instruction: str = "", tools: tuple[str, ...] = ()) -> agent_pb2.AgentDefinition:
    return drop_unknown_fields(
        agent_pb2.AgentDefinition(
            name=name,
            description=f"Is {name}.",
            llm=agent_pb2.LlmAgent(
                instruction=instruction, tools=[agent_pb2.ToolLink(name=tool, max_calls_per_run=1) for tool in tools]
            ),
            sub_agents=[agent_pb2.AgentLink(agent=link) for link in links],
        )
    )


def stored(definition: agent_pb2.AgentDefinition) -> agent_pb2.Agent:
    return agent_pb2.Agent(
        definition=definition,
        revision=revision(definition),
        source=agent_pb2.AGENT_SOURCE_STORED,
        kind=kind_of(definition),
    )


async def keep(shelf: Shelf, tenant_id: str, definition: agent_pb2.AgentDefinition, *, version: int) -> None:
    await shelf.put(tenant_id, stored(definition), version=version)


def scripted(name: str, *fallbacks: str) -> ScriptedModel:
    return ScriptedModel(name=name, script=parse_script("agents: {'*': [a]}"), fallbacks=fallbacks)


async def test_a_tenant_has_its_own_models_with_their_aliases_and_no_others_even_as_fallbacks(shelf: Shelf) -> None:
    models = ConfiguredModels(
        {"small": scripted("small", "big", "tiny"), "big": scripted("big"), "tiny": scripted("tiny")},
        {"default": "big", "usual": "small"},
        default="default",
    )
    grand = define("grand")
    grand.llm.model = "big"
    registry = Registry([define("writer"), grand], models=models)
    catalog = AgentCatalog(registry, shelf, {"a": ["usual", "tiny"], "b": None, "*": ["big"]})
    listed = {
        tenant: {info.name: [*info.fallbacks] for info in catalog.for_tenant(tenant).list_models()} for tenant in "abc"
    }
    every = {"big": [], "default": [], "small": ["big", "tiny"], "tiny": [], "usual": ["big", "tiny"]}
    assert listed == {
        "a": {"small": ["tiny"], "tiny": [], "usual": ["tiny"]},
        "b": every,
        "c": {"big": [], "default": []},
    }
    _, versions = await catalog.for_run("c", "grand")
    assert list(versions.models) == ["big"]
    with pytest.raises(AgentUnusable) as refused:
        await catalog.for_run("a", "grand")
    assert "names the model 'big', which does not exist for this tenant" in refused.value.message
    poet = define("poet")
    poet.llm.model = "small"
    await keep(shelf, "a", poet, version=0)
    resolver, versions = await catalog.for_run("a", "poet")
    assert (list(versions.models), resolver.model(""), resolver.model("big")) == (["small", "tiny"], None, None)
    with pytest.raises(ConfigurationError, match="`tenants` names the model 'tini', which is not configured"):
        AgentCatalog(registry, shelf, {"a": ["tini"]})


def catalog_of(shelf: Shelf) -> AgentCatalog:
    return AgentCatalog(Registry([define("writer")], models=MODELS), shelf)


async def test_a_catalog_is_read_once_for_each_version(shelf: Shelf) -> None:
    catalog = catalog_of(shelf)
    await keep(shelf, "a", define("poet"), version=0)
    first = await catalog.of("a")
    assert await catalog.of("a") is first
    assert shelf.reads == ["a"]
    await shelf.remove("a", "poet", version=1)
    second = await catalog.of("a")
    listed = [found.names() for found in (first, second)]
    assert listed == [["poet", "writer"], ["writer"]]


async def test_catalogs_are_kept_within_their_bound_the_last_used_longest(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough_server.agents.catalog.HELD_BYTES", 5_000)
    catalog = catalog_of(shelf)
    for name in "abc":
        await keep(shelf, name, define("poet", instruction="x" * 1_000), version=0)
    for name in ("a", "b", "a", "c", "a", "b"):
        await catalog.of(name)
    assert shelf.reads == ["a", "b", "c", "b"]


async def test_a_catalog_that_is_larger_than_the_bound_is_kept_while_it_is_used(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough_server.agents.catalog.HELD_BYTES", 10)
    catalog = catalog_of(shelf)
    for name in ("a", "a", "b", "a"):
        await catalog.of(name)
    assert shelf.reads == ["a", "b", "a"]


async def test_a_resolver_stays_as_it_was(shelf: Shelf) -> None:
    await keep(shelf, "a", define("poet", "writer"), version=0)
    catalog = catalog_of(shelf)
    resolver, versions = await catalog.for_run("a", "poet")
    await shelf.remove("a", "poet", version=1)
    with pytest.raises(NotFound):
        await catalog.for_run("a", "poet")
    assert [each.name for each in find_reachable(resolver, "poet")] == ["poet", "writer"]
    assert versions == versions_of(resolver, "poet")
    assert versions.models == {"m": ""}


async def test_definitions_of_a_request_touch_no_other_resolver(shelf: Shelf) -> None:
    catalog = catalog_of(shelf)
    mine = define("writer", instruction="Mine.")
    tried, _ = await catalog.for_run("a", "writer", [mine])
    plain, _ = await catalog.for_run("a", "writer")
    assert tried.agents["writer"].definition == mine
    assert plain.agents["writer"].definition == define("writer")


async def test_what_is_gone_is_named_all_at_once(shelf: Shelf) -> None:
    poet = define("poet", "writer", "ghost", tools=("look_up",))
    poet.llm.model = "huge"
    await keep(shelf, "a", poet, version=0)
    catalog = catalog_of(shelf)
    with pytest.raises(AgentUnusable) as refused:
        await catalog.for_run("a", "poet")
    gone = [
        f"The agent 'poet' {each}, which no longer exists."
        for each in ("links to the agent 'ghost'", "names the tool 'look_up'")
    ]
    gone.append("The agent 'poet' names the model 'huge', which does not exist for this tenant.")
    assert refused.value.message == " ".join([*gone, "Change the agents that name it, or restore it."])
    assert [each.name for each in find_reachable((await catalog.of("a")).resolver, "poet")] == ["poet", "writer"]


async def test_a_stored_agent_whose_key_no_state_can_hold_is_refused_before_it_runs_and_hides_no_other(
    shelf: Shelf,
) -> None:
    poet = define("poet")
    poet.output_key = "9 lives"
    await keep(shelf, "a", poet, version=0)
    await keep(shelf, "a", define("reader", "poet"), version=1)
    catalog = catalog_of(shelf)
    assert (await catalog.of("a")).names() == ["poet", "reader", "writer"]
    for name in ("poet", "reader"):
        with pytest.raises(AgentUnusable) as refused:
            await catalog.for_run("a", name)
        assert refused.value.message.startswith(
            "The agent 'poet' has the output_key '9 lives', which is no valid key of session state"
        )
    _, versions = await catalog.for_run("a", "writer")
    assert versions.models == {"m": ""}


async def test_an_agent_that_is_not_there_is_answered_with_the_nearest_that_the_caller_can_list(shelf: Shelf) -> None:
    await keep(shelf, "a", define("guide"), version=0)
    await keep(shelf, "b", define("guido"), version=0)
    catalog = catalog_of(shelf)
    said = []
    for tenant, name in (("a", "guid"), ("b", "guid"), ("c", "guid"), ("a", "zzz")):
        with pytest.raises(NotFound) as missing:
            await catalog.for_run(tenant, name, [define("mine")])
        said.append(missing.value.message)
        with pytest.raises(NotFound) as missing:
            (await catalog.of(tenant)).agent(name)
        assert missing.value.message == said[-1]
    end = "CatalogService.ListAgents lists all agents."
    assert said == [
        f"There is no agent 'guid'. Did you mean 'guide'? {end}",
        f"There is no agent 'guid'. Did you mean 'guido'? {end}",
        f"There is no agent 'guid'. {end}",
        f"There is no agent 'zzz'. {end}",
    ]


async def test_code_and_functions_that_are_gone_are_named_too(shelf: Shelf) -> None:
    coder = agent_pb2.AgentDefinition(name="coder", description="Codes.")
    coder.function.function = "writer"  # a name that a definition has, and no code
    poet = define("poet", "writer")
    poet.llm.history_rewriter = "bare"
    poet.sub_agents[0].input.function = "build"
    await keep(shelf, "a", coder, version=0)
    await keep(shelf, "a", poet, version=1)
    catalog = catalog_of(shelf)
    for name, gone in {
        "coder": ["the code 'writer'"],
        "poet": ["the rewriter 'bare'", "the input builder 'build'"],
    }.items():
        with pytest.raises(AgentUnusable) as refused:
            await catalog.for_run("a", name)
        told = [f"The agent {name!r} names {each}, which no longer exists." for each in gone]
        assert refused.value.message == " ".join([*told, "Change the agents that name it, or restore it."])
    assert (await catalog.of("a")).agent("coder").definition == coder


async def test_an_agent_is_shown_with_where_it_is_defined_and_found_by_its_revision(shelf: Shelf) -> None:
    poet, writer = define("poet"), define("writer")
    await keep(shelf, "a", poet, version=0)
    catalog = await catalog_of(shelf).of("a")
    of_file = agent_pb2.Agent(
        definition=writer,
        revision=revision(writer),
        source=agent_pb2.AGENT_SOURCE_FILE,
        kind=execution_pb2.AGENT_KIND_LLM,
    )
    assert catalog.list_agents() == [stored(poet), of_file]
    assert [catalog.current(name) for name in ("poet", "writer")] == [stored(poet), of_file]
    assert [catalog.find_at_revision(name, revision(poet)) for name in ("poet", "writer", "absent")] == [
        stored(poet),
        None,
        None,
    ]
