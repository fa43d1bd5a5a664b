"""`bough serve`: run a server until a signal stops it."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import DefaultModelOption, Target, target_of

if TYPE_CHECKING:
    from bough_server.settings import Flags


def serve(
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option("--host", metavar="HOST", help="The address to listen on.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, metavar="PORT", help="The port; 0 for any.  [default: 50051]"),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", metavar="F", help="A file to write HOST:PORT to once it serves."),
    ] = None,
    default_model: DefaultModelOption = None,
    allow_no_tls: Annotated[
        bool,
        typer.Option("--allow-no-tls", help="Listen beyond loopback in plaintext, behind a proxy that encrypts."),
    ] = False,
    allow_no_auth: Annotated[
        bool, typer.Option("--allow-no-auth", help="Listen beyond loopback, although all callers are the same user.")
    ] = False,
    allow_insecure: Annotated[bool, typer.Option("--allow-insecure", help="Both of them.")] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Start again when a file of the configuration changes; for development.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", min=1, max=256, metavar="N", help="Serve by N processes on one PostgreSQL and one port."
        ),
    ] = 1,
    as_worker: Annotated[bool, typer.Option("--as-worker", hidden=True)] = False,
    mtls_port: Annotated[int | None, typer.Option("--mtls-port", hidden=True)] = None,
    check: Annotated[bool, typer.Option("--check", hidden=True)] = False,
) -> None:
    """Serve agents over gRPC until SIGINT or SIGTERM.

    Prints "serving HOST:PORT" on standard output once it accepts calls.
    """
    if reload and workers > 1:
        raise typer.BadParameter("--reload and --workers cannot be combined: --reload is for development.")
    flags: Flags = {
        "host": host,
        "port": port,
        "mtls_port": mtls_port,
        "default_model": default_model,
        "allow_no_tls": allow_no_tls,
        "allow_no_auth": allow_no_auth,
        "allow_insecure": allow_insecure,
    }
    if reload:
        finish(_serve_reloading(target_of(context), _arguments(flags), ready_file))
    if check:
        finish(_check(target_of(context), default_model))
    if workers > 1:
        finish(_serve_workers(target_of(context), flags, ready_file, count=workers))
    finish(_serve(target_of(context), flags, ready_file, is_worker=as_worker), is_server=True)


async def _check(target: Target, default_model: str | None) -> ExitCode:
    """Load everything that a server loads. Raises ConfigurationError."""
    from bough_server.cli.definitions import registry_of
    from bough_server.settings import Settings

    registry_of(Settings.load(target.config, default_model=default_model))
    return ExitCode.YES


async def _serve(target: Target, flags: "Flags", ready_file: Path | None, *, is_worker: bool = False) -> ExitCode:
    from bough_server.app import App
    from bough_server.cli.output import print_line
    from bough_server.observability.logs import configure_logging
    from bough_server.settings import Settings

    settings = Settings.load(target.config, **flags)
    if ready_file is not None:
        _check_ready_file(ready_file)
    configure_logging(settings.log_level, settings.log_format)
    if is_worker:
        from bough_server.cli.workers import end_with_parent, report_to_parent

        end_with_parent()
        async with App.open(settings.for_worker(), is_worker=True) as app:
            report = partial(report_to_parent, app.metrics_address)
            await app.serve(announce=lambda _: app.health.report_to(report))
        return ExitCode.YES
    async with App.open(settings) as app:
        await app.serve(ready_file=ready_file, announce=lambda address: print_line(f"serving {address}"))
    return ExitCode.YES


async def _serve_workers(target: Target, flags: "Flags", ready_file: Path | None, *, count: int) -> ExitCode:
    from bough_server.cli.workers import serve_workers
    from bough_server.observability.logs import configure_logging
    from bough_server.settings import Settings

    settings = Settings.load(target.config, **flags)
    if ready_file is not None:
        _check_ready_file(ready_file)
    configure_logging(settings.log_level, settings.log_format)
    # The parent names the ports, which it holds.
    arguments = _arguments({**flags, "port": None, "mtls_port": None})
    return await serve_workers(target, arguments, settings, count=count, ready_file=ready_file)


def _arguments(flags: "Flags") -> list[str]:
    """Return the options of a server as they are typed."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        words += [] if value is True else [str(value)]
    return words


async def _serve_reloading(target: Target, arguments: list[str], ready_file: Path | None) -> ExitCode:
    from bough_server.cli.reload import serve_reloading

    if ready_file is not None:
        _check_ready_file(ready_file)
    return await serve_reloading(target, arguments, ready_file)


def _check_ready_file(ready_file: Path) -> None:
    """Raise ConfigurationError for a ready file that cannot be written, before the server announces itself."""
    from bough_server.errors import ConfigurationError

    if ready_file.is_dir():
        raise ConfigurationError(f"The ready file {str(ready_file)!r} is a folder: name a file in it.")
    folder = ready_file.parent
    if not folder.is_dir():
        raise ConfigurationError(f"The ready file's folder {str(folder)!r} does not exist: create it, or name another.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"The ready file's folder {str(folder)!r} is not writable: make it writable, or name another."
        )
