"""Driver of the Python client, as README.md of this folder's parent describes: JSON lines in, JSON lines out.

Usage: python -m tests.contract.drivers.python HOST:PORT
"""

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc import aio

import bough
from bough import AsyncClient, BoughError, CallFailed, Rejoining, v1
from bough.channel import Token, async_channel, token_metadata
from bough.errors import from_rpc_error
from bough.v1 import (
    agent_service_pb2_grpc,
    catalog_service_pb2_grpc,
    eval_service_pb2_grpc,
    execution_pb2,
    follow_pb2,
    session_service_pb2_grpc,
    usage_service_pb2_grpc,
)

Line = Mapping[str, Any]

STUBS: Final[Mapping[str, Any]] = {
    "AgentService": agent_service_pb2_grpc.AgentServiceStub,
    "CatalogService": catalog_service_pb2_grpc.CatalogServiceStub,
    "EvalService": eval_service_pb2_grpc.EvalServiceStub,
    "SessionService": session_service_pb2_grpc.SessionServiceStub,
    "UsageService": usage_service_pb2_grpc.UsageServiceStub,
}


def _credentials() -> grpc.ChannelCredentials | None:
    """Return what the environment says of TLS."""
    files = [os.environ.get(name) for name in ("DRIVER_CA_FILE", "DRIVER_KEY_FILE", "DRIVER_CERT_FILE")]
    if files[0] is None:
        return None
    return grpc.ssl_channel_credentials(*(None if file is None else Path(file).read_bytes() for file in files))


def _token() -> Token | None:
    """Return the token of the environment, or what reads the present one from a file."""
    file = os.environ.get("DRIVER_TOKEN_FILE")
    return os.environ.get("DRIVER_TOKEN") if file is None else lambda: Path(file).read_text(encoding="utf-8")


class NotUnderstood(Exception):
    """A line that this driver cannot perform."""


class Driver:
    """Performs lines with one client, and with another one for calls that do not rejoin."""

    def __init__(self, address: str) -> None:
        self._rejoins = 0
        credentials, token = _credentials(), _token()
        self._metadata = token_metadata(token, address, credentials)
        self._channel = async_channel(address, credentials, ())
        self._clients = {
            True: AsyncClient(channel=self._channel, token=token, rejoining=Rejoining(on_drop=self._dropped)),
            False: AsyncClient(channel=self._channel, token=token, rejoining=bough.NO_REJOINING),
        }

    async def perform(self, line: Line) -> None:
        """Perform one line and print what comes of it."""
        if "transcode" in line:
            _print(transcoded=_transcoded(line))
            return
        self._rejoins = 0
        end: dict[str, object] = {"code": "OK"}
        try:
            await self._call(line)
        except CallFailed as error:
            end = _failure(error)
        except BoughError as error:
            end = {"code": "UNKNOWN", "message": error.message}
        _print(end={**end, "rejoins": self._rejoins})

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _call(self, line: Line) -> None:
        if "tree" in line:
            _print(answer={"agents": _agents(await self._clients[True].get_invocation(line["tree"]))})
            return
        service, _, method = line["call"].partition(".")
        if service not in STUBS:
            raise NotUnderstood(f"there is no service {service!r}")
        kind = getattr(v1, f"{method}Request")
        request = json_format.ParseDict(line.get("request", {}), kind())
        stream = self._stream(method, request, line)
        if stream is None:
            _print(answer=_json(await self._answer(service, method, request, line.get("timeoutSeconds"))))
        elif line.get("collect"):
            await self._collect(stream)
        else:
            await _print_events(stream, line.get("cancelAfterEvents"))

    def _stream(self, method: str, request: Any, line: Line) -> Any:
        """Return the client's stream for a call that streams events; None for any other call."""
        client = self._clients[line.get("rejoin", True)]
        timeout = line.get("timeoutSeconds")
        match method:
            case "Run":
                return client.run(
                    request.agent,
                    request.input,
                    session_id=request.session_id,
                    on_missing_session=request.on_missing_session,
                    definitions=request.definitions,
                    policy=_set(request, "policy"),
                    labels=request.labels,
                    **_options(request, timeout),
                )
            case "ForkRun":
                return client.fork(
                    request.run_id,
                    request.after_sequence,
                    changes=_set(request, "changes"),
                    allow_open_effects=request.allow_open_effects,
                    policy=_set(request, "policy"),
                    labels=request.labels,
                    **_options(request, timeout),
                )
            case "ResumeRun":
                after = _set(request, "after_sequence")
                return client.resume(
                    request.run_id, request.answers, after_sequence=after, **_options(request, timeout)
                )
            case "WatchRun":
                options = _options(request, timeout)
                return client.watch(
                    request.run_id, after_sequence=request.after_sequence, until=request.until, **options
                )
            case "Evaluate":
                return _evaluation(client, request, timeout)
            case "WatchEvaluation":
                return client.evaluations.watch(
                    request.evaluation_id,
                    after_sequence=request.after_sequence,
                    **_evaluation_options(request.follow, timeout),
                )
        return None

    async def _answer(self, service: str, method: str, request: Message, timeout: float | None) -> Message:
        call = getattr(STUBS[service](self._channel), method)
        sent = iter([request]) if method == "AggregateEvents" else request
        try:
            response: Message = await call(sent, timeout=timeout, metadata=self._metadata())
        except aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return response

    async def _collect(self, stream: Any) -> None:
        run = await bough.collect(stream)
        _print(
            answer={
                "text": run.answer,
                "state": _state(run.state),
                "interrupted": run.state == execution_pb2.EXECUTION_STATE_INPUT_REQUIRED,
                "runId": run.run_id,
                "throughSequence": stream.through_sequence,
            }
        )

    def _dropped(self, error: CallFailed) -> None:
        self._rejoins += 1


