"""Follow an evaluation to its end: its progress on standard error, Ctrl-C, and a server that stays away."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

from bough import AsyncClient, CallFailed, Unavailable
from bough.v1 import eval_result_pb2, evaluation_pb2
from bough_server.cli.connection import Connection
from bough_server.cli.eval.progress import EvalProgress
from bough_server.cli.exit_codes import print_stderr
from bough_server.cli.follow import ConnectionLost
from bough_server.cli.loop import on_interrupt
from bough_server.errors import ConfigurationError
from bough_server.settings_sections import RedactSection

_MIN_SUFFIX: Final = 6
_PAGE_SIZE: Final = 1000
_ID_LENGTH: Final = 36

Events = AsyncIterator[evaluation_pb2.EvaluationEvent]


class Following:
    """One evaluation that a command follows."""

    def __init__(self, connection: Connection, *, evaluation_id: str = "", redact: RedactSection | None = None) -> None:
        """`redact` says what is removed from what is shown; default: nothing."""
        self._connection, self._redact = connection, redact or RedactSection()
        self.evaluation_id = evaluation_id
        """The id; empty until the first event of an evaluation that the command starts."""
        self.is_interrupted = False
        """Whether the user pressed Ctrl-C, which cancels an evaluation that the command started."""
        self._cancelling: asyncio.Task[None] | None = None

    async def start(self, events: Events) -> None:
        """Follow an evaluation that this command starts to its end; the first Ctrl-C cancels it.

        Raises ConnectionLost if its server stays away, and KeyboardInterrupt at the second Ctrl-C.
        """
        try:
            with self._interrupts():
                await self.watch(events)
        finally:
            # The stream can end before the call returns; no task may outlive the command.
            if self._cancelling is not None:
                self._cancelling.cancel()
                await asyncio.wait({self._cancelling})

    async def watch(self, events: Events) -> None:
        """Show the progress of an evaluation to its end. Raises ConnectionLost if its server stays away."""
        last = 0
        try:
            with EvalProgress(self._redact) as progress:
                async for event in events:
                    if not self.evaluation_id:
                        self._announce(event.evaluation_id)
                    last = event.sequence
                    progress.show(event)
        except Unavailable as error:
            if not last:
                raise
            what = error.message if error.reason else "The connection to the server was lost, and it did not come back."
            raise ConnectionLost(
                f"{what}\n  evaluation: {self.evaluation_id}\nThe evaluation may continue there. To rejoin it: "
                f"{self._connection.command} eval watch {self.evaluation_id}"
            ) from error

    def _announce(self, evaluation_id: str) -> None:
        self.evaluation_id = evaluation_id
        print_stderr(f"evaluation {evaluation_id}")
        if self.is_interrupted:
            self._cancel()

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        main = asyncio.current_task()
        assert main is not None, "a coroutine runs in a task"

        def interrupt() -> None:
            if self.is_interrupted:
                main.cancel()
                return
            self.is_interrupted = True
            print_stderr("Cancelling the evaluation; Ctrl-C again to leave at once.")
            # A request that is still being checked may become an evaluation: that is cancelled at its first event.
            if self.evaluation_id:
                self._cancel()

        try:
            with on_interrupt(interrupt):
                yield
        except asyncio.CancelledError:
            if not self.is_interrupted:
                raise
            # Our own cancellation of the command's task: report it as the interrupt that caused it.
            raise KeyboardInterrupt from None

    def _cancel(self) -> None:
        self._cancelling = asyncio.create_task(self._request_cancel())

    async def _request_cancel(self) -> None:
        try:
            await self._connection.client.evaluations.cancel(self.evaluation_id)
        except CallFailed as error:
            print_stderr(f"The evaluation could not be cancelled: {error.message}")


async def result_of(client: AsyncClient, source: str | eval_result_pb2.EvalResult) -> eval_result_pb2.EvalResult:
    """Return a result of a file, or that of the evaluation with this name. Raises ConfigurationError and NotFound."""
    if not isinstance(source, str):
        return source
    result = await client.evaluations.result(await resolve_evaluation(client, source))
    if not result.HasField("end_time"):
        raise ConfigurationError(f"The evaluation {result.evaluation_id} has not ended: wait for its end.")
    return result


async def resolve_evaluation(client: AsyncClient, text: str) -> str:
    """Return the id of the evaluation that a full id, `last` or a unique suffix of an id names.

    Raises ConfigurationError if there is no such evaluation, or more than one.
    """
    if len(text) == _ID_LENGTH:
        return text.lower()
    if text == "last":
        async for one in client.evaluations.list(page_size=1):
            return one.evaluation_id
        raise ConfigurationError("There is no evaluation yet: start one with `bough eval run`.")
    if len(text) < _MIN_SUFFIX:
        raise ConfigurationError(
            f"{text!r} is too short to name an evaluation: use its id, `last`, or at least the last 6 characters of "
            "its id."
        )
    ids = [one.evaluation_id async for one in client.evaluations.list(page_size=_PAGE_SIZE)]
    found = [each for each in ids if each.endswith(text.lower())]
    if not found:
        raise ConfigurationError(
            f"There is no evaluation whose id ends in {text!r}: `bough eval list` lists evaluations."
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} evaluation ids end in {text!r}, such as {found[0]} and {found[1]}: use more characters."
        )
    return found[0]
