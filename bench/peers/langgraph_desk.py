"""The desk on langgraph, specialists as tools that invoke graphs; a program that answers lines.

python -m bench.peers.langgraph_desk BASE_URL [DATABASE]

With a database an `AsyncSqliteSaver` keeps the checkpoints of each turn, a thread for each.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvloop
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import BaseTool, StructuredTool, tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph.state import CompiledStateGraph

from bench.desk_team import INSTRUCTIONS, QUESTION, SPECIALISTS, lookup
from bench.lines import answer_lines
from bench.peers.desk_turns import TURN_SECONDS, Turn, answer

Graph = CompiledStateGraph[Any, Any, Any, Any]


def _calling(name: str, graph: Graph) -> BaseTool:
    async def call(message: str) -> str:
        state = await graph.ainvoke(_asked(message))
        text: str = state["messages"][-1].text
        return text

    return StructuredTool.from_function(coroutine=call, name=f"call_{name}", description=f"Answers as the {name}.")


def _asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def lead(base_url: str, saver: AsyncSqliteSaver | None) -> Graph:
    """Build the team."""
    model = ChatOpenAI(
        model="m",
        base_url=base_url,
        api_key="none",
        timeout=TURN_SECONDS,
        max_retries=0,
        streaming=True,
        stream_usage=True,
    )
    look_up = tool(lookup)
    calls = [
        _calling(name, create_agent(model, [look_up], system_prompt=INSTRUCTIONS[name], name=name))
        for name in SPECIALISTS
    ]
    return create_agent(model, calls, system_prompt=INSTRUCTIONS["lead"], name="lead", checkpointer=saver)


@asynccontextmanager
async def _saver(database: str) -> AsyncIterator[AsyncSqliteSaver | None]:
    if not database:
        yield None
        return
    async with AsyncSqliteSaver.from_conn_string(database) as saver:
        yield saver


async def main(base_url: str, database: str = "") -> None:
    """Answer lines until the input ends."""
    async with _saver(database) as saver:
        team = lead(base_url, saver)
        numbers = iter(range(1_000_000))

        async def turn(one: Turn) -> None:
            config = {"configurable": {"thread_id": f"thread-{next(numbers)}"}}
            pieces: list[str] = []
            stream = team.astream(_asked(QUESTION), config, stream_mode="messages", subgraphs=True)
            async for namespace, (message, _) in stream:
                if isinstance(message, AIMessageChunk):
                    one.take(message.text)
                    if not namespace:
                        pieces.append(message.text)
            one.answer = "".join(pieces)

        await answer_lines(partial(answer, turn))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
