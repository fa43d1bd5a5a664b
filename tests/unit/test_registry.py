"""The catalog in force: what it finds, lists, hashes and refuses."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from bough.v1 import agent_pb2, error_pb2, execution_pb2, message_pb2, model_pb2, tool_pb2
from bough_server.agents.definition import Source, kind_of, revision
from bough_server.agents.function import FunctionAgent, agent
from bough_server.agents.llm import LlmAgent
from bough_server.agents.registry import Registry, agent_of, find_reachable, versions_of
from bough_server.agents.validation import violations
from bough_server.errors import ConfigurationError
from bough_server.models.model import Model, Price
from bough_server.runtime.agent import Context
from bough_server.tools.tool import Tool, tool


@dataclass(frozen=True)
class Configured:
    """As much of a model as a catalog asks for."""

    name: str
    config_digest: str
    price: Price | None = None
    fallbacks: tuple[str, ...] = ()


class Models:
    """Two models, and `default` for the first."""

    def __init__(self, *models: Configured, default: str = "") -> None:
        self._models = {model.name: model for model in models}
        self._default = default

    def get(self, name: str) -> Model:
        return self._models[self._default if name in ("", "default") else name]  # type: ignore[return-value]

    def list(self) -> Sequence[model_pb2.ModelInfo]:
        return [model_pb2.ModelInfo(name=name, provider="scripted") for name in self._models]


MODELS = Models(
    Configured("small", "d1", Price(input_per_million=1, output_per_million=2)),
    Configured("large", "d2"),
    default="small",
)


@tool
def search(topic: str) -> str:
    """Searches."""
    return topic


@tool
def forget(topic: str) -> str:
    """Forgets."""
    return topic


@agent(version="7", tools=["forget"], agents=["writer"])
async def coder(ctx: Context, input: message_pb2.Message) -> str:
    """Codes."""
    return "done"


def define(
    name: str, *, model: str = "", tools: Sequence[str] = (), links: Sequence[str] = ()
) -> agent_pb2.AgentDefinition:
    return agent_pb2.AgentDefinition(
        name=name,
        description=f"Is {name}.",
        llm=agent_pb2.LlmAgent(model=model, tools=[agent_pb2.ToolLink(name=each) for each in tools]),
        sub_agents=[agent_pb2.AgentLink(agent=each) for each in links],
    )


TEAM = [
    define("lead", model="large", links=["researcher", "coder"]),
    define("researcher", tools=["search"], links=["lead"]),
    define("writer"),
    define("alone", model="large", tools=["search"]),
]


@pytest.fixture
def registry() -> Registry:
    return Registry(TEAM, models=MODELS, tools=[search, forget], code_agents=[coder])


def test_names_lead_to_agents_tools_and_models(registry: Registry) -> None:
    resolver = registry.resolver
    assert isinstance(resolver.agents["lead"], LlmAgent)
    assert isinstance(resolver.agents["coder"], FunctionAgent)
    assert resolver.tools["search"] is search
    assert [resolver.models.get(name).name for name in ("", "default", "large")] == ["small", "small", "large"]


def test_an_unknown_name_stands_for_nothing(registry: Registry) -> None:
    resolver = registry.resolver
    assert "absent" not in {*resolver.agents, *resolver.tools, *resolver.functions}
    assert resolver.model("absent") is None
    with pytest.raises(KeyError):
        resolver.models.get("absent")


def test_agents_have_the_revisions_of_their_definitions_and_those_in_code_their_versions(registry: Registry) -> None:
    assert registry.resolver.agents["writer"].revision == revision(TEAM[2])
    assert registry.resolver.agents["coder"].revision == "7"


@pytest.mark.parametrize(
    "kind", [field.name for field in agent_pb2.AgentDefinition.DESCRIPTOR.oneofs_by_name["kind"].fields]
)
def test_the_kind_of_a_definition_is_that_of_its_agent(registry: Registry, kind: str) -> None:
    definition = agent_pb2.AgentDefinition(name="a", description="Is one.")
    getattr(definition, kind).SetInParent()
    made = agent_of(definition, registry.resolver.agents, registry.resolver.functions)
    assert (kind_of(definition), made.revision) == (made.kind, revision(definition))


def test_the_kind_of_an_agent_in_code_is_function(registry: Registry) -> None:
    coder = registry.resolver.agents["coder"]
    assert kind_of(coder.definition) == coder.kind == execution_pb2.AGENT_KIND_FUNCTION


def test_what_a_run_can_reach_is_sorted_and_survives_circles(registry: Registry) -> None:
    assert [each.name for each in find_reachable(registry.resolver, "lead")] == [
        "coder",
        "lead",
        "researcher",
        "writer",
    ]
    assert [each.name for each in find_reachable(registry.resolver, "alone")] == ["alone"]


def test_versions_are_of_what_a_run_can_reach(registry: Registry) -> None:
    versions = versions_of(registry.resolver, "lead")
    assert versions.tools == {"forget": forget.digest, "search": search.digest}
    assert versions.models == {"large": "d2", "small": "d1"}
    assert versions.agents == {"coder": "7"}
    assert versions_of(registry.resolver, "alone").tools == {"search": search.digest}
    no_prices = hashlib.sha256(b"[]").hexdigest()
    assert (versions_of(registry.resolver, "alone").prices, versions.prices == no_prices) == (no_prices, False)


def test_the_hash_of_prices_is_of_their_currency_too() -> None:
    def prices(currency: str) -> str:
        price = Price(input_per_million=1, output_per_million=2, currency_code=currency)
        models = Models(Configured("small", "d1", price), default="small")
        return versions_of(Registry([define("alone")], models=models).resolver, "alone").prices

    assert prices("USD") == prices("USD") != prices("EUR")


def test_everything_is_listed_by_name(registry: Registry) -> None:
    source, kind = agent_pb2.AgentSource, execution_pb2.AgentKind
    assert [
        (each.definition.name, source.Name(each.source), kind.Name(each.kind)) for each in registry.list_agents()
    ] == [
        ("alone", "AGENT_SOURCE_FILE", "AGENT_KIND_LLM"),
        ("coder", "AGENT_SOURCE_CODE", "AGENT_KIND_FUNCTION"),
        ("lead", "AGENT_SOURCE_FILE", "AGENT_KIND_LLM"),
        ("researcher", "AGENT_SOURCE_FILE", "AGENT_KIND_LLM"),
        ("writer", "AGENT_SOURCE_FILE", "AGENT_KIND_LLM"),
    ]
    listed = registry.list_tools()
    assert [(each.name, tool_pb2.ToolSource.Name(each.source)) for each in listed] == [
        ("break_loop", "TOOL_SOURCE_BUILT_IN"),
        ("exit", "TOOL_SOURCE_BUILT_IN"),
        ("forget", "TOOL_SOURCE_CODE"),
        ("get_state", "TOOL_SOURCE_BUILT_IN"),
        ("search", "TOOL_SOURCE_CODE"),
        ("set_state", "TOOL_SOURCE_BUILT_IN"),
    ]
    assert [each for each in listed if each.source == tool_pb2.TOOL_SOURCE_CODE] == [
        tool_pb2.ToolInfo(
            name=each.name,
            description=each.description,
            input_schema_json=each.input_schema_json,
            source=tool_pb2.TOOL_SOURCE_CODE,
            on_recovery=tool_pb2.TOOL_RECOVERY_RETRY,
            digest=each.digest,
        )
        for each in (forget, search)
    ]
    assert json.loads(listed[1].input_schema_json)["required"] == ["final_answer"]
    assert "No agent after you runs" in listed[1].description
    assert [each.name for each in registry.list_models()] == ["large", "small"]


def test_definitions_are_judged_against_the_catalog(registry: Registry) -> None:
    good = define("lead", model="default", tools=["search"], links=["writer", "coder"])
    bad = define("coder", model="huge", links=["absent"])
    assert violations([good], registry.collect_known_names([good])) == []
    found = violations([good, bad], registry.collect_known_names([good, bad]))
    assert [(each.agent, each.field, each.reason) for each in found] == [
        ("coder", "name", error_pb2.ERROR_REASON_INVALID_REQUEST),
        ("coder", "llm.model", error_pb2.ERROR_REASON_INVALID_REQUEST),
        ("coder", "sub_agents[0].agent", error_pb2.ERROR_REASON_UNKNOWN_AGENT),
    ]


def test_a_tool_of_the_client_and_one_that_is_always_approved_are_shown_as_such() -> None:
    @tool(execution="client")
    def pick(what: str) -> str:
        """Picks."""
        raise AssertionError

    @tool(approval=True)
    def pay(amount: int) -> str:
        """Pays."""
        return "paid"

    @tool(approval=lambda arguments: arguments["amount"] > 5)
    def tip(amount: int) -> str:
        """Tips."""
        return "tipped"

    listed = Registry([], models=MODELS, tools=[pick, pay, tip]).list_tools()
    shown = {each.name: (each.source, each.requires_approval) for each in listed}
    assert {name: shown[name] for name in ("pay", "pick", "tip", "exit")} == {
        "pay": (tool_pb2.TOOL_SOURCE_CODE, True),
        "pick": (tool_pb2.TOOL_SOURCE_CLIENT, False),
        "tip": (tool_pb2.TOOL_SOURCE_CODE, False),
        "exit": (tool_pb2.TOOL_SOURCE_BUILT_IN, False),
    }


def test_the_place_of_an_agent_is_a_file_or_code(registry: Registry) -> None:
    source = Source(definition=define("reader", model="large"), path="/srv/team/agents/reader.yaml")
    team = Registry([source], models=MODELS)
    assert team.place("reader") == "the file reader.yaml"
    assert (registry.place("coder"), registry.place("absent")) == ("Python code", "")
    assert [each.source(name) for each, name in ((team, "reader"), (registry, "coder"), (registry, "absent"))] == [
        agent_pb2.AGENT_SOURCE_FILE,
        agent_pb2.AGENT_SOURCE_CODE,
        agent_pb2.AGENT_SOURCE_UNSPECIFIED,
    ]


def test_a_catalog_with_mistakes_is_refused_with_all_of_them() -> None:
    lead = Source(definition=define("lead", links=["absent"]), path="lead.yaml", lines={"": 1, "sub_agents[0]": 7})
    with pytest.raises(ConfigurationError) as refused:
        Registry([lead, define("writer", tools=["serch"])], models=MODELS, tools=[search], code_agents=[coder])
    assert refused.value.message.splitlines() == [
        "lead.yaml:7: sub_agents[0].agent: There is no agent 'absent'. There is coder, lead, writer.",
        "agents: llm.tools[0].name: There is no tool 'serch'. Did you mean 'search'?",
        "agent coder: tools[0].name: There is no tool 'forget'. "
        "There is break_loop, exit, get_state, search, set_state.",
    ]


def test_a_definition_without_a_model_needs_a_default_or_a_caller_with_one() -> None:
    models = Models(Configured("large", "d2"))
    assert Registry([define("lead", model="large", links=["writer"]), define("writer")], models=models)
    with pytest.raises(ConfigurationError, match=r"agents: llm\.model: is required"):
        Registry([define("writer")], models=models)


def test_a_tool_that_runs_in_the_client_is_known_to_do_so() -> None:
    @tool(execution="client")
    def read_card() -> None:
        """Reads the card."""

    reader = define("reader", model="large", tools=["read_card"])
    assert versions_of(Registry([reader], models=MODELS, tools=[read_card]).resolver, "reader").tools == {
        "read_card": read_card.digest
    }
    reader.llm.tools[0].timeout.seconds = 1
    with pytest.raises(ConfigurationError, match=r"agents: llm\.tools\[0\]\.timeout: 'read_card' runs in the client"):
        Registry([reader], models=MODELS, tools=[read_card])


def test_two_tools_of_one_name_are_refused() -> None:
    other = Tool(name="search", description="", input_schema_json="{}", function=str)
    assert Registry([], models=MODELS, tools=[search, search]).list_tools()
    with pytest.raises(ConfigurationError, match="There are two tools named 'search'"):
        Registry([], models=MODELS, tools=[search, other])
