"""The team that is tortured: who calls whom, what its model says, and so what each turn has to answer; it runs nothing.

The model's part is one rule: an agent makes the calls of its plan, round by round, and then repeats their results.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bough import approve, reply, tool_outcome
from bough.v1 import input_pb2
from bough_server.store.sqlite.database_path import is_postgres
from tests.support.model_scenarios import Reply, Request, calling, chunk, ending
from tests.support.projects import llm, openai_model, write_project

Round = Sequence[tuple[str, str]]
"""Calls of one model answer: what is called, and the name of the call."""

PLANS: Final[Mapping[str, Sequence[Round]]] = {
    "talker": (),
    "smith": ([("touch", "a"), ("touch", "b"), ("touch", "c")], [("touch", "d")]),
    "scout": ([("touch", "s")],),
    "lead": ([("call_scout", "left"), ("call_scout", "right"), ("touch", "self")],),
    "top": ([("call_middle", "m")],),
    "middle": ([("call_bottom", "b")],),
    "bottom": ([("touch", "deep")],),
    "cashier": ([("pay", "sum"), ("read_card", "card")],),
}
"""What each agent with a model does before it answers."""

EVALUATED: Final = "tests.durability.evaluated_agent"
"""The module of the agent that is evaluated beside these."""

KINDS: Final = ("talker", "smith", "lead", "top", "cashier", "chief")
"""The agents that turns ask: plain; tools, agents, depth 3; and two that ask back."""

_RESULTS: Final = {"touch": "touched", "pay": "paid", "read_card": "card of"}

Asked = tuple[str, str, int]
"""A model call: the agent, what it was told, and the round of its plan."""


def write_team(folder: Path, base_url: str, database: str) -> Path:
    """Writes the configuration of the team into a folder, with the URL of its database; gives its path."""
    definitions = [
        llm(
            name,
            tools=sorted({called for calls in plan for called, _ in calls if not called.startswith("call_")}),
            calls=sorted({called.removeprefix("call_") for calls in plan for called, _ in calls if "call_" in called}),
        )
        for name, plan in PLANS.items()
    ]
    return write_project(
        folder,
        *definitions,
        model=openai_model(base_url, price={"input_per_million": 1, "output_per_million": 2}),
        accounts={"per": "user"},
        # A crash of PostgreSQL loses commits that were not flushed.
        storage={"url": database, "durability": "disk" if is_postgres(database) else "process"},
        python=["tests.durability.torture_tools", EVALUATED],
        log_level="info",
    )


def expected(name: str, told: str) -> str:
    """What an agent answers in the end."""
    if name == "chief":
        scouts = [expected("scout", f"{told}.{side}") for side in ("left", "right")]
        said = [*scouts, f"noted {told}.note", f"word for {told}.word"]
    else:
        said = [_result(called, f"{told}.{label}") for calls in PLANS[name] for called, label in calls]
    return _answer(name, told, said)


def _result(called: str, told: str) -> str:
    if called.startswith("call_"):
        return expected(called.removeprefix("call_"), told)
    return f"{_RESULTS[called]} {told}"


def _answer(name: str, told: str, said: Sequence[str]) -> str:
    return f"{name} says {told}: {'; '.join(said)}"


def answer_to(request: input_pb2.InputRequest) -> input_pb2.InputAnswer:
    """What a client says to a request."""
    if request.kind == input_pb2.INPUT_KIND_APPROVAL:
        return approve(request)
    if request.kind == input_pb2.INPUT_KIND_CLIENT_TOOL:
        return tool_outcome(request, f"card of {json.loads(request.call.arguments_json)['label']}")
    return reply(request, f"word for {request.prompt}")


class Mind:
    """The team's model, as a scenario of the model server; it counts how often it was asked what."""

    def __init__(self) -> None:
        self.asked: Counter[Asked] = Counter()

    def __call__(self, request: Request) -> Reply:
        """The next calls of the agent's plan, or its answer."""
        name, told, said = _read(request)
        done = 0
        for number, calls in enumerate(PLANS[name]):
            if len(said) == done:
                self.asked[name, told, number] += 1
                return calling([(called, _arguments(called, f"{told}.{label}")) for called, label in calls])
            done += len(calls)
        self.asked[name, told, len(PLANS[name])] += 1
        return _words(_answer(name, told, said))


def _read(request: Request) -> tuple[str, str, list[str]]:
    """Who asks, what it was told, and the results of its tools since."""
    first, *rest = request["messages"]
    name = str(first["content"]).removeprefix("You are ").removesuffix(".")
    said: list[str] = []
    for message in reversed(rest):
        content = str(message["content"])
        if message["role"] == "tool":
            said.insert(0, content)
        elif message["role"] == "user" and not content.startswith("For context:"):
            return name, content, said
    raise AssertionError(f"{name} was told nothing: {rest}")


def _arguments(called: str, told: str) -> str:
    return json.dumps({"message" if called.startswith("call_") else "label": told})


def _words(text: str) -> Reply:
    words = [chunk({"content": f"{word} "}) for word in text.split(" ")[:-1]]
    last = chunk({"content": text.rpartition(" ")[2]})
    return Reply(pieces=(*words, last, *ending("stop")))
