"""Forks that begin while a failure aborts its caller: they end, replay, and judge the failure by one policy."""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import agent_pb2, event_pb2, execution_pb2, fork_pb2, run_pb2
from bough_server.agents.function import FunctionAgent, agent
from bough_server.errors import ForkRefused
from bough_server.runtime.agent import Context
from bough_server.tools.tool import OnRecovery, Tool, tool
from tests.runtime.test_simultaneous_timeouts import SECONDS, finished, judged
from tests.support.composite_agents import parallel
from tests.support.examples import examples
from tests.support.fork_agents import edited, run_of
from tests.support.held_clock import HeldClock
from tests.support.log_readings import check_replay, having, results_of
from tests.support.run_harness import RunHarness
from tests.support.teams import call, calls, llm, open_team, script

Log = Sequence[event_pb2.AgentEvent]

ENDING = ("fails", "is late", "is aborted")
ENDLESS = ("waits", "asks", "works", "calls")
CALLERS = ("calls", "lanes", "lanes that fail fast", "code")
POLICIES = {"the origin's": None, "CONTINUE": judged("CONTINUE"), "ABORT": judged("ABORT")}


@dataclass
class Team:
    """A caller `p` with a child for each word of `children`, which says what it does while `is_held`."""

    caller: str
    children: Sequence[str]
    on_recovery: OnRecovery = "retry"
    is_held: bool = True
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once every child is where it waits, or may fail."""
    definitions: list[agent_pb2.AgentDefinition] = field(default_factory=list)
    code: list[FunctionAgent] = field(default_factory=list)
    turns: dict[str, list[object]] = field(default_factory=dict)
    _waiting: int = 0
    _places: int = 0

    def __post_init__(self) -> None:
        links = [agent_pb2.AgentLink(agent=self._child(kind)) for kind in self.children]
        for link, kind in zip(links, self.children, strict=True):
            if kind == "is late":
                link.limits.wall_duration.FromSeconds(SECONDS)
        if self.caller == "calls":
            self._llm("p", calls(*(call(f"call_{link.agent}", message="go") for link in links)), links=links)
        elif self.caller == "code":
            self._gathering("p", links)
        else:
            self.definitions.append(parallel("p", *links, fails_fast=self.caller == "lanes that fail fast"))

    async def gate(self, agent: str, turn: int, chunk: int) -> None:
        """Holds the models of those who ask."""
        if agent.startswith("asks"):
            await self._wait()

    def tools(self) -> list[Tool]:
        """The one that those who work call."""

        @tool(on_recovery=self.on_recovery)
        async def work() -> str:
            """Works as long as it may."""
            await self._wait()
            return "worked"

        return [work]

    async def _wait(self) -> None:
        if self.is_held:
            self._has_begun()
            await asyncio.Event().wait()

    def _has_begun(self) -> None:
        self._waiting += 1
        if self._waiting == self._places:
            self.begun.set()

    def _child(self, kind: str) -> str:
        name = f"{kind.replace(' ', '_')}_{len(self.definitions) + len(self.code)}"
        if kind == "is aborted":
            self._gathering(name, [agent_pb2.AgentLink(agent=self._child(one)) for one in ("fails", "asks")])
            return name
        if kind == "calls":
            self._llm(name, calls(call("call_" + (below := self._child("works")), message="go")), links=[below])
            return name
        self._places += 1
        if kind in ("asks", "works"):
            self._llm(name, *([calls(call("work"))] if kind == "works" else []), tools=["work"])
        else:
            self._coded(name, fails=kind == "fails")
        return name

    def _llm(self, name: str, *turns: object, **fields: Sequence[object]) -> None:
        self.definitions.append(llm(name, **fields))  # type: ignore[arg-type]
        self.turns[name] = [*turns, "Done."]

    def _coded(self, name: str, *, fails: bool) -> None:
        async def begin() -> None:
            if self.is_held:
                self._has_begun()
                await self.begun.wait()

        @agent(name=name, description="Waits or fails.")
        async def coded(ctx: Context, input: object) -> str:
            await ctx.step("wait", begin if fails else self._wait)
            if fails:
                raise ValueError("no")
            return "waited"

        self.code.append(coded)

    def _gathering(self, name: str, links: Sequence[agent_pb2.AgentLink]) -> None:
        @agent(name=name, description="Runs all at once.", agents=links)
        async def gathering(ctx: Context, input: object) -> str:
            await ctx.gather(*(lambda lane, link=link: lane.dispatch(link.agent, "go") for link in links))
            return "gathered"

        self.code.append(gathering)


async def _aborted(team: Team, harness: RunHarness, clock: HeldClock) -> Log:
    """The log of a run that a child aborts."""
    going = await harness.start("p", policy=judged("ABORT"))
    async with asyncio.timeout(SECONDS):
        await team.begun.wait()
    if "is late" in team.children:
        clock.advance(SECONDS)
    log = await finished(harness, clock, going)
    assert _is_aborted(log)
    await check_replay(harness, log)
    team.is_held = False
    return log


def _is_aborted(log: Log) -> bool:
    return "its failure aborts 'p'" in log[-1].run_failed.error.message


def _cause(log: Log) -> event_pb2.AgentEvent:
    """The failure that aborts the root: the last of its children's."""
    return [one for one in having(log, "sub_agent_failed") if one.parent_invocation_id == log[0].invocation_id][-1]


