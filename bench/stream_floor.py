"""The catch-up case's floor: a bare grpc.aio server that streams prepared messages; a program that serves.

python -m bench.stream_floor MESSAGES [--parsed] --ready-file F

MESSAGES is a file as `write_messages` makes it. Every call of WatchRun gets them all, whatever it asks: as the bytes
that they are, or, `--parsed`, as message objects that gRPC serializes as it sends them.
"""

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import grpc
from grpc import aio

from bough.v1.agent_service_pb2 import WatchRunResponse

SERVICE, METHOD = "bough.v1.AgentService", "WatchRun"
_LENGTH_BYTES = 4

Message = WatchRunResponse | bytes


def write_messages(path: Path, messages: Iterable[bytes]) -> None:
    """Keeps serialized messages in a file, each behind its length."""
    with path.open("wb") as file:
        for message in messages:
            file.write(len(message).to_bytes(_LENGTH_BYTES))
            file.write(message)


def read_messages(path: Path) -> Iterator[bytes]:
    """The messages of a file."""
    with path.open("rb") as file:
        while length := file.read(_LENGTH_BYTES):
            yield file.read(int.from_bytes(length))


def _serialized(message: Message) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


async def _serve(path: Path, ready_file: Path, *, is_parsed: bool) -> None:
    data = list(read_messages(path))
    messages = [WatchRunResponse.FromString(one) for one in data] if is_parsed else data

    async def stream(request: bytes, context: aio.ServicerContext[bytes, Message]) -> AsyncIterator[Message]:
        for message in messages:
            yield message

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = aio.server()
    handler: grpc.RpcMethodHandler[bytes, Message] = grpc.unary_stream_rpc_method_handler(
        stream, response_serializer=_serialized
    )
    handlers = {METHOD: handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    draft = ready_file.with_name(f"{ready_file.name}.draft")
    draft.write_text(f"127.0.0.1:{port}", encoding="utf-8")
    draft.replace(ready_file)
    await stopped.wait()
    await server.stop(0.0)


def main() -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("messages", type=Path)
    parser.add_argument("--parsed", action="store_true")
    parser.add_argument("--ready-file", type=Path, required=True)
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.messages, arguments.ready_file, is_parsed=arguments.parsed))


if __name__ == "__main__":
    main()
