"""A turn of a case that has been run."""

from dataclasses import dataclass

from bough.v1 import eval_set_pb2, invocation_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn of a case: what is expected and what happened."""

    index: int
    expect: eval_set_pb2.Expectation | None
    invocation: invocation_pb2.Invocation
