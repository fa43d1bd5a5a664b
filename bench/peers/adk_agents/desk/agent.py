"""The desk on ADK, as `adk api_server` loads it: specialists as single-turn agents, which the lead calls as tools.

The environment variable BENCH_BASE_URL has the address of the model server.
"""

import os

from google.adk.agents import LlmAgent
from google.adk.integrations.openai import OpenAILlm
from openai import AsyncOpenAI, DefaultAioHttpClient

from bench.desk_team import INSTRUCTIONS, SPECIALISTS, lookup
from bench.peers.desk_turns import TURN_SECONDS

_client = AsyncOpenAI(
    base_url=os.environ["BENCH_BASE_URL"],
    api_key="none",
    timeout=TURN_SECONDS,
    max_retries=0,
    http_client=DefaultAioHttpClient(),
)
_model = OpenAILlm(model="m", client=_client)

root_agent = LlmAgent(
    name="lead",
    model=_model,
    instruction=INSTRUCTIONS["lead"],
    sub_agents=[
        LlmAgent(
            name=f"call_{name}",
            description=f"Answers as the {name}.",
            model=_model,
            mode="single_turn",
            disallow_transfer_to_parent=True,
            disallow_transfer_to_peers=True,
            instruction=INSTRUCTIONS[name],
            tools=[lookup],
        )
        for name in SPECIALISTS
    ],
)
