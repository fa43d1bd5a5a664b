"""What definitions may name, as a configuration says without a server; which of them are right is judged elsewhere."""

from collections.abc import Collection
from pathlib import Path

from bough_server.agents.loading import definition_files, load_python, load_sources, read_sources
from bough_server.agents.registry import Registry
from bough_server.agents.validation import Known
from bough_server.models.registry import build_models
from bough_server.settings import Settings


def known_to(settings: Settings, *, without: Collection[Path] = ()) -> Known:
    """The tools, models and agents of a configuration, but for the definitions in some files.

    Raises ConfigurationError where a Python module or a file cannot be read.
    """
    python = load_python(settings.python, settings.folder)
    left_out = {path.resolve() for path in without}
    files = [path for path in definition_files(settings.agents, settings.folder) if path.resolve() not in left_out]
    sources, _ = read_sources(files)
    return Known(
        tools=[tool.name for tool in python.tools],
        client_tools=[tool.name for tool in python.tools if tool.is_client_side],
        models=list(settings.models),
        has_default_model="default" in settings.models,
        definitions=[source.definition for source in sources],
        code_agents=[agent.definition for agent in python.agents],
        functions={function.name: function.kind for function in python.functions},
    )


def registry_of(settings: Settings) -> Registry:
    """The catalog of a configuration, as a server would have it; nothing is asked and nothing starts.

    Raises ConfigurationError where anything of it is wrong.
    """
    python = load_python(settings.python, settings.folder)
    return Registry(
        load_sources(definition_files(settings.agents, settings.folder)),
        models=build_models(settings.models, folder=settings.folder, secrets=settings.secrets),
        code_agents=python.agents,
        tools=python.tools,
        functions=python.functions,
    )
