"""A server that evaluates, the agents that it evaluates, and short ways to start and follow evaluations."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from grpc import aio

from bough.v1 import agent_pb2, agent_service_pb2, eval_service_pb2, eval_set_pb2, evaluation_pb2, event_pb2, run_pb2
from bough_server import Context, Message, RunError, agent
from bough_server.settings import Settings
from bough_server.tools.tool import tool
from tests.rpc import run_server
from tests.rpc.run_server import Served

GATES: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
"""Events that `gated` waits for, by its input; each test has other names."""

ARRIVED: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
"""Set once `gated` waits."""

CALLED: Counter[str] = Counter()
"""How often `stamp` ran, by its text."""

AT_ONCE: list[int] = [0, 0]
"""How many `slow` agents run now, and how many did at most."""


@agent(description="Says what it is told.")
async def echo(ctx: Context, input: Message) -> str:
    """Answers with its input."""
    return input.parts[0].text


@agent(description="Says no.")
async def gruff(ctx: Context, input: Message) -> str:
    """Answers no to everything."""
    return "no"


@agent(description="Asks two agents, and does without an answer.", agents=["echo", "gruff"])
async def lenient(ctx: Context, input: Message) -> str:
    """Answers with the answers of those that did not fail."""
    answers = []
    for name in ("echo", "gruff"):
        try:
            answers.append((await ctx.dispatch(name, input)).parts[0].text)
        except RunError:
            answers.append("-")
    return " ".join(answers)


@agent(description="Fails if it is told to.")
async def touchy(ctx: Context, input: Message) -> str:
    """Answers with its input, or raises."""
    text = input.parts[0].text
    if text == "fail":
        raise ValueError("it was told to")
    return text


async def wait_at_gate(name: str) -> None:
    """Wait until a gate is open."""
    ARRIVED[name].set()
    await GATES[name].wait()


async def shaky_answer(ctx: Context, text: str) -> str:
    """Raise the first N times of "NAME N", and then return "done"."""

    async def count() -> int:
        CALLED[text] += 1
        return CALLED[text]

    if await ctx.step("count", count) <= int(text.split()[1]):
        raise ValueError("it was told to")
    return "done"


@agent(description="Crashes as often as it is told, and then answers.")
async def shaky(ctx: Context, input: Message) -> str:
    """Answers "done" to "NAME N" once it has crashed N times."""
    return await shaky_answer(ctx, input.parts[0].text)


@agent(description="Crashes as often as it is told, and then waits for its gate.")
async def shaky_then_waits(ctx: Context, input: Message) -> str:
    """As `shaky`, but that it answers when the gate of its input is open."""
    answer = await shaky_answer(ctx, input.parts[0].text)
    await ctx.step("wait", lambda: wait_at_gate(input.parts[0].text))
    return answer


@agent(description="Waits for the gate that it is told.")
async def gated(ctx: Context, input: Message) -> str:
    """Answers when its gate is open."""
    name = input.parts[0].text
    await ctx.step("wait", lambda: wait_at_gate(name))
    return name


@agent(description="Takes a moment.")
async def slow(ctx: Context, input: Message) -> str:
    """Counts how many of it run at once."""

    async def moment() -> None:
        AT_ONCE[0] += 1
        AT_ONCE[1] = max(AT_ONCE)
        await asyncio.sleep(0.02)
        AT_ONCE[0] -= 1

    await ctx.step("moment", moment)
    return input.parts[0].text


@agent(description="Asks what it is told, and says the answer.")
async def asker(ctx: Context, input: Message) -> str:
    """Answers with what it is answered."""
    return str(await ctx.ask(input.parts[0].text))


@agent(description="Remembers what it was told, in the session.")
async def memory(ctx: Context, input: Message) -> str:
    """Answers with what was said before, and with the name that the session began with."""
    said = ctx.state.get("said", [])
    ctx.state["said"] = [*said, input.parts[0].text]
    return f"{ctx.state.get('name', 'nobody')}: {','.join(said)}"


@agent(description="Stamps a text.", tools=["stamp"])
async def clerk(ctx: Context, input: Message) -> str:
    """Answers with what the tool returns for each word, after the clerk's turn."""
    said = [str(await ctx.call_tool("stamp", text=word)) for word in input.parts[0].text.split()]
    return ", ".join(said)


@agent(description="Stamps a text, and then waits for its gate.", tools=["stamp"])
async def careful(ctx: Context, input: Message) -> str:
    """Answers with what the tool returns, when its gate is open."""
    name = input.parts[0].text
    said = str(await ctx.call_tool("stamp", text=name))

    async def opened() -> None:
        ARRIVED[name].set()
        await GATES[name].wait()

    await ctx.step("wait", opened)
    return said


