"""Tables of runs, sessions, agents, models and messages, in the order given."""

import json
from collections.abc import Sequence
from typing import Final

from rich.text import Text

from bough import text_of
from bough.v1 import agent_pb2, execution_pb2, message_pb2, model_pb2, run_pb2, session_pb2, tool_pb2, usage_pb2
from bough_server.cli.render.blocks import truncate_line
from bough_server.cli.render.format import (
    clip,
    cost_text,
    enum_text,
    state_style,
    state_text,
    time_text,
    tokens,
    tokens_text,
)
from bough_server.cli.render.notes import result_text
from bough_server.cli.render.questions import open_request_lines, origin_lines
from bough_server.log.blobs import blobs_in, file_text
from bough_server.plain_text import one_line, printable

_BELOW: Final = "magenta"
_STATE_WIDTH: Final = 9
REVISION_WIDTH: Final = 12
"""Number of characters of a revision that are printed."""


def runs_table(runs: Sequence[run_pb2.Run], width: int) -> list[Text]:
    """Return a row for each run: its id, state, creation time and agent.

    Lines below it have its usage so far and the beginning of its input, its origin, its open requests, and why it is
    parked, as far as they apply.
    """
    state_width = max([_STATE_WIDTH, *(len(state_text(run.state)) for run in runs)])
    lines = [Text(f"{'run':36}  {'state':{state_width}}  {'created':16}  agent"[:width], style="dim")]
    for run in runs:
        line = Text(f"{run.run_id:36}  ")
        line.append(f"{state_text(run.state):{state_width}}", style=state_style(run.state))
        line.append(f"  {time_text(run.create_time)}  {run.agent}")
        lines.append(truncate_line(line, width))
        if below := _usage_and_input(run):
            lines.append(truncate_line(Text(f"  {below}", style="dim"), width))
        lines += [
            truncate_line(Text(f"  {below}", style=_BELOW), width)
            for below in [*origin_lines(run), *open_request_lines(run)]
        ]
    return lines


def _usage_and_input(run: run_pb2.Run) -> str:
    """Return a run's usage so far, as far as it is known, and the beginning of its input."""
    return " · ".join(part for part in (*_format_usage(run.tree_usage), one_line(run.input_excerpt)) if part)


def _format_usage(usage: usage_pb2.Usage) -> list[str]:
    used = [f"{tokens_text(usage)} tokens"] if tokens(usage) is not None else []
    return used + ([cost_text(usage)] if usage.HasField("cost_nanos") else [])


def sessions_table(sessions: Sequence[session_pb2.Session], width: int) -> list[Text]:
    """Return a row for each session: its id, when a run last started or ended in it, and the run that holds it."""
    lines = [Text(f"{'session':36}  {'last run':16}  held by"[:width], style="dim")]
    for session in sessions:
        line = Text(f"{session.session_id:36}  {_last_run(session):16}  {session.current_run_id or '-'}")
        lines.append(truncate_line(line, width))
    return lines


def _last_run(session: session_pb2.Session) -> str:
    return time_text(session.last_run_time) if session.HasField("last_run_time") else "-"


def session_lines(session: session_pb2.Session, *, width: int) -> list[Text]:
    """Return a session's fields, one on each line."""
    fields = [
        ("session", session.session_id),
        ("user", session.user_id),
        ("created", time_text(session.create_time)),
        ("last run", _last_run(session)),
        ("held by", session.current_run_id or "-"),
        *(("label", f"{key}={value}") for key, value in sorted(session.labels.items())),
    ]
    return [truncate_line(Text(f"{name:8}  {one_line(value)}"), width) for name, value in fields]


def agents_table(agents: Sequence[agent_pb2.Agent], width: int) -> list[Text]:
    """Return a row for each agent: its name, model and description; if any is stored, also revision and time.

    The model of an agent that calls none is its kind in parentheses, and of an agent in code "(code)".
    """
    name_width = max([5, *(len(agent.definition.name) for agent in agents)])
    model_width = max([5, *(len(_model(agent)) for agent in agents)])
    has_stored = any(agent.source == agent_pb2.AGENT_SOURCE_STORED for agent in agents)
    stored = f"  {'revision':{REVISION_WIDTH}}  {'stored':16}" if has_stored else ""
    lines = [Text(f"{'agent':{name_width}}  {'model':{model_width}}{stored}  what it does"[:width], style="dim")]
    for agent in agents:
        line = Text(f"{agent.definition.name:{name_width}}", style="bold")
        since = time_text(agent.revision_create_time) if agent.HasField("revision_create_time") else "-"
        stored = f"  {agent.revision[:REVISION_WIDTH]:{REVISION_WIDTH}}  {since:16}" if has_stored else ""
        rest = f"  {_model(agent):{model_width}}{stored}  {one_line(agent.definition.description)}"
        line.append(clip(rest, max(8, width - name_width)), style="not bold")
        lines.append(line)
    return lines


def agent_lines(agent: agent_pb2.Agent) -> list[str]:
    """Return the fields that the server adds to a definition, one on each line."""
    fields = [
        ("source", enum_text(agent_pb2.AgentSource.DESCRIPTOR, agent.source)),
        ("revision", agent.revision[:REVISION_WIDTH]),
    ]
    if agent.HasField("create_time"):
        fields.append(("create_time", agent.create_time.ToJsonString()))
    if agent.HasField("revision_create_time"):
        fields.append(("revision_create_time", agent.revision_create_time.ToJsonString()))
    return [f"{name}: {value}" for name, value in fields]


