"""U+0000 in any text of any request, on PostgreSQL, which cannot hold it: refused, or of no harm."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc import aio

from bough import reply
from bough.v1 import (
    agent_pb2,
    catalog_service_pb2,
    eval_result_pb2,
    eval_service_pb2,
    eval_set_pb2,
    event_pb2,
    invocation_pb2,
    message_pb2,
    session_service_pb2,
)
from bough.v1 import agent_service_pb2 as pb
from tests.rpc.run_server import Served, begin, said, served, settings
from tests.support import postgres

_NUL: Final = "a\0b"
_RECORDS: Final = {
    event_pb2.AgentEvent.DESCRIPTOR,
    invocation_pb2.Invocation.DESCRIPTOR,
    eval_result_pb2.EvalResult.DESCRIPTOR,
}
"""Messages that requests bring to be judged and that are stored as they are, if at all."""

_HARMFUL: Final = {
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}

Place = tuple[FieldDescriptor, ...]


@dataclass(kw_only=True)
class World:
    """A server with something of everything that requests name."""

    server: Served
    ended: str = ""
    session: str = ""
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    async def begin(self) -> None:
        """Execute a run."""
        turn = await begin(self.server, "echo", "hi").to_the_end()
        self.ended, self.session = await turn.run_id(), turn.events[0].session_id

    async def asked(self) -> tuple[str, str]:
        """Start a run that asks; return it and what it asks."""
        turn = await begin(self.server, "asker", "what?").until("run_interrupted")
        return await turn.run_id(), turn.events[-1].run_interrupted.requests[0].input_id

    def definition(self) -> agent_pb2.AgentDefinition:
        """A definition of a name that no agent has."""
        loop = agent_pb2.LoopAgent(max_iterations=1)
        links = [agent_pb2.AgentLink(agent="echo")]
        name = f"made-{next(self.numbers)}"
        return agent_pb2.AgentDefinition(name=name, description="Loops.", loop=loop, sub_agents=links)


async def _run(world: World) -> Message:
    return pb.RunRequest(agent="echo", input=said("hi"))


async def _fork(world: World) -> Message:
    return pb.ForkRunRequest(run_id=world.ended, after_sequence=1)


async def _resume(world: World) -> Message:
    run_id, input_id = await world.asked()
    return pb.ResumeRunRequest(run_id=run_id, answers=[reply(input_id, 1)])


async def _create_agent(world: World) -> Message:
    return catalog_service_pb2.CreateAgentRequest(definition=world.definition())


async def _update_agent(world: World) -> Message:
    made = world.definition()
    await world.server.catalog.CreateAgent(catalog_service_pb2.CreateAgentRequest(definition=made))
    return catalog_service_pb2.UpdateAgentRequest(definition=made)


async def _evaluate(world: World) -> Message:
    turn = eval_set_pb2.EvalTurn(input=message_pb2.Message(parts=[message_pb2.Part(text="hi")]))
    case = eval_set_pb2.EvalCase(id="one", turns=[turn])
    return eval_service_pb2.EvaluateRequest(eval_set=eval_set_pb2.EvalSet(name="desk", agent="echo", cases=[case]))


_BASES: Final[dict[type[Message], Callable[[World], Any]]] = {
    pb.RunRequest: _run,
    pb.ForkRunRequest: _fork,
    pb.ResumeRunRequest: _resume,
    catalog_service_pb2.CreateAgentRequest: _create_agent,
    catalog_service_pb2.UpdateAgentRequest: _update_agent,
    eval_service_pb2.EvaluateRequest: _evaluate,
}
"""Requests that are accepted; the others have the fields only whose texts are tried."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A server on PostgreSQL."""
    with postgres.emptied() as url:
        storage = {"url": url, "durability": "process"}
        made = settings(tmp_path, python=["tests.rpc.agents", "tests.rpc.question_agents"], storage=storage)
        async with served(made) as server:
            here = World(server=server)
            await here.begin()
            yield here


def _places(kind: Descriptor, above: tuple[Descriptor, ...]) -> Iterator[Place]:
    """Yield the way to each text in a message and in those below it."""
    for each in kind.fields:
        if each.type == FieldDescriptor.TYPE_STRING:
            yield (each,)
        elif each.message_type is not None and each.message_type not in {*above, *_RECORDS}:
            yield from ((each, *rest) for rest in _places(each.message_type, (*above, each.message_type)))


def _set(message: Any, place: Place) -> None:
    """Set the text at a place to one with U+0000."""
    first, *rest = place
    if first.message_type is not None and first.message_type.GetOptions().map_entry:
        _set_in_map(getattr(message, first.name), first.message_type, rest)
    elif rest:
        below = getattr(message, first.name)
        if first.is_repeated:
            below = below[0] if below else below.add()
        _set(below, (*rest,))
    elif first.is_repeated:
        getattr(message, first.name).append(_NUL)
    else:
        setattr(message, first.name, _NUL)


def _set_in_map(entries: Any, kind: Descriptor, rest: Sequence[FieldDescriptor]) -> None:
    value = kind.fields_by_name["value"]
    key = _NUL if rest[0].name == "key" else "k"
    if value.message_type is not None:
        below = entries[key]
        if rest[0].name == "value":
            _set(below, (*rest[1:],))
    else:
        entries[key] = _NUL if rest[0].name == "value" else "v"


async def _code(call: Any) -> grpc.StatusCode:
    """Make a call to its end."""
    try:
        if hasattr(call, "read"):
            async for _ in call:
                pass
        else:
            await call
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _methods() -> Iterator[tuple[str, Any]]:
    for file in (pb, catalog_service_pb2, eval_service_pb2, session_service_pb2):
        for each in file.DESCRIPTOR.services_by_name.values():
            for method in each.methods:
                if not method.client_streaming:
                    yield each.name, method


@pytest.mark.grid
async def test_no_text_with_nul_makes_storage_fail(world: World, whole_grid: bool) -> None:
    stubs = {
        "AgentService": world.server.agents,
        "CatalogService": world.server.catalog,
        "EvalService": world.server.trees,
        "SessionService": world.server.sessions,
    }
    harmed, codes = [], []
    for service, method in _methods():
        request_class = getattr(_module_of(method.input_type), method.input_type.name)
        make = _BASES.get(request_class)
        places = _places(method.input_type, (method.input_type,))
        # The way to a text that other ways of the call lead to as well makes no difference, as far as we know.
        for place in places if whole_grid else {place[-2:]: place for place in places}.values():
            request = await make(world) if make is not None else request_class()
            _set(request, place)
            code = await _code(getattr(stubs[service], method.name)(request, timeout=5))
            codes.append(code)
            if code in _HARMFUL:
                harmed.append(f"{method.name}: {'.'.join(one.name for one in place)}: {code.name}")
    assert harmed == []
    assert set(codes) > {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


def _module_of(kind: Descriptor) -> Any:
    modules = (pb, catalog_service_pb2, eval_service_pb2, session_service_pb2)
    return next(module for module in modules if module.DESCRIPTOR.name == kind.file.name)
