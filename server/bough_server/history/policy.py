"""Which history policy holds for an agent, of those that its caller's link and its definition give; pure."""

from bough.v1.agent_pb2 import HISTORY_SCOPE_SESSION, AgentDefinition, AgentLink, HistoryPolicy


def policy_of(definition: AgentDefinition, link: AgentLink | None = None) -> HistoryPolicy:
    """The history policy in force: of scope and of overflow the link's, else the definition's; SESSION where none."""
    own, called = definition.history, link.history if link is not None else HistoryPolicy()
    policy = HistoryPolicy()
    policy.CopyFrom(own if called.WhichOneof("overflow") is None else called)
    policy.scope = called.scope or own.scope or HISTORY_SCOPE_SESSION
    return policy
