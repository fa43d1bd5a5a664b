"""Routing: the targets that a node's output, or the graph's input, travels to."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from bough.v1 import agent_pb2, error_pb2
from bough_server.agents.graph.topology import Topology, targets_of_branch
from bough_server.agents.graph.values import MISSING, copy_value, json_key, parse_inner_path, walk
from bough_server.errors import RunError
from bough_server.functions import Function, Router, Snapshot


def route(
    topology: Topology, source: str, value: Any, *, functions: Mapping[str, Function], snapshot: Callable[[], Snapshot]
) -> list[str]:
    """Return the targets of a node's output, sorted by name. Raises RunError NO_ROUTE, and what a router raises."""
    chosen = set(topology.edges.get(source, ()))
    for branch in topology.branches.get(source, ()):
        if branch.HasField("function"):
            router = functions[branch.function]
            assert isinstance(router, Router)  # checked when the run started
            chosen.update(_check_choice(branch, router.choose(copy_value(value), snapshot())))
        else:
            chosen.update(_choose(branch, value))
    return sorted(chosen)


def _check_choice(branch: agent_pb2.GraphBranch, chosen: object) -> list[str]:
    targets = targets_of_branch(branch)
    names = list(chosen) if isinstance(chosen, list | tuple) else []
    wrong = [name for name in names if name not in targets]
    if wrong or not names:
        what = f"chose {wrong[0]!r}" if wrong else "chose no target"
        raise _build_error(f"The router {branch.function!r} {what}; its targets are {', '.join(targets)}.")
    return names


def _choose(branch: agent_pb2.GraphBranch, value: Any) -> list[str]:
    at = walk(value, parse_inner_path(branch.path).names)
    cases = {json_key(json.loads(case.value_json)): case.target for case in branch.cases}
    chosen = []
    for item in at if isinstance(at, list) else [at]:
        target = branch.otherwise if item is MISSING else cases.get(json_key(item), branch.otherwise)
        if not target:
            shown = "nothing" if item is MISSING else json.dumps(item, ensure_ascii=False)[:80]
            where = f" at {branch.path}" if branch.path else ""
            raise _build_error(
                f"No case of its branch fits {shown}{where}; they are "
                f"{', '.join(case.value_json for case in branch.cases)}. Add the case, or `otherwise`."
            )
        chosen.append(target)
    if not chosen and not branch.otherwise:
        raise _build_error(f"Its branch by {branch.path or 'the output'} chose no target: the list is empty.")
    return chosen or [branch.otherwise]


def _build_error(message: str) -> RunError:
    return RunError(message, reason=error_pb2.ERROR_REASON_NO_ROUTE)
