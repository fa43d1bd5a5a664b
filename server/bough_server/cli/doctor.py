"""`bough doctor`: read-only checks of the installation, each with what to do if it fails."""

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import JsonOption, Target, target_of
from bough_server.distribution import version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bough_server.cli.doctor_certificates import Judgment
    from bough_server.models.model import Model
    from bough_server.settings import Settings

_PROBE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check. The failure of an optional one does not change the exit code."""

    name: str
    is_right: bool
    words: str
    is_optional: bool = False


ProbeOption = Annotated[
    bool, typer.Option("--probe", help="Call each model once with a short question, which may cost money.")
]


def doctor(context: typer.Context, json: JsonOption = False, probe: ProbeOption = False) -> None:
    """Report which parts of this installation work, and what to do about the rest.

    Checks the configuration, certificates, API keys and issuers, agents, tool servers, the database, the models and the
    server. It lists the tools of tool servers; it calls no model, except with --probe.
    The exit code is 1 if something has to be done; each line says what.
    """
    finish(_doctor(target_of(context), json=json, probe=probe))


async def _doctor(target: Target, *, json: bool, probe: bool) -> ExitCode:
    from bough_server.cli.output import print_line, values_json

    findings = await examine(target, probe=probe)
    for finding in findings:
        if json:
            print_line(values_json(asdict(finding)))
        else:
            mark = "ok" if finding.is_right else "--" if finding.is_optional else "!!"
            print_line(f"{mark}  {finding.name}: {finding.words}")
    return ExitCode.YES if all(each.is_right or each.is_optional for each in findings) else ExitCode.FAILED


async def examine(target: Target, *, probe: bool = False) -> list[Finding]:
    """Run all checks, or only the first two if the configuration is invalid: the others depend on it.

    With `probe` each model is called once.
    """
    from bough_server.errors import ConfigurationError
    from bough_server.settings import Settings

    findings = [
        Finding(name="bough", is_right=True, words=f"{version()} on Python {platform.python_version()}"),
    ]
    try:
        settings = Settings.load(target.config)
    except ConfigurationError as error:
        return [*findings, Finding(name="configuration", is_right=False, words=str(error))]
    findings.append(_configuration(settings))
    findings += [*_certificates(settings), *await _callers(settings)]
    findings.append(_run_check("agents", lambda: _agents(settings)))
    findings += await _tool_servers(settings)
    findings.append(_run_check("database", lambda: _database(settings, target.command)))
    models = [_model(settings, name) for name in settings.models]
    findings += await probe_models(settings, models) if probe else models
    findings.append(await _server(target))
    return findings


def _run_check(name: str, check: Callable[[], Finding]) -> Finding:
    from bough_server.errors import ConfigurationError

    try:
        return check()
    except ConfigurationError as error:
        return Finding(name=name, is_right=False, words=str(error))


def _configuration(settings: "Settings") -> Finding:
    where = f"read from {settings.folder}"
    if not settings.agents and not settings.python:
        return Finding(
            name="configuration",
            is_right=False,
            is_optional=True,
            words=f"{where}, and it names no agents: set `agents` in bough.yaml, or name another file with --config",
        )
    return Finding(name="configuration", is_right=True, words=where)


def _certificates(settings: "Settings") -> "Iterator[Finding]":
    from bough_server.cli.doctor_certificates import judge_certificates

    return map(_to_finding, judge_certificates(settings))


async def _callers(settings: "Settings") -> "Iterator[Finding]":
    from bough_server.cli.doctor_callers import judge_callers

    return map(_to_finding, await judge_callers(settings))


def _to_finding(judgment: "Judgment") -> Finding:
    name, is_right, words, is_optional = judgment
    return Finding(name=name, is_right=is_right, words=words, is_optional=is_optional)


def _agents(settings: "Settings") -> Finding:
    from bough_server.agents.loading import definition_files, load_sources, source_problems
    from bough_server.cli.definitions import load_known_names
    from bough_server.documents.yaml import raise_problems

    files = definition_files(settings.agents, settings.folder)
    sources = load_sources(files)
    known = load_known_names(settings, without=files)
    raise_problems(source_problems(sources, known))
    names = [source.definition.name for source in sources] + [agent.name for agent in known.code_agents]
    return Finding(name="agents", is_right=True, words=", ".join(names) or "none")


async def _tool_servers(settings: "Settings") -> list[Finding]:
    """Connect to each tool server, and list its tools."""
    from bough_server.cli.tools import describe_problems
    from bough_server.errors import ConfigurationError
    from bough_server.observability.logs import configure_logging

    try:
        servers = settings.build_tool_servers({})
    except ConfigurationError as error:
        return [Finding(name="tool servers", is_right=False, words=str(error))]
    if not servers.names:
        return []
    configure_logging("error", settings.log_format)  # the findings say what is wrong
    try:
        await servers.wait_until_settled(servers.names)
        return [
            Finding(
                name=f"tool server {each.name}",
                is_right=not describe_problems(each),
                words="; ".join([f"{each.tool_count} tools offered", *describe_problems(each)]),
            )
            for each in servers.describe(None)
        ]
    finally:
        await servers.close()


def _database(settings: "Settings", command: str) -> Finding:
    from bough_server.cli.db import verdict_text
    from bough_server.store.opening import database_status

    status = database_status(settings.storage.url)
    if status.revision is None:
        return _new_database(status.name, settings, command)
    return Finding(name="database", is_right=status.is_current, words=verdict_text(status, command))


def _new_database(name: str, settings: "Settings", command: str) -> Finding:
    from bough_server.store.sqlite.database_path import is_postgres

    if not is_postgres(settings.storage.url):
        return Finding(name="database", is_right=True, words=f"{name} will be created when it is first needed")
    if settings.storage.upgrade_at_start:
        return Finding(name="database", is_right=True, words=f"{name} has no tables yet; the first server makes them")
    return Finding(name="database", is_right=False, words=f"{name} has no tables yet; run `{command} db upgrade`")


def _model(settings: "Settings", name: str) -> Finding:
    """Check a model. Only an unusable default fails the doctor: the others may be meant for other machines."""
    problem = _model_problem(settings, name)
    model = settings.models[name]
    words = f"alias of {model.alias}" if model.alias else str(model.provider)
    return Finding(
        name=f"model {name}",
        is_right=not problem,
        is_optional=name != "default",
        words=f"{words}; {problem}" if problem else words,
    )


def _model_problem(settings: "Settings", name: str) -> str:
    model = settings.models[name]
    if model.alias:
        return _model_problem(settings, model.alias)
    if model.provider == "local":
        from bough_server.models.local.engine import find_problem

        return find_problem() or ""
    if model.provider == "scripted" and model.script is not None and not model.script.is_file():
        return f"its script {model.script} does not exist"
    if model.api_key_env and model.api_key_env not in settings.secrets:
        return f"set the environment variable {model.api_key_env} to its key"
    return ""


async def probe_models(settings: "Settings", findings: "Sequence[Finding]") -> list[Finding]:
    """Call each model in which no check has found a problem, and report whether it answered.

    Aliases are not called: they are as good as their models. Scripted models are read only, they answer by agent.
    """
    from bough_server.errors import ConfigurationError
    from bough_server.models.config import REMOTE
    from bough_server.models.registry import build_models

    try:
        models = build_models(
            settings.models, folder=settings.folder, secrets=settings.secrets, currency=settings.currency
        )
    except ConfigurationError as error:
        return [*findings, Finding(name="models", is_right=False, words=str(error))]
    by_name = dict(zip(settings.models, findings, strict=True))
    try:
        for name, finding in by_name.items():
            if finding.is_right and settings.models[name].provider in (*REMOTE, "local"):
                by_name[name] = await _probe(finding, models.get(name))
    finally:
        await models.close()
    return [_resolve_alias_finding(name, by_name, settings) for name in by_name]


async def _probe(finding: Finding, model: "Model") -> Finding:
    import asyncio

    from bough import text_of, user_message
    from bough.v1 import step_pb2
    from bough_server.cli.render.format import clip, seconds_text
    from bough_server.errors import ModelError
    from bough_server.models.model import ModelRequest
    from bough_server.plain_text import one_line

    began, answer = time.monotonic(), ""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            async for delta in model.stream(ModelRequest(messages=[user_message("Answer with one word: ready.")])):
                if isinstance(delta, step_pb2.LlmResponse):
                    answer = text_of(delta.message)
    except ModelError as error:
        return replace(finding, is_right=False, words=f"{finding.words}; does not answer: {error.message}")
    except TimeoutError:
        return replace(finding, is_right=False, words=f"{finding.words}; no answer within {_PROBE_SECONDS:.0f} s")
    spent = seconds_text(time.monotonic() - began)
    return replace(finding, words=f"{finding.words}; answered in {spent}: {clip(one_line(answer), 40)!r}")


def _resolve_alias_finding(name: str, findings: "Mapping[str, Finding]", settings: "Settings") -> Finding:
    """Return a model's finding; an alias of a model that does not answer is not right either."""
    target = name
    while alias := settings.models[target].alias:
        target = alias
    finding = findings[name]
    if target == name or findings[target].is_right:
        return finding
    return replace(finding, is_right=False, words=f"{finding.words}; {target} does not answer")


async def _server(target: Target) -> Finding:
    from bough_server.cli.connection import find_local_address, running_server
    from bough_server.errors import ConfigurationError
    from bough_server.settings import Settings

    try:
        found = await running_server(target)
    except ConfigurationError as error:
        return Finding(name="server", is_right=False, words=str(error))
    if found is not None:
        return Finding(name="server", is_right=True, words=f"{found.address} answers")
    words = "commands use an embedded one"
    if not target.embedded:
        words = f"no server of Bough answers at {find_local_address(Settings.load(target.config))}; {words}"
    return Finding(name="server", is_right=False, is_optional=True, words=words)
