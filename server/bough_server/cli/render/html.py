"""The agent tree of a run as one HTML page that needs nothing else: no script, no network, light and dark."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from bough import text_of
from bough.v1 import execution_pb2, invocation_pb2, message_pb2, step_pb2
from bough_server.blobs import file_text
from bough_server.cli.render.format import (
    between,
    cost_text,
    counted,
    error_text,
    one_line,
    printable,
    seconds_text,
    state_text,
    tokens,
    tokens_text,
)
from bough_server.cli.render.notes import finish_text
from bough_server.cli.render.tree import kind_and_end, origin_parts, totals

_DEEPEST: Final = 12
"""Levels that are indented; deeper agents are indented as far as these."""

_STYLE: Final = """
:root { color-scheme: light dark; --text: #1c2024; --dim: #60646c; --back: #fcfcfd; --box: #f0f0f3; --line: #d9d9e0;
  --good: #18794e; --bad: #c62a2f; --warn: #946800; --note: #5746af; }
@media (prefers-color-scheme: dark) { :root { --text: #edeef0; --dim: #b0b4ba; --back: #111113; --box: #212225;
  --line: #363a3f; --good: #3dd68c; --bad: #ff9592; --warn: #ffca16; --note: #baa7ff; } }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; } p { margin: .3rem 0; } a { color: inherit; }
.dim { color: var(--dim); } .succeeded { color: var(--good); } .failed { color: var(--bad); }
.cancelled, .anomaly { color: var(--warn); } .input_required { color: var(--note); }
details { border-left: 2px solid var(--line); margin: .3rem 0; padding-left: .7rem; }
summary { cursor: pointer; } summary b { margin-right: .5rem; } summary span { margin-right: .8rem; }
h2 { font-size: .8rem; font-weight: 600; color: var(--dim); margin: .6rem 0 .1rem; }
pre { background: var(--box); border-radius: 4px; margin: .1rem 0; padding: .4rem .6rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
"""


def tree_page(invocation: invocation_pb2.Invocation) -> str:
    """Return the page of a record with steps. It has ASCII characters only, so that it survives any encoding."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(invocation.agent or 'run')} {_text(invocation.run_id)}</title>",
        f"<style>{_STYLE}</style></head><body>",
        *_head(invocation),
    ]
    work = _Work(invocation)
    for agent in invocation.agents:
        lines += _agent(agent, work)
    if (more := invocation.agents_total - len(invocation.agents)) > 0:
        lines.append(f'<p class="dim">… and {counted(more, "more agent")}</p>')
    lines.append("</body></html>")
    return "\n".join(lines).encode("ascii", "xmlcharrefreplace").decode("ascii")


class _Work:
    """Steps and tool calls of a record by the invocation that made them, and the names of invocations."""

    def __init__(self, invocation: invocation_pb2.Invocation) -> None:
        self.names: Mapping[str, str] = {each.invocation_id: each.name for each in invocation.agents}
        self._steps: dict[str, list[step_pb2.AgentStep]] = {}
        self._tools: dict[str, list[invocation_pb2.ToolInvocation]] = {}
        for step in invocation.steps:
            self._steps.setdefault(step.invocation_id, []).append(step)
        for tool in invocation.tools:
            self._tools.setdefault(tool.invocation_id, []).append(tool)

    def of(
        self, invocation_id: str
    ) -> Iterator[tuple[step_pb2.AgentStep | None, Sequence[invocation_pb2.ToolInvocation]]]:
        """Yield each step with its tool calls, then the calls that belong to no step."""
        tools = self._tools.get(invocation_id, [])
        steps = self._steps.get(invocation_id, [])
        for step in steps:
            yield step, [tool for tool in tools if tool.step_id == step.step_id]
        known = {step.step_id for step in steps}
        yield None, [tool for tool in tools if tool.step_id not in known]


def _head(invocation: invocation_pb2.Invocation) -> Iterator[str]:
    yield f"<h1>{_text(invocation.agent or 'run')} <span class=dim>{_text(invocation.run_id)}</span></h1>"
    yield f'<p class="{state_text(invocation.state)}">{_text(" · ".join(totals(invocation)))}</p>'
    if invocation.HasField("forked_from"):
        yield f'<p class="dim">{_text(" · ".join(origin_parts(invocation)))}</p>'
    if not invocation.agents and invocation.HasField("error"):
        yield f'<p class="failed">{_text(error_text(invocation.error))}</p>'
    for anomaly in invocation.anomalies:
        yield f'<p class="anomaly">{_text(one_line(anomaly.message))}</p>'


def _agent(agent: invocation_pb2.AgentInvocation, work: _Work) -> Iterator[str]:
    indent = min(max(0, agent.depth), _DEEPEST) * 1.6
    is_open = " open" if agent.depth == 0 else ""
    yield f'<details id="{_text(agent.invocation_id)}" style="margin-left: {indent:.1f}rem"{is_open}>'
    facts = "".join(f"<span class=dim>{_text(fact)}</span>" for fact in _facts(agent))
    yield f"<summary><b>{_text(agent.name or '?')}</b>{_state(agent.state)}{facts}</summary>"
    yield from _message("input", agent.input)
    for step, tools in work.of(agent.invocation_id):
        if step is not None and not _is_output(step.llm_response.message, agent.output):
            yield from _message(f"step {step.step_index + 1}", step.llm_response.message)
        if step is not None and (reason := finish_text(step.llm_response)):
            yield f'<p class="anomaly">finish reason {_text(reason)}</p>'
        for tool in tools:
            yield from _tool(tool, work.names)
    yield from _message("answer", agent.output)
    if agent.HasField("error"):
        yield f'<p class="failed">{_text(error_text(agent.error))}</p>'
    for anomaly in agent.anomalies:
        yield f'<p class="anomaly">{_text(one_line(anomaly.message))}</p>'
    yield "</details>"


def _facts(agent: invocation_pb2.AgentInvocation) -> Iterator[str]:
    if kind := kind_and_end(agent):
        yield kind
    if agent.HasField("start_time") and agent.HasField("end_time"):
        yield seconds_text(between(agent.start_time, agent.end_time))
    if agent.step_count:
        yield counted(agent.step_count, "step")
    if tokens(agent.usage) is not None:
        yield f"{tokens_text(agent.usage)} tokens"
    if agent.usage.HasField("cost_nanos"):
        yield cost_text(agent.usage)


def _tool(tool: invocation_pb2.ToolInvocation, names: Mapping[str, str]) -> Iterator[str]:
    spent = ""
    if tool.HasField("start_time") and tool.HasField("end_time"):
        spent = f"<span class=dim>{_text(seconds_text(between(tool.start_time, tool.end_time)))}</span>"
    called = ""
    if tool.child_invocation_id in names:
        target = _text(tool.child_invocation_id)
        called = f'<span class=dim>runs <a href="#{target}">{_text(names[tool.child_invocation_id])}</a></span>'
    yield f"<details><summary>→ <b>{_text(tool.name)}</b>{_state(tool.state)}{spent}{called}</summary>"
    yield from _json("arguments", tool.arguments_json, is_cut=tool.arguments_truncated)
    yield from _json("result", tool.result_json, is_cut=tool.result_truncated)
    if tool.HasField("error"):
        yield f'<p class="failed">{_text(error_text(tool.error))}</p>'
    yield "</details>"


def _message(title: str, message: message_pb2.Message) -> Iterator[str]:
    reasoning = "\n".join(part.reasoning.text for part in message.parts if part.reasoning.text)
    if reasoning:
        yield from _block(f"{title}, reasoning", reasoning)
    if text := "".join(part.text for part in message.parts):
        yield from _block(title, text)
    for part in message.parts:
        if part.data_json:
            yield from _json(title, part.data_json, is_cut=part.truncated)
        elif part.HasField("blob"):
            yield from _block(title, file_text(part.blob))


def _json(title: str, text: str, *, is_cut: bool) -> Iterator[str]:
    if not text:
        return
    try:
        value = json.loads(text)
        shown = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):  # what was cut is no JSON, and deep nesting is too much for both functions
        shown = text
    yield from _block(f"{title}, cut" if is_cut else title, shown)


def _block(title: str, text: str) -> Iterator[str]:
    yield f"<h2>{_text(title)}</h2><pre>{_text(text)}</pre>"


def _is_output(message: message_pb2.Message, output: message_pb2.Message) -> bool:
    """Return whether a step's message is the agent's answer, which is shown once."""
    return bool(text_of(message)) and text_of(message) == text_of(output)


def _state(state: execution_pb2.ExecutionState.ValueType) -> str:
    name = _text(state_text(state))
    return f'<span class="{name}">{name}</span>'


def _text(text: str) -> str:
    return escape(printable(text))
