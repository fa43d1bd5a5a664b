"""A team whose runs are forked, the world that its tools touch, and places in its logs; it asserts nothing."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from bough.v1 import event_pb2, fork_pb2, message_pb2, run_pb2
from bough_server.models.model import ModelRequest
from bough_server.tools.tool import Tool, ToolContext, tool
from tests.support.log_readings import having
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script

Run = run_pb2.Run
Log = Sequence[event_pb2.AgentEvent]

SPENT = {"usage": {"input_tokens": 10, "output_tokens": 5}}
TEAM = (llm("p", tools=["look"], links=["c"]), llm("c", tools=["look"]))
TURNS = script(
    p=[calls(call("look", what="leaf"), call("call_c", message="root"), **SPENT), {"text": "Done.", **SPENT}],
    c=[calls(call("look", what="root"), **SPENT), {"text": "Found.", **SPENT}],
)


class World:
    """Counts what is done."""

    def __init__(self) -> None:
        self.looked: Counter[str] = Counter()
        self.keys: list[str] = []
        self.heard: list[ModelRequest] = []

    def tools(self) -> list[Tool]:
        """One that counts."""

        @tool
        def look(what: str, context: ToolContext) -> str:
            """Looks something up."""
            self.looked[what] += 1
            self.keys.append(context.idempotency_key)
            return f"{what} is red"

        return [look]


def open_forked(folder: Path, world: World) -> AbstractAsyncContextManager[RunHarness]:
    """A harness with the team."""
    return open_team(folder, TURNS, *TEAM, tools=world.tools(), heard=world.heard)


def run_of(log: Log) -> Run:
    """The run of a log."""
    return Run(run_id=log[0].run_id, session_id=log[0].session_id)


def place(log: Log, payload: str, nth: int = 0) -> int:
    """The sequence of an event."""
    return having(log, payload)[nth].sequence


def edited(text: str, call_id: str, **fields: object) -> fork_pb2.EditedResult:
    """A call's result that is another text."""
    outcome = message_pb2.ToolOutcome(parts=[message_pb2.Part(text=text)])
    return fork_pb2.EditedResult(call_id=call_id, outcome=outcome, **fields)  # type: ignore[arg-type]
