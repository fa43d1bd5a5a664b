"""Models of native providers against fakes that keep their rules: one alone, and one of an agent in a harness."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bough.v1 import model_pb2
from bough_server import tool
from bough_server.models.config import ModelSection
from bough_server.models.model import Model
from bough_server.models.registry import build_models
from tests.support.model_scenarios import Scenario
from tests.support.model_server import ModelServer, serving_model
from tests.support.run_harness import RunHarness, open_harness
from tests.support.teams import llm

KEY = "not-shaped-like-a-key"


@tool
def lookup(query: str) -> str:
    """Look a word up."""
    return f"{query}: a tree"


@dataclass(frozen=True, slots=True)
class NativeProvider:
    """A provider, a name of one of its models, and its rules."""

    name: str
    model: str
    rules: Scenario

    def section(self, server: ModelServer, **fields: object) -> ModelSection:
        """The configuration of a model at a fake, whose key is in `KEY`."""
        facts = {"provider": self.name, "model": self.model, "base_url": server.root, "api_key_env": "KEY"}
        return ModelSection.model_validate({**facts, **fields})

    @asynccontextmanager
    async def talking(
        self, folder: Path, scenario: Scenario | None = None, **fields: object
    ) -> AsyncIterator[tuple[Model, ModelServer]]:
        """A fake, by default of the rules, and a model `large` that talks to it."""
        async with serving_model(scenario or self.rules) as server:
            models = build_models({"large": self.section(server, **fields)}, secrets={"KEY": KEY}, folder=folder)
            try:
                yield models.get("large"), server
            finally:
                await models.close()

    @asynccontextmanager
    async def harness(self, folder: Path, **settings: object) -> AsyncIterator[tuple[RunHarness, ModelServer]]:
        """A harness whose agent `p` has a tool and this provider's model; `settings` are those of its calls."""
        async with serving_model(self.rules) as server:
            models = build_models({"m": self.section(server)}, secrets={"KEY": KEY}, folder=folder)
            chosen = model_pb2.ModelSettings(**settings)  # type: ignore[arg-type]
            team = [llm("p", model="m", tools=["lookup"], settings=chosen)]
            async with open_harness(folder, models=models, definitions=team, tools=[lookup]) as harness:
                yield harness, server
            await models.close()
