"""Ask models whether rubrics hold: what they are asked, and the score that their answers add up to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bough.v1 import agent_pb2, eval_result_pb2, eval_set_pb2
from bough_server.evals.metrics.judge_prompts import JudgedPart, build_prompt, criterion_key
from bough_server.evals.metrics.rubrics import bounds_of, rubric_id, score_rubric
from bough_server.evals.metrics.turn import MAX_REASON, no_score, with_score

AGENT: Final = "judge"
"""The name of the agent that a judgment is a run of."""

_OF_ANSWER: Final = "You judge the answer of another agent by criteria."

_OF_CONVERSATION: Final = """You judge a conversation of a user with another agent by criteria. A criterion about the
answer holds only if it holds for every answer of the conversation."""

_DECIDING: Final = """For each of the criteria decide whether it
holds, by what you are shown and by nothing else. Say first why, in one or two sentences, then whether it holds."""

_GRADING: Final = """For each of the criteria decide how far it
holds, by what you are shown and by nothing else. Say first why, in one or two sentences, then whether it holds, or the
grade if the criterion has grades."""

_SHOWN_ANSWER: Final = 200
"""The most characters of an answer that does not fit, in the sentence that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAnswer:
    """What a judge's run ended with."""

    run_id: str
    text: str = ""
    """Its answer; with a problem, the last text that it said and that is none."""
    problem: str = ""
    """Why there is no answer, as a sentence; empty if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a judge is asked about a turn or a conversation, once for each sample."""

    turn: int
    """The number of the turn, from 0; of a conversation, which is about none, that of its turns."""
    is_conversation: bool = False
    sample: int
    model: str
    prompt: str
    definition: agent_pb2.AgentDefinition


def models_of(metric: eval_set_pb2.LlmJudgeMetric) -> Sequence[str]:
    """Return the configured names of the models that judge."""
    return metric.models or [metric.model]


def questions(metric: eval_set_pb2.LlmJudgeMetric, judged: JudgedPart) -> list[Question]:
    """Return what each judge is asked, as often as `samples` says. Raises RunError if it is too long."""
    prompt = build_prompt(metric, judged)
    samples = metric.samples if metric.HasField("samples") else 1
    judges = [(model, build_judge(metric, model)) for model in models_of(metric)]
    return [
        Question(
            turn=judged.number,
            is_conversation=judged.is_conversation,
            sample=sample,
            model=model,
            prompt=prompt,
            definition=definition,
        )
        for model, definition in judges
        for sample in range(samples)
    ]


def build_judge(metric: eval_set_pb2.LlmJudgeMetric, model: str) -> agent_pb2.AgentDefinition:
    """Return the agent that judges by a metric's rubrics, with one member of its answer for each of them."""
    members = {criterion_key(index): _answer_schema(rubric) for index, rubric in enumerate(metric.rubrics)}
    schema = _object_schema(members)
    definition = agent_pb2.AgentDefinition(
        name=AGENT,
        description="Judges an answer by criteria.",
        output_schema_json=json.dumps(schema, separators=(",", ":")),
    )
    definition.llm.model = model
    subject = _OF_CONVERSATION if metric.whole_conversation else _OF_ANSWER
    how = _GRADING if any(one.HasField("scale") for one in metric.rubrics) else _DECIDING
    definition.llm.instruction = f"{subject} {how}"
    definition.llm.settings.CopyFrom(metric.settings)
    return definition


def _answer_schema(rubric: eval_set_pb2.JudgeRubric) -> dict[str, object]:
    verdict: dict[str, object] = {"holds": {"type": "boolean"}}
    if rubric.HasField("scale"):
        least, most = bounds_of(rubric.scale)
        verdict = {"grade": {"type": "integer", "minimum": least, "maximum": most}}
    return _object_schema({"reason": {"type": "string"}, **verdict})


def _object_schema(members: Mapping[str, object]) -> dict[str, object]:
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


def parse_judgments(
    metric: eval_set_pb2.LlmJudgeMetric, question: Question, judge_answer: JudgeAnswer
) -> list[eval_result_pb2.Judgment]:
    """Return what the judge said about each rubric; without `holds` and `grade` if it did not say."""
    try:
        answer = None if judge_answer.problem else json.loads(judge_answer.text)
    except (ValueError, RecursionError):
        answer = None
    found: list[eval_result_pb2.Judgment] = []
    for index, rubric in enumerate(metric.rubrics):
        one = eval_result_pb2.Judgment(
            rubric_id=rubric_id(rubric),
            sample=question.sample,
            turn=question.turn,
            model=question.model,
            run_id=judge_answer.run_id,
        )
        judged = answer.get(criterion_key(index)) if isinstance(answer, dict) else None
        if isinstance(judged, dict) and _read_verdict(rubric, judged, one):
            one.reason = _clean_reason(str(judged.get("reason", "")))
        else:
            one.reason = _clean_reason(_explain_missing(metric, judge_answer))
        found.append(one)
    return found