def _evaluation(client: AsyncClient, request: v1.EvaluateRequest, timeout: float | None) -> AsyncIterator[Any]:
    baseline = request.baseline if request.HasField("baseline") else None
    source = None if baseline is None else getattr(baseline, baseline.WhichOneof("source") or "evaluation_id")
    return client.evaluations.run(
        request.eval_set,
        agent=request.agent,
        definitions=request.definitions,
        trials=_set(request, "trials"),
        max_concurrency=_set(request, "max_concurrency"),
        gates=request.gates,
        budget=_set(request, "budget"),
        baseline=source,
        allow_removed=request.allow_removed,
        allow_incomplete_baseline=request.allow_incomplete_baseline,
        labels=request.labels,
        request_id=request.request_id,
        **_evaluation_options(request.follow, timeout),
    )


def _evaluation_options(follow: follow_pb2.EvaluationFollowOptions, timeout: float | None) -> dict[str, Any]:
    return {
        "event_names": follow.event_names,
        "without_trees": follow.without_trees,
        "heartbeat": _seconds(follow, "heartbeat_interval"),
        "timeout": timeout,
    }


def _options(request: Any, timeout: float | None) -> dict[str, Any]:
    follow: follow_pb2.FollowOptions = request.follow
    options = {
        "view": follow.view,
        "event_names": follow.event_names,
        "heartbeat": _seconds(follow, "heartbeat_interval"),
        "timeout": timeout,
    }
    return options if isinstance(request, v1.WatchRunRequest) else {**options, "request_id": request.request_id}


def _set(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _seconds(message: Message, field: str) -> float | None:
    value = _set(message, field)
    return None if value is None else value.ToTimedelta().total_seconds()


async def _print_events(stream: Any, most: int | None) -> None:
    count = 0
    async for event in stream:
        count += 1
        _print(event=_json(event))
        if count == most:
            await stream.aclose()
            return


def _agents(invocation: v1.Invocation) -> list[dict[str, object]]:
    tree = bough.AgentTree(invocation)
    return [
        {
            "agent": agent.name,
            "path": "/".join(above.name for above in tree.path(agent)),
            "depth": agent.depth,
            "state": _state(agent.state),
        }
        for agent in tree
    ]


def _state(state: int) -> str | int:
    known = execution_pb2.ExecutionState.DESCRIPTOR.values_by_number
    return known[state].name if state in known else state


def _failure(error: CallFailed) -> dict[str, object]:
    code: grpc.StatusCode = error.code
    status = error.status
    return {
        "code": code.name,
        "message": error.message,
        "reason": error.reason,
        "metadata": dict(status.details),
        "violations": [{"field": one.field, "description": one.description} for one in status.violations],
    }


def _transcoded(line: Line) -> dict[str, object]:
    package, _, name = line["transcode"].rpartition(".")
    if package != "bough.v1" or not hasattr(v1, name):
        raise NotUnderstood(f"there is no message {line['transcode']!r}")
    message: Message = getattr(v1, name)()
    if "binary" in line:
        message.MergeFromString(base64.b64decode(line["binary"]))
    else:
        json_format.ParseDict(line["json"], message)
    return {"binary": base64.b64encode(message.SerializeToString()).decode(), "json": _json(message)}


def _json(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message)


def _print(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(address: str) -> int:
    """Perform the lines of standard input; return the exit code."""
    driver = Driver(address)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            await driver.perform(json.loads(line))
    except (KeyError, ValueError, NotUnderstood, json_format.ParseError) as error:
        print(f"This line is not understood: {error!r}: {line}", file=sys.stderr)
        return 2
    finally:
        await driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
