"""What is wrong with an eval set beyond how it is written: each problem with the path of its field."""

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from bough.v1 import eval_set_pb2
from bough_server.evals.sets.expectation_validation import KnownNames
from bough_server.evals.sets.validation import MAX_TRIALS, problems_of

KNOWN = KnownNames(
    agents=frozenset({"lead", "writer"}),
    models=frozenset({"default"}),
    tools=frozenset({"search", "t"}),
    metrics={"polite": True, "plain": False},
)
MIB = 1024 * 1024

Json = Mapping[str, Any]


def set_of(*cases: Json, **fields: Any) -> eval_set_pb2.EvalSet:
    """A set of the desk; a case without turns has one."""
    filled = [{"id": f"c{index}", "turns": [{"user": "Hi."}], **case} for index, case in enumerate(cases)]
    return json_format.ParseDict({"name": "s", "agent": "lead", "cases": filled, **fields}, eval_set_pb2.EvalSet())


def problems(*cases: Json, **fields: Any) -> list[tuple[str, str]]:
    return problems_of(set_of(*cases, **fields), known=KNOWN)


def of_case(case: Json) -> list[tuple[str, str]]:
    """The problems of one case, with paths inside it."""
    return [(field.removeprefix("cases[0]."), text) for field, text in problems(case)]


def of_expectation(expect: Json) -> list[tuple[str, str]]:
    """The problems of one expectation, with paths inside it."""
    found = of_case({"turns": [{"user": "Hi.", "expect": expect}]})
    return [(field.removeprefix("turns[0].expect."), text) for field, text in found]


def of_metric(metric: Json) -> list[tuple[str, str]]:
    """The problems of one metric, with paths inside it."""
    return [
        (field.removeprefix("metrics[0]").removeprefix("."), text) for field, text in of_case({"metrics": [metric]})
    ]


def test_the_evaluated_agent_is_mocked_only_if_another_one_calls_it() -> None:
    eval_set = set_of({"mocks": {"agents": [{"agent": "writer", "text": "x"}, {"agent": "lead", "text": "x"}]}})
    called = [KnownNames(called_agents=frozenset(names)) for names in ({"writer"}, {"writer", "lead"})]
    never = (
        "cases[0].mocks.agents[1].agent",
        "'lead' is the evaluated agent, and no agent calls it, so the mock can never answer: mock the agents or tools "
        "that it calls.",
    )
    assert [problems_of(eval_set, known=known) for known in called] == [[never], []]


def test_a_sound_set_has_no_problems() -> None:
    turn = {"user": "Hi.", "expect": {"answer": {"exact": "Hi."}, "agents": [{"name": "*"}]}}
    metrics = [{"agentTrajectory": {}}, {"finalResponse": {}}, {"custom": {"name": "polite"}}]
    assert problems({"turns": [turn, {"input": {"parts": [{"text": "x"}]}}], "metrics": metrics}, {}) == []


def test_a_set_needs_cases_and_an_agent() -> None:
    assert problems() == [("cases", "must have at least one case.")]
    assert problems({}, agent="") == [("agent", "is required: the agent that the cases run.")]


def test_a_set_of_recorded_invocations_needs_no_agent() -> None:
    assert problems({"turns": [{"recorded": {"run": {"runId": "r"}}}]}, agent="") == []


def test_an_unknown_agent_is_reported_with_a_suggestion() -> None:
    assert problems({}, agent="leed") == [("agent", "There is no agent 'leed'. Did you mean 'lead'?")]
    assert problems_of(set_of({}), agent="riter", known=KNOWN) == [
        ("agent", "There is no agent 'riter'. Did you mean 'writer'?")
    ]


