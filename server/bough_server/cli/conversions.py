"""Conversion of options to messages of the schema."""

from bough.v1 import execution_pb2, follow_pb2, policy_pb2
from bough_server.cli.options import Delta, OnBusy, OnDisconnect, View
from bough_server.errors import ConfigurationError
from bough_server.log.events import KIND_OF_FIELD, NAME_OF_KIND


def view_of(view: View) -> follow_pb2.EventView.ValueType:
    """Return the schema's value for a view."""
    return follow_pb2.EVENT_VIEW_SUMMARY if view is View.SUMMARY else follow_pb2.EVENT_VIEW_FULL


def policy_of(
    delta: Delta | None, on_disconnect: OnDisconnect | None, on_busy: OnBusy | None = None
) -> policy_pb2.RunPolicy:
    """Build a run's policy from flags; the fields of flags that are None stay unset, for the server to fill in."""
    policy = policy_pb2.RunPolicy()
    if delta is Delta.PASSTHROUGH:
        policy.deltas.passthrough.SetInParent()
    elif delta is Delta.AGGREGATED:
        policy.deltas.aggregated.SetInParent()
    if on_disconnect is not None:
        policy.on_disconnect = policy_pb2.DisconnectPolicy.Value(f"DISCONNECT_POLICY_{on_disconnect.name}")
    if on_busy is not None:
        policy.on_busy_session = policy_pb2.BusySessionPolicy.Value(f"BUSY_SESSION_POLICY_{on_busy.name}")
    return policy


def state_of(text: str) -> execution_pb2.ExecutionState.ValueType:
    """Parse a state such as `failed` or `INPUT_REQUIRED`. Raises ConfigurationError for an unknown state."""
    normalized = text.strip().upper().replace("-", "_").replace(" ", "_")
    name = f"EXECUTION_STATE_{normalized.removeprefix('EXECUTION_STATE_')}"
    names = [known for known in execution_pb2.ExecutionState.keys() if known != "EXECUTION_STATE_UNSPECIFIED"]  # noqa: SIM118
    if name not in names:
        known = ", ".join(each.removeprefix("EXECUTION_STATE_").lower() for each in names)
        raise ConfigurationError(f"There is no state {text!r}: use one of {known}.")
    return execution_pb2.ExecutionState.Value(name)


def event_names_of(text: str) -> tuple[str, ...]:
    """Parse a list of event names such as `llm.completed,tool.*` into dotted names.

    `agent.` may be omitted, and `run_started`, the name of the event's field in the schema, means `agent.run.started`.
    Raises ConfigurationError for a name that matches no event.
    """
    patterns = tuple(_to_dotted_name(name.strip().lower()) for name in text.split(",") if name.strip())
    for pattern in patterns:
        if not any(is_named(known, (pattern,)) for known in NAME_OF_KIND.values()):
            from bough_server.documents.yaml import suggestion

            raise ConfigurationError(f"There is no event {pattern!r}.{suggestion(pattern, NAME_OF_KIND.values())}")
    return patterns


def _to_dotted_name(name: str) -> str:
    if name in KIND_OF_FIELD:
        return NAME_OF_KIND[KIND_OF_FIELD[name]]
    return name if name.startswith("agent.") else f"agent.{name}"


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a dotted name matches a pattern. `agent.llm.*` matches a group; no patterns match every name."""
    return not patterns or any(
        name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern for pattern in patterns
    )
