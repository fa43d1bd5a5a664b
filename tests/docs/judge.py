"""Judge the files of a folder as a server would at its start; run as a program, in a process forked for it.

python -m tests.docs.judge MODULE... prints every problem and exits with 1 if there is one.
"""

import sys
from pathlib import Path

from bough_server.agents.loading import load_python, load_sources
from bough_server.agents.registry import Registry
from bough_server.auth.api_keys import read_keys
from bough_server.documents.yaml import raise_problems
from bough_server.errors import ConfigurationError
from bough_server.evals.sets.eval_set import parse_eval_set
from bough_server.evals.sets.expectation_validation import KnownNames
from bough_server.evals.sets.validation import set_problems
from bough_server.models.registry import build_models
from bough_server.models.scripted.script import read_script
from bough_server.settings import DEFAULT_FILE, Settings


def judge(folder: Path, modules: list[str]) -> None:
    """Read the settings, scripts, modules and definitions of a folder. Raises ConfigurationError."""
    config = folder / DEFAULT_FILE
    settings = Settings.load(config) if config.exists() else Settings()
    for script in sorted(folder.glob("*script*.yaml")):
        read_script(script)
    for eval_set in sorted([*folder.glob("eval.yaml"), *folder.glob("evals/*.yaml")]):
        _judge_set(eval_set)
    for keys in sorted(folder.glob("keys.yaml")):
        read_keys(keys)
    # A page may name modules in its settings that come in a later block.
    there = [name for name in settings.python if (folder / f"{name}.py").is_file()]
    python = load_python(dict.fromkeys([*there, *modules]), folder)
    Registry(
        load_sources(sorted(folder.glob("agents/*.yaml"))),
        models=build_models(settings.models, folder=folder, secrets={}, currency=settings.currency),
        code_agents=python.agents,
        tools=python.tools,
        functions=python.functions,
        tool_servers=settings.build_tool_servers,
    )


def _judge_set(file: Path) -> None:
    """Read an eval set; a page may show it without the agents that it names. Raises ConfigurationError."""
    raise_problems(set_problems(parse_eval_set(file), KnownNames()))


def main() -> int:
    """Judge the working directory."""
    try:
        judge(Path.cwd(), sys.argv[1:])
    except ConfigurationError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