def test_every_name_of_an_agent_or_a_tool_is_one_that_there_is() -> None:
    agent, tool = (
        "There is no agent 'riter'. Did you mean 'writer'?",
        "There is no tool 'serch'. Did you mean 'search'?",
    )
    metrics = [
        {"budget": {"agent": "riter", "errors": 0}},
        {"toolTrajectory": {"agent": "riter", "tools": [{"name": "serch"}]}},
        {"finalResponse": {"agent": "riter", "answer": {}}},
        {
            "llmJudge": {
                "model": "default",
                "rubrics": [{"id": "kind", "text": "It is kind."}],
                "template": "{{answer}} {{agents.writer.output}} {{agents.riter.output}}",
            }
        },
    ]
    inner = {"name": "riter", "forbidden": ["writer", "riter"], "tools": [{"name": "serch"}]}
    expect = {"tools": [{"name": "search"}, {"name": "serch"}], "agents": [{"name": "lead", "children": [inner]}]}
    expect["run"] = {"handoffs": [{"fromAgent": "riter", "toAgent": "writer"}, {"toAgent": "riter"}]}
    mocks = {
        "tools": [{"name": "serch", "agent": "riter", "resultJson": "1"}],
        "agents": [{"agent": "riter", "caller": "riter", "text": "x"}],
    }
    answers = [{"agent": "riter", "tool": "serch", "approval": {"approved": True}}]
    turns = [{"user": "Hi.", "expect": expect}]
    case = {"turns": turns, "mocks": mocks, "answers": answers, "metrics": metrics}
    assert problems(case, defaults={"metrics": metrics[:1]}) == [
        ("defaults.metrics[0].budget.agent", agent),
        ("cases[0].turns[0].expect.tools[1].name", tool),
        ("cases[0].turns[0].expect.agents[0].children[0].name", agent),
        ("cases[0].turns[0].expect.agents[0].children[0].forbidden[1]", agent),
        ("cases[0].turns[0].expect.agents[0].children[0].tools[0].name", tool),
        ("cases[0].turns[0].expect.run.handoffs[0].from_agent", agent),
        ("cases[0].turns[0].expect.run.handoffs[1].to_agent", agent),
        ("cases[0].mocks.tools[0].name", tool),
        ("cases[0].mocks.tools[0].agent", agent),
        ("cases[0].mocks.agents[0].agent", agent),
        ("cases[0].mocks.agents[0].caller", agent),
        ("cases[0].answers[0].agent", agent),
        ("cases[0].answers[0].tool", tool),
        ("cases[0].metrics[0].budget.agent", agent),
        ("cases[0].metrics[1].tool_trajectory.agent", agent),
        ("cases[0].metrics[1].tool_trajectory.tools[0].name", tool),
        ("cases[0].metrics[2].final_response.agent", agent),
        ("cases[0].metrics[3].llm_judge.template", agent),
    ]
    # Other agents and tools may be in what is recorded.
    recorded = {**case, "turns": [{"recorded": {"run": {"runId": "r"}}, "expect": expect}]}
    forked = {**case, "turns": [{"expect": expect}], "origin": {"runId": "r", "afterSequence": 3}}
    assert problems(recorded, forked, defaults={"metrics": metrics[:1]}) == []


def test_any_name_built_in_tools_calls_of_agents_and_patterns_are_known() -> None:
    tools = [{"name": "*"}, {"name": "exit"}, {"name": "call_writer"}, {"nameRegex": "^serch"}]
    assert of_expectation({"tools": tools, "agents": [{"name": "*"}]}) == []
    assert of_expectation({"tools": [{"name": "call_riter"}]}) == [
        ("tools[0].name", "There is no tool 'call_riter'. Did you mean 'call_writer'?")
    ]


def test_a_mock_that_is_named_like_the_call_of_an_agent_says_what_to_mock() -> None:
    assert of_case({"mocks": {"tools": [{"name": "call_writer", "resultJson": "1"}]}}) == [
        ("mocks.tools[0].name", "'call_writer' calls an agent: mock that agent, in `mocks.agents`, or its tools.")
    ]


def test_a_threshold_can_be_reached_and_missed() -> None:
    for threshold in (1.5, -0.1):
        assert of_metric({"budget": {"errors": 0}, "threshold": threshold}) == [
            ("threshold", "must be from 0 to 1, as the scores of this metric are.")
        ]
        assert of_metric({"custom": {"name": "polite"}, "threshold": threshold}) == []
    assert of_metric({"budget": {"errors": 0}, "threshold": 0.5}) == []


