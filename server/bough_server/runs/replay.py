"""Re-executing a run from its log alone: the same agents, models and tools that are never touched, no event added."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bough.v1 import event_pb2
from bough_server import events
from bough_server.clock import Clock
from bough_server.engine.execution import Execution
from bough_server.engine.journal import Journal
from bough_server.engine.keys import RunFacts
from bough_server.errors import NonDeterministic
from bough_server.runtime.agent import Resolver
from bough_server.runtime.context import LaneContext
from bough_server.runtime.dispatcher import dispatch_root
from bough_server.store.ports import StoredMessage
from bough_server.telemetry import Parent, Tracing

PATIENCE: Final = 10.0
"""Seconds in which a replay hands something back, or ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay gave: how many recorded results were handed back, and where it diverged; empty for nowhere."""

    results: int
    divergence: str


async def replay(
    log: Sequence[event_pb2.AgentEvent],
    *,
    resolver: Resolver,
    tracing: Tracing,
    clock: Clock,
    session: Sequence[StoredMessage] = (),
    patience: float = PATIENCE,
) -> Replayed:
    """Runs the agents of a finished run again, answered from its log.

    Every effect gets its recorded result; every end is computed again and compared with the recorded one. Anything that
    the log does not hold is a divergence: nothing is appended and no model or tool is called. So is code that waits for
    something else than its effects, for `patience` seconds.
    """
    facts = RunFacts(
        run_id=log[0].run_id or log[0].invocation_id,
        session_id=log[0].session_id,
        user_id="",
        started=log[0],
        session=session,
    )
    journal = Journal(log)
    results = len(journal.results.keys() - journal.dispatched)
    execution = Execution(facts, tracing=tracing, clock=clock, journal=journal, recorder=None)
    definition = resolver.agent(log[0].run_started.agent).definition
    execution.spans[""] = tracing.invoke_agent(
        agent=definition.name,
        description=definition.description,
        invocation_id=facts.started.invocation_id,
        run_id=facts.run_id,
        session_id=facts.session_id,
        branch=definition.name,
        depth=0,
        parent=Parent.current(),
    )
    divergence = ""
    try:
        await _finished(execution, dispatch_root(execution, resolver, LaneContext), patience)
        if events.kind_of(log[-1]) not in {*events.TERMINAL_KINDS, events.RUN_INTERRUPTED}:
            divergence = "The log has no end."
    except NonDeterministic as error:
        divergence = error.message
    finally:
        execution.end_spans()
    return Replayed(results=results, divergence=divergence)


async def _finished(execution: Execution, root: Coroutine[Any, Any, None], patience: float) -> None:
    """Runs the run's root to its end. Raises NonDeterministic, also where nothing happens for so many seconds."""
    finishing = asyncio.get_running_loop().create_task(execution.finish(root))
    try:
        left = None
        while not finishing.done():
            await asyncio.wait({finishing}, timeout=patience)
            before, left = left, len(execution.journal.todo)
            if before == left:
                execution.stop(
                    NonDeterministic(
                        f"The log holds {left} more results and ends, but the agents' code waits for something "
                        "else. Agent code must take the world in by effects only."
                    )
                )
    finally:
        finishing.cancel()
    finishing.result()
