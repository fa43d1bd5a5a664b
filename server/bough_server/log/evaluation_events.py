"""EvaluationEvent: kinds, and conversion from the bytes that the log stores."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from bough.v1 import evaluation_pb2, options_pb2

EvaluationEvent = evaluation_pb2.EvaluationEvent

_PAYLOADS = EvaluationEvent.DESCRIPTOR.oneofs_by_name["payload"].fields

NAME_OF_KIND: Final[Mapping[int, str]] = MappingProxyType(
    {field.number: field.GetOptions().Extensions[options_pb2.event_options].name for field in _PAYLOADS}
)
"""Payload tag to dotted name, such as 204 to "evaluation.trial.scored"."""

KIND_OF_FIELD: Final[Mapping[str, int]] = MappingProxyType({field.name: field.number for field in _PAYLOADS})
"""Payload field name, as WhichOneof("payload") returns it, to tag, which the log stores as `kind`.

None is a tag of AgentEvent's, so the kind of a stored event says which message it is.
"""

EVALUATION_PLANNED: Final = KIND_OF_FIELD["evaluation_planned"]
CASE_PLANNED: Final = KIND_OF_FIELD["case_planned"]
CASE_TRIAL_SCORED: Final = KIND_OF_FIELD["case_trial_scored"]
EVALUATION_TOTALED: Final = KIND_OF_FIELD["evaluation_totaled"]
EVALUATION_CANCEL_REQUESTED: Final = KIND_OF_FIELD["evaluation_cancel_requested"]
EVALUATION_COMPLETED: Final = KIND_OF_FIELD["evaluation_completed"]
EVALUATION_FAILED: Final = KIND_OF_FIELD["evaluation_failed"]
SUSPECTS_PLANNED: Final = KIND_OF_FIELD["suspects_planned"]
EVALUATION_CANCELLED: Final = KIND_OF_FIELD["evaluation_cancelled"]

TERMINAL_KINDS: Final = frozenset({EVALUATION_COMPLETED, EVALUATION_FAILED, EVALUATION_CANCELLED})
"""The last event of a log."""


def kind_of(event: EvaluationEvent) -> int:
    """Return the payload's tag; 0 for a payload that this reader does not know."""
    name = event.WhichOneof("payload")
    return KIND_OF_FIELD[name] if name else 0


def stamp(evaluation_id: str) -> bytes:
    """Return the bytes to prepend to an event's stored bytes when it is read; see events.stamp."""
    return EvaluationEvent(evaluation_id=evaluation_id).SerializeToString()


def parse(stamped: bytes) -> EvaluationEvent:
    """Parse an event from its stamp and stored bytes."""
    return EvaluationEvent.FromString(stamped)