def test_a_function_gets_a_configuration_only_if_it_takes_one() -> None:
    assert of_metric({"custom": {"name": "polite", "configJson": "{}"}}) == []
    assert of_metric({"custom": {"name": "plain", "configJson": "{}"}}) == [
        (
            "custom.config_json",
            "must not be set: the function 'plain' takes no configuration. Remove it, or give the function a third "
            "parameter.",
        )
    ]


def test_names_are_not_checked_if_it_is_not_known_which_there_are() -> None:
    eval_set = set_of({"metrics": [{"custom": {"name": "other"}}]}, agent="other")
    assert problems_of(eval_set, known=KnownNames()) == []


def test_an_id_is_used_once() -> None:
    assert problems({"id": "a"}, {"id": "b"}, {"id": "a"}) == [("cases[2].id", "'a' is also the id of cases[0].")]


def test_an_evaluation_has_a_bounded_number_of_trials() -> None:
    eval_set = set_of(*[{}] * 101, defaults={"trials": 1000})
    problem = ("cases", f"have 101,000 trials in all; an evaluation may have {MAX_TRIALS:,}.")
    assert problems_of(eval_set, known=KNOWN) == [problem]
    assert problems_of(eval_set, known=KNOWN, trials=990) == []


def test_sets_cases_and_mocks_have_a_bounded_size() -> None:
    mock = {"name": "t", "resultJson": json.dumps("x" * MIB)}
    assert of_case({"mocks": {"tools": [mock]}}) == [("mocks", "are larger than 1 MiB.")]
    assert problems({"turns": [{"user": "Hi.", "expect": {"answer": {"exact": "x" * 2 * MIB}}}]}) == [
        ("cases[0]", "is larger than 2 MiB.")
    ]
    assert problems(*[{"turns": [{"user": "Hi.", "expect": {"answer": {"exact": "x" * MIB}}}]}] * 8) == [
        ("", "is larger than 8 MiB.")
    ]


def test_each_turn_says_what_the_user_says_in_one_way() -> None:
    both = {"user": "Hi.", "input": {"parts": [{"text": "x"}]}}
    assert of_case({"turns": []}) == [
        ("turns", "must have at least one turn, unless a model plays the user: see `user`.")
    ]
    assert of_case({"turns": [{}, {"user": " \n"}, both]}) == [
        ("turns[0].user", "is required, or `input`, or in every turn `recorded`."),
        ("turns[1].user", "must not be blank."),
        ("turns[2].input", "excludes `user`: set one of the two."),
    ]


def test_an_input_is_one_that_a_run_accepts() -> None:
    turns = [
        {"input": {"role": "ROLE_TOOL", "parts": [{"text": "x"}]}},
        {"input": {"parts": [{"text": " "}]}},
        {"input": {"parts": [{"text": "x"}, {"dataJson": "{"}]}},
        {"input": {"parts": [{"text": "x" * (256 * 1024)}]}},
        {"user": "x" * (256 * 1024)},
        {"input": {"parts": [{"blob": {"data": "eA==", "mediaType": "text/plain"}}]}},
    ]
    found = of_case({"turns": turns})
    assert [field for field, _ in found] == [
        "turns[0].input.role",
        "turns[1].input.parts",
        "turns[2].input.parts[1].data_json",
        "turns[3].input.parts",
        "turns[4].user",
    ]
    assert found[0][1] == "must be USER, or left out."
    assert found[3][1] == found[4][1]
    assert "an input may have 262144" in found[3][1]


def test_either_every_turn_is_recorded_or_none() -> None:
    recorded = {"recorded": {"run": {"runId": "r"}}}
    assert of_case({"turns": [recorded, {"user": "Hi."}]}) == [
        ("turns[1].recorded", "is required: either every turn of a case has it or none."),
        ("turns[1].user", "must not be set: the turns are recorded, so nothing runs."),
    ]
    assert [field for field, _ in of_case({"turns": [{"recorded": {}}]})] == ["turns[0].recorded"]
    assert of_case({"turns": [recorded], "origin": {"runId": "r", "afterSequence": 1}}) == [
        ("origin", "must not be set: the turns are recorded, so nothing runs.")
    ]


