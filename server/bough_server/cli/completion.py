"""What a shell completes: agents and models of the configuration's files, and runs of a server that is there.

A completion prints nothing else, starts no server, runs no code of the operator's and creates no database: what cannot
be found is left out.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer  # at run time: it reads the annotations

if TYPE_CHECKING:
    from bough_server.cli.access import Access
    from bough_server.settings import Settings

_MOST_RUNS: Final = 20


def complete_agents(context: typer.Context, incomplete: str) -> list[str]:
    """Return the agents that the definition files of the configuration have."""
    with suppress(Exception):
        from bough_server.agents.loading import definition_files, read_sources

        settings = _load_settings(context)
        sources, _ = read_sources(definition_files(settings.agents, settings.folder))
        return [source.definition.name for source in sources if source.definition.name.startswith(incomplete)]
    return []


def complete_models(context: typer.Context, incomplete: str) -> list[str]:
    """Return the models of the configuration."""
    with suppress(Exception):
        return [name for name in _load_settings(context).models if name.startswith(incomplete)]
    return []


def complete_runs(context: typer.Context, incomplete: str) -> list[str]:
    """Return `last`, and the newest runs of the server that commands would use, if one answers."""
    found = ["last"]
    with suppress(Exception):
        import asyncio

        found += asyncio.run(_list_runs(context))
    return [name for name in found if name.startswith(incomplete)]


async def _list_runs(context: typer.Context) -> list[str]:
    address, access = _find_server(context)
    async with access.make_client(address, timeout=1.0) as client:
        runs: list[str] = []
        async for run in client.list_runs(page_size=_MOST_RUNS):
            runs.append(run.run_id)
            if len(runs) == _MOST_RUNS:
                break
        return runs


def _find_server(context: typer.Context) -> "tuple[str, Access]":
    """Return the address of the named server, or of the one that has the database open, else the default."""
    from bough.channel import DEFAULT_ADDRESS
    from bough_server.cli.access import local_access, remote_access
    from bough_server.store.sqlite.database_path import database_path, is_postgres
    from bough_server.store.sqlite.file_lock import find_serving_owner

    settings = _load_settings(context)
    if address := _get_options(context).get("address") or settings.address:
        return str(address), remote_access(settings)
    url = settings.storage.url
    owner = None if is_postgres(url) else find_serving_owner(database_path(url))
    return DEFAULT_ADDRESS if owner is None else owner.address, local_access(settings)


def _load_settings(context: typer.Context) -> "Settings":
    from bough_server.settings import Settings

    config = _get_options(context).get("config")
    return Settings.load(None if config is None else Path(config))


def _get_options(context: typer.Context) -> dict[str, Any]:
    """Return the options that were typed so far, before the command's name or after it."""
    return {**context.find_root().params, **{name: value for name, value in context.params.items() if value}}
