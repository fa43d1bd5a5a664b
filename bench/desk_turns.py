"""Turns of the desk against a server, checked: the answer, the nested text and the model calls; it measures nothing."""

import asyncio
from collections.abc import Sequence

from grpc import aio

from bench.desk_team import QUESTION, SPECIALISTS
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, event_pb2, message_pb2, policy_pb2
from tests.support.model_scenarios import TEXT

MODEL_CALLS = 2 + 2 * len(SPECIALISTS)
TURN_SECONDS = 120.0

PASSTHROUGH = policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas())
_ANSWERS = 1 + len(SPECIALISTS)


class Turns:
    """A client that runs turns and says what is wrong with them."""

    def __init__(self, channel: aio.Channel, *, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """`metadata` is sent with every call."""
        self._agents = agent_service_pb2_grpc.AgentServiceStub(channel)
        self._metadata = metadata

    async def run(
        self, count: int, at_once: int, *, agent: str = "lead", delta: policy_pb2.DeltaPolicy | None = None
    ) -> list[str]:
        """Runs that many turns, `at_once` together; gives a sentence for each that failed."""
        request = _request(agent, delta)
        failures: list[str] = []
        for _ in range(count // at_once):
            found = await asyncio.gather(*(self._turn(request) for _ in range(at_once)))
            failures += filter(None, found)
        return failures

    async def _turn(self, request: agent_service_pb2.RunRequest) -> str:
        try:
            stream = self._agents.Run(request, timeout=TURN_SECONDS, metadata=self._metadata)
            return fault_of([event async for response in stream for event in response.batch.events])
        except aio.AioRpcError as error:
            return f"The call failed: {error.code().name} {error.details()}"


def _request(agent: str, delta: policy_pb2.DeltaPolicy | None) -> agent_service_pb2.RunRequest:
    return agent_service_pb2.RunRequest(
        agent=agent,
        input=message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=QUESTION)]),
        policy=policy_pb2.RunPolicy(deltas=delta),
    )


def fault_of(told: list[event_pb2.AgentEvent]) -> str:
    """What is wrong with a turn's events; empty for nothing."""
    end = told[-1] if told else event_pb2.AgentEvent()
    if not end.HasField("run_completed"):
        return f"The run did not complete: {end}"
    calls = end.run_completed.tree_usage.model_calls
    if calls != MODEL_CALLS:
        return f"The turn took {calls} model calls instead of {MODEL_CALLS}."
    answer = "".join(part.text for part in end.run_completed.final_answer.parts)
    if answer != TEXT:
        return f"The answer is {answer[:80]!r}."
    streamed = sum(len(event.llm_output_text_delta.text) for event in told)
    if streamed != _ANSWERS * len(TEXT):
        return f"{streamed} characters were streamed instead of {_ANSWERS * len(TEXT)}."
    return ""