def test_the_first_turn_of_a_fork_is_what_follows_in_it() -> None:
    origin = {"runId": "r", "afterSequence": 1, "changes": {"agents": {"lead": {"model": "defalt"}}}}
    assert of_case({"turns": [{}, {"user": "More."}], "origin": {**origin, "changes": {}}}) == []
    assert of_case({"turns": [{"user": "Hi."}], "origin": origin}) == [
        ("turns[0].user", "must not be set: the first turn of a case with `origin` is what follows in it."),
        ('origin.changes.agents["lead"].model', "There is no model 'defalt'. Did you mean 'default'?"),
    ]


def test_a_simulated_user_wants_something_of_a_known_model_and_has_turns_to_say_it() -> None:
    def of_user(user: Json, *turns: Json, **fields: Any) -> list[tuple[str, str]]:
        return of_case({"turns": turns, "user": {"model": "default", "goal": "A trip.", **user}, **fields})

    greeting = {"user": "Hi."}
    assert of_user({}) == []
    assert (
        of_user({"goal": "", "plan": "Ask.", "maxTurns": 2, "expect": {"agents": [{"name": "lead"}]}}, greeting) == []
    )
    assert of_user({"goal": " "}) == [("user.goal", "is required, or `plan`: what the user wants.")]
    assert of_user({"model": "defualt"}) == [("user.model", "There is no model 'defualt'. Did you mean 'default'?")]
    assert of_user({"settings": {"extraJson": "[]"}}) == [("user.settings.extra_json", "must be one JSON object.")]
    assert of_user({"maxTurns": 1}, greeting) == [
        ("user.max_turns", "is 1 and must be more than the 1 turns before the user speaks.")
    ]
    assert of_user({}, *[greeting] * 10) == [
        ("user.max_turns", "is 10, the default, and must be more than the 10 turns before the user speaks.")
    ]
    assert of_user({}, {"recorded": {"run": {"runId": "r"}}}) == [
        ("user", "must not be set: the turns are recorded, so nothing runs.")
    ]
    assert of_user({}, {}, origin={"runId": "r", "afterSequence": 1}) == [
        ("user", "must not be set: a case with `origin` continues a recorded run with the turns that it has.")
    ]
    wrong = {"answer": {"regex": "("}, "agents": [{"name": "leed"}], "tools": [{"name": "serch"}]}
    assert [field for field, _ in of_user({"expect": {**wrong, "run": {"handoffs": [{"toAgent": "riter"}]}}})] == [
        "user.expect.tools[0].name",
        "user.expect.agents[0].name",
        "user.expect.run.handoffs[0].to_agent",
        "user.expect.answer",
    ]
    assert of_user({}, metrics=[{"agentTrajectory": {}}])[0][0] == "metrics[0]"
    expecting = {"expect": {"agents": [{"name": "lead"}], "run": {}, "answer": {}}}
    scored = [{"agentTrajectory": {}}, {"runOutcome": {}}, {"finalResponse": {}}]
    assert of_user(expecting, metrics=scored) == []


def test_session_state_is_an_object_with_keys_of_session_state() -> None:
    assert of_case({"sessionStateJson": "[1]"}) == [("session_state_json", "must be one JSON object.")]
    assert of_case({"sessionStateJson": '{"a": NaN}'}) == [
        ("session_state_json", "must be JSON text: NaN is not JSON.")
    ]
    [(field, text)] = of_case({"sessionStateJson": '{"ok": 1, "1 no": 2}'})
    assert (field, text.startswith("'1 no' is not a key of session state")) == ("session_state_json", True)


