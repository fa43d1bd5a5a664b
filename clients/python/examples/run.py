"""Run an agent and show its tree while it grows: python run.py AGENT TEXT [ADDRESS]."""

import asyncio
import sys

from bough import AsyncClient, text_of
from bough.channel import DEFAULT_ADDRESS


async def main(agent: str, text: str, address: str = DEFAULT_ADDRESS) -> int:
    async with AsyncClient(address) as client, client.run(agent, text) as stream:
        async for event in stream:
            indent = "  " * event.depth
            match event.WhichOneof("payload"):
                case "run_started" | "sub_agent_started":
                    print(f"{indent}{event.agent}", flush=True)
                case "tool_started":
                    print(
                        f"{indent}  {event.tool_started.call.name} {event.tool_started.call.arguments_json}", flush=True
                    )
                case "run_completed":
                    print(f"\n{text_of(event.run_completed.final_answer)}\n")
                case "run_failed":
                    print(f"failed: {event.run_failed.error.message}", file=sys.stderr)
                    return 1
        tree = await client.tree(stream.run_id)
        for each in tree:
            print(f"{each.branch}: {each.tree_usage.model_calls} model calls, {len(tree.tools(each))} tool calls")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
