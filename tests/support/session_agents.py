"""Runs of one session that wait for each other: an agent that speaks when it may, and one that asks."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from bough.v1 import execution_pb2, input_pb2, message_pb2, policy_pb2, run_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.clock import Clock
from bough_server.quotas import Quotas
from bough_server.runtime.agent import Context
from tests.support.log_readings import text_of
from tests.support.run_harness import ME, RunHarness, open_harness
from tests.support.teams import Scripts

Run = run_pb2.Run
QUEUE = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_QUEUE)
CANCEL_INTERRUPTED = policy_pb2.RunPolicy(on_busy_session=policy_pb2.BUSY_SESSION_POLICY_CANCEL_INTERRUPTED)


class Floor:
    """An agent that waits until it may speak, and one that asks; each answers with the conversation that it sees."""

    def __init__(self) -> None:
        self.may_speak: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.began: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    def agents(self) -> Sequence[FunctionAgent]:
        @agent(description="Speaks when it may.")
        async def speaker(ctx: Context, input: message_pb2.Message) -> str:
            text = text_of(input)

            async def wait() -> None:
                self.began[text].set()
                await self.may_speak[text].wait()

            await ctx.step("wait", wait)
            told = (text_of(one) if one.role == message_pb2.ROLE_USER else "." for one in ctx.history())
            return " ".join(["saw", *told])

        @agent(description="Asks.")
        async def asker(ctx: Context, input: message_pb2.Message) -> str:
            return str(await ctx.ask(text_of(input)))

        return speaker, asker

    def let(self, *texts: str) -> None:
        """Lets these speak."""
        for text in texts:
            self.may_speak[text].set()


def harness(
    folder: Path, floor: Floor, *, quotas: Quotas | None = None, clock: Clock | None = None
) -> AbstractAsyncContextManager[RunHarness]:
    """A harness whose agents are on a floor."""
    models = Scripts("agents: {}")
    return open_harness(folder, models=models, code_agents=floor.agents(), quotas=quotas, clock=clock)


async def queued(it: RunHarness, session_id: str, *texts: str) -> list[Run]:
    """Runs that wait for a session, in this order."""
    return [await it.start("speaker", text, session_id=session_id, policy=QUEUE) for text in texts]


def answer_to(request: input_pb2.InputRequest, value: str) -> input_pb2.InputAnswer:
    """A text as the answer to a question."""
    return input_pb2.InputAnswer(input_id=request.input_id, value_json=f'"{value}"')


async def state_of(it: RunHarness, run: Run) -> execution_pb2.ExecutionState.ValueType:
    """The state in a run's row."""
    return (await it.runs.get(ME, run.run_id)).run.state
