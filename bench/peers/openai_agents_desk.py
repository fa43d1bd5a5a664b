"""The desk on openai-agents, specialists as tools whose nested runs stream; a program that answers lines.

python -m bench.peers.openai_agents_desk BASE_URL [DATABASE]

With a database each turn has a `SQLiteSession` in it.
"""

import sys
from contextvars import ContextVar
from functools import partial
from typing import Any

import uvloop
from agents import (
    Agent,
    AgentToolStreamEvent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from agents.stream_events import RawResponsesStreamEvent, StreamEvent
from openai import AsyncOpenAI, DefaultAioHttpClient

from bench.desk_team import INSTRUCTIONS, QUESTION, SPECIALISTS, lookup
from bench.lines import answer_lines
from bench.peers.desk_turns import TURN_SECONDS, Turn, answer

_turn: ContextVar[Turn] = ContextVar("turn")


def _take(event: StreamEvent) -> None:
    if isinstance(event, RawResponsesStreamEvent) and event.data.type == "response.output_text.delta":
        _turn.get().take(event.data.delta)


def _nested(event: AgentToolStreamEvent) -> None:
    _take(event["event"])


def lead(client: AsyncOpenAI) -> Agent[Any]:
    """Build the team."""
    model = OpenAIChatCompletionsModel(model="m", openai_client=client)
    settings = ModelSettings(include_usage=True)
    tool = function_tool(lookup)
    specialists = [
        Agent(name=name, instructions=INSTRUCTIONS[name], model=model, model_settings=settings, tools=[tool])
        for name in SPECIALISTS
    ]
    return Agent(
        name="lead",
        instructions=INSTRUCTIONS["lead"],
        model=model,
        model_settings=settings,
        tools=[
            one.as_tool(f"call_{one.name}", f"Answers as the {one.name}.", on_stream=_nested) for one in specialists
        ],
    )


async def main(base_url: str, database: str = "") -> None:
    """Answer lines until the input ends."""
    set_tracing_disabled(True)
    transport = DefaultAioHttpClient()
    client = AsyncOpenAI(base_url=base_url, api_key="none", timeout=TURN_SECONDS, max_retries=0, http_client=transport)
    team = lead(client)
    numbers = iter(range(1_000_000))

    async def turn(one: Turn) -> None:
        _turn.set(one)
        session = SQLiteSession(f"session-{next(numbers)}", database) if database else None
        try:
            result = Runner.run_streamed(team, QUESTION, session=session)
            async for event in result.stream_events():
                _take(event)
            one.answer = result.final_output
        finally:
            if session is not None:
                session.close()

    await answer_lines(partial(answer, turn))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
