"""The agent tree of a run as one HTML page that needs nothing else: no script, no network, light and dark."""

from collections.abc import Iterator, Mapping, Sequence

from bough import text_of
from bough.v1 import invocation_pb2, message_pb2, step_pb2
from bough_server.cli.render.format import (
    cost_text,
    error_text,
    pluralize,
    seconds_between,
    seconds_text,
    state_text,
    tokens,
    tokens_text,
)
from bough_server.cli.render.notes import finish_text
from bough_server.cli.render.tree import kind_and_end, origin_parts, totals
from bough_server.evals.reports.page import Block, Call, Note, Step, TreeNode, indent_json, render
from bough_server.log.blobs import file_text
from bough_server.plain_text import one_line


def tree_page(invocation: invocation_pb2.Invocation) -> str:
    """Return the page of a record with steps. It has ASCII characters only, so that it survives any encoding."""
    work = _Work(invocation)
    more = invocation.agents_total - len(invocation.agents)
    return render(
        "run.html.jinja",
        title=f"{invocation.agent or 'run'} {invocation.run_id}",
        agent=invocation.agent or "run",
        run_id=invocation.run_id,
        head=list(_head(invocation)),
        nodes=[_node(agent, work) for agent in invocation.agents],
        tail=[Note(text=f"… and {pluralize(more, 'more agent')}")] if more > 0 else [],
    )


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


def _head(invocation: invocation_pb2.Invocation) -> Iterator[Note]:
    yield Note(text=" · ".join(totals(invocation)), style=state_text(invocation.state))
    if invocation.HasField("forked_from"):
        yield Note(text=" · ".join(origin_parts(invocation)))
    if not invocation.agents and invocation.HasField("error"):
        yield Note(text=error_text(invocation.error), style="failed")
    for anomaly in invocation.anomalies:
        yield Note(text=one_line(anomaly.message), style="anomaly")


def _node(agent: invocation_pb2.AgentInvocation, work: _Work) -> TreeNode:
    notes = [Note(text=error_text(agent.error), style="failed")] if agent.HasField("error") else []
    notes += [Note(text=one_line(anomaly.message), style="anomaly") for anomaly in agent.anomalies]
    return TreeNode(
        id=agent.invocation_id,
        name=agent.name or "?",
        depth=agent.depth,
        state=state_text(agent.state),
        facts=list(_facts(agent)),
        blocks=list(_message("input", agent.input)),
        steps=[_step(step, tools, agent, work.names) for step, tools in work.of(agent.invocation_id)],
        answer=list(_message("answer", agent.output)),
        notes=notes,
        is_open=agent.depth == 0,
    )


def _step(
    step: step_pb2.AgentStep | None,
    tools: Sequence[invocation_pb2.ToolInvocation],
    agent: invocation_pb2.AgentInvocation,
    names: Mapping[str, str],
) -> Step:
    blocks: list[Block] = []
    notes: list[Note] = []
    if step is not None:
        if not _is_output(step.llm_response.message, agent.output):
            blocks += _message(f"step {step.step_index + 1}", step.llm_response.message)
        if reason := finish_text(step.llm_response):
            notes.append(Note(text=f"finish reason {reason}", style="anomaly"))
    return Step(blocks=blocks, notes=notes, calls=[_call(tool, names) for tool in tools])


def _facts(agent: invocation_pb2.AgentInvocation) -> Iterator[str]:
    if kind := kind_and_end(agent):
        yield kind
    if agent.HasField("start_time") and agent.HasField("end_time"):
        yield seconds_text(seconds_between(agent.start_time, agent.end_time))
    if agent.step_count:
        yield pluralize(agent.step_count, "step")
    if tokens(agent.usage) is not None:
        yield f"{tokens_text(agent.usage)} tokens"
    if agent.usage.HasField("cost_nanos"):
        yield cost_text(agent.usage)


def _call(tool: invocation_pb2.ToolInvocation, names: Mapping[str, str]) -> Call:
    spent: list[str] = []
    if tool.HasField("start_time") and tool.HasField("end_time"):
        spent.append(seconds_text(seconds_between(tool.start_time, tool.end_time)))
    is_known = tool.child_invocation_id in names
    return Call(
        name=tool.name,
        state=state_text(tool.state),
        facts=spent,
        blocks=[
            *_json("arguments", tool.arguments_json, is_truncated=tool.arguments_truncated),
            *_json("edited arguments", tool.executed_arguments_json, is_truncated=tool.executed_arguments_truncated),
            *_json("result", tool.result_json, is_truncated=tool.result_truncated),
        ],
        notes=[Note(text=error_text(tool.error), style="failed")] if tool.HasField("error") else [],
        target=tool.child_invocation_id if is_known else "",
        target_name=names.get(tool.child_invocation_id, ""),
    )


def _message(title: str, message: message_pb2.Message) -> Iterator[Block]:
    if reasoning := "\n".join(part.reasoning.text for part in message.parts if part.reasoning.text):
        yield Block(title=f"{title}, reasoning", text=reasoning)
    if text := "".join(part.text for part in message.parts):
        yield Block(title=title, text=text)
    for part in message.parts:
        if part.data_json:
            yield from _json(title, part.data_json, is_truncated=part.truncated)
        elif part.HasField("blob"):
            yield Block(title=title, text=file_text(part.blob))


def _json(title: str, text: str, *, is_truncated: bool) -> Iterator[Block]:
    if not text:
        return
    yield Block(title=f"{title}, cut" if is_truncated else title, text=indent_json(text))


def _is_output(message: message_pb2.Message, output: message_pb2.Message) -> bool:
    """Return whether a step's message is the agent's answer, which is shown once."""
    return bool(text_of(message)) and text_of(message) == text_of(output)