def test_expected_texts_of_json_are_json_and_matchers_make_sense() -> None:
    tools = [
        {"name": "t", "argumentsJson": "{", "resultJson": "1"},
        {"name": "t", "argumentsJson": "{}", "argumentsMatch": {}},
        {"name": "t", "resultJson": "1", "resultMatch": {"regex": "("}},
        {"name": "t", "argumentsMatch": {"schemaJson": '{"type": 7}'}},
        {"argumentsJson": "1"},
        {"name": "t", "nameRegex": "("},
    ]
    found = of_expectation({"answer": {"regex": "["}, "tools": tools})
    assert [field for field, _ in found] == [
        "answer",
        "tools[0].arguments_json",
        "tools[1].arguments_match",
        "tools[2].result_match",
        "tools[2].result_match",
        "tools[3].arguments_match",
        "tools[4].name",
        "tools[5].name_regex",
        "tools[5].name_regex",
    ]
    assert found[2][1] == "excludes arguments: set one of the two."
    assert [text for _, text in found[-3:]] == [
        "is required: the tool's name, `*` for any, or `name_regex`.",
        "excludes name: set one of the two.",
        "is not a regular expression of RE2: missing ): (.",
    ]
    assert of_expectation({"tools": [{"nameRegex": "^search_"}]}) == []


def test_expected_agents_are_checked_at_every_depth() -> None:
    child = {"name": "writer", "repeat": {"max": 1, "min": 2}, "tools": [{"name": "t", "resultJson": "{"}]}
    assert [field for field, _ in of_expectation({"agents": [{"name": "lead", "children": [child]}]})] == [
        "agents[0].children[0].repeat.max",
        "agents[0].children[0].tools[0].result_json",
    ]
    assert of_expectation({"agents": [{"name": "writer", "repeat": {"min": 0, "max": 1}}]}) == []


def test_an_expected_end_is_one_that_runs_agents_and_calls_have() -> None:
    state = "must be SUCCEEDED, FAILED or CANCELLED: in no other state anything ends."
    running = "EXECUTION_STATE_RUNNING"
    values = [
        {"path": "a..b"},
        {"path": "a", "absent": True, "valueMatch": {"regex": "x"}},
        {"path": "a", "valueMatch": {"regex": "("}},
    ]
    expect = {
        "run": {"state": running, "reason": "ERROR_REASON_TOOL_FAILED", "sessionState": values},
        "tools": [{"name": "search", "state": running}],
        "agents": [{"name": "lead", "state": running, "inputMatch": {"schemaJson": "{"}}],
    }
    found = of_expectation(expect)
    assert found[:1] + found[1:2] + found[3:6] == [
        ("tools[0].state", state),
        ("agents[0].state", state),
        ("run.state", state),
        ("run.reason", "is that of a run that failed: set state to FAILED."),
        ("run.session_state[0].path", "must be a key, then names of members and numbers of items, each after a dot."),
    ]
    assert [field for field, _ in found] == [
        "tools[0].state",
        "agents[0].state",
        "agents[0].input_match",
        "run.state",
        "run.reason",
        "run.session_state[0].path",
        "run.session_state[1].value_match",
        "run.session_state[2].value_match",
    ]


def test_the_id_of_a_turn_is_used_once() -> None:
    turns = [{"user": "Hi.", "id": "a"}, {"user": "Hi."}, {"user": "Hi."}, {"user": "Hi.", "id": "a"}]
    assert of_case({"turns": turns}) == [("turns[3].id", "There are two turns 'a': give each its own id.")]


def test_metrics_of_a_case_have_different_names_and_a_kind() -> None:
    budget = {"budget": {"errors": 0}}
    assert of_case(
        {"metrics": [budget, budget, {"name": "budget", "finalResponse": {"answer": {"exact": "x"}}}, {}]}
    ) == [
        ("metrics[1]", "There are two metrics 'budget': give each its own `name`."),
        ("metrics[2].name", "There are two metrics 'budget': give each its own `name`."),
        ("metrics[3]", "needs a kind, such as `tool_trajectory: {}`."),
    ]
    assert of_case({"metrics": [budget, {"name": "other", **budget}]}) == []


