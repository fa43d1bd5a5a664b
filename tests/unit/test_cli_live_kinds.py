"""The live view of agents that run agents: kinds, iterations, transfers, plans, summaries, values, and other models."""

from bough.v1 import error_pb2, event_pb2, execution_pb2, message_pb2, session_pb2, step_pb2, usage_pb2
from bough_server.cli.render.plain import plain_line
from tests.clients.run_events import AgentEvent, Turn, words
from tests.unit.test_cli_live import delta, shown, status


def begin(turn: Turn, chain: str, kind: str = "llm") -> AgentEvent:
    started = event_pb2.SubAgentStarted(kind=getattr(execution_pb2, f"AGENT_KIND_{kind.upper()}"))
    return turn.add(chain, sub_agent_started=started)


def end(turn: Turn, chain: str, reason: execution_pb2.EndReason.ValueType = execution_pb2.END_REASON_ANSWERED) -> None:
    turn.add(chain, sub_agent_completed=event_pb2.SubAgentCompleted(output=words("x"), end_reason=reason))


def plan(*texts: str) -> list[event_pb2.PlanItem]:
    return [event_pb2.PlanItem(text=text) for text in texts]


def test_a_loop_counts_its_rounds_and_says_what_ended_it() -> None:
    turn = Turn()
    begin(turn, "lead/haiku", "loop")
    for number, chain in enumerate(("lead/haiku/critic", "lead/haiku/critic#2")):
        turn.add("lead/haiku", loop_iteration_started=event_pb2.LoopIterationStarted(iteration=number))
        begin(turn, chain)
        end(turn, chain, execution_pb2.END_REASON_BROKE_LOOP if number else execution_pb2.END_REASON_ANSWERED)
    end(turn, "lead/haiku", execution_pb2.END_REASON_BROKE_LOOP)
    assert shown(turn.events) == [
        "│ ● haiku  loop",
        "│ │ ○ iteration 1",
        "│ │ ● critic",
        "│ │ ✓ critic  0 ms",
        "│ │ ○ iteration 2",
        "│ │ ● critic #2",
        "│ │ ✓ critic #2  broke the loop, 0 ms",
        "│ ✓ haiku  ended by a break, 0 ms",
    ]


def test_a_loop_that_ran_out_says_so() -> None:
    turn = Turn()
    begin(turn, "lead/haiku", "loop")
    end(turn, "lead/haiku", execution_pb2.END_REASON_ITERATIONS_EXHAUSTED)
    assert shown(turn.events)[-1] == "│ ✓ haiku  iterations used up, 0 ms"


def test_a_run_that_starts_with_the_last_speaker_says_so_also_after_it_has_waited() -> None:
    turn = Turn()
    swarm = execution_pb2.AGENT_KIND_SWARM
    started = turn.add("team", run_started=event_pb2.RunStarted(agent="team", kind=swarm, starts_with="booking"))
    waited = turn.add("team", run_dequeued=event_pb2.RunDequeued(starts_with="rooms"))
    assert shown(turn.events) == [
        "● team  swarm",
        "│ ⇢ starts with booking, who spoke last",
        "│ … its session is free",
        "│ ⇢ starts with rooms, who spoke last",
    ]
    assert [plain_line(event).partition(" team ")[2] for event in (started, waited)] == [
        "agent.run.started (swarm, starts with booking, who spoke last)",
        "agent.run.dequeued starts with rooms, who spoke last",
    ]


def test_a_transfer_is_said_once_and_names_who_hands_over_where_that_is_another_one() -> None:
    turn = Turn()
    turn.start()
    turn.tool_start("lead", "transfer_to_agent", '{"agent_name": "rooms"}', call="c1")
    turn.tool_end("lead", "transfer_to_agent", "Transferred to rooms.", call="c1")
    turn.add("lead", agent_transferred=event_pb2.AgentTransferred(from_agent="lead", to_agent="rooms"))
    begin(turn, "lead/rooms", "swarm")
    turn.add("lead/rooms", agent_transferred=event_pb2.AgentTransferred(from_agent="a", to_agent="b"))
    assert shown(turn.events) == [
        "● lead",
        '│ → transfer_to_agent {"agent_name": "rooms"}',
        "│ ⇢ transfers to rooms",
        "│ ● rooms  swarm",
        "│ │ ⇢ a transfers to b",
    ]
    assert status(turn.events, now=1.0) == ["│ │ … rooms: starting 1.0 s"]


def test_a_refused_transfer_says_why() -> None:
    turn = Turn()
    turn.start()
    turn.tool_start("lead", "transfer_to_agent", call="c1")
    turn.tool_end("lead", "transfer_to_agent", call="c1", error="There is no absent.")
    assert shown(turn.events)[-1] == "│ ✗ transfer_to_agent  TOOL_FAILED: There is no absent.  0.4 s"


