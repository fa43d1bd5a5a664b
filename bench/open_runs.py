"""Runs that a server has left open: a team of three shapes, what its model says, and a database full of such runs.

The runs are recorded by the runtime itself, up to a model call that is never answered; nothing here is measured.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from bough.v1 import agent_pb2, execution_pb2, model_pb2, policy_pb2
from bough_server.models.model import Model
from bough_server.models.scripted.model import Gate, ScriptedModel
from bough_server.models.scripted.script import Script, parse_script
from bough_server.store.ports.runs import Page, RunFilter
from bough_server.tools.tool import tool
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.teams import call, calls, llm, script

_POLICY: Final = policy_pb2.RunPolicy(
    deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()),
    on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE,
)
"""Every delta is an event, and no stream follows these runs."""

SPECIALISTS: Final = ("botanist", "carpenter", "historian")
_USAGE: Final = {"input_tokens": 400, "output_tokens": 40}
_AT_ONCE: Final = 32
_PAGE: Final = 1_000


@tool
async def lookup(query: str) -> str:
    """Looks a topic up."""
    return f"A bough is a main branch of a tree. You asked for {query}."


@dataclass(frozen=True, slots=True)
class Shape:
    """A root agent, and how many of its steps are done when its run is left."""

    agent: str
    steps: int


SHAPES: Final = (Shape("clerk", 37), Shape("searcher", 20), Shape("lead", 5))
"""A long line of single calls; three calls at once in every step; three sub-agents at once, each with a call."""


def _lookups(count: int, *, text: str = "") -> dict[str, object]:
    made = [call("lookup", query=f"branch number {number}") for number in range(count)]
    return calls(*made, text=text, usage=_USAGE)


def _script() -> Script:
    asked = [call(f"call_{name}", message=f"What does a {name} know of boughs?") for name in SPECIALISTS]
    turns: dict[str, list[object]] = {
        "clerk": [_lookups(1, text="Next.")] * SHAPES[0].steps,
        "searcher": [_lookups(3)] * SHAPES[1].steps,
        "lead": [calls(*asked, usage=_USAGE)] * SHAPES[2].steps,
    }
    for shape in SHAPES:
        turns[shape.agent].append({"text": "That is what we know.", "usage": _USAGE})
    for name in SPECIALISTS:
        turns[name] = [_lookups(1), {"text": "A main branch.", "usage": _USAGE}]
    return parse_script(script(**turns))


def _team() -> list[agent_pb2.AgentDefinition]:
    lines = [llm(shape.agent, tools=["lookup"], max_steps=100) for shape in SHAPES[:2]]
    specialists = [llm(name, tools=["lookup"]) for name in SPECIALISTS]
    return [*lines, llm("lead", links=SPECIALISTS, max_steps=100), *specialists]


class _Mind:
    """The one model, under every name."""

    def __init__(self, gate: Gate) -> None:
        self._model = ScriptedModel(name="default", script=_script(), gate=gate)

    def get(self, name: str) -> Model:
        """The model."""
        return self._model

    def list(self) -> Sequence[model_pb2.ModelInfo]:
        """The model."""
        return [model_pb2.ModelInfo(name="default", provider="scripted", model="script")]


class Silence:
    """Keeps the model from answering where the runs are left, and counts the calls that wait there."""

    def __init__(self, expected: int) -> None:
        self._left = expected
        self._steps = {shape.agent: shape.steps for shape in SHAPES}
        self.reached = asyncio.Event()
        """Set when as many calls wait as are expected."""

    def expect(self, count: int) -> None:
        """Waits for so many more."""
        self._left += count
        self.reached.clear()

    async def gate(self, agent: str, place: int, piece: int) -> None:
        """Lets every piece pass but those of a root's last answer."""
        if self._steps.get(agent) == place:
            await self._forever()

    async def _forever(self) -> NoReturn:
        self._left -= 1
        if not self._left:
            self.reached.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("no model answers")


@asynccontextmanager
async def team_harness(folder: Path, silence: Silence) -> AsyncIterator[RunHarness]:
    """The team on the database of a folder."""
    async with open_harness(folder, models=_Mind(silence.gate), definitions=_team(), tools=[lookup]) as harness:
        yield harness


async def leave_open(folder: Path, count: int) -> Counter[int]:
    """Fills the database of a folder with so many runs, of every shape in turn, each RUNNING when its server ends.

    Gives how many events of each kind their logs have.
    """
    silence = Silence(0)
    async with team_harness(folder, silence) as harness:
        for first in range(0, count, _AT_ONCE):
            numbers = range(first, min(count, first + _AT_ONCE))
            silence.expect(len(numbers))
            for number in numbers:
                await harness.start(SHAPES[number % len(SHAPES)].agent, f"Question {number}", policy=_POLICY)
            await silence.reached.wait()
        run_ids = await open_run_ids(harness)
        if len(run_ids) != count:
            raise ValueError(f"{len(run_ids)} runs are open instead of {count}")
        return await _kinds(harness, run_ids)


async def _kinds(harness: RunHarness, run_ids: Sequence[str]) -> Counter[int]:
    kinds: Counter[int] = Counter()
    for run_id in run_ids:
        after = 0
        while page := await harness.store.log.read(run_id, after=after):
            kinds.update(event.kind for event in page)
            after = page[-1].sequence
    return kinds


async def open_run_ids(harness: RunHarness) -> list[str]:
    """The runs that wait to be gone on with."""
    found: list[str] = []
    token = ""
    while True:
        running = RunFilter(states=[execution_pb2.EXECUTION_STATE_RUNNING])
        runs, token = await harness.store.runs.list(ME, running, Page(size=_PAGE, token=token))
        found += [run.run_id for run in runs]
        if not token:
            return found