def test_models_and_functions_of_metrics_are_known() -> None:
    rubrics = [{"id": "a", "text": "x"}, {"id": "b", "text": "x"}, {"id": "a", "text": "y"}]
    assert of_metric({"llmJudge": {"model": "defalt", "rubrics": rubrics}}) == [
        ("llm_judge.model", "There is no model 'defalt'. Did you mean 'default'?"),
        ("llm_judge.rubrics[2].id", "'a' is also the id of cases[0].metrics[0].llm_judge.rubrics[0]."),
    ]
    assert of_metric({"custom": {"name": "polit", "configJson": "[]"}}) == [
        ("custom.name", "There is no metric 'polit'. Did you mean 'polite'?"),
        ("custom.config_json", "must be one JSON object."),
    ]


def test_a_budget_bounds_something_that_runs_use() -> None:
    assert of_metric({"budget": {}}) == [("budget", "bounds nothing: set `limits` or `errors`.")]
    assert of_metric({"budget": {"limits": {"concurrency": 2}}}) == [
        ("budget.limits.concurrency", "has no meaning here: a budget bounds the total that a run used.")
    ]


def test_what_metrics_expect_themselves_is_checked_too() -> None:
    assert [field for field, _ in of_metric({"toolTrajectory": {"tools": [{"name": "t", "resultJson": "{"}]}})] == [
        "tool_trajectory.tools[0].result_json"
    ]
    assert [field for field, _ in of_metric({"finalResponse": {"answer": {"regex": "("}}})] == ["final_response.answer"]


def test_a_metric_that_has_nothing_to_score_is_reported_with_its_case() -> None:
    assert of_metric({"agentTrajectory": {}}) == [("", "has nothing to score: the case 'c0' expects no agents.")]
    assert of_metric({"finalResponse": {}}) == [("", "has nothing to score: the case 'c0' expects no answer.")]
    assert of_metric({"toolTrajectory": {}}) == [
        ("", "has nothing to score: the case 'c0' expects no tools, and a turn without `expect` is not scored.")
    ]
    assert of_metric({"toolTrajectory": {"tools": [{"name": "search"}]}}) == []
    of_none: Json = {"metrics": [{"toolTrajectory": {}}]}
    assert of_case({"turns": [{"user": "Hi."}, {"user": "So?", "expect": {}}], **of_none}) == []
    user = {"goal": "A stamp.", "model": "default", "expect": {"answer": {"contains": ["stamp"]}}}
    assert of_case({"turns": [], "user": user, **of_none}) == []


def of_judge(*rubrics: Json, **judge: Any) -> list[tuple[str, str]]:
    """The problems of a judge by these rubrics, with paths inside it."""
    metric = {"llmJudge": {"model": "default", **judge, "rubrics": rubrics}}
    return [(field.removeprefix("llm_judge."), text) for field, text in of_metric(metric)]


def test_a_rubric_has_a_text_or_is_ready_and_has_one_id() -> None:
    assert of_judge({"ready": "READY_RUBRIC_GROUNDED"}, {"ready": "READY_RUBRIC_SAFE"}) == []
    assert of_judge(
        {"ready": "READY_RUBRIC_SAFE", "text": "It is safe."},
        {"id": "safe", "text": "It is safe."},
        {"text": "It is kind."},
        {"id": "empty"},
        {"id": "odd", "text": "It is odd.", "scale": {"min": 5}},
    ) == [
        ("rubrics[0].ready", "excludes text: set one of the two."),
        ("rubrics[1].id", "'safe' is also the id of cases[0].metrics[0].llm_judge.rubrics[0]."),
        ("rubrics[2].id", "is required: the name of the rubric."),
        ("rubrics[3].text", "is required: what has to be true of the answer, or `ready`."),
        ("rubrics[4].scale.max", "must be more than min, which is 5."),
    ]


def test_a_judge_is_one_known_model_or_several() -> None:
    safe = {"ready": "READY_RUBRIC_SAFE"}
    assert of_judge(safe, model="", models=["default"]) == []
    required = "is required: the configured name of the model that judges, or `models`."
    assert of_judge(safe, model="") == [("model", required)]
    assert of_judge(safe, models=["defalt"]) == [
        ("models", "excludes model: set one of the two."),
        ("models[0]", "There is no model 'defalt'. Did you mean 'default'?"),
    ]


