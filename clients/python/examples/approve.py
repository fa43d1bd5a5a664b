"""Run an agent and answer in the terminal what it waits for: python approve.py AGENT TEXT [ADDRESS]."""

import asyncio
import json
import sys

from bough import AsyncClient, approve, collect, refuse, reply, tool_outcome
from bough.channel import DEFAULT_ADDRESS
from bough.v1 import INPUT_KIND_APPROVAL, INPUT_KIND_CLIENT_TOOL, InputAnswer, InputRequest


def answer(request: InputRequest) -> InputAnswer:
    who = request.agent_path[-1]
    match request.kind:
        case kind if kind == INPUT_KIND_APPROVAL:
            decision = input(f"{who} wants to call {request.call.name} {request.call.arguments_json}. Approve? [y/n] ")
            return approve(request) if decision == "y" else refuse(request, note="The user said no.")
        case kind if kind == INPUT_KIND_CLIENT_TOOL:
            return tool_outcome(request, input(f"{who} calls {request.call.name} {request.call.arguments_json}: "))
    text = input(f"{who} asks: {request.prompt} ")
    try:
        return reply(request, json.loads(text))
    except ValueError:
        return reply(request, text)


async def main(agent: str, text: str, address: str = DEFAULT_ADDRESS) -> int:
    async with AsyncClient(address) as client:
        run = await collect(client.run(agent, text))
        while run.open_requests:
            answers = [answer(request) for request in run.open_requests]
            run = await collect(client.resume(run.run_id, answers))
    print(run.answer or (run.error.message if run.error else "no answer"))
    return 0 if run.message else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
