"""Expectations in words that people read."""

from collections.abc import Iterator

from bough.v1 import eval_set_pb2
from bough_server.evals.metrics.run_outcome import describe_handoffs, find_expected_state, name_reason
from bough_server.evals.metrics.tool_names import name_words
from bough_server.evals.metrics.turn import name_state
from bough_server.evals.reports.page import Block, indent_json

_MODES = {
    eval_set_pb2.TRAJECTORY_MODE_EXACT: "in this order, and no others",
    eval_set_pb2.TRAJECTORY_MODE_IN_ORDER: "in this order, others may be between them",
    eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER: "in any order, and no others",
    eval_set_pb2.TRAJECTORY_MODE_SUPERSET: "in any order, others may be made",
    eval_set_pb2.TRAJECTORY_MODE_SUBSET: "none but these, in any order",
}


def expectation_blocks(expect: eval_set_pb2.EvalExpectation) -> Iterator[Block]:
    """Yield what is expected beside the tree: how the run ends, the answer and the tool calls."""
    if expect.HasField("run"):
        yield Block(title="run", text="\n".join(_run_words(expect.run)))
    if expect.HasField("answer"):
        yield Block(title="answer", text=answer_words(expect.answer))
    if expect.tools:
        numbered = (f"{number}. {_tool_words(tool)}" for number, tool in enumerate(expect.tools, start=1))
        yield Block(title="tool calls", text="\n".join(numbered))


def call_blocks(tool: eval_set_pb2.ExpectedTool) -> Iterator[Block]:
    """Yield what is expected of a call's arguments and result."""
    for title, text, matcher in (
        ("arguments", tool.arguments_json, tool.arguments_match if tool.HasField("arguments_match") else None),
        ("result", tool.result_json, tool.result_match if tool.HasField("result_match") else None),
    ):
        if text:
            yield Block(title=title, text=indent_json(text))
        if matcher is not None:
            yield Block(title=title, text=matcher_words(matcher))


def answer_words(expected: eval_set_pb2.ExpectedAnswer) -> str:
    """Return what is expected of an answer, a line for each condition; "any" if there is none."""
    lines = [f"is: {expected.exact}"] if expected.HasField("exact") else []
    lines += [f"contains: {text}" for text in expected.contains]
    lines += [f"does not contain: {text}" for text in expected.excludes]
    if expected.regex:
        lines.append(f"matches: {expected.regex}")
    if expected.HasField("min_characters"):
        lines.append(f"at least {expected.min_characters:,} characters")
    if expected.HasField("max_characters"):
        lines.append(f"at most {expected.max_characters:,} characters")
    if lines and expected.ignore_case:
        lines.append("case is ignored")
    if expected.HasField("json"):
        lines.append(f"is JSON that {matcher_words(expected.json)}")
    return "\n".join(lines) or "any"


def matcher_words(matcher: eval_set_pb2.ValueMatcher) -> str:
    """Return what a value has to be."""
    kind = matcher.WhichOneof("expected")
    if kind == "equals_json":
        lines = [f"equals {indent_json(matcher.equals_json)}"]
    elif kind == "subset_json":
        lines = [f"contains {indent_json(matcher.subset_json)}"]
    elif kind == "regex":
        lines = [f"matches: {matcher.regex}"]
    elif kind == "schema_json":
        lines = [f"fits the JSON Schema {indent_json(matcher.schema_json)}"]
    else:
        lines = ["is anything"]
    if matcher.ignore:
        lines.append(f"ignored: {', '.join(matcher.ignore)}")
    if matcher.number_tolerance:
        lines.append(f"numbers may be {matcher.number_tolerance:g} apart")
    return "\n".join(lines)


def _run_words(run: eval_set_pb2.ExpectedRun) -> Iterator[str]:
    yield f"is {name_state(find_expected_state(run))}"
    if run.reason:
        yield f"for the reason {name_reason(run.reason)}"
    for value in run.session_state:
        wanted = matcher_words(value.value_match) if value.HasField("value_match") else "is there"
        yield f"session state {value.path} {'is absent' if value.absent else wanted}"
    if run.handoffs or run.handoffs_mode:
        mode = _MODES.get(run.handoffs_mode, _MODES[eval_set_pb2.TRAJECTORY_MODE_EXACT])
        yield f"handoffs {mode}: {describe_handoffs(run.handoffs)}"


def agent_words(agent: eval_set_pb2.ExpectedAgent) -> Iterator[str]:
    """Yield what is expected of how an agent began and ended."""
    if agent.state:
        yield f"is {name_state(agent.state)}"
    if agent.HasField("input_match"):
        yield f"its input {matcher_words(agent.input_match)}"


def mode_words(agent: eval_set_pb2.ExpectedAgent) -> str:
    """Return how an agent's calls are compared; empty if they are not."""
    if not agent.tools and not agent.tools_mode:
        return ""
    words = _MODES.get(agent.tools_mode, _MODES[eval_set_pb2.TRAJECTORY_MODE_EXACT])
    return f"calls {words}" if agent.tools else "no calls"


def repeat_words(repeat: eval_set_pb2.EvalRepeat) -> str:
    """Return how often something is expected."""
    low = repeat.min if repeat.HasField("min") else 1
    if not repeat.HasField("max"):
        return f"at least {_times(low)}" if low else "any number of times"
    return _times(low) if low == repeat.max else f"{low} to {_times(repeat.max)}"


def _times(count: int) -> str:
    return "1 time" if count == 1 else f"{count} times"


def call_words(tool: eval_set_pb2.ExpectedTool) -> str:
    """Return which call of which tool is expected, and how it ends."""
    words = name_words(tool) + (f", call {tool.nth} of it" if tool.HasField("nth") else "")
    return words + (f", is {name_state(tool.state)}" if tool.state else "")


def _tool_words(tool: eval_set_pb2.ExpectedTool) -> str:
    details = [f"{block.title} {block.text}" for block in call_blocks(tool)]
    return "\n".join([call_words(tool), *details]).replace("\n", "\n  ")
