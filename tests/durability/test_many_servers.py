"""Servers on one PostgreSQL: a run outlives its server, and a server that was only stopped notices its replacement.

The times that are printed are asserted nowhere.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any, Final

import pytest
from google.protobuf.json_format import MessageToDict

from bough import AsyncClient, RunStream
from bough.v1 import eval_result_pb2, eval_set_pb2, evaluation_ref_pb2
from tests.durability.torture_clients import Events, changing_client
from tests.durability.torture_evaluations import Progress, runs_of
from tests.support import postgres
from tests.support.log_laws import check_laws
from tests.support.log_readings import having
from tests.support.model_scenarios import Reply, Request, calling, plain, results
from tests.support.model_server import serving_model
from tests.support.processes import PATIENCE_SECONDS, Serving, serving
from tests.support.projects import llm, openai_model, write_project
from tests.support.tool_gate import Gate, standing_gate


@pytest.fixture
def database() -> Iterator[str]:
    """An empty database of PostgreSQL with its tables."""
    made = postgres.database()
    yield made
    postgres.drop(made)


@dataclass(slots=True)
class Model:
    """Looks something up, then waits at the gate, and then answers; it counts how often it was asked for each."""

    port: int
    asked: Counter[int] = field(default_factory=Counter)

    def __call__(self, request: Request) -> Reply:
        """The next call, or the answer."""
        done = results(request)
        self.asked[done] += 1
        calls = [("look_up", '{"topic": "gates"}'), ("wait_at", f'{{"port": {self.port}}}')]
        return calling([calls[done]]) if done < len(calls) else plain(request)


@dataclass(slots=True, kw_only=True)
class Servers:
    """Three servers on one database, and the model and the gate of their agent."""

    all: list[Serving]
    model: Model
    gate: Gate


@asynccontextmanager
async def three_servers(folder: Path, database: str) -> AsyncIterator[Servers]:
    """Three servers with the agent `waiter`."""
    async with standing_gate() as gate, AsyncExitStack() as stack:
        model = Model(gate.port)
        served = await stack.enter_async_context(serving_model(model, delta_interval=0.01))
        config = write_project(
            folder,
            llm("waiter", tools=["look_up", "wait_at"]),
            model=openai_model(served.base_url),
            storage={"url": database},
        )
        servers = [await stack.enter_async_context(serving(config, name=f"serve-{number}")) for number in range(3)]
        yield Servers(all=servers, model=model, gate=gate)


class Follower:
    """A client that reads a run to its end, beginning at one of the servers and rejoining at the next ones."""

    def __init__(self) -> None:
        self.events: Events = []
        self._more = asyncio.Event()

    async def read(self, stream: RunStream) -> None:
        """Read to the end."""
        async for event in stream:
            self.events.append(event)
            self._more.set()

    async def until(self, payload: str, *, times: int = 1) -> None:
        """Wait until so many events of a kind have come."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(having(self.events, payload)) < times:
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def followed(servers: Servers) -> AsyncIterator[list[Follower]]:
    """A run of `waiter` that waits at the gate at the first server, followed through each; it ends in the context."""
    addresses = [server.address for server in servers.all]
    followers = [Follower() for _ in addresses]
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        clients = [
            await stack.enter_async_context(changing_client(addresses, (n % len(addresses) for n in count(first))))
            for first in range(len(addresses))
        ]
        stream = clients[0].run("waiter", "hi")
        run_id = await stream.started()
        group.create_task(followers[0].read(stream))
        for client, follower in zip(clients[1:], followers[1:], strict=True):
            group.create_task(follower.read(client.watch(run_id)))
        await servers.gate.arrived.wait()
        for follower in followers:
            await follower.until("tool_started", times=2)
        yield followers


def _check(log: Events, servers: Servers) -> None:
    """The run was taken over once, and repeated nothing but the call that was in flight."""
    check_laws(log)
    assert log[-1].HasField("run_completed")
    assert [event.run_resumed.epoch for event in having(log, "run_resumed")] == [2]
    assert servers.model.asked == {0: 1, 1: 1, 2: 1}
    started = [event.tool_started for event in having(log, "tool_started")]
    assert [
        (one.call.name, event.attempt) for one, event in zip(started, having(log, "tool_started"), strict=True)
    ] == [
        ("look_up", 1),
        ("wait_at", 1),
        ("wait_at", 2),
    ]
    assert started[1].idempotency_key == started[2].idempotency_key


