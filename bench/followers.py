"""The followers case: CPU of the server for each further client that follows a run, delta by delta."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from grpc import aio

from bench.figures import CaseResult, Figure
from bench.growth_project import WORDS, write_growth_project
from bench.programs import Program
from bench.servers import bough_server
from bench.stream_floor import METHOD, SERVICE
from bough.v1 import agent_service_pb2, follow_pb2, message_pb2, policy_pb2

FOLLOWERS: Final = 50
ROUNDS: Final = 5
VIEWS: Final = {"FULL": follow_pb2.EVENT_VIEW_FULL, "SUMMARY": follow_pb2.EVENT_VIEW_SUMMARY}
_SECONDS: Final = 120.0


class Following:
    """Clients that follow one run; those that watch it leave its messages as they come, unparsed."""

    def __init__(self, channel: aio.Channel, server: Program) -> None:
        self._server = server
        self._run: aio.UnaryStreamMultiCallable[agent_service_pb2.RunRequest, bytes] = channel.unary_stream(
            f"/{SERVICE}/Run", request_serializer=agent_service_pb2.RunRequest.SerializeToString
        )
        self._watch: aio.UnaryStreamMultiCallable[agent_service_pb2.WatchRunRequest, bytes] = channel.unary_stream(
            f"/{SERVICE}/{METHOD}", request_serializer=agent_service_pb2.WatchRunRequest.SerializeToString
        )
        self.failed = 0
        """Runs that some client did not follow to their end."""

    async def cpu(self, followers: int, view: follow_pb2.EventView.ValueType) -> tuple[float, float]:
        """The CPU, in milliseconds, of a run with so many followers, and how many messages each of them got."""
        start = self._server.cpu_seconds()
        stream = self._run(_request(view), timeout=_SECONDS)
        run_id = str(dict(await stream.initial_metadata())["bough-run-id"])
        options = follow_pb2.FollowOptions(view=view)
        watch = agent_service_pb2.WatchRunRequest(run_id=run_id, follow=options)
        streams = [stream, *(self._watch(watch, timeout=_SECONDS) for _ in range(followers - 1))]
        came = await asyncio.gather(*map(_drained, streams))
        took = (self._server.cpu_seconds() - start) * 1000
        self.failed += any(size < WORDS * len("word0 ") for _, size in came)
        return took, sum(count for count, _ in came) / followers


async def _drained(stream: aio.UnaryStreamCall[object, bytes]) -> tuple[int, int]:
    count, size = 0, 0
    async for message in stream:
        count, size = count + 1, size + len(message)
    return count, size


def _request(view: follow_pb2.EventView.ValueType) -> agent_service_pb2.RunRequest:
    deltas = policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas())
    return agent_service_pb2.RunRequest(
        agent="speaker",
        input=message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="Speak.")]),
        policy=policy_pb2.RunPolicy(deltas=deltas),
        follow=follow_pb2.FollowOptions(view=view),
    )


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    config = write_growth_project(folder)
    async with bough_server(folder, config) as server, aio.insecure_channel(server.address) as channel:
        following = Following(channel, server)
        figures = [figure for name in VIEWS for figure in await _figures(following, name)]
    failures = [f"{following.failed} runs were not followed to their end."] if following.failed else []
    return CaseResult(figures=figures, failures=failures)


async def _figures(following: Following, view: str) -> Sequence[Figure]:
    """What each of 50 followers costs beside the first, round by round in turns."""
    each, alone, message = list[float](), list[float](), list[float]()
    await following.cpu(FOLLOWERS, VIEWS[view])
    for _ in range(ROUNDS):
        one, _ = await following.cpu(1, VIEWS[view])
        many, messages = await following.cpu(FOLLOWERS, VIEWS[view])
        alone.append(one)
        each.append((many - one) / (FOLLOWERS - 1))
        message.append((many - one) / (FOLLOWERS - 1) / messages * 1000)
    what = f"of a run of {WORDS} deltas, {view}, {FOLLOWERS} followers"
    return [
        Figure(
            case="followers",
            what=f"CPU of a further follower {what}",
            unit="ms",
            rounds=each,
            floor="the run and its first",
            floor_rounds=alone,
        ),
        Figure(case="followers", what=f"CPU of each message to it, {view}", unit="us", rounds=message),
    ]