def _read_verdict(
    rubric: eval_set_pb2.JudgeRubric, judged: Mapping[str, object], judgment: eval_result_pb2.Judgment
) -> bool:
    """Set what a judge said about a rubric. Return False if it does not say."""
    if rubric.HasField("scale"):
        grade, (least, most) = judged.get("grade"), bounds_of(rubric.scale)
        if isinstance(grade, float) and grade.is_integer():
            grade = int(grade)  # JSON Schema takes 4.0 for an integer
        if not isinstance(grade, int) or isinstance(grade, bool) or not least <= grade <= most:
            return False
        judgment.grade = grade
        return True
    holds = judged.get("holds")
    if not isinstance(holds, bool):
        return False
    judgment.holds = holds
    return True


def describe_answer(metric: eval_set_pb2.LlmJudgeMetric) -> str:
    """Return what a judge has to answer, as JSON with words in the place of values."""
    members = (f'"{criterion_key(index)}": {_describe_member(rubric)}' for index, rubric in enumerate(metric.rubrics))
    return f"{{{', '.join(members)}}}"


def _describe_member(rubric: eval_set_pb2.JudgeRubric) -> str:
    if not rubric.HasField("scale"):
        return '{"reason": "…", "holds": true or false}'
    least, most = bounds_of(rubric.scale)
    return f'{{"reason": "…", "grade": {least} to {most}}}'


def _explain_missing(metric: eval_set_pb2.LlmJudgeMetric, answer: JudgeAnswer) -> str:
    """Say why an answer is no judgment, and what it has to be: a script has to answer so too."""
    text = answer.text
    if not text:
        return answer.problem or "its answer is empty."
    shown = json.dumps(text[:_SHOWN_ANSWER] + "…" if len(text) > _SHOWN_ANSWER else text, ensure_ascii=False)
    wrong = f"Its answer {shown} does not fit; it has to be {describe_answer(metric)}."
    return f"{wrong} {answer.problem}" if answer.problem else wrong


def score(
    metric: eval_set_pb2.EvalMetric, judgments: Sequence[eval_result_pb2.Judgment], *, problem: str = ""
) -> eval_result_pb2.MetricScore:
    """Return the score: the mean of the rubrics' scores over the turns.

    It could not be scored if `problem` says so, or a judgment is missing.
    """
    missing = next((one for one in judgments if not (one.HasField("holds") or one.HasField("grade"))), None)
    if problem or missing is not None or not judgments:
        judge = f"The judge {missing.model!r}" if missing and len(models_of(metric.llm_judge)) > 1 else "The judge"
        why = problem or (f"{judge} gave no verdict: {missing.reason}" if missing else "Nothing was scored.")
        found = no_score(metric, why)
    else:
        rubrics = {rubric_id(rubric): rubric for rubric in metric.llm_judge.rubrics}
        places: dict[tuple[int, str], list[eval_result_pb2.Judgment]] = {}
        for one in judgments:
            places.setdefault((one.turn, one.rubric_id), []).append(one)
        scores = [score_rubric(rubrics[rubric], each) for (_, rubric), each in places.items()]
        missed = [rubric for rubric in scores if rubric.value < 1]
        sentences = (
            f"{begin}: {', '.join(dict.fromkeys(rubric.described for rubric in each))}."
            for begin, each in (
                ("Does not hold", [rubric for rubric in missed if not rubric.is_graded]),
                ("Mean grades", [rubric for rubric in missed if rubric.is_graded]),
            )
            if each
        )
        reason = " ".join(sentences)
        # Every turn is judged by the same rubrics, so this is also the mean of the turns' means.
        found = with_score(metric, sum(rubric.value for rubric in scores) / len(scores), reason)
    found.judgments.extend(judgments)
    return found


def _clean_reason(reason: str) -> str:
    # JSON can escape unpaired surrogates, which a result cannot hold.
    return reason.encode(errors="replace").decode()[:MAX_REASON]
