"""Files of other tools: what each is, secrets that stay out of sets, and what is wrong with them in a sentence."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_set_pb2
from bough_server.errors import ConfigurationError
from bough_server.evals.importers.files import FileFormat, detect
from bough_server.evals.importers.values import JsonValue, Notes
from tests.evals.trpc_files import import_paths, import_values
from tests.support.examples import examples

FILES = Path(__file__).parents[1] / "golden" / "imports"
SAID: JsonValue = {"role": "user", "content": "hello"}
TRPC: JsonValue = {"evalSetId": "s", "evalCases": [{"evalId": "one", "conversation": [{"userContent": SAID}]}]}
ADK: JsonValue = {
    "eval_set_id": "s",
    "eval_cases": [{"eval_id": "one", "conversation": [{"user_content": {"parts": [{"text": "hello"}]}}]}],
}
METRICS: JsonValue = [{"metricName": "tool_trajectory_avg_score"}]
CONFIG: JsonValue = {"criteria": {"tool_trajectory_avg_score": 1}}


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        (TRPC, "a.json", FileFormat.TRPC_SET),
        ({"evalCases": [{"evalMode": "trace"}]}, "a.json", FileFormat.TRPC_SET),
        ({"evalCases": [{"conversation": [{"tools": []}]}]}, "a.test.json", FileFormat.TRPC_SET),
        ({"evalCases": []}, "a.json", FileFormat.TRPC_SET),
        ({"evalCases": []}, "a.test.json", FileFormat.ADK_SET),
        ({"evalCases": [{"conversation": [{"intermediateData": {}}]}]}, "a.json", FileFormat.ADK_SET),
        ({"evalCases": [{"conversation": [{"userContent": {"parts": []}}]}]}, "a.json", FileFormat.ADK_SET),
        (ADK, "a.evalset.json", FileFormat.ADK_SET),
        ([{"query": "Hi"}], "a.test.json", FileFormat.ADK_TESTS),
        ([{"name": "a", "data": []}], "a.json", FileFormat.ADK_TESTS),
        (METRICS, "a.json", FileFormat.TRPC_METRICS),
        ([], "a.metrics.json", FileFormat.TRPC_METRICS),
        (CONFIG, "a.json", FileFormat.ADK_CONFIG),
        ({}, "test_config.json", FileFormat.ADK_CONFIG),
        ({"evalSetId": "s", "evalCaseResults": []}, "a.json", FileFormat.TRPC_RESULT),
    ],
)
def test_a_file_is_what_it_holds(value: JsonValue, name: str, expected: FileFormat) -> None:
    assert detect(value, Path(name)) is expected


@pytest.mark.parametrize("value", [None, 1, "x", [], {}, [1]])
def test_a_file_of_no_format_is_refused(value: JsonValue) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^a\.json: The file is no eval set of trpc-agent-go, no metrics file of"
    ):
        detect(value, Path("a.json"))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"name": "s", "cases": []}, "an eval set of Bough, which needs no import: "),
        ({"evalSetName": "s", "cases": []}, "a result of `bough eval`, which needs no import: "),
    ],
)
def test_a_file_of_our_own_needs_no_import(value: JsonValue, what: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^a\.json: The file is {what}"):
        detect(value, Path("a.json"))


def test_a_metrics_file_says_whose_set_it_is() -> None:
    # trpc-agent-go once wrote its sets as ADK does.
    eval_set, sentences = import_values(ADK, METRICS, path=Path("a.evalset.json"))
    assert eval_set.defaults.metrics[0].tool_trajectory.mode == eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER
    assert sentences == []


def test_the_metrics_beside_an_older_set_of_trpc_are_read(tmp_path: Path) -> None:
    source, metrics = tmp_path / "math.evalset.json", tmp_path / "math.metrics.json"
    use: JsonValue = {"name": "add", "args": {"a": 1}}
    turn: JsonValue = {
        "user_content": {"parts": [{"text": "1 + 1?"}], "role": "user"},
        "intermediate_data": {"tool_uses": [use]},
    }
    source.write_text(json.dumps({"eval_set_id": "math", "eval_cases": [{"eval_id": "a", "conversation": [turn]}]}))
    metrics.write_text(json.dumps(METRICS))
    (tmp_path / "test_config.json").write_text(json.dumps(CONFIG))
    eval_set, sentences = import_paths([source])
    assert sentences == [f"The metrics are those of {metrics}."]
    assert eval_set.defaults.metrics[0].tool_trajectory.mode == eval_set_pb2.TRAJECTORY_MODE_ANY_ORDER
    # The file has no results, and without a criterion none is required to be missing.
    assert [(tool.name, tool.HasField("result_match")) for tool in eval_set.cases[0].turns[0].expect.tools] == [
        ("add", False)
    ]


@pytest.mark.parametrize(("source", "metrics"), [(TRPC, CONFIG), ([{"query": "Hi"}], METRICS)])
def test_metrics_of_the_other_tool_are_refused(source: JsonValue, metrics: JsonValue) -> None:
    with pytest.raises(ConfigurationError, match="The metrics are not those of"):
        import_values(source, metrics, path=Path("a.json"))


def test_files_must_be_one_with_cases_and_at_most_one_with_metrics() -> None:
    metrics = FILES / "tooltrajectory-basic.metrics.json"
    trace = FILES / "trace-basic.evalset.json"
    for files in ([], [metrics], [trace, trace], [trace, metrics, metrics]):
        with pytest.raises(ConfigurationError, match="Name one file with cases, and at most one with metrics: "):
            import_paths(files)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", ":1: This is not JSON that can be read: expected a key in double quotes."),
        (b"\xff\xfe\xfd", ": The file is not UTF-8 text."),
        (b'{"evalCases":\n[NaN]}', ":2: This is not JSON that can be read: NaN is not JSON."),
        (b'{"evalCases":\n[1e999]}', ":2: evalCases[0]: is too large for a number"),
        (b'{"evalCases":\n[' + b"1" * 5000 + b"]}", ":2: This is not JSON that can be read: Exceeds the limit"),
        (b"[" * 200 + b"]" * 200, ":1: This is not JSON that can be read: it is nested deeper than 100 levels."),
        (b"[" * 100_000, ":1: This is not JSON that can be read: it is nested deeper than 100 levels."),
        (b'{"evalCases": [],\n"evalCases": []}', ":2: evalCases: is given twice"),
        (b'{"evalCases":\n["\\ud800"]}', ":2: evalCases[0]: contains half of a surrogate pair"),
        (b'{\n"evalCases": 1}', ":2: evalCases: must be a list"),
        (b'{"evalCases": [\n1]}', ":2: evalCases[0]: must be an object"),
        (b'{"evalCases": [\n{"evalId": 1}]}', ":2: evalCases[0].evalId: must be a text"),
        (b'{"evalCases": [{\n"evalMode": "novel"}]}', ":2: evalCases[0].evalMode: must be trace or empty"),
        (b'{"evalCases": []}', ": The set has no case that can be imported"),
        (
            b'{"evalCases":[{"conversation":[{"tools":[\n{"id":"a"}]}]}]}',
            ":2: evalCases[0].conversation[0].tools[0].name: is required",
        ),
        (
            b'{"evalCases":[{"conversation":[{"userContent":{"parts":[\n{"inlineData":{"data":"?"}}]}}]}]}',
            ":2: evalCases[0].conversation[0].userContent.parts[0].inlineData.data: must be base64",
        ),
    ],
    ids=range(16),
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "a.evalset.json"
    path.write_bytes(data)
    with pytest.raises(ConfigurationError) as raised:
        import_paths([path])
    assert raised.value.message.startswith(f"{path}{problem}")


def test_a_file_that_is_missing_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        import_paths([path])
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024 + 1)
    with pytest.raises(ConfigurationError, match="larger than 64 MiB"):
        import_paths([path])


def test_escaped_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    path = tmp_path / "a.evalset.json"
    path.write_text(json.dumps(TRPC).replace("hello", "\\ud83d\\ude00"))
    assert import_paths([path])[0].cases[0].turns[0].user == "😀"


# Secrets.


def judge(**model: JsonValue) -> JsonValue:
    return [{"metricName": "quality", "threshold": 0.5, "criterion": {"llmJudge": {"judgeModel": model}}}]


def kept(**model: JsonValue) -> tuple[JsonValue, list[str]]:
    eval_set, sentences = import_values(TRPC, judge(**model), path=Path("a.evalset.json"))
    config = json.loads(eval_set.defaults.metrics[0].custom.config_json)
    return config["criterion"]["llmJudge"]["judgeModel"], sentences


def test_environment_variables_are_never_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "a-secret")
    found, _ = kept(modelName="${JUDGE}", baseURL="$JUDGE/v1", providerName="%JUDGE%")
    assert found == {"modelName": "${JUDGE}", "baseURL": "$JUDGE/v1", "providerName": "%JUDGE%"}


@pytest.mark.parametrize(
    "secret",
    [
        {"apiKey": "abc"},
        {"api_key": "${KEY}"},
        {"APIKey": "abc"},
        {"accessKey": "abc"},
        {"key": "abc"},
        {"authToken": "abc"},
        {"clientSecret": "abc"},
        {"password": "abc"},
        {"credentials": {"user": "a"}},
        {"headers": {"Authorization": "abc"}},
        {"headers": {"x": "Bearer abc"}},
        {"headers": {"Cookie": ["a=b"]}},
        {"extra": "sk-abcdefgh12345678"},
        {"extra": ["AKIAABCDEFGHIJKLMNOP"]},
        {"extra": [["ghp_abcdefgh12345678"]]},
        {"extra": "eyJhbGciOiJI.eyJzdWIi.x"},
        {"baseURL": "https://user:pass@example.org/v1"},
        {"baseURL": "https://example.org/v1?api_key=abc"},
        {"baseURL": "https://example.org/v1?a=1&sig=abc"},
    ],
)
def test_what_looks_like_a_secret_is_left_out_and_named(secret: dict[str, JsonValue]) -> None:
    found, sentences = kept(modelName="m", **secret)
    assert "abc" not in json.dumps(found)
    assert json.dumps(found) in ('{"modelName": "m"}', '{"modelName": "m", "headers": {}}') or "extra" in secret
    assert [sentence for sentence in sentences if sentence.endswith("looks like a secret and was left out.")]
    name = next(iter(secret))
    assert sentences[-1].startswith(f"quality: criterion.llmJudge.judgeModel.{name}")


def test_what_is_no_secret_stays() -> None:
    model: dict[str, JsonValue] = {
        "baseURL": "https://example.org/v1?model=a",
        "generationConfig": {"max_tokens": 512, "temperature": 0.5},
        "tokenizer": "jieba",
        "monkey": "banana",
        "apiKey": "",
        "useAuth": True,
    }
    found, sentences = kept(**model)
    assert found == model
    assert len(sentences) == 1


def test_a_sentence_names_a_few_of_its_cases() -> None:
    notes = Notes()
    notes.add("Nothing.")
    for case in "aabcde":
        notes.add("Something.", case)
    assert notes.sentences == ["Nothing.", "Something. (Cases 'a', 'b', 'c' and 2 more.)"]


# Anything that is JSON.

TEXTS = st.text(max_size=8) | st.sampled_from(
    ["trace", "exact", "contains", "regex", "skip", "(", "EXACT", "sk-abcdefgh1234", "a.b", "*"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | TEXTS
NAMES = st.sampled_from(
    [
        *("evalCases", "eval_cases", "evalCaseResults", "evalId", "evalMode", "conversation", "actualConversation"),
        *("userContent", "finalResponse", "content", "parts", "text", "tools", "name", "arguments", "result", "id"),
        *("intermediateData", "tool_uses", "tool_responses", "args", "response", "intermediate_responses", "image"),
        *(
            "invocation_events",
            "sessionInput",
            "state",
            "agents",
            "invocationId",
            "parentInvocationId",
            "data",
            "query",
        ),
        *("expected_tool_use", "tool_name", "tool_input", "mock_tool_output", "reference", "initial_session", "runId"),
        *("metricName", "threshold", "criterion", "toolTrajectory", "defaultStrategy", "toolStrategy", "ignoreTree"),
        *("onlyTree", "matchStrategy", "numberTolerance", "finalResponse", "json", "length", "min", "max", "criteria"),
        *(
            "tool_trajectory_avg_score",
            "match_type",
            "evalMetricResultPerInvocation",
            "actualInvocation",
            "inline_data",
        ),
    ]
)
VALUES: st.SearchStrategy[JsonValue] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | TEXTS, inner, max_size=4), max_leaves=30
)


def listed(inner: st.SearchStrategy[JsonValue]) -> st.SearchStrategy[JsonValue]:
    return st.lists(inner, min_size=1, max_size=2).map(list)


def shaped(**members: st.SearchStrategy[JsonValue]) -> st.SearchStrategy[JsonValue]:
    return st.fixed_dictionaries(members).map(dict)


@st.composite
def damaged(draw: st.DrawFn, source: st.SearchStrategy[JsonValue]) -> JsonValue:
    """Values of a strategy of which a few members or items are something else, or missing."""
    value = draw(source)
    for _ in range(draw(st.integers(0, 3))):
        inner = value
        for _ in range(draw(st.integers(0, 6))):
            choices: list[JsonValue] = list(inner.values() if isinstance(inner, dict) else inner or [])  # type: ignore[arg-type]
            deeper = [one for one in choices if isinstance(one, list | dict) and one]
            if not deeper:
                break
            inner = draw(st.sampled_from(deeper))
        if isinstance(inner, dict) and inner:
            name = draw(st.sampled_from(sorted(inner)))
            if draw(st.booleans()):
                del inner[name]
            else:
                inner[name] = draw(VALUES)
        elif isinstance(inner, list):
            inner.append(draw(VALUES))
    return value


NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
CONTENTS = shaped(content=TEXTS) | shaped(
    parts=listed(
        shaped(text=TEXTS) | shaped(image=shaped(url=TEXTS, data=TEXTS)) | shaped(inline_data=shaped(data=TEXTS))
    )
)
TURN = shaped(
    userContent=CONTENTS,
    finalResponse=CONTENTS,
    tools=listed(shaped(name=TEXTS, arguments=JSON, result=JSON)),
    intermediateData=shaped(tool_uses=listed(shaped(name=TEXTS, args=JSON))),
)
CASE = shaped(
    evalId=TEXTS,
    evalMode=st.sampled_from(["", "trace"]),
    conversation=listed(TURN),
    actualConversation=st.none() | listed(TURN),
    sessionInput=shaped(state=st.dictionaries(TEXTS, LEAVES).map(dict)),
)
FLAGS: st.SearchStrategy[JsonValue] = st.booleans()
BRANCHES: st.SearchStrategy[JsonValue] = st.dictionaries(NAMES, FLAGS).map(dict)
TREES: st.SearchStrategy[JsonValue] = st.dictionaries(NAMES, FLAGS | BRANCHES).map(dict)
STRATEGIES = st.sampled_from(["exact", "skip", "contains", "regex", "other"])
JSON_CRITERION = shaped(matchStrategy=STRATEGIES, ignoreTree=TREES) | shaped(onlyTree=TREES, numberTolerance=NUMBERS)
STRATEGY = shaped(name=shaped(matchStrategy=st.just("exact")), arguments=JSON_CRITERION, result=JSON_CRITERION)
CRITERION = shaped(
    toolTrajectory=shaped(defaultStrategy=STRATEGY, toolStrategy=st.dictionaries(TEXTS, STRATEGY).map(dict)),
    finalResponse=shaped(
        text=shaped(matchStrategy=STRATEGIES, length=shaped(min=NUMBERS, max=NUMBERS)), json=JSON_CRITERION
    ),
)
METRIC = shaped(metricName=TEXTS, threshold=NUMBERS, criterion=CRITERION)
SOURCES = (
    shaped(evalSetId=TEXTS, evalCases=listed(CASE))
    | shaped(eval_set_id=TEXTS, eval_cases=listed(CASE))
    | listed(shaped(query=TEXTS, expected_tool_use=listed(shaped(tool_name=TEXTS, tool_input=VALUES)), reference=TEXTS))
    | shaped(
        evalCaseResults=listed(
            shaped(
                evalId=TEXTS,
                runId=st.integers(),
                overallEvalMetricResults=listed(METRIC),
                evalMetricResultPerInvocation=listed(shaped(actualInvocation=TURN, expectedInvocation=TURN)),
            )
        )
    )
)
METRICS_FILES = listed(METRIC) | shaped(criteria=st.dictionaries(TEXTS, NUMBERS | shaped(threshold=NUMBERS)).map(dict))


@examples(50)
@given(
    damaged(SOURCES) | VALUES,
    st.none() | damaged(METRICS_FILES) | VALUES,
    st.sampled_from(["a.json", "a.test.json", "a.evalset.json", "1.metrics.json"]),
)
def test_whatever_the_json_an_import_returns_a_set_or_says_what_is_wrong(
    value: JsonValue, metrics: JsonValue, name: str
) -> None:
    try:
        eval_set, sentences = import_values(value, metrics, path=Path(name))
    except ConfigurationError:
        return  # any other exception fails the test
    assert eval_set == eval_set_pb2.EvalSet.FromString(eval_set.SerializeToString())
    assert eval_set.cases
    assert all(case.id and case.turns for case in eval_set.cases)
    assert all(tool.name for case in eval_set.cases for turn in case.turns for tool in turn.expect.tools)
    assert all(sentences)
