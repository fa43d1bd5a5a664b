"""A model that judges, at the wire: it answers each criterion by a function of the prompt."""

import json
import re
from collections.abc import Callable
from typing import Any

from tests.support.model_scenarios import Reply, Request, chunk, ending

Verdict = Callable[[str, int], bool | float | None]
"""Of a prompt and the number of the request: whether the criteria hold, or their grade; None for nonsense."""


def prompt_of(request: Request) -> str:
    """The prompt of a judge."""
    content: Any = request["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def text_reply(text: str) -> Reply:
    """An answer of one piece."""
    return Reply(pieces=(chunk({"role": "assistant", "content": ""}), chunk({"content": text}), *ending("stop")))


def judging(verdict: Verdict) -> Callable[[Request], Reply]:
    """A scenario that says the same of each criterion of a prompt."""
    asked = 0

    def scenario(request: Request) -> Reply:
        nonlocal asked
        asked += 1
        prompt = prompt_of(request)
        holds = verdict(prompt, asked)
        if holds is None:
            return text_reply("I would rather not say.")
        criteria = re.findall(r"^(criterion_\d+):", prompt, re.MULTILINE)
        field = "holds" if isinstance(holds, bool) else "grade"
        return text_reply(json.dumps({one: {"reason": f"so says {asked}", field: holds} for one in criteria}))

    return scenario
