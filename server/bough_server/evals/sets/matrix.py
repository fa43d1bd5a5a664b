"""Matrices: every case of a set in every combination of an agent's models, instructions and temperatures."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

from bough.v1 import agent_pb2, eval_set_pb2, evaluation_pb2
from bough_server.agents.registry import find_reachable
from bough_server.documents.yaml import suggestion
from bough_server.evals.sets.expectation_validation import FieldProblem, KnownNames, unknown_name
from bough_server.messages import copy_of
from bough_server.runtime.agent import Resolver, llm_of
from bough_server.templates import template_mistake

MAX_CELLS: Final = 64
"""The most cells of a matrix."""

CELL_LABEL: Final = "bough/cell"
"""The label of a case that names its cell."""

_AXES: Final = ("model", "instruction", "temperature")
_MOST_ID: Final = 256


def count_cells(matrix: eval_set_pb2.EvalMatrix) -> int:
    """Return how many combinations a matrix has; 0 without any values."""
    sizes = [len(getattr(matrix, axis)) for axis in _AXES]
    return math.prod(max(1, size) for size in sizes) if any(sizes) else 0


def matrix_problems(eval_set: eval_set_pb2.EvalSet, known: KnownNames) -> Iterator[FieldProblem]:
    """Yield every problem of a set's matrix: the field's path and a sentence."""
    matrix, count = eval_set.matrix, count_cells(eval_set.matrix)
    if not eval_set.HasField("matrix"):
        return
    if not count:
        yield "matrix", f"has no values: set one of {', '.join(_AXES)}."
    if count > MAX_CELLS:
        sizes = " by ".join(f"{size:,} {axis}s" for axis in _AXES if (size := len(getattr(matrix, axis))))
        yield "matrix", f"has {count:,} cells ({sizes}), and may have {MAX_CELLS}."
        return
    yield from unknown_name("agent", matrix.agent, known.agents, "matrix.agent")
    for index, model in enumerate(matrix.model):
        yield from unknown_name("model", model, known.models, f"matrix.model[{index}]")
    for index, instruction in enumerate(matrix.instruction):
        if problem := template_mistake(instruction, ()):
            yield f"matrix.instruction[{index}]", problem
    longest = max((len(cell.name) for cell in list_cells(matrix)), default=0)
    for index, case in enumerate(eval_set.cases):
        place = f"cases[{index}]"
        if case.HasField("origin"):
            yield f"{place}.origin", "must not be set with a matrix: a fork has the agents of its origin."
        if any(turn.HasField("recorded") for turn in case.turns):
            yield f"{place}.turns[0].recorded", "must not be set with a matrix: nothing would run."
        if len(case.id) + longest + 3 > _MOST_ID:
            yield f"{place}.id", f"is {len(case.id)} characters, and {_MOST_ID} at most with the name of its cell."


def list_cells(matrix: eval_set_pb2.EvalMatrix) -> list[evaluation_pb2.EvalCell]:
    """Return the cells of a matrix, of which the last axis varies fastest, without their definitions."""
    axes = [
        [(axis, repr(value).removesuffix(".0") if axis == "temperature" else value) for value in values]
        for axis in _AXES
        if (values := range(1, len(matrix.instruction) + 1) if axis == "instruction" else getattr(matrix, axis))
    ]
    return [
        evaluation_pb2.EvalCell(
            name=", ".join(f"{axis}={value}" for axis, value in combination),
            values={axis: str(value) for axis, value in combination},
        )
        for combination in (itertools.product(*axes) if axes else ())
    ]


def plan_cells(
    cases: Sequence[evaluation_pb2.CasePlanned], cells: Sequence[evaluation_pb2.EvalCell]
) -> list[evaluation_pb2.CasePlanned]:
    """Return the cases in every cell, one case after the other: an evaluation that ends early has tried all cells."""
    return [_plan_in_cell(case, cell) for case in cases for cell in cells] if cells else list(cases)


def _plan_in_cell(case: evaluation_pb2.CasePlanned, cell: evaluation_pb2.EvalCell) -> evaluation_pb2.CasePlanned:
    planned = copy_of(case)
    planned.cell = planned.eval_case.labels[CELL_LABEL] = cell.name
    planned.eval_case.id = f"{case.eval_case.id} [{cell.name}]"
    return planned


def fill_cells(
    cells: Sequence[evaluation_pb2.EvalCell], matrix: eval_set_pb2.EvalMatrix, agent: str, resolver: Resolver
) -> str:
    """Set the definitions of cells: that of the changed agent, with the values of each.

    Return why the agent cannot be changed, as a sentence; empty if it can.
    """
    name = matrix.agent or agent
    found = resolver.agents.get(name)
    if found is None:
        return f"There is no agent {name!r}.{suggestion(name, resolver.agents)}" if cells else ""
    if cells and found.definition.WhichOneof("kind") not in ("llm", "supervisor"):
        return f"The agent {name!r} calls no model itself: name one that does."
    if cells and name not in {one.name for one in find_reachable(resolver, agent)}:
        return f"The agent {agent!r} never runs {name!r}: its cells would all be the same."
    for cell in cells:
        cell.definition.CopyFrom(_change(found.definition, matrix, cell))
    return ""


def _change(
    definition: agent_pb2.AgentDefinition, matrix: eval_set_pb2.EvalMatrix, cell: evaluation_pb2.EvalCell
) -> agent_pb2.AgentDefinition:
    changed = copy_of(definition)
    llm, values = llm_of(changed), cell.values
    if "model" in values:
        llm.model = values["model"]
    if "instruction" in values:
        llm.instruction = matrix.instruction[int(values["instruction"]) - 1]
    if "temperature" in values:
        llm.settings.temperature = float(values["temperature"])
    return changed