@agent(description="Pays.", tools=["pay"])
async def cashier(ctx: Context, input: Message) -> str:
    """Answers with what the tool returns."""
    return str(await ctx.call_tool("pay", amount=int(input.parts[0].text)))


@agent(description="Has the client look.", tools=["look"])
async def scout(ctx: Context, input: Message) -> str:
    """Answers with what the client's tool returns."""
    return str(await ctx.call_tool("look", place=input.parts[0].text))


@tool
async def stamp(text: str) -> str:
    """Stamps a text."""
    CALLED[text] += 1
    return f"stamped {text}"


@tool(approval=True)
async def pay(amount: int) -> str:
    """Pays."""
    return f"paid {amount}"


@tool(execution="client")
async def look(place: str) -> str:
    """Looks at a place."""
    raise AssertionError("the client looks")


def case(case_id: str, *said: str, answers: Sequence[str | None] = (), **fields: Any) -> dict[str, Any]:
    """A case, in the file's form: what the user says, and the exact answers."""
    turns: list[dict[str, Any]] = [{"user": text} for text in said]
    for turn, answer in zip(turns, answers, strict=False):
        if answer is not None:
            turn["expect"] = {"answer": {"exact": answer}}
    return {"id": case_id, "turns": turns, **fields}


def eval_set(*cases: dict[str, Any], agent: str = "echo", **fields: Any) -> eval_set_pb2.EvalSet:
    """A set of these cases."""
    return json_format.ParseDict({"name": "set", "agent": agent, "cases": cases, **fields}, eval_set_pb2.EvalSet())


def front(behind: str) -> agent_pb2.AgentDefinition:
    """An agent that hands everything to another one."""
    return agent_pb2.AgentDefinition(
        name="front",
        description="Hands on.",
        sequence=agent_pb2.SequenceAgent(),
        sub_agents=[agent_pb2.AgentLink(agent=behind)],
    )


def many(count: int, said: str = "hello") -> list[dict[str, Any]]:
    """Cases of `echo` that pass."""
    return [case(f"c{number}", said, answers=[said]) for number in range(count)]


@dataclass(slots=True, kw_only=True)
class Followed:
    """The events of one stream of an evaluation."""

    call: Any
    events: list[evaluation_pb2.EvaluationEvent] = field(default_factory=list)
    heartbeats: int = 0
    through: int = 0
    """The last sequence that the stream has considered."""

    async def until(self, kind: str) -> "Followed":
        """Read until an event of this kind has arrived."""
        while kind not in self.kinds:
            response = await self.call.read()
            assert response is not aio.EOF, f"the stream ended before {kind}: {self.kinds}"
            self._take(response)
        return self

    async def to_the_end(self) -> "Followed":
        """Read to the end of the stream. Raises AioRpcError if it fails."""
        while (response := await self.call.read()) is not aio.EOF:
            self._take(response)
        return self

    async def heartbeat(self) -> "Followed":
        """Read until a response without events has arrived."""
        before = self.heartbeats
        while self.heartbeats == before:
            self._take(await self.call.read())
        return self

    def _take(self, response: Any) -> None:
        self.events.extend(response.batch.events)
        self.through = response.batch.through_sequence
        self.heartbeats += not response.batch.events

    @property
    def kinds(self) -> list[str]:
        """The payloads, in order."""
        return [str(event.WhichOneof("payload")) for event in self.events]

    @property
    def evaluation_id(self) -> str:
        """The evaluation of the first event."""
        return self.events[0].evaluation_id

    def having(self, kind: str) -> list[Any]:
        """The payloads of a kind, in order."""
        return [getattr(event, kind) for event in self.events if event.WhichOneof("payload") == kind]

    @property
    def verdict(self) -> int:
        """What the evaluation came to."""
        return int(self.having("evaluation_completed")[0].verdict)

    def results(self) -> dict[tuple[str, int], Any]:
        """The results of the trials; each has exactly one."""
        found = {(one.result.case_id, one.result.trial): one.result for one in self.having("case_trial_scored")}
        assert len(found) == len(self.having("case_trial_scored"))
        return found

    def result(self, case_id: str, trial: int = 0) -> Any:
        """The result of a trial."""
        return self.results()[case_id, trial]


def settings(folder: Path, **changes: Any) -> Settings:
    """Settings of a server with the agents of this module."""
    return run_server.settings(folder, **{"python": ["tests.evals.job_server"], **changes})


@asynccontextmanager
async def evaluating(folder: Path, **changes: Any) -> AsyncIterator[Served]:
    """A server with the agents of this module, over a socket."""
    async with run_server.served(settings(folder, **changes)) as server:
        yield server


