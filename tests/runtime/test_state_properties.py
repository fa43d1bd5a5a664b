"""A law of whole runs: what the root sees of the state at its end is what the log says, and what the session keeps."""

import asyncio
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_pb2, message_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.log.session_state_fold import StateFold
from bough_server.runtime.agent import Context
from tests.support.examples import examples
from tests.support.log_readings import answer_of, check_replay
from tests.support.run_harness import ME
from tests.support.teams import call, calls, llm, open_team, script

_WRITE = st.tuples(st.just("set"), st.sampled_from("abc"), st.integers(0, 9))
_DROP = st.tuples(st.just("drop"), st.sampled_from("abc"))
PLANS = st.recursive(
    st.lists(_WRITE | _DROP, max_size=3),
    lambda plans: st.lists(
        _WRITE
        | st.tuples(st.just("child"), plans)
        | st.tuples(st.just("lanes"), st.lists(plans, min_size=2, max_size=3))
        | st.tuples(st.just("calls"), st.booleans(), st.lists(_WRITE | plans, min_size=1, max_size=3)),
        max_size=3,
    ),
    max_leaves=8,
)


@dataclass
class Cast:
    """The agents that a plan takes: those that call have a model each, with what it says."""

    definitions: list[agent_pb2.AgentDefinition] = field(default_factory=list)
    turns: dict[str, list[object]] = field(default_factory=dict)

    def told(self, plan: Any) -> list[Any]:
        """A plan as `node` is told it: calls are an agent's."""
        return [self._act(act) for act in plan]

    def _act(self, act: Any) -> list[Any]:
        match act:
            case ("child", plan):
                return ["agent", "peer", self.told(plan)]
            case ("lanes", plans):
                return ["lanes", [self.told(plan) for plan in plans]]
            case ("calls", at_once, made):
                name = f"caller{len(self.definitions)}"
                self.definitions.append(llm(name, links=["node"], tools=["set_state"], parallel_tools=at_once))
                self.turns[name] = [calls(*[self._call(one) for one in made]), "Done."]
                return ["agent", name, []]
        return list(act)

    def _call(self, made: Any) -> dict[str, object]:
        if isinstance(made, tuple):
            return call("set_state", key=made[1], value=made[2])
        return call("call_node", message=json.dumps(self.told(made)))

    def nodes(self) -> list[FunctionAgent]:
        """Two that do what they are told, and call each other: no agent links to itself."""
        return [self._node("node", peer="other"), self._node("other", peer="node")]

    def _node(self, name: str, *, peer: str) -> FunctionAgent:
        @agent(name=name, description="Does what it is told.", agents=[peer, *self.turns])
        async def node(ctx: Context, input: message_pb2.Message) -> str:
            await _follow(ctx, json.loads(input.parts[0].text), peer)
            return json.dumps(dict(ctx.state))

        return node


async def _follow(ctx: Context, plan: list[Any], peer: str) -> None:
    for act in plan:
        match act:
            case ["set", name, value]:
                ctx.state[name] = value
            case ["drop", name]:
                ctx.state.pop(name, None)
            case ["agent", name, told]:
                await ctx.dispatch(peer if name == "peer" else name, json.dumps(told))
            case ["lanes", plans]:
                await ctx.gather(*[_lane(plan, peer) for plan in plans])


def _lane(plan: list[Any], peer: str) -> Any:
    return lambda own: _follow(own, plan, peer)


async def _check(plan: Any, folder: Path) -> None:
    cast = Cast()
    told = json.dumps(cast.told(plan))
    async with open_team(folder, script(**cast.turns), *cast.definitions, code_agents=cast.nodes()) as harness:
        first = await harness.turn("node", told)
        log = await harness.turn("node", told, session_id=first[0].session_id)
        await check_replay(harness, log)
        kept = (await harness.store.sessions.read_position(ME, log[0].session_id)).state_json
    fold = StateFold()
    for event in log:
        fold.apply(event)
    said = {name: json.loads(text) for name, text in fold.values.items()}
    assert json.loads(answer_of(log)) == said == json.loads(kept or "{}")


@pytest.mark.grid
@examples(15)
@given(PLANS)
def test_what_a_run_sees_at_its_end_is_what_its_log_says_and_its_session_keeps(plan: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_check(plan, Path(folder)))
