"""Turns of the desk against `bough serve`, as a client of its gRPC service sees them."""

from grpc import aio

from bench.desk_team import QUESTION
from bench.peers.desk_turns import TURN_SECONDS, RunTurn, Turn
from bough.v1 import agent_service_pb2, agent_service_pb2_grpc, message_pb2


def turn_of(channel: aio.Channel) -> RunTurn:
    """Return what runs one turn."""
    agents = agent_service_pb2_grpc.AgentServiceStub(channel)
    said = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=QUESTION)])
    request = agent_service_pb2.RunRequest(agent="lead", input=said)

    async def run_turn(turn: Turn) -> None:
        async for response in agents.Run(request, timeout=TURN_SECONDS):
            for event in response.batch.events:
                if event.HasField("llm_output_text_delta"):
                    turn.take(event.llm_output_text_delta.text)
                elif event.HasField("run_completed"):
                    turn.answer = "".join(part.text for part in event.run_completed.final_answer.parts)

    return run_turn
