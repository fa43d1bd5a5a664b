"""What is scored and compared: stored runs, and results or the evaluations that have them."""

from typing import TypeAlias

from bough.arguments import build, wrong_type
from bough.v1 import eval_result_pb2, invocation_pb2

Source: TypeAlias = str | eval_result_pb2.EvalResult
"""A result, or the id of an evaluation that has one."""

InvocationSource: TypeAlias = invocation_pb2.InvocationSource


def run_source(run_id: str, *, as_of_sequence: int = 0) -> InvocationSource:
    """Return a stored run as something to score or to compare, up to a sequence if one is given."""
    return InvocationSource(run=build(invocation_pb2.RunRef, run_id=run_id, as_of_sequence=as_of_sequence))


def source_of(name: str, source: Source) -> eval_result_pb2.EvalSource:
    """Return a result, or the id of an evaluation, as requests name it; `name` is that of the argument."""
    if isinstance(source, str):
        return eval_result_pb2.EvalSource(evaluation_id=source)
    if not isinstance(source, eval_result_pb2.EvalResult):
        raise wrong_type(name, "an EvalResult or the id of an evaluation", source)
    return eval_result_pb2.EvalSource(result=source)