def models_table(models: Sequence[model_pb2.ModelInfo], width: int) -> list[Text]:
    """Return a row for each model: its name, provider, name at the provider, and fallbacks in order."""
    columns = [("model", 5), ("provider", 8), ("at the provider", 15)]
    rows = [(model.name, model.provider, model.model or "-") for model in models]
    sizes = [max([least, *(len(row[index]) for row in rows)]) for index, (_, least) in enumerate(columns)]
    head = "  ".join(f"{name:{size}}" for (name, _), size in zip(columns, sizes, strict=True))
    lines = [Text(f"{head}  fallbacks"[:width].rstrip(), style="dim")]
    for model, row in zip(models, rows, strict=True):
        line = Text(f"{row[0]:{sizes[0]}}", style="bold")
        rest = "".join(f"  {cell:{size}}" for cell, size in zip(row[1:], sizes[1:], strict=True))
        line.append(f"{rest}  {', '.join(model.fallbacks) or '-'}", style="not bold")
        lines.append(truncate_line(line, width))
    return lines


def tools_table(tools: Sequence[tool_pb2.ToolInfo], width: int) -> list[Text]:
    """Return a row for each tool: its name, where it runs, whether every call needs an approval, and what it does."""
    name_width = max([4, *(len(tool.name) for tool in tools)])
    place_width = max([7, *(len(tool.server) for tool in tools)])
    lines = [Text(f"{'tool':{name_width}}  {'runs in':{place_width}}  what it does"[:width], style="dim")]
    for tool in tools:
        line = Text(f"{tool.name:{name_width}}", style="bold")
        approval = "(needs an approval) " if tool.requires_approval else ""
        place = tool.server or enum_text(tool_pb2.ToolSource.DESCRIPTOR, tool.source)
        rest = f"  {place:{place_width}}  {approval}{one_line(tool.description)}"
        line.append(clip(rest, max(8, width - name_width)), style="not bold")
        lines.append(line)
    return lines


def tool_lines(tool: tool_pb2.ToolInfo) -> list[str]:
    """Return a tool's name, rules, description and schemas as lines."""
    facts = {
        "runs in": enum_text(tool_pb2.ToolSource.DESCRIPTOR, tool.source),
        "server": f"{tool.server}, as {tool.server_tool_name!r}" if tool.server else "",
        "approval": "every call" if tool.requires_approval else "",
        "approvers": tool.approver_group,
        "if its outcome is unknown": enum_text(tool_pb2.ToolRecovery.DESCRIPTOR, tool.on_recovery),
        "timeout": f"{tool.timeout.ToNanoseconds() / 1e9:g} s" if tool.HasField("timeout") else "",
        "hints": ", ".join(f"{field.name}: {str(value).lower()}" for field, value in tool.hints.ListFields()),
        "digest": tool.digest,
    }
    lines = [printable(tool.name), *(f"  {name}: {printable(fact)}" for name, fact in facts.items() if fact)]
    lines += ["", printable(tool.description), "", "input schema:", *_schema_lines(tool.input_schema_json)]
    return [*lines, "output schema:", *_schema_lines(tool.output_schema_json)] if tool.output_schema_json else lines


def _schema_lines(schema_json: str) -> list[str]:
    return [f"  {line}" for line in json.dumps(json.loads(schema_json), indent=2, ensure_ascii=False).splitlines()]


def message_lines(message: message_pb2.Message, *, width: int) -> list[Text]:
    """Return a message's position, author and kind, then its text, tool calls and results, indented."""
    kind = enum_text(message_pb2.MessageKind.DESCRIPTOR, message.kind)
    head = Text(f"{message.position:>4}  ", style="dim")
    head.append(message.author or "?", style="bold").append(f"  {kind}", style="dim")
    lines = [truncate_line(head, width)]
    lines += [Text(f"      {line}") for line in printable(text_of(message)).splitlines()]
    lines += [Text(f"      {line}", style="dim") for line in map(one_line, _describe_files(message))]
    for part in message.parts:
        if part.HasField("tool_call"):
            call = f"→ {part.tool_call.name} {one_line(part.tool_call.arguments_json)}"
            lines.append(Text("      " + clip(call, max(8, width - 6)), style="blue"))
        elif part.HasField("tool_result"):
            result = f"← {part.tool_result.call.name}  {one_line(result_text(part.tool_result))}"
            lines.append(Text("      " + clip(result, max(8, width - 6)), style="blue"))
    return lines


def _describe_files(message: message_pb2.Message) -> list[str]:
    """Describe each file of a message, with the hash by which `bough sessions file` reads it."""
    return [" ".join(filter(None, (file_text(blob), blob.sha256))) for blob in blobs_in(message.parts)]


def _model(agent: agent_pb2.Agent) -> str:
    if agent.source == agent_pb2.AGENT_SOURCE_CODE:
        return "(code)"
    if agent.kind not in (execution_pb2.AGENT_KIND_LLM, execution_pb2.AGENT_KIND_SUPERVISOR):
        return f"({enum_text(execution_pb2.AgentKind.DESCRIPTOR, agent.kind)})"
    return agent.definition.supervisor.llm.model or agent.definition.llm.model or "(caller's)"