async def test_a_run_whose_server_is_killed_is_continued_by_another_and_looks_the_same_through_all(
    tmp_path: Path, database: str
) -> None:
    async with three_servers(tmp_path, database) as servers:
        async with followed(servers) as followers:
            await servers.all[0].kill()
            killed = time.monotonic()
            await followers[1].until("run_resumed")
            print(f"taken over after {time.monotonic() - killed:.2f} s")
            servers.gate.open()
        logs = [follower.events for follower in followers]
    _check(logs[0], servers)
    assert logs[1] == logs[2] == logs[0]


async def test_a_server_that_was_stopped_and_replaced_writes_nothing_more_of_its_runs_and_serves_on(
    tmp_path: Path, database: str
) -> None:
    async with three_servers(tmp_path, database) as servers:
        stopped = servers.all[0]
        async with followed(servers) as followers:
            stopped.send(SIGSTOP)
            began = time.monotonic()
            await followers[1].until("run_resumed")
            print(f"taken over after {time.monotonic() - began:.2f} s")
            stopped.send(SIGCONT)
            continued = time.monotonic()
            await stopped.until_said("run stopped unrecorded")
            print(f"noticed after {time.monotonic() - continued:.2f} s")
            servers.gate.open()
        logs = [follower.events for follower in followers]
        _check(logs[0], servers)
        assert logs[1] == logs[2] == logs[0]
        async with AsyncClient(stopped.address) as client:
            (run,) = [run async for run in client.list_runs()]
            assert [event async for event in client.watch(run.run_id)] == logs[0]
            again = [event async for event in client.run("waiter", "hi", session_id=run.session_id)]
        check_laws(again)
        assert again[-1].HasField("run_completed")
        assert not having(again, "run_resumed")


TURN: Final = evaluation_ref_pb2.EVALUATION_ROLE_TURN
USER: Final = evaluation_ref_pb2.EVALUATION_ROLE_USER
JUDGE: Final = evaluation_ref_pb2.EVALUATION_ROLE_JUDGE

_SPOKEN: Final = {
    "keeper": [
        {"when": "wait", "calls": [{"name": "wait_at", "arguments_json": '{"port": GATE}'}]},
        {"when": "wait", "text": "The gate is open."},
        "Yes.",
    ],
    "user": [
        {"when": "message number 1 of", "text": '{"message": "Are you there?", "done": false}', "delay_ms": 5},
        {"when": "message number 3 of", "text": '{"message": "", "done": true}'},
        {"when": "A patient one.", "text": '{"message": "I wait.", "done": false}'},
        {"text": '{"message": "And now?", "done": false}', "delay_ms": 5},
    ],
    "judge": [{"text": '{"criterion_1": {"reason": "It is.", "holds": true}}', "delay_ms": 5}],
}
"""What the agent, simulated users and judges say: a patient user has the agent wait at the gate in the second turn."""


_DIFFERING: Final = re.compile(r"^(evaluationId|runId|userRunId|traceId|invocationId)$|Time$|[dD]uration")
"""The fields of a result that differ in each evaluation, as JSON has them."""


def conversations() -> eval_set_pb2.EvalSet:
    """Conversations with simulated users, whose turns are judged, and which are judged as a whole."""
    made = eval_set_pb2.EvalSet(name="gates", agent="keeper")
    made.defaults.metrics.add(name="polite").llm_judge.rubrics.add(id="polite", text="It is polite.")
    made.defaults.metrics.add(name="solved").llm_judge.rubrics.add(id="solved", text="The user got it.")
    made.defaults.metrics[1].llm_judge.whole_conversation = True
    for metric in made.defaults.metrics:
        metric.llm_judge.model, metric.llm_judge.fresh = "default", True
    for name in ("patient", "brief", "short"):
        user = eval_set_pb2.SimulatedUser(model="default", persona=f"A {name} one.", goal="Pass the gate.")
        made.cases.add(id=name, user=user)
    return made