def test_a_plan_is_a_list_of_which_a_long_one_is_cut() -> None:
    turn = Turn()
    begin(turn, "lead/party", "plan_execute")
    turn.add("lead/party", plan_made=event_pb2.PlanMade(items=plan("Ask who comes.", "Order a\ncake.")))
    turn.add("lead/party", plan_revised=event_pb2.PlanRevised(items=plan(*(f"s{n}" for n in range(1, 11)))))
    assert shown(turn.events) == [
        "│ ● party  plan_execute",
        "│ │ ≡ planned: 2 steps",
        "│ │   1. Ask who comes.",
        "│ │   2. Order a cake.",
        "│ │ ≡ left to do: 10 steps",
        *(f"│ │   {number}. s{number}" for number in range(1, 9)),
        "│ │   … and 2 more",
    ]


def test_what_a_planning_agent_keeps_of_its_plan_is_not_said_twice() -> None:
    turn = Turn()
    begin(turn, "lead/party", "plan_execute")
    for keys in (("plan", "executed_steps"), ("plan", "guests")):
        changes = [session_pb2.SessionStateChange(key=key, value_json="6") for key in keys]
        turn.add("lead/party", session_state_changed=event_pb2.SessionStateChanged(state_changes=changes))
    assert shown(turn.events)[1:] == ["│ │ ≔ guests = 6"]


def test_values_and_summaries_stand_in_their_agents_blocks() -> None:
    turn = Turn()
    turn.start()
    changes = [
        session_pb2.SessionStateChange(key="guests", value_json="6"),
        session_pb2.SessionStateChange(key="draft"),
    ]
    turn.add("lead", session_state_changed=event_pb2.SessionStateChanged(state_changes=changes))
    summary = words("Six come.")
    summary.summary_range.CopyFrom(message_pb2.SummaryRange(from_position=1, to_position=9))
    turn.add("lead", history_compacted=event_pb2.HistoryCompacted(summary=summary))
    assert shown(turn.events)[1:] == [
        "│ ≔ guests = 6, draft deleted",
        "│ ≈ summarized messages 1 to 9 of the session: Six come.",
    ]


def outside(event: AgentEvent) -> None:
    """Makes it an event of a model call that is no step: one that summarizes."""
    event.step_id, event.step_index = "", 0


def test_a_model_that_summarizes_is_waited_for_and_not_quoted() -> None:
    turn = Turn()
    turn.start()
    turn.model("lead", "Shown.")
    outside(turn.add("lead", llm_started=event_pb2.LlmStarted(model="small", provider="test")))
    assert status(turn.events, now=1.0) == ["│ … lead: summarizing with test/small 1.0 s"]
    outside(turn.add("lead", attempt=2, llm_retrying=event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_TIMEOUT)))
    response = step_pb2.LlmResponse(message=words("A summary."))
    outside(turn.add("lead", attempt=2, llm_completed=event_pb2.LlmCompleted(response=response)))
    turn.add("lead", step=1, llm_output_text_delta=delta("Next.\n"))
    assert shown(turn.events)[1:] == ["│ Shown.", "│ ↻ retry 1: timeout", "│ Next."]


def test_a_call_that_goes_on_with_another_model_names_it() -> None:
    turn = Turn()
    turn.start()
    turn.add("lead", llm_started=event_pb2.LlmStarted(model="first", provider="test"))
    turn.add("lead", llm_output_text_delta=delta("Half an\nans"))
    error = error_pb2.AgentError(message="It broke off.")
    for attempt, model in ((2, "first"), (3, "second")):
        retrying = event_pb2.LlmRetrying(reason=event_pb2.RETRY_REASON_BAD_RESPONSE, error=error, next_model=model)
        turn.add("lead", attempt=attempt, llm_retrying=retrying)
    assert status(turn.events, now=1.0) == ["│ … lead: waiting for second 1.0 s"]
    turn.add("lead", attempt=3, llm_output_text_delta=delta("Whole."))
    turn.end("Whole.")
    assert shown(turn.events)[1:] == [
        "│ Half an",
        "│ ↻ retry 1: bad response: It broke off.",
        "│   the text of this step so far is discarded",
        "│ ↻ continuing with second: bad response",
        "│ Whole.",
        "✓ lead  9.0 s, 1,204 tokens",
    ]


def test_an_agent_that_runs_others_is_not_said_to_be_starting() -> None:
    turn = Turn()
    begin(turn, "lead/both", "parallel")
    begin(turn, "lead/both/a")
    assert status(turn.events, now=2.0) == ["│ │ │ … a: starting 2.0 s"]


def test_a_limit_that_stops_an_agent_stands_at_its_end() -> None:
    turn = Turn()
    turn.start()
    error = error_pb2.AgentError(reason=error_pb2.ERROR_REASON_LIMIT_EXCEEDED, message="10 steps were done.")
    failed = event_pb2.RunFailed(error=error, end_reason=execution_pb2.END_REASON_LIMIT, usage=usage_pb2.Usage())
    turn.add("lead", run_failed=failed)
    assert shown(turn.events)[-1] == "✗ lead  LIMIT_EXCEEDED: 10 steps were done."
