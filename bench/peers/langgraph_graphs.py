"""Graphs that do nothing on langgraph, with checkpoints in SQLite, each committed before the next superstep.

python -m bench.peers.langgraph_graphs DATABASE
"""

import sys
import time
from collections.abc import Mapping
from itertools import count
from typing import Any, TypedDict

import uvloop
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph

from bench.lines import answer_lines
from bench.peers.graph_shapes import LOOPS, Edges, chain, fan_out

_ENDS = {"START": START, "END": END}


class _State(TypedDict, total=False):
    value: str
    visits: int


def _nothing(_: _State) -> dict[str, Any]:
    return {}


def _count(state: _State) -> dict[str, Any]:
    return {"visits": state.get("visits", 0) + 1}


def _straight(edges: Edges) -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(_State)
    for name in dict.fromkeys(target for _, target in edges if target != "END"):
        graph.add_node(name, _nothing)
    joined = [source for source, target in edges if target == "join"]
    for source, target in edges:
        if target != "join":
            graph.add_edge(_ENDS.get(source, source), _ENDS.get(target, target))
    if joined:
        graph.add_edge(joined, "join")
    return graph


def _loop() -> StateGraph[Any, Any, Any, Any]:
    graph = StateGraph(_State)
    graph.add_node("again", _count)
    graph.add_edge(START, "again")
    graph.add_conditional_edges("again", lambda state: END if state["visits"] >= LOOPS else "again", ["again", END])
    return graph


async def main(database: str) -> None:
    """Answer lines until the input ends: the number of a graph, and the milliseconds that it took."""
    async with AsyncSqliteSaver.from_conn_string(database) as saver:
        made = (_straight(chain()), _straight(fan_out()), _loop(), _straight(chain()))
        graphs = [each.compile(checkpointer=saver) for each in made]
        threads = count()

        async def answer(words: list[str]) -> Mapping[str, Any]:
            config = {"configurable": {"thread_id": f"t{next(threads)}"}, "recursion_limit": LOOPS + 10}
            begun = time.perf_counter()
            await graphs[int(words[0])].ainvoke({"value": "x"}, config, durability="sync")
            return {"ms": (time.perf_counter() - begun) * 1e3}

        await answer_lines(answer)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