def turn_of(ref: evaluation_ref_pb2.EvaluationRef) -> int | None:
    """The turn that a run is about; None if it is about none."""
    return ref.turn if ref.HasField("turn") else None


def comparable(result: eval_result_pb2.EvalResult) -> Any:
    """A result without ids of what was run, times and durations."""

    def strip(value: Any) -> Any:
        if isinstance(value, list):
            return [strip(each) for each in value]
        if not isinstance(value, dict):
            return value
        return {key: strip(each) for key, each in value.items() if not _DIFFERING.search(key)}

    return strip(MessageToDict(result))


@asynccontextmanager
async def three_evaluators(folder: Path, database: str, gate: Gate) -> AsyncIterator[list[Serving]]:
    """Three servers with scripted models, of which `keeper` waits at the gate if it is asked to."""
    scripted = {"provider": "scripted", "script": "script.yaml"}
    config = write_project(
        folder,
        llm("keeper", tools=["wait_at"], model="small"),
        script=json.loads(json.dumps(_SPOKEN).replace("GATE", str(gate.port))),
        models=dict.fromkeys(("default", "small", "large"), scripted),
        storage={"url": database},
    )
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(config, name=f"serve-{number}")) for number in range(3)]


async def test_a_matrix_of_conversations_outlives_its_server_and_nothing_is_run_or_asked_twice(
    tmp_path: Path, database: str
) -> None:
    matrix, seen = eval_set_pb2.EvalMatrix(model=["small", "large"]), Progress()
    async with standing_gate() as gate, three_evaluators(tmp_path, database, gate) as servers:
        addresses = [server.address for server in servers]

        async def follow(client: AsyncClient) -> None:
            async for event in client.evaluations.run(conversations(), matrix=matrix, max_concurrency=4):
                seen.take(event)

        async with changing_client(addresses, cycle(range(3))) as client, asyncio.TaskGroup() as group:
            following = group.create_task(follow(client))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await gate.arrived.wait()
                await seen.until_scored(1)
                await servers[0].kill()
                gate.open()
                await following
        async with AsyncClient(addresses[1]) as client, AsyncClient(addresses[2]) as other:
            evaluation_id = seen.events[0].evaluation_id
            logs = [[event async for event in each.evaluations.watch(evaluation_id)] for each in (client, other)]
            runs = await runs_of(client, evaluation_id)
            result = await other.evaluations.result(evaluation_id)
            waiting = [
                run.run_id
                for run in runs
                if run.evaluation.case_id.startswith("patient") and turn_of(run.evaluation) == 1
            ]
            resumed = [having([event async for event in client.watch(run_id)], "run_resumed") for run_id in waiting]
            undisturbed = [event async for event in other.evaluations.run(conversations(), matrix=matrix)]
            expected = await client.evaluations.result(undisturbed[0].evaluation_id)
    assert logs == [seen.events] * 2
    cases = {f"{name} [model={model}]" for name in ("patient", "brief", "short") for model in ("small", "large")}
    scored = [event.case_trial_scored.result for event in seen.events if event.HasField("case_trial_scored")]
    assert Counter(one.case_id for one in scored) == Counter(cases)
    parts: list[tuple[int, str, int | None]] = [
        (TURN, "", 0),
        (TURN, "", 1),
        (USER, "", 0),
        (USER, "", 1),
        (USER, "", 2),
    ]
    parts += [(JUDGE, "polite", 0), (JUDGE, "polite", 1), (JUDGE, "solved", None)]
    refs = [run.evaluation for run in runs]
    assert Counter((ref.case_id, ref.role, ref.metric, turn_of(ref)) for ref in refs) == Counter(
        (case_id, *part) for case_id in cases for part in parts
    )
    assert any(resumed), "a server took over while an agent waited"
    assert comparable(result) == comparable(expected)
    assert result.verdict == eval_result_pb2.VERDICT_PASSED