def test_a_template_shows_what_a_ready_rubric_is_judged_by() -> None:
    grounded = {"ready": "READY_RUBRIC_GROUNDED"}
    assert of_judge(grounded, template="{{user}} {{tools}} {{answer}}") == []
    assert of_judge(grounded, template="{{answer}}") == [
        ("template", "lacks {{user}} and {{tools}}, by which the rubric 'grounded' is judged.")
    ]
    assert of_judge({"ready": "READY_RUBRIC_SAFE"}, template="{{answer}}") == []


def test_a_reference_has_something_to_compare() -> None:
    assert of_metric({"rouge1": {}}) == [("", "has nothing to score: the case 'c0' expects no answer.exact.")]
    no_words = "has no word of the letters a to z or digits, which are all that ROUGE-1 counts: use `similarity`."
    blank = "is blank: there is nothing to compare."
    assert of_metric({"rouge1": {"reference": "Привет"}}) == [("rouge_1.reference", no_words)]
    assert of_metric({"similarity": {"reference": " "}}) == [("similarity.reference", blank)]
    assert of_metric({"similarity": {"reference": "Привет"}}) == []
    expected = {"turns": [{"user": "Hi.", "expect": {"answer": {"exact": "世界"}}}], "metrics": [{"similarity": {}}]}
    assert of_case(expected) == []
    assert problems(expected, defaults={"metrics": [{"rouge1": {}}]}) == [
        ("cases[0].turns[0].expect.answer.exact", no_words)
    ]


def test_no_part_of_an_expected_answer_is_left_unscored() -> None:
    answer = {"exact": "Yes.", "contains": ["Y"]}
    case = {"turns": [{"user": "Hi.", "expect": {"answer": answer}}], "metrics": [{"similarity": {}}]}
    assert of_case(case) == [
        (
            "turns[0].expect.answer.contains",
            "is scored by no metric: the case has `similarity`, which compares `exact` alone. Set its `reference` "
            "instead.",
        )
    ]
    assert of_case({**case, "metrics": [{"similarity": {"reference": "Yes."}}]}) == []
    assert of_case({**case, "metrics": [{"similarity": {}}, {"finalResponse": {}}]}) == []


def test_a_default_metric_scores_the_cases_that_expect_something() -> None:
    judged = {"turns": [{"user": "Hi.", "expect": {"answer": {}}}]}
    defaults = {"metrics": [{"finalResponse": {}}]}
    assert problems(judged, {}, defaults=defaults) == []
    assert problems({}, {}, defaults=defaults) == [
        ("defaults.metrics[0]", "has nothing to score: no case expects any answer.")
    ]


def test_faults_name_what_exists_and_do_one_thing_to_a_share_of_the_calls() -> None:
    wrong = [
        {"tool": "serch", "share": 0.2, "fail": {}},
        {"model": "defalt", "agent": "leed", "share": 1, "fail": {}},
        {"tool": "search", "share": 0, "delay": "1s"},
        {"tool": "search", "share": 1.5, "delay": "601s"},
        {"tool": "search", "share": "NaN", "answerJson": "{"},
        {"model": "default", "share": 0.1, "delay": "1s"},
        {"model": "default", "share": 0.1, "fail": {"reason": "ERROR_REASON_INTERNAL"}},
        {"share": 0.5},
        {"tool": "get_state", "share": 1, "fail": {}},
        {"tool": "call_writer", "share": 1, "fail": {}},
    ]
    share = "must be over 0 and at most 1: the share of the calls that have the fault."
    expected = [
        ("faults[0].tool", "There is no tool 'serch'. Did you mean 'search'?"),
        ("faults[1].agent", "There is no agent 'leed'. Did you mean 'lead'?"),
        ("faults[9].tool", "'call_writer' calls an agent: mock that agent, in `mocks.agents`, or its tools."),
        ("faults[1].model", "There is no model 'defalt'. Did you mean 'default'?"),
        ("faults[2].share", share),
        ("faults[3].share", share),
        ("faults[3].delay", "must be over 0 and at most 10 minutes."),
        ("faults[4].share", share),
        (
            "faults[4].answer_json",
            "answer_json is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)).",
        ),
        ("faults[5].delay", "is for tools: attempts of a model only fail, with `fail`."),
        ("faults[6].fail.reason", "must be MODEL_RATE_LIMITED, or left out: so attempts of a model fail."),
        ("faults[7]", "concerns nothing: set `tool` or `model`."),
        ("faults[7]", "does nothing: set `fail`, `delay` or `answer`."),
        ("faults[8].tool", "'get_state' is a built-in tool, which cannot be mocked."),
    ]
    assert sorted(of_case({"faults": wrong})) == sorted(expected)
    in_defaults = problems({}, defaults={"faults": wrong})
    assert sorted(in_defaults) == sorted((f"defaults.{field}", text) for field, text in expected)


