"""Results for tests of reports: one with every kind of text, and one for people to look at."""

from collections.abc import Callable, Iterator

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from bough.v1 import eval_result_pb2


def fill(message: Message, text: Callable[[str], str], depth: int = 0) -> None:
    """Set every text of a message and of the messages in it; of lists, one item."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_STRING:
                getattr(message, field.name)["key"] = text(field.name)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(text(field.name))
            else:
                setattr(message, field.name, text(field.name))
        elif field.message_type is not None and depth < 7 and field.name not in ("recorded", "children"):
            if field.message_type.full_name.startswith("google.protobuf."):
                continue
            held = getattr(message, field.name)
            fill(held.add() if field.is_repeated else held, text, depth + 1)


def messages(first: Message) -> Iterator[Message]:
    """A message and all messages in it."""
    yield first
    for field, value in first.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for one in value if field.is_repeated else [value]:
                yield from messages(one)


_TRIAL = {
    "caseId": "who-calls-whom",
    "verdict": "VERDICT_FAILED",
    "reason": "agent_trajectory is 0.6667, below 1: writer was called by researcher, expected by lead",
    "duration": "1.5s",
    "usage": {
        "inputTokens": 1200,
        "outputTokens": 40,
        "totalTokens": 1240,
        "costNanos": 2500000,
        "currencyCode": "USD",
    },
    "scores": [
        {"name": "tool_trajectory", "verdict": "VERDICT_PASSED", "score": 1, "threshold": 1},
        {
            "name": "agent_trajectory",
            "verdict": "VERDICT_FAILED",
            "score": 0.6667,
            "threshold": 1,
            "treeComparisons": [
                {
                    "violations": 2,
                    "differences": [
                        {
                            "kind": "DIFFERENCE_KIND_MOVED",
                            "agent": "writer",
                            "expectedParent": "lead",
                            "actualParent": "lead/researcher",
                            "message": "writer was called by researcher, expected by lead",
                            "invocationId": "i3",
                        },
                        {
                            "kind": "DIFFERENCE_KIND_MISSING",
                            "agent": "checker",
                            "expectedParent": "lead",
                            "message": "checker was expected below lead and is missing",
                        },
                    ],
                }
            ],
        },
        {
            "name": "polite",
            "verdict": "VERDICT_NOT_EVALUATED",
            "threshold": 1,
            "reason": "The judge answered nonsense.",
            "judgments": [{"rubricId": "kind", "reason": "It is | rude\n@everyone", "holds": False}],
        },
    ],
    "turns": [
        {
            "runId": "run-1",
            "traceId": "0af7651916cd43dd8448eb211c80319c",
            "state": "EXECUTION_STATE_SUCCEEDED",
            "answer": "Chlorophyll fades.",
            "agents": [
                {
                    "name": "lead",
                    "invocationId": "i1",
                    "state": "EXECUTION_STATE_SUCCEEDED",
                    "mark": "TREE_MARK_MATCHED",
                    "stepCount": 2,
                    "answer": "Chlorophyll fades.",
                    "usage": {"totalTokens": 700},
                    "steps": [{"text": "Let me ask the researcher."}, {"index": 1}],
                    "calls": [
                        {
                            "name": "call_researcher",
                            "state": "EXECUTION_STATE_SUCCEEDED",
                            "argumentsJson": '{"topic":"leaves"}',
                            "resultJson": '"It fades."',
                            "stepIndex": 0,
                        }
                    ],
                },
                {
                    "name": "researcher",
                    "depth": 1,
                    "invocationId": "i2",
                    "state": "EXECUTION_STATE_SUCCEEDED",
                    "mark": "TREE_MARK_VIOLATED",
                    "stepCount": 1,
                    "steps": [{}],
                    "calls": [
                        {
                            "name": "search_notes",
                            "state": "EXECUTION_STATE_FAILED",
                            "argumentsJson": '{"topic":"leaves","limit":3}',
                            "executedArgumentsJson": '{"topic":"leaves","limit":1}',
                            "error": {"message": "The notes <are> closed & locked."},
                            "stepIndex": 0,
                        }
                    ],
                },
                {"name": "writer", "depth": 2, "invocationId": "i3", "mark": "TREE_MARK_MOVED", "answer": "It fades."},
                {"name": "translator", "depth": 1, "invocationId": "i4", "mark": "TREE_MARK_UNEXPECTED"},
                {"name": "logger", "depth": 1, "invocationId": "i5", "mark": "TREE_MARK_ALLOWED"},
            ],
        }
    ],
}

_TURNS = [
    {
        "user": "Why do leaves turn red?",
        "expect": {
            "answer": {
                "contains": ["chlorophyll", "red"],
                "excludes": ["As an AI"],
                "regex": "fade[sd]",
                "ignoreCase": True,
                "json": {"subsetJson": '{"a":1}', "ignore": ["a.id"], "numberTolerance": 0.5},
            },
            "tools": [{"name": "search_notes", "argumentsMatch": {"subsetJson": '{"topic":"leaves"}'}}],
            "agents": [
                {
                    "name": "lead",
                    "childrenOrder": "EVAL_ORDER_ORDERED",
                    "children": [
                        {
                            "name": "researcher",
                            "repeat": {"min": 1},
                            "tools": [{"name": "search_notes", "resultMatch": {"regex": "red"}}],
                            "toolsMode": "TRAJECTORY_MODE_SUPERSET",
                        },
                        {"name": "writer", "forbidden": ["researcher"]},
                        {"name": "checker"},
                    ],
                }
            ],
        },
    }
]


def example(*, passed: int = 1) -> eval_result_pb2.EvalResult:
    """A result with a flaky case that failed, one that crashed, one that is not scored, and some that passed."""
    ok = {"caseId": "easy", "verdict": "VERDICT_PASSED", "duration": "0.5s", "turns": [{"runId": "run-9"}]}
    rate = {
        "trials": 2,
        "passed": 1,
        "passRate": 0.5,
        "passRateInterval": {"lower": 0.0945, "upper": 0.9055, "level": 0.95},
        "flaky": True,
    }
    all_passed = {
        "trials": 1,
        "passed": 1,
        "passRate": 1,
        "passRateInterval": {"lower": 0.2065, "upper": 1, "level": 0.95},
    }
    value = {
        "evaluationId": "ev-1",
        "evalSetName": "desk",
        "pins": {"agent": "lead"},
        "verdict": "VERDICT_FAILED",
        "state": "EXECUTION_STATE_SUCCEEDED",
        "totals": {
            "cases": 3 + passed,
            "casesPassed": passed,
            "casesFailed": 2,
            "casesNotEvaluated": 1,
            "trials": 4 + passed,
            "trialsPassed": 1 + passed,
            "passRate": 0.5,
            "passRateInterval": {"lower": 0.2, "upper": 0.8, "level": 0.95},
            "metricMeans": {"agent_trajectory": 0.8333},
            "usage": {
                "totalTokens": 3720,
                "costNanos": 7500000,
                "currencyCode": "USD",
                "modelCalls": 6,
                "toolCalls": 4,
            },
            "judgeUsage": {"totalTokens": 100},
            "flakyCases": ["who-calls-whom"],
        },
        "cases": [
            {
                "caseId": "who-calls-whom",
                "labels": {"topic": "nature"},
                "turns": _TURNS,
                "verdict": "VERDICT_FAILED",
                "reason": "agent_trajectory is 0.8333, below 1.",
                "trials": [_TRIAL, {**_TRIAL, "trial": 1, "verdict": "VERDICT_PASSED", "reason": "", "scores": []}],
                "metrics": [
                    {"name": "agent_trajectory", "verdict": "VERDICT_FAILED", "mean": 0.8333, "threshold": 1},
                    {"name": "polite", "verdict": "VERDICT_NOT_EVALUATED", "threshold": 1},
                ],
                "statistics": rate,
            },
            {
                "caseId": "crash",
                "verdict": "VERDICT_FAILED",
                "reason": "The trial crashed: the model is gone.",
                "trials": [
                    {
                        "caseId": "crash",
                        "verdict": "VERDICT_FAILED",
                        "crashed": True,
                        "reason": "The run failed: the model \u0007 is\ngone.",
                        "turns": [{"runId": "run-3", "state": "EXECUTION_STATE_FAILED", "error": {"message": "gone"}}],
                    }
                ],
            },
            {
                "caseId": "approval",
                "verdict": "VERDICT_NOT_EVALUATED",
                "reason": "No answer for: Send the mail?",
                "trials": [
                    {
                        "caseId": "approval",
                        "verdict": "VERDICT_NOT_EVALUATED",
                        "reason": "No answer for: Send the mail?",
                        "unanswered": {
                            "inputId": "in-1",
                            "prompt": "Send the mail?",
                            "call": {"name": "send", "argumentsJson": '{"to":"ann@example.com"}'},
                            "agentPath": ["lead", "mailer"],
                        },
                    }
                ],
            },
            *(
                {
                    "caseId": f"easy-{number}",
                    "verdict": "VERDICT_PASSED",
                    "turns": _TURNS,
                    "trials": [{**ok, "caseId": f"easy-{number}", "turns": _TRIAL["turns"]}],
                    "statistics": all_passed,
                }
                for number in range(passed)
            ),
        ],
        "gates": [
            {
                "gate": "pass_rate>=0.9",
                "number": "pass_rate",
                "operator": "GATE_OPERATOR_AT_LEAST",
                "bound": 0.9,
                "verdict": "VERDICT_FAILED",
                "value": 0.5,
                "reason": "0.5 is below 0.9.",
            },
            {
                "gate": "regressions<=0",
                "number": "regressions",
                "operator": "GATE_OPERATOR_AT_MOST",
                "verdict": "VERDICT_PASSED",
                "value": 0,
            },
        ],
    }
    return json_format.ParseDict(value, eval_result_pb2.EvalResult())


def comparison() -> eval_result_pb2.EvalComparison:
    """What is different about it: one case is worse, one was removed."""
    value = {
        "pinsChanged": ["The revision of lead is not the same."],
        "cases": [
            {
                "caseId": "who-calls-whom",
                "change": "CASE_CHANGE_WORSE",
                "verdictBaseline": "VERDICT_PASSED",
                "verdictCandidate": "VERDICT_FAILED",
                "passRateBaseline": 1,
                "passRateCandidate": 0.5,
                "differences": [{"message": "writer was called by researcher, expected by lead"}],
                "reason": "3 of 20 trials passed, 18 of 20 in the baseline (p = 2.6e-06).",
            },
            {"caseId": "old", "change": "CASE_CHANGE_REMOVED", "verdictBaseline": "VERDICT_PASSED"},
        ],
        "worse": 1,
        "regressions": 1,
        "regressionTest": {
            "pValue": 2.6e-06,
            "level": 0.05,
            "cases": 1,
            "candidate": {"trials": 20, "passed": 3},
            "baseline": {"trials": 20, "passed": 18},
            "power": "This comparison finds what it can.",
        },
        "changes": [
            {"name": "pass_rate", "value": -0.25, "interval": {"lower": -0.5, "upper": 0, "level": 0.95}, "cases": 2},
            {"name": "cost", "value": 0.0005, "cases": 1},
        ],
        "removed": 1,
        "passRateChange": -0.25,
        "costNanosChange": -1000000,
        "costCurrencyCode": "USD",
        "stateBaseline": "EXECUTION_STATE_SUCCEEDED",
        "stateCandidate": "EXECUTION_STATE_SUCCEEDED",
    }
    return json_format.ParseDict(value, eval_result_pb2.EvalComparison())
