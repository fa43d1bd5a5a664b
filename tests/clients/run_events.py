"""Runs built by hand, event by event, as a server would stream them."""

from collections.abc import Callable, Sequence

from google.protobuf import duration_pb2, timestamp_pb2

from bough.v1 import error_pb2, event_pb2, execution_pb2, follow_pb2, message_pb2, policy_pb2, step_pb2, usage_pb2

RUN_ID = "0193d6b4-0000-7000-8000-00000000abcd"
SESSION_ID = "0193d6b4-0000-7000-8000-00000000beef"
AgentEvent = event_pb2.AgentEvent


def words(text: str) -> message_pb2.Message:
    """An assistant's message."""
    return message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(text=text)])


def batch_of(events: Sequence[AgentEvent]) -> follow_pb2.EventBatch:
    """A batch of events, through the sequence of the last one."""
    return follow_pb2.EventBatch(events=events, through_sequence=events[-1].sequence)


class Turn:
    """Builds a log: numbers events as they are added, one second apart."""

    def __init__(self, run_id: str = RUN_ID) -> None:
        self.run_id = run_id
        self.events: list[AgentEvent] = []

    def add(self, chain: str, *, step: int = 0, attempt: int = 1, **payload: object) -> AgentEvent:
        """Add an event of the invocation at a chain of names such as "lead/writer"; a name may end in "#2"."""
        names = chain.split("/")
        event = AgentEvent(
            run_id=self.run_id,
            session_id=SESSION_ID,
            sequence=len(self.events) + 1,
            record_time=timestamp_pb2.Timestamp(seconds=1_700_000_000 + len(self.events)),
            invocation_id=f"id-of-{chain}",
            parent_invocation_id=f"id-of-{'/'.join(names[:-1])}" if len(names) > 1 else "",
            agent=names[-1].partition("#")[0],
            branch="/".join(name.partition("#")[0] for name in names),
            depth=len(names) - 1,
            step_id=f"step-{step}-of-{chain}",
            step_index=step,
            attempt=attempt,
            **payload,
        )
        self.events.append(event)
        return event

    def start(self, agent: str = "lead", text: str = "Write about owls.") -> AgentEvent:
        """The run begins."""
        return self.add(
            agent,
            run_started=event_pb2.RunStarted(
                invocation_id=f"id-of-{agent}",
                key_root=self.run_id,
                agent=agent,
                kind=execution_pb2.AGENT_KIND_LLM,
                input=message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text=text)]),
                policy=policy_pb2.RunPolicy(),
            ),
        )

    def model(self, chain: str, *pieces: str, step: int = 0, attempt: int = 1, reasoning: str = "") -> None:
        """A model call that streams these deltas."""
        self.add(chain, step=step, attempt=attempt, llm_started=event_pb2.LlmStarted(model="default", provider="test"))
        if reasoning:
            delta = event_pb2.LlmReasoningDelta(text=reasoning)
            self.add(chain, step=step, attempt=attempt, llm_reasoning_delta=delta)
        for piece in pieces:
            delta_of_text = event_pb2.LlmOutputTextDelta(text=piece)
            self.add(chain, step=step, attempt=attempt, llm_output_text_delta=delta_of_text)
        response = step_pb2.LlmResponse(message=words("".join(pieces)), provider="test", model="default")
        self.add(chain, step=step, attempt=attempt, llm_completed=event_pb2.LlmCompleted(response=response))

    def tool_start(self, chain: str, name: str, arguments: str = "{}", *, call: str, step: int = 0) -> None:
        """A tool begins."""
        tool_call = message_pb2.ToolCall(call_id=call, name=name, arguments_json=arguments)
        self.add(chain, step=step, tool_started=event_pb2.ToolStarted(call=tool_call))

    def tool_end(
        self, chain: str, name: str, text: str = "", *, call: str, step: int = 0, child: str = "", error: str = ""
    ) -> None:
        """A tool ends, with a text or an error."""
        result = message_pb2.ToolResult(
            call=message_pb2.ToolCall(call_id=call, name=name),
            parts=[message_pb2.Part(text=text)] if text else [],
            duration=duration_pb2.Duration(nanos=400_000_000),
            child_invocation_id=f"id-of-{child}" if child else "",
            error=error_pb2.AgentError(reason=error_pb2.ERROR_REASON_TOOL_FAILED, message=error) if error else None,
        )
        if error:
            self.add(chain, step=step, tool_failed=event_pb2.ToolFailed(result=result))
        else:
            self.add(chain, step=step, tool_completed=event_pb2.ToolCompleted(result=result))

    def child_start(self, chain: str, text: str) -> None:
        """A sub-agent begins."""
        self.add(
            chain,
            sub_agent_started=event_pb2.SubAgentStarted(
                input=words(text), trigger=execution_pb2.INVOCATION_TRIGGER_TOOL
            ),
        )

    def child_end(self, chain: str, text: str) -> None:
        """A sub-agent ends with an answer."""
        end = event_pb2.SubAgentCompleted(
            output=words(text), duration=duration_pb2.Duration(seconds=2), tree_usage=USED
        )
        self.add(chain, sub_agent_completed=end)

    def step_end(self, chain: str, text: str, *, step: int = 0, attempt: int = 1) -> None:
        """A step ends."""
        done = step_pb2.AgentStep(
            step_id=f"step-{step}-of-{chain}",
            invocation_id=f"id-of-{chain}",
            step_index=step,
            attempt=attempt,
            llm_response=step_pb2.LlmResponse(message=words(text)),
        )
        self.add(chain, step=step, attempt=attempt, step_completed=event_pb2.StepCompleted(step=done))

    def end(self, text: str, agent: str = "lead") -> None:
        """The run ends with an answer."""
        end = event_pb2.RunCompleted(
            final_answer=words(text), tree_usage=USED, duration=duration_pb2.Duration(seconds=9)
        )
        self.add(agent, run_completed=end)


USED = usage_pb2.Usage(
    input_tokens=900, output_tokens=304, model_calls=4, tool_calls=2, cost_nanos=1_200_000, currency_code="USD"
)


def desk() -> Sequence[AgentEvent]:
    """A lead that asks a researcher, who searches, and answers."""
    turn = Turn()
    turn.start()
    turn.model("lead", "Let me ", "ask.", reasoning="The researcher knows.")
    turn.tool_start("lead", "call_researcher", '{"message": "Facts about owls"}', call="c1")
    turn.child_start("lead/researcher", "Facts about owls")
    turn.model("lead/researcher", "Searching.")
    turn.tool_start("lead/researcher", "search", '{"query": "owls"}', call="c2")
    turn.tool_end("lead/researcher", "search", "Owls are birds.", call="c2")
    turn.step_end("lead/researcher", "Searching.")
    turn.model("lead/researcher", "Owls ", "are birds.", step=1)
    turn.step_end("lead/researcher", "Owls are birds.", step=1)
    turn.child_end("lead/researcher", "Owls are birds.")
    turn.tool_end("lead", "call_researcher", "Owls are birds.", call="c1", child="lead/researcher")
    turn.step_end("lead", "Let me ask.")
    turn.model("lead", "Owls hunt ", "at night.", step=1)
    turn.step_end("lead", "Owls hunt at night.", step=1)
    turn.end("Owls hunt at night.")
    return turn.events


def built(build: Callable[[Turn], None]) -> Sequence[AgentEvent]:
    """The events of a run that a function builds."""
    turn = Turn()
    build(turn)
    return turn.events
