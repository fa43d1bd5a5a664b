"""A server on loopback that speaks a newer schema than its clients, and serves what it is given."""

import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc import aio

from bough import v1
from tests.contract.newer_schema import newer_type
from tests.contract.scenario_files import NewerServer
from tests.support.tool_gate import Gate


class NewerProcess:
    """Where it serves; it is no process, and cannot be killed."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def restart(self, number: signal.Signals) -> None:
        """Raise AssertionError: without a database there is nothing that could go on."""
        raise AssertionError(f"a scenario of a newer schema has no step that ends its server by {number.name}")


class _Services:
    def __init__(self, served: NewerServer, gate: Gate) -> None:
        self._served, self._gate = served, gate
        self._log = _numbered("bough.v1.AgentEvent", served.log, run_id=served.run_id)
        self._evaluation = _numbered(
            "bough.v1.EvaluationEvent", served.evaluation_log, evaluation_id=served.evaluation_id
        )

    def agent_handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        follow = self._streaming("bough-run-id", self._served.run_id, self._log)
        return {
            "Run": _streamed(follow("bough.v1.RunResponse"), v1.RunRequest.FromString),
            "WatchRun": _streamed(follow("bough.v1.WatchRunResponse"), v1.WatchRunRequest.FromString),
            "GetRun": _answered(self._get_run, v1.GetRunRequest.FromString),
        }

    def eval_handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        follow = self._streaming("bough-evaluation-id", self._served.evaluation_id, self._evaluation)
        watch = follow("bough.v1.WatchEvaluationResponse")
        return {
            "Evaluate": _streamed(follow("bough.v1.EvaluateResponse"), v1.EvaluateRequest.FromString),
            "WatchEvaluation": _streamed(watch, v1.WatchEvaluationRequest.FromString),
            "GetInvocation": _answered(self._get_invocation, v1.GetInvocationRequest.FromString),
        }

    def _streaming(self, key: str, value: str, log: Sequence[Message]) -> Callable[[str], Any]:
        def responding(response: str) -> Any:
            async def follow(request: Any, context: Any) -> AsyncIterator[Message]:
                await context.send_initial_metadata(((key, value),))
                after = getattr(request, "after_sequence", 0)
                untils = (getattr(request, "until", 0), getattr(request.follow, "until", 0))
                is_current = v1.WATCH_UNTIL_CURRENT in untils
                for sequence, event in enumerate(log[after:], start=after + 1):
                    if sequence == len(log) and not is_current:
                        await self._gate.opened()
                    batch = {"events": [json_format.MessageToDict(event)], "throughSequence": sequence}
                    yield json_format.ParseDict({"batch": batch}, newer_type(response)())

            return follow

        return responding

    async def _get_run(self, request: v1.GetRunRequest, context: Any) -> Message:
        run = {"runId": self._served.run_id, "state": self._served.state, "lastSequence": len(self._log)}
        return json_format.ParseDict({"run": run}, newer_type("bough.v1.GetRunResponse")())

    async def _get_invocation(self, request: v1.GetInvocationRequest, context: Any) -> Message:
        answer = {"invocation": self._served.invocation}
        return json_format.ParseDict(answer, newer_type("bough.v1.GetInvocationResponse")())


def _streamed(behavior: Any, reads: Callable[[bytes], Message]) -> grpc.RpcMethodHandler:
    return grpc.unary_stream_rpc_method_handler(behavior, request_deserializer=reads, response_serializer=_written)


def _answered(behavior: Any, reads: Callable[[bytes], Message]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(behavior, request_deserializer=reads, response_serializer=_written)


def _written(message: Message) -> bytes:
    return message.SerializeToString()


def _numbered(kind: str, log: Sequence[Mapping[str, Any]], **ids: str) -> Sequence[Message]:
    return [
        json_format.ParseDict({**ids, "sequence": sequence, **event}, newer_type(kind)())
        for sequence, event in enumerate(log, start=1)
    ]


@asynccontextmanager
async def serving_newer(served: NewerServer, gate: Gate) -> AsyncIterator[NewerProcess]:
    """Serve on any free port."""
    services = _Services(served, gate)
    server = aio.server(options=(("grpc.so_reuseport", 0),))
    handlers = (
        grpc.method_handlers_generic_handler("bough.v1.AgentService", services.agent_handlers()),
        grpc.method_handlers_generic_handler("bough.v1.EvalService", services.eval_handlers()),
    )
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield NewerProcess(f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