def _edits(log: Log, cut: int) -> dict[str, Any]:
    """Another result of the first call of a tool that failed after a place, if there is one."""
    results = [end.tool_failed.result for end in having(log, "tool_failed") if end.sequence > cut]
    first = [result for result in results if not result.child_invocation_id][:1]
    changes = [edited("Another.", one.call.call_id, invocation_id=one.invocation_id) for one in first]
    return {"tool_results": changes} if changes else {}


def _overrides(team: Team) -> dict[str, Any]:
    """Another model and instruction of each agent that has one, if there are any."""
    names = [definition.name for definition in team.definitions if definition.HasField("llm")]
    override = fork_pb2.AgentOverride(model="other", instruction="Do otherwise.")
    return {"agents": dict.fromkeys(names, override)} if names else {}


def _check_fork(fork: run_pb2.Run, origin: Log, log: Log, *, cut: int, is_judged_again: bool) -> None:
    start, cause = fork.forked_from.sequence, _cause(origin)
    assert _is_aborted(log) or not _stops(log[:start]), "what the log says was stopped stays so"
    if is_judged_again and cut < cause.sequence:
        assert start <= cut
        assert not _is_aborted(log)
    else:
        assert start == cut


def _stops(log: Log) -> list[int]:
    """Where something was stopped because a failure aborts the root: requests of the root, and ends of its children."""
    root, stops = log[0].invocation_id, list[int]()
    for event in log:
        is_request = event.cancel_requested.reason == execution_pb2.CANCEL_REASON_ABORT and event.invocation_id == root
        is_end = event.sub_agent_failed.end_reason == execution_pb2.END_REASON_CANCELLED
        if is_request or (is_end and event.parent_invocation_id == root):
            stops.append(event.sequence)
    return stops


def _open(folder: Path, team: Team, clock: HeldClock) -> AbstractAsyncContextManager[RunHarness]:
    return open_team(
        folder,
        script(**team.turns),
        *team.definitions,
        tools=team.tools(),
        gate=team.gate,
        clock=clock,
        code_agents=team.code,
    )


@given(
    caller=st.sampled_from(CALLERS),
    children=st.tuples(
        st.sampled_from(ENDING), st.lists(st.sampled_from(ENDING + ENDLESS), min_size=1, max_size=2)
    ).flatmap(lambda drawn: st.permutations([drawn[0], *drawn[1]])),
    place=st.integers(0, 30),
    policy=st.sampled_from(sorted(POLICIES)),
    change=st.sampled_from(["nothing", "results", "agents"]),
)
@examples(25)
async def test_a_fork_during_an_abort_ends_and_its_policy_judges_what_is_not_recorded(
    caller: str, children: list[str], place: int, policy: str, change: str
) -> None:
    team, clock = Team(caller, children), HeldClock()
    with tempfile.TemporaryDirectory() as folder:
        async with _open(Path(folder), team, clock) as harness:
            origin = await _aborted(team, harness, clock)
            first = having(origin, "cancel_requested")[0].sequence - 1
            cut = first + place % (len(origin) - first)
            changes = {"nothing": {}, "results": _edits(origin, cut), "agents": _overrides(team)}[change]
            fork = await harness.fork(
                run_of(origin),
                cut,
                policy=POLICIES[policy],
                allow_open_effects=True,
                **changes,
            )
            log = await finished(harness, clock, fork)
            await check_replay(harness, log)
            _check_fork(fork, origin, log, cut=cut, is_judged_again=policy == "CONTINUE")


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("children", [("waits", "fails"), ("is late", "is late"), ("asks", "is aborted")])
async def test_a_fork_that_continues_starts_before_the_abort_and_not_within_it(
    tmp_path: Path, caller: str, children: Sequence[str]
) -> None:
    team, clock = Team(caller, children), HeldClock()
    async with _open(tmp_path, team, clock) as harness:
        origin = await _aborted(team, harness, clock)
        first = _stops(origin)[0]
        for cut in range(first, _cause(origin).sequence):
            fork = await harness.fork(run_of(origin), cut, policy=judged("CONTINUE"))
            assert fork.forked_from.sequence == first - 1
            log = await finished(harness, clock, fork)
            await check_replay(harness, log)
            assert not _is_aborted(log)


async def test_a_tool_that_the_abort_stopped_is_not_simply_run_again(tmp_path: Path) -> None:
    team, clock = Team("calls", ("works", "fails"), on_recovery="fail"), HeldClock()
    async with _open(tmp_path, team, clock) as harness:
        origin = await _aborted(team, harness, clock)
        first = _stops(origin)[0]
        with pytest.raises(ForkRefused, match="'work' was running at this point"):
            await harness.fork(run_of(origin), first, policy=judged("CONTINUE"))
        stopped = await finished(harness, clock, await harness.fork(run_of(origin), first))
        log = await finished(
            harness,
            clock,
            await harness.fork(run_of(origin), first, policy=judged("CONTINUE"), **_edits(origin, first)),
        )
    assert _is_aborted(stopped)
    assert "Another." in str(results_of(log))
    assert not _is_aborted(log)
