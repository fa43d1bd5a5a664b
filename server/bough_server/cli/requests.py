"""The words of the command line in the words of the schema; it asks nobody."""

from bough.v1 import agent_service_pb2, event_pb2, policy_pb2
from bough_server.cli.choices import Delta, OnBusy, OnDisconnect, View
from bough_server.documents import suggestion
from bough_server.errors import ConfigurationError
from bough_server.events import NAME_OF_KIND


def view_of(view: View) -> agent_service_pb2.View.ValueType:
    """The view as the schema names it."""
    return agent_service_pb2.VIEW_SUMMARY if view is View.SUMMARY else agent_service_pb2.VIEW_FULL


def policy_of(
    delta: Delta | None, on_disconnect: OnDisconnect | None, on_busy: OnBusy | None = None
) -> policy_pb2.RunPolicy:
    """A run's policy that says only what the flags say."""
    policy = policy_pb2.RunPolicy()
    if delta is Delta.PASSTHROUGH:
        policy.delta.passthrough.SetInParent()
    elif delta is Delta.AGGREGATED:
        policy.delta.aggregated.SetInParent()
    if on_disconnect is not None:
        policy.on_disconnect = policy_pb2.OnDisconnect.Value(f"ON_DISCONNECT_{on_disconnect.name}")
    if on_busy is not None:
        policy.on_busy_session = policy_pb2.OnBusySession.Value(f"ON_BUSY_SESSION_{on_busy.name}")
    return policy


def state_of(text: str) -> event_pb2.State.ValueType:
    """The state of a name such as `failed`. Raises ConfigurationError for another."""
    name = f"STATE_{text.strip().upper().replace('-', '_').replace(' ', '_')}"
    names = [known for known in event_pb2.State.keys() if known != "STATE_UNSPECIFIED"]  # noqa: SIM118
    if name not in names:
        known = ", ".join(each.removeprefix("STATE_").lower() for each in names)
        raise ConfigurationError(f"There is no state {text!r}; there is {known}.")
    return event_pb2.State.Value(name)


def event_names_of(text: str) -> tuple[str, ...]:
    """The dotted names in a list such as `llm.completed,tool.*`; `agent.` may be left out.

    Raises ConfigurationError for one that no event has.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    patterns = tuple(name if name.startswith("agent.") else f"agent.{name}" for name in names)
    for pattern in patterns:
        if not any(is_named(known, (pattern,)) for known in NAME_OF_KIND.values()):
            raise ConfigurationError(f"There is no event {pattern!r}.{suggestion(pattern, NAME_OF_KIND.values())}")
    return patterns


def is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of those wanted; `agent.llm.*` stands for its group, none for all."""
    return not patterns or any(
        name.startswith(pattern[:-1]) if pattern.endswith(".*") else name == pattern for pattern in patterns
    )
