"""Records and expected trees in few words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from google.protobuf import timestamp_pb2

from bough.v1 import eval_set_pb2, execution_pb2, invocation_pb2, message_pb2, usage_pb2

LLM = execution_pb2.AGENT_KIND_LLM
SUCCEEDED = execution_pb2.EXECUTION_STATE_SUCCEEDED


@dataclass(frozen=True, kw_only=True)
class Call:
    """A tool call that has succeeded."""

    name: str
    arguments_json: str = "{}"
    result_json: str = '"ok"'


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent with the calls that it made and the agents that it called."""

    name: str
    children: tuple["Agent", ...] = ()
    calls: tuple[Call, ...] = ()
    kind: execution_pb2.AgentKind.ValueType = LLM


def agent(
    name: str,
    *children: Agent,
    calls: Iterable[str | Call] = (),
    kind: execution_pb2.AgentKind.ValueType = LLM,
) -> Agent:
    """An agent that called these; a call that is a text is the tool's name."""
    made = tuple(Call(name=call) if isinstance(call, str) else call for call in calls)
    return Agent(name=name, children=children, calls=made, kind=kind)


@dataclass
class _Builder:
    agents: list[invocation_pb2.AgentInvocation] = field(default_factory=list)
    tools: list[invocation_pb2.ToolInvocation] = field(default_factory=list)

    def add(self, one: Agent, parent: str, depth: int) -> str:
        invocation_id = f"i{len(self.agents) + 1}"
        self.agents.append(
            invocation_pb2.AgentInvocation(
                invocation_id=invocation_id,
                parent_invocation_id=parent,
                name=one.name,
                kind=one.kind,
                depth=depth,
                child_count=len(one.children),
                state=SUCCEEDED,
            )
        )
        for call in one.calls:
            number = len(self.tools) + 1
            self.tools.append(
                invocation_pb2.ToolInvocation(
                    call_id=f"c{number}",
                    name=call.name,
                    arguments_json=call.arguments_json,
                    result_json=call.result_json,
                    state=SUCCEEDED,
                    agent=one.name,
                    invocation_id=invocation_id,
                    sequence=number,
                )
            )
        return invocation_id


def invocation(*roots: Agent, answer: str = "", seconds: int = 1, input_tokens: int = 0) -> invocation_pb2.Invocation:
    """A record of a run that has succeeded. Ids are i1, i2, ... in preorder; calls have sequences in preorder too."""
    builder = _Builder()
    ahead = [(root, "", 0) for root in reversed(roots)]
    while ahead:
        one, parent, depth = ahead.pop()
        invocation_id = builder.add(one, parent, depth)
        ahead.extend((child, invocation_id, depth + 1) for child in reversed(one.children))
    return invocation_pb2.Invocation(
        invocation_id="i1" if builder.agents else "",
        run_id="run-1",
        agent=roots[0].name if roots else "",
        agents=builder.agents,
        agents_total=len(builder.agents),
        tools=builder.tools,
        tools_total=len(builder.tools),
        state=SUCCEEDED,
        complete=True,
        final_response=message_pb2.Message(
            role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(text=answer)] if answer else []
        ),
        start_time=timestamp_pb2.Timestamp(seconds=1),
        end_time=timestamp_pb2.Timestamp(seconds=1 + seconds),
        tree_usage=usage_pb2.Usage(input_tokens=input_tokens) if input_tokens else None,
    )


def expected(
    name: str,
    *children: eval_set_pb2.ExpectedAgent,
    optional: bool = False,
    at_least: int | None = None,
    at_most: int | None = None,
    repeated: bool = False,
    is_ordered: bool = False,
    allows_extra: bool = False,
    forbidden: Sequence[str] = (),
    tools: Sequence[str] = (),
    tools_mode: eval_set_pb2.TrajectoryMode.ValueType = eval_set_pb2.TRAJECTORY_MODE_UNSPECIFIED,
) -> eval_set_pb2.ExpectedAgent:
    """An expected agent that calls these. It has a repeat if `repeated` or one of its bounds is set."""
    has_repeat = repeated or at_least is not None or at_most is not None
    return eval_set_pb2.ExpectedAgent(
        name=name,
        optional=optional,
        repeat=eval_set_pb2.EvalRepeat(min=at_least, max=at_most) if has_repeat else None,
        children=children,
        children_order=eval_set_pb2.EVAL_ORDER_ORDERED if is_ordered else eval_set_pb2.EVAL_ORDER_UNSPECIFIED,
        extra=eval_set_pb2.EXTRA_AGENTS_POLICY_ALLOW if allows_extra else eval_set_pb2.EXTRA_AGENTS_POLICY_UNSPECIFIED,
        forbidden=forbidden,
        tools=[eval_set_pb2.ExpectedTool(name=tool) for tool in tools],
        tools_mode=tools_mode,
    )
