"""Calls that the tests make themselves, by name and in JSON, with stubs that know nothing of a client."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc import aio

from bough import v1
from bough.v1 import (
    agent_service_pb2_grpc,
    catalog_service_pb2_grpc,
    eval_service_pb2_grpc,
    session_service_pb2_grpc,
)
from tests.contract.scenario_files import STREAMS

_SECONDS: Final = 20.0
_UNBOUNDED: Final = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1))

_STUBS: Final[Mapping[str, Any]] = {
    "AgentService": agent_service_pb2_grpc.AgentServiceStub,
    "CatalogService": catalog_service_pb2_grpc.CatalogServiceStub,
    "EvalService": eval_service_pb2_grpc.EvalServiceStub,
    "SessionService": session_service_pb2_grpc.SessionServiceStub,
}


class Operator:
    """A channel of the tests to a server."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        if credentials is None:
            self._channel = aio.insecure_channel(address, options=_UNBOUNDED)
        else:
            self._channel = aio.secure_channel(address, credentials, options=_UNBOUNDED)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def call(self, call: str, request: Mapping[str, Any]) -> None:
        """Make a call; a stream is left after its first response."""
        service, _, method = call.partition(".")
        message = json_format.ParseDict(request, request_type(call)())
        made = getattr(_STUBS[service](self._channel), method)(message, timeout=_SECONDS)
        if call not in STREAMS:
            await made
            return
        await made.read()
        made.cancel()

    async def run_log(self, run_id: str, follow: v1.FollowOptions) -> Sequence[v1.AgentEvent]:
        """Return what a run's log holds now, as a view of it."""
        request = v1.WatchRunRequest(run_id=run_id, until=v1.WATCH_UNTIL_CURRENT, follow=follow)
        stream = agent_service_pb2_grpc.AgentServiceStub(self._channel).WatchRun(request, timeout=_SECONDS)
        return [event async for response in stream for event in response.batch.events]

    async def evaluation_log(
        self, evaluation_id: str, follow: v1.EvaluationFollowOptions
    ) -> Sequence[v1.EvaluationEvent]:
        """Return what an evaluation's log holds now, as a stream with these options shows it."""
        shown = v1.EvaluationFollowOptions(
            event_names=follow.event_names, without_trees=follow.without_trees, until=v1.WATCH_UNTIL_CURRENT
        )
        request = v1.WatchEvaluationRequest(evaluation_id=evaluation_id, follow=shown)
        stream = eval_service_pb2_grpc.EvalServiceStub(self._channel).WatchEvaluation(request, timeout=_SECONDS)
        return [event async for response in stream for event in response.batch.events]


def request_type(call: str) -> type[Message]:
    """Return the class of a call's request."""
    kind: type[Message] = getattr(v1, f"{call.partition('.')[2]}Request")
    return kind


def response_type(call: str) -> type[Message]:
    """Return the class of a call's response."""
    kind: type[Message] = getattr(v1, f"{call.partition('.')[2]}Response")
    return kind