def test_faults_are_beside_mocks_and_only_in_cases_that_run() -> None:
    fault = {"tool": "search", "share": 1, "fail": {}}
    assert of_case({"mocks": {"faults": [fault]}}) == [
        ("mocks.faults", "must not be set: the faults of a case are beside its mocks, in `faults`.")
    ]
    recorded = [{"recorded": {"run": {"runId": "r"}}}]
    assert of_case({"turns": recorded, "faults": [fault]}) == [
        ("faults", "must not be set: the turns are recorded, so nothing runs.")
    ]
    large = {"tool": "search", "share": 1, "answerJson": json.dumps("x" * (MIB // 2))}
    assert of_case({"faults": [large, large]}) == [("faults", "are with `mocks` larger than 1 MiB.")]


def test_mocks_answer_calls_of_tools_that_can_be_mocked() -> None:
    mocks = [
        {"name": "transfer_to_agent", "resultJson": "1"},
        {"name": "t"},
        {"name": "t", "resultJson": "{"},
        {"name": "t", "resultJson": ""},
        {"name": "t", "outcome": {}},
        {"name": "t", "resultJson": "1", "argumentsMatch": {"equalsJson": ""}},
        {"name": "t", "outcome": {"parts": [{"text": ""}]}},
    ]
    found = of_case({"mocks": {"tools": mocks}})
    assert [field for field, _ in found] == [
        "mocks.tools[0].name",
        "mocks.tools[1]",
        "mocks.tools[2].result_json",
        "mocks.tools[3].result_json",
        "mocks.tools[4].outcome",
        "mocks.tools[5].arguments_match",
    ]
    assert found[0][1] == "'transfer_to_agent' is a built-in tool, which cannot be mocked."
    assert found[1][1] == "answers nothing: set `result` or `outcome`."


def test_an_answer_says_something() -> None:
    answers = [
        {"tool": "t"},
        {"approval": {"argumentsJson": "{}"}},
        {"approval": {"approved": True, "argumentsJson": "[]"}},
        {"tool": "t", "valueJson": "1"},
        {"question": "why", "approval": {}},
        {"question": "why", "valueJson": "because"},
        {"question": "why", "valueJson": '"because"'},
        {"tool": "t", "toolOutcome": {"parts": [{"text": "a"}]}},
    ]
    assert of_case({"answers": answers})[:5] == [
        ("answers[0]", "answers nothing: set `approval`, `value` or `tool_outcome`."),
        ("answers[1].approval.arguments_json", "is for an approval: other arguments to run the call with."),
        ("answers[2].approval.arguments_json", "must be one JSON object."),
        (
            "answers[3]",
            "is about a tool, whose calls are answered by `approval` or `tool_outcome`, not by `value`.",
        ),
        ("answers[4]", "is about a question, which is answered by `value`."),
    ]
    assert [field for field, _ in of_case({"answers": answers})[5:]] == ["answers[5].value_json"]


def test_a_deep_tree_of_expected_agents_is_checked() -> None:
    depth = 40
    tree: Json = {"name": "lead", "repeat": {"min": 2, "max": 1}}
    for _ in range(depth):
        tree = {"name": "lead", "children": [tree]}
    assert [field for field, _ in of_expectation({"agents": [tree]})] == [
        "agents[0]" + ".children[0]" * depth + ".repeat.max"
    ]
