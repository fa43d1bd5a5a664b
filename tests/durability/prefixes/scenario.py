"""What a recorded run is made of, and the world that its tools and steps touch; it runs nothing."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bough.v1 import agent_pb2, input_pb2, policy_pb2
from bough_server.functions import Function
from bough_server.models.model import ModelRequest
from bough_server.models.scripted.script import current_turn, step_of
from bough_server.runs.admission import EvaluationRun
from bough_server.runtime.agent import Agent
from bough_server.tools.tool import Tool
from tests.support.held_clock import HeldClock

Answer = Callable[[input_pb2.InputRequest], input_pb2.InputAnswer]


class World:
    """What the agents of one harness touch: who was called how often, and who waits for whom."""

    def __init__(self, clock: HeldClock, *, is_patient: bool) -> None:
        self.clock = clock
        self.is_patient = is_patient
        """Whether a tool waits to be cancelled: in a run that is not cancelled it does not."""
        self.made: Counter[str] = Counter()
        self.heard: list[ModelRequest] = []
        self.idempotency_keys: set[str] = set()
        self._arrived: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def call(self, name: str, idempotency_key: str = "") -> None:
        """A tool or a step was called; with a key, under that one."""
        self.made[name] += 1
        if idempotency_key:
            self.idempotency_keys.add(idempotency_key)

    def arrive(self, place: str) -> None:
        """Record that an agent has arrived."""
        self._arrived[place].set()

    async def until_arrived(self, place: str) -> None:
        """Wait until an agent has arrived."""
        await self._arrived[place].wait()

    async def for_ever(self) -> None:
        """Waits to be cancelled."""
        await asyncio.Event().wait()

    def calls(self) -> Counter[str]:
        """Everything that was called: tools, steps, and every attempt of a model."""
        return self.made + Counter(name_of(request) for request in self.heard)

    def forget(self) -> None:
        """Nothing was called yet."""
        self.made.clear()
        self.heard.clear()
        self.idempotency_keys.clear()


def name_of(request: ModelRequest) -> str:
    """Who asks its model, and when."""
    return call_of_model(request.agent, step_of(current_turn(request.messages)))


def call_of_model(agent: str, step: int) -> str:
    """A model call of an agent; those of the nodes of a graph, which is called so, are in no order."""
    return f"{agent} asks its model" if agent == "graph" else f"{agent} asks its model at step {step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Who takes part."""

    definitions: Sequence[agent_pb2.AgentDefinition] = ()
    code_agents: Sequence[Agent] = ()
    tools: Sequence[Tool] = ()
    functions: Sequence[Function] = ()


def no_team(_: World) -> Team:
    """A team without agents."""
    return Team()


def no_answer(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    """Raises: the run was to ask nothing."""
    raise AssertionError(f"the run asked, which it must not: {request.prompt}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run: its root, who takes part, what models say, what people answer."""

    name: str
    root: str = "lead"
    turns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """What the model of each agent says, turn by turn."""
    team: Callable[[World], Team] = no_team
    answer: Answer = no_answer
    cancelled_at: str = ""
    """Where an agent has to arrive for the run to be cancelled, or "its questions"; empty for never."""
    policy: policy_pb2.RunPolicy | None = None
    has_past: bool = False
    """Whether its session has had such a run before."""
    case: EvaluationRun | None = None
    """The case that it is a run of. Its mocks answer every call of the tools that they name."""

    def __str__(self) -> str:
        return self.name