def begin(
    server: Served,
    made: eval_set_pb2.EvalSet,
    *,
    timeout: float | None = 60,
    metadata: tuple[tuple[str, str], ...] = (),
    **fields: Any,
) -> Followed:
    """Start an evaluation."""
    request = eval_service_pb2.EvaluateRequest(eval_set=made, **fields)
    return Followed(call=server.trees.Evaluate(request, timeout=timeout, metadata=metadata))


async def evaluated(server: Served, made: eval_set_pb2.EvalSet, **fields: Any) -> Followed:
    """Evaluate a set and return the whole log."""
    return await begin(server, made, **fields).to_the_end()


def watch(server: Served, evaluation_id: str, **fields: Any) -> Followed:
    """Follow an evaluation."""
    request = eval_service_pb2.WatchEvaluationRequest(evaluation_id=evaluation_id, **fields)
    return Followed(call=server.trees.WatchEvaluation(request, timeout=60))


async def runs_of(server: Served, evaluation_id: str) -> list[run_pb2.Run]:
    """Every run of an evaluation, oldest first."""
    request = agent_service_pb2.ListRunsRequest(page_size=1000)
    request.filter.evaluation_id = evaluation_id
    found: list[run_pb2.Run] = []
    while True:
        response = await server.agents.ListRuns(request)
        found.extend(response.runs)
        if not response.next_page_token:
            return found[::-1]
        request.page_token = response.next_page_token


async def run_started(server: Served, run_id: str) -> event_pb2.RunStarted:
    """Return the first event of a run."""
    turn = run_server.watch(server, run_id, follow={"event_names": ["run_started"]})
    return (await turn.to_the_end()).events[0].run_started


async def evaluation(server: Served, evaluation_id: str) -> eval_service_pb2.GetEvaluationResponse:
    """Return an evaluation, and its result with all of its cases."""
    request = eval_service_pb2.GetEvaluationRequest(evaluation_id=evaluation_id)
    response: eval_service_pb2.GetEvaluationResponse = await server.trees.GetEvaluation(request)
    assert not response.result.cases
    token = ""
    while True:
        page = await case_results(server, evaluation_id, page_size=1_000, page_token=token)
        response.result.cases.extend(page.cases)
        if not (token := page.next_page_token):
            return response


async def case_results(
    server: Served, evaluation_id: str, *, page_size: int = 0, page_token: str = "", **conditions: Any
) -> eval_service_pb2.ListCaseResultsResponse:
    """Return a page of an evaluation's cases; `conditions` are the fields of the filter."""
    request = eval_service_pb2.ListCaseResultsRequest(
        evaluation_id=evaluation_id,
        page_size=page_size,
        page_token=page_token,
        filter=evaluation_pb2.CaseResultFilter(**conditions) if conditions else None,
    )
    response: eval_service_pb2.ListCaseResultsResponse = await server.trees.ListCaseResults(request)
    return response


def check_log(events: Sequence[evaluation_pb2.EvaluationEvent]) -> None:
    """Check what holds for every log that has ended with a verdict."""
    kinds = [str(event.WhichOneof("payload")) for event in events]
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    planned = events[0].evaluation_planned
    assert kinds[: planned.case_count + 1] == ["evaluation_planned"] + ["case_planned"] * planned.case_count
    assert kinds[-2:] == ["evaluation_totaled", "evaluation_completed"]
    trials = {
        (event.case_planned.eval_case.id, trial)
        for event in events
        if event.HasField("case_planned")
        for trial in range(event.case_planned.trials)
    }
    reruns: set[tuple[str, int]] = set()
    for event in events:
        if event.HasField("suspects_planned"):
            suspects = event.suspects_planned.suspects
            first = {one.case_planned.eval_case.id: one.case_planned.trials for one in events}
            count = suspects.trials * (2 if suspects.HasField("baseline_pins") else 1)
            reruns = {(case_id, first[case_id] + number) for case_id in suspects.case_ids for number in range(count)}
    scored = [event.case_trial_scored.result for event in events if event.HasField("case_trial_scored")]
    assert sorted((one.case_id, one.trial) for one in scored) == sorted(trials | reruns)
    assert len(trials) == planned.trial_count
    for kind in ("case_trial_started", "case_trial_ended"):
        facts = [getattr(event, kind) for event in events if event.HasField(kind)]
        assert len({(one.case_id, one.trial) for one in facts}) == len(facts)
    for place, event in enumerate(events):
        if event.HasField("case_trial_started"):
            one = event.case_trial_started
            later = [other.case_trial_scored.result for other in events[place:] if other.HasField("case_trial_scored")]
            assert (one.case_id, one.trial) in {(other.case_id, other.trial) for other in later}
