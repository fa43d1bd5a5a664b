"""Scripts of runs and evaluations: events as a server would record them."""

from bough.v1 import (
    eval_result_pb2,
    evaluation_pb2,
    event_pb2,
    input_pb2,
    message_pb2,
)


def answer(text: str) -> list[event_pb2.AgentEvent]:
    """Return the events of a run that streams one text and ends with it as its answer."""
    message = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, parts=[message_pb2.Part(text=text)])
    return [
        event_pb2.AgentEvent(run_started=event_pb2.RunStarted()),
        event_pb2.AgentEvent(llm_output_text_delta=event_pb2.LlmOutputTextDelta(text=text)),
        event_pb2.AgentEvent(run_completed=event_pb2.RunCompleted(final_answer=message)),
    ]


def interruption(*requests: input_pb2.InputRequest) -> event_pb2.AgentEvent:
    """Return the event of a run that waits for answers to these requests; what is scripted after it follows them."""
    return event_pb2.AgentEvent(run_interrupted=event_pb2.RunInterrupted(requests=requests))


def verdict(result: eval_result_pb2.EvalResult) -> list[evaluation_pb2.EvaluationEvent]:
    """Return the events of an evaluation with this result: its plan, each trial as it was scored, its end."""
    planned = evaluation_pb2.EvaluationPlanned(case_count=len(result.cases))
    scored = [evaluation_pb2.CaseTrialScored(result=trial) for case in result.cases for trial in case.trials]
    completed = evaluation_pb2.EvaluationCompleted(verdict=result.verdict)
    return [
        evaluation_pb2.EvaluationEvent(evaluation_planned=planned),
        *(evaluation_pb2.EvaluationEvent(case_trial_scored=each) for each in scored),
        evaluation_pb2.EvaluationEvent(evaluation_completed=completed),
    ]
