"""`bough serve`: run a server until a signal stops it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from bough_server.cli.exit_codes import ExitCode, finish
from bough_server.cli.options import DefaultModelOption, Target, target_of


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
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", help="Listen beyond loopback, although nothing is encrypted.")
    ] = False,
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
    check: Annotated[bool, typer.Option("--check", hidden=True)] = False,
) -> None:
    """Serve agents over gRPC until SIGINT or SIGTERM.

    Prints "serving HOST:PORT" on standard output once it accepts calls.
    """
    if reload and workers > 1:
        raise typer.BadParameter("--reload and --workers cannot be combined: --reload is for development.")
    if reload:
        arguments = _arguments(host=host, port=port, default_model=default_model, allow_insecure=allow_insecure)
        finish(_serve_reloading(target_of(context), arguments, ready_file))
    if check:
        finish(_check(target_of(context), default_model))
    if workers > 1:
        arguments = _arguments(host=host, port=None, default_model=default_model, allow_insecure=allow_insecure)
        finish(_serve_workers(target_of(context), arguments, ready_file, count=workers, host=host, port=port))
    finish(
        _serve(
            target_of(context),
            ready_file,
            host=host,
            port=port,
            default_model=default_model,
            allow_insecure=allow_insecure,
            is_worker=as_worker,
        ),
        is_server=True,
    )


async def _check(target: Target, default_model: str | None) -> ExitCode:
    """Load everything that a server loads. Raises ConfigurationError."""
    from bough_server.cli.definitions import registry_of
    from bough_server.settings import Settings

    registry_of(Settings.load(target.config, default_model=default_model))
    return ExitCode.YES


async def _serve(
    target: Target,
    ready_file: Path | None,
    *,
    host: str | None,
    port: int | None,
    default_model: str | None,
    allow_insecure: bool,
    is_worker: bool = False,
) -> ExitCode:
    from bough_server.app import App
    from bough_server.cli.output import print_line
    from bough_server.observability.logs import configure_logging
    from bough_server.settings import Settings

    settings = Settings.load(
        target.config, host=host, port=port, default_model=default_model, allow_insecure=allow_insecure
    )
    if ready_file is not None:
        _check_ready_file(ready_file)
    configure_logging(settings.log_level, settings.log_format)
    if is_worker:
        from bough_server.cli.workers import end_with_parent, report_to_parent

        end_with_parent()
        async with App.open(settings.for_worker(), is_worker=True) as app:
            await app.serve(announce=lambda _: report_to_parent(app.metrics_address))
        return ExitCode.YES
    async with App.open(settings) as app:
        await app.serve(ready_file=ready_file, announce=lambda address: print_line(f"serving {address}"))
    return ExitCode.YES


async def _serve_workers(
    target: Target, arguments: list[str], ready_file: Path | None, *, count: int, host: str | None, port: int | None
) -> ExitCode:
    from bough_server.cli.workers import serve_workers
    from bough_server.observability.logs import configure_logging
    from bough_server.settings import Settings

    settings = Settings.load(target.config, host=host, port=port)
    if ready_file is not None:
        _check_ready_file(ready_file)
    configure_logging(settings.log_level, settings.log_format)
    return await serve_workers(target, arguments, settings, count=count, ready_file=ready_file)


def _arguments(*, host: str | None, port: int | None, default_model: str | None, allow_insecure: bool) -> list[str]:
    """Return the options of a server as they are typed."""
    words = ["--host", host] if host is not None else []
    words += ["--port", str(port)] if port is not None else []
    words += ["--default-model", default_model] if default_model is not None else []
    return words + (["--allow-insecure"] if allow_insecure else [])


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
