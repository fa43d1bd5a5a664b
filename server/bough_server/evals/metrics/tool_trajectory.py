"""Compare tool calls with the expected ones, by name."""

from collections import Counter
from collections.abc import Collection, Sequence

from bough.v1 import eval_set_pb2, invocation_pb2
from bough_server.tools import builtin

_CONTROL = frozenset({builtin.TRANSFER, builtin.PLAN, builtin.RESPOND, *builtin.SPECS})


def mismatch(
    expected: Sequence[eval_set_pb2.ExpectedTool],
    actual: Sequence[invocation_pb2.ToolInvocation],
    mode: eval_set_pb2.TrajectoryMode.ValueType,
) -> str:
    """Return an empty text if the calls are as expected, else the difference in words."""
    names, made = [tool.name for tool in expected], [call.name for call in actual]
    missing, others = Counter(names) - Counter(made), Counter(made) - Counter(names)
    ahead = iter(made)
    in_order = all(name in ahead for name in names)
    is_right = {
        eval_set_pb2.TRAJECTORY_MODE_UNSPECIFIED: names == made,
        eval_set_pb2.TRAJECTORY_MODE_EXACT: names == made,
        eval_set_pb2.TRAJECTORY_MODE_IN_ORDER: in_order,
        eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER: not missing and not others,
        eval_set_pb2.TRAJECTORY_MODE_SUPERSET: not missing,
        eval_set_pb2.TRAJECTORY_MODE_SUBSET: not others,
    }[mode]
    return "" if is_right else f"expected {', '.join(names) or 'no calls'}, got {', '.join(made) or 'none'}"


def counted(
    expected_names: Collection[str], calls: Sequence[invocation_pb2.ToolInvocation]
) -> list[invocation_pb2.ToolInvocation]:
    """Return the calls in order, without calls of agents and of built-in control tools that are not expected."""
    return [
        call
        for call in sorted(calls, key=lambda call: call.sequence)
        if call.name in expected_names or not (call.child_invocation_id or call.name in _CONTROL)
    ]
