"""Runs, sessions, agents and messages as aligned lines; it sorts and filters nothing."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich.text import Text

from bough import text_of
from bough.v1 import agent_pb2, agent_service_pb2, catalog_service_pb2, message_pb2, session_service_pb2
from bough_server.cli.render.format import clip, moment, one_line, printable, short_state_text, state_style
from bough_server.cli.render.questions import origin_lines, standing_lines

_BELOW: Final = "magenta"


def runs_table(runs: Iterable[agent_service_pb2.Run], *, width: int) -> list[Text]:
    """A row for each run: its id, state, beginning and agent; below it what it asks, comes from and misses."""
    lines = [Text(f"{'run':36}  {'state':9}  {'created':16}  agent"[:width], style="dim")]
    for run in runs:
        line = Text(f"{run.run_id:36}  ")
        line.append(f"{short_state_text(run.state):9}", style=state_style(run.state))
        line.append(f"  {moment(run.create_time)}  {run.agent}")
        lines.append(_fitted(line, width))
        lines += [
            _fitted(Text(f"  {below}", style=_BELOW), width) for below in [*origin_lines(run), *standing_lines(run)]
        ]
    return lines


def sessions_table(sessions: Iterable[session_service_pb2.Session], *, width: int) -> list[Text]:
    """A row for each session: its id, its last use and the run that holds it."""
    lines = [Text(f"{'session':36}  {'last used':16}  held by"[:width], style="dim")]
    for session in sessions:
        used = session.update_time if session.HasField("update_time") else session.create_time
        line = Text(f"{session.session_id:36}  {moment(used)}  {session.current_run_id or '-'}")
        lines.append(_fitted(line, width))
    return lines


def session_lines(session: session_service_pb2.Session, *, width: int) -> list[Text]:
    """A session, a field on each line."""
    fields = [
        ("session", session.session_id),
        ("user", session.user_id),
        ("created", moment(session.create_time)),
        ("held by", session.current_run_id or "-"),
        *(("label", f"{key}={value}") for key, value in sorted(session.labels.items())),
    ]
    return [_fitted(Text(f"{name:8}  {one_line(value)}"), width) for name, value in fields]


def agents_table(agents: Sequence[agent_pb2.AgentDefinition], *, width: int) -> list[Text]:
    """A row for each agent: its name, its model and what it does; where any is stored, its revision and since when.

    An agent that asks no model has its kind in the model's place.
    """
    name_width = max([5, *(len(agent.name) for agent in agents)])
    model_width = max([5, *(len(_model(agent)) for agent in agents)])
    has_stored = any(agent.HasField("create_time") for agent in agents)
    stored = f"  {'revision':16}  {'stored':16}" if has_stored else ""
    lines = [Text(f"{'agent':{name_width}}  {'model':{model_width}}{stored}  what it does"[:width], style="dim")]
    for agent in agents:
        line = Text(f"{agent.name:{name_width}}", style="bold")
        since = moment(agent.create_time) if agent.HasField("create_time") else "-"
        stored = f"  {agent.revision:16}  {since:16}" if has_stored else ""
        rest = f"  {_model(agent):{model_width}}{stored}  {one_line(agent.description)}"
        line.append(clip(rest, max(8, width - name_width)), style="not bold")
        lines.append(line)
    return lines


def models_table(models: Sequence[catalog_service_pb2.ModelInfo], *, width: int) -> list[Text]:
    """A row for each model: its name, its provider, its name there, and who answers where it cannot."""
    columns = [("model", 5), ("provider", 8), ("at the provider", 15)]
    rows = [(model.name, model.provider, model.model or "-") for model in models]
    sizes = [max([least, *(len(row[place]) for row in rows)]) for place, (_, least) in enumerate(columns)]
    head = "  ".join(f"{name:{size}}" for (name, _), size in zip(columns, sizes, strict=True))
    lines = [Text(f"{head}  then"[:width].rstrip(), style="dim")]
    for model, row in zip(models, rows, strict=True):
        line = Text(f"{row[0]:{sizes[0]}}", style="bold")
        rest = "".join(f"  {cell:{size}}" for cell, size in zip(row[1:], sizes[1:], strict=True))
        line.append(f"{rest}  {', '.join(model.fallbacks) or '-'}", style="not bold")
        lines.append(_fitted(line, width))
    return lines


def message_lines(message: message_pb2.Message, *, width: int) -> list[Text]:
    """A message: who said it, then its text, indented; calls and results by name."""
    kind = message_pb2.MessageKind.Name(message.kind).removeprefix("MESSAGE_KIND_").lower().replace("_", " ")
    head = Text(f"{message.position:>4}  ", style="dim")
    head.append(message.author or "?", style="bold").append(f"  {kind}", style="dim")
    lines = [_fitted(head, width)]
    lines += [Text(f"      {line}") for line in printable(text_of(message)).splitlines()]
    for part in message.parts:
        if part.HasField("tool_call"):
            call = f"→ {part.tool_call.name} {one_line(part.tool_call.arguments_json)}"
            lines.append(Text("      " + clip(call, max(8, width - 6)), style="blue"))
        elif part.HasField("tool_result"):
            said = text_of(message_pb2.Message(parts=part.tool_result.parts)) or part.tool_result.error.message
            result = f"← {part.tool_result.call.name}  {one_line(said)}"
            lines.append(Text("      " + clip(result, max(8, width - 6)), style="blue"))
    return lines


def _model(agent: agent_pb2.AgentDefinition) -> str:
    kind = agent.WhichOneof("kind")
    if kind not in ("llm", "supervisor"):
        return f"({kind or 'code'})"
    return agent.supervisor.llm.model or agent.llm.model or "(caller's)"


def _fitted(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line
