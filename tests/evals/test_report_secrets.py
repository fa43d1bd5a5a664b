"""No secret of a result is in a file that a command writes, and no more of conversations than was asked for."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.v1 import eval_result_pb2
from bough_server.cli.eval.files import Content, Files
from bough_server.errors import ConfigurationError
from bough_server.evals.results.compare import compare
from bough_server.evals.results.content import reduce_result
from bough_server.settings_sections import RedactSection
from tests.evals.report_results import comparison, example, fill, messages
from tests.support.eval_results import passing, rerun, result_of

_SECRETS = st.text("abcdefghijkABCDEF0123456789-_\"\\<&|é'", min_size=6, max_size=30).map(lambda text: f"q{text}q")
_IDS = {
    "evaluation_id",
    "run_ids",
    "revision",
    "run_id",
    "user_run_id",
    "trace_id",
    "invocation_id",
    "eval_set_digest",
    "prices",
    "server_version",
    "code_digest",
}
_OURS = {*_IDS, "agents", "models", "tools", "judges", "users", "currency_code", "cost_currency_code"}


def _result(text: str, value: str) -> tuple[eval_result_pb2.EvalResult, eval_result_pb2.EvalComparison]:
    def said(name: str) -> str:
        if name in _OURS:
            return "ours"
        return value if name.endswith("_json") else text

    result, compared = eval_result_pb2.EvalResult(), eval_result_pb2.EvalComparison()
    fill(result, said)
    fill(compared, said)
    return result, compared


def _forms(secret: str) -> set[str]:
    return {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}


def _texts(content: str, text: str, value: str, **redact: list[str]) -> list[str]:
    """Every text of what is left."""
    found: list[str] = []
    for one in reduce_result(*_result(text, value), content, **redact):
        assert one is not None
        for message in messages(one):
            for _, held in message.ListFields():
                found += [held] if isinstance(held, str) else []
                if hasattr(held, "values") and not hasattr(held, "DESCRIPTOR"):
                    found += [item for item in held.values() if isinstance(item, str)]
                elif not isinstance(held, str) and hasattr(held, "__iter__"):
                    found += [item for item in held if isinstance(item, str)]
    return found


@given(secret=_SECRETS, cut=st.sampled_from(["", "x" * 1_990]), content=st.sampled_from(["cut", "full"]))
def test_no_text_holds_what_a_member_at_a_path_has(secret: str, cut: str, content: str) -> None:
    value = json.dumps({"user": [{"password": secret}], "other": secret, "more": cut})
    for text in _texts(content, f"{cut}It said {secret}, not {secret!r}.", value, fields=["user.*.password"]):
        assert not any(form in text for form in _forms(secret))


@given(secret=_SECRETS, cut=st.sampled_from(["", "x" * 1_990]), is_whole=st.booleans())
def test_no_text_holds_what_a_pattern_matches(secret: str, cut: str, is_whole: bool) -> None:
    value = json.dumps({"a": f"{cut}{secret}"})
    patterns = [r"q[^q]*q"]
    for text in _texts("cut", f"{cut}It said {secret}.", value if is_whole else value[:-1], patterns=patterns):
        assert not any(form in text for form in _forms(secret))


@given(secret=_SECRETS)
def test_nothing_that_was_said_is_left_without_content(secret: str) -> None:
    result, compared = example(), comparison()
    run = result.cases[0].trials[0]
    for message in (result.cases[0].turns[0], run.scores[0], run.turns[0].agents[0].calls[0], run.unanswered):
        fill(message, lambda name: "a" if name in {"id", "name", "agent"} or name.endswith("_id") else secret)
    for difference in run.scores[0].tree_comparisons[0].differences:
        difference.kind = eval_result_pb2.DIFFERENCE_KIND_TOOLS
        difference.expected_parent = difference.actual_parent = "lead"
    run.scores[0].judgments[0].rubric_id = "kind"
    run.unanswered.agent_path[:] = ["lead"]
    for agent in result.cases[0].turns[0].expect.agents:
        agent.forbidden[:] = ["writer"]
    result.cases[0].turns[0].input.metadata_json = secret
    shown, _ = reduce_result(result, compared, "none")
    assert secret.encode() not in shown.SerializeToString()
    (moved, missing) = shown.cases[0].trials[0].scores[1].tree_comparisons[0].differences
    assert (moved.message, missing.agent) == ("writer was called by researcher, expected by lead", "checker")


def test_what_quotes_nothing_is_left_without_content() -> None:
    result = example()
    result.pins.eval_set_digest = "sha256:0"
    shown, compared = reduce_result(result, comparison(), "none")
    assert compared is not None
    assert [(one.gate, one.number) for one in shown.gates] == [(one.gate, one.number) for one in result.gates]
    assert (shown.pins, compared.cost_currency_code) == (result.pins, "USD")


@pytest.mark.parametrize("content", ["full", "cut", "none"])
def test_a_result_is_compared_alike_however_much_of_its_content_is_left(content: str) -> None:
    before, after = result_of(passing("a", 5, 5), passing("b", 5, 5)), result_of(passing("a", 0, 5), passing("b", 5, 5))
    rerun(after.cases[0], candidate=(0, 20), baseline=(20, 20))
    after.cases[0].turns[0].id = "ask"
    after.suspects.case_ids.append("a")
    after.suspects.trials = 20
    after.suspects.baseline_pins.CopyFrom(before.pins)
    (kept, _), (shown, _) = (reduce_result(one, None, content) for one in (before, after))
    assert compare(kept, shown) == compare(before, after)
    assert compare(before, after).regressions == 1
    assert shown.cases[0].turns[0].id == "ask"


def test_the_beginning_of_a_secret_before_an_ellipsis_is_removed() -> None:
    result = example()
    run = result.cases[0].trials[0]
    run.turns[0].agents[0].calls[0].arguments_json = '{"password": "hunter2-and-more"}'
    run.reason = 'password: "hunter2-a… is not expected'
    shown, _ = reduce_result(result, None, "full", fields=["password"])
    assert shown.cases[0].trials[0].reason == 'password: "[redacted]… is not expected'


def test_json_that_was_cut_is_replaced_as_a_whole_if_there_are_paths() -> None:
    result = example()
    call = result.cases[0].trials[0].turns[0].agents[0].calls[0]
    call.arguments_json, call.result_json = '{"password": "hunter2", "more": "', '"\\ud800"'
    result.cases[0].reason = "It said hunter2."
    shown, _ = reduce_result(result, None, "full", fields=["password"])
    call = shown.cases[0].trials[0].turns[0].agents[0].calls[0]
    assert (call.arguments_json, call.result_json) == ('"[redacted]"', '"?"')
    assert shown.cases[0].reason == "It said [redacted]."


@pytest.mark.parametrize(
    "answer",
    [
        '{"password": "hunter2-and-more", "user": "Annabel"}',
        '[{"password": {"value": ["hunter2-and-more"]}}]',
        'Here it is: {"password": "hunter2-and-more"}.',
        "{'password': 'hunter2-and-more'}",
        '{"password": "hunter2-and-m',
    ],
)
def test_members_are_found_in_answers_that_are_json(answer: str) -> None:
    result = example()
    result.cases[0].trials[0].turns[0].answer = answer
    result.cases[0].trials[0].scores[0].reason = f"The answer is {answer}."
    shown, _ = reduce_result(result, None, "full", fields=["password"])
    assert "hunter2" not in str(shown)
    assert ("Annabel" in str(shown)) == ("Annabel" in answer)


def test_members_are_found_in_texts_of_json_that_are_json() -> None:
    result = example()
    call = result.cases[0].trials[0].turns[0].agents[0].calls[0]
    call.result_json = json.dumps(json.dumps({"password": "hunter2-and-more", "user": "Annabel"}))
    result.cases[0].reason = "It said hunter2-and-more."
    shown, _ = reduce_result(result, None, "full", fields=["password"])
    assert "hunter2" not in str(shown)
    assert "Annabel" in shown.cases[0].trials[0].turns[0].agents[0].calls[0].result_json


def test_names_of_metrics_and_labels_are_searched_too() -> None:
    result, compared = example(), comparison()
    result.labels["key-0123456789"] = "x"
    result.totals.metric_means["key-0123456789"] = 1
    result.totals.metric_means["key-0123456780"] = 0.5
    result.pins.tools["key-0123456789"] = "abc"
    compared.cases[0].metric_changes["key-0123456789"] = 1
    for one in reduce_result(result, compared, "full", patterns=["key-[0-9]{10}"]):
        assert "key-" not in str(one)


def test_texts_are_cut_after_secrets_are_found() -> None:
    result = example()
    turn = result.cases[0].trials[0].turns[0]
    turn.answer = "x" * 1_996 + " key-0123456789"
    shown, _ = reduce_result(result, None, "cut", patterns=["key-[0-9]{10}"])
    answer = shown.cases[0].trials[0].turns[0].answer
    assert (len(answer), answer[-6:]) == (2_000, "xx [r…")
    whole, _ = reduce_result(result, None, "full")
    assert whole == result


def test_a_pattern_that_is_no_regular_expression_is_said() -> None:
    with pytest.raises(ConfigurationError, match=r"evaluation\.redact\.patterns: '\(' is no regular expression"):
        reduce_result(example(), None, "full", patterns=["("])


def test_no_file_that_is_written_holds_a_secret(tmp_path: Path) -> None:
    result, compared = _result("It is hunter2hunter2.", '{"password": "hunter2hunter2"}')
    files = [tmp_path / name for name in ("j.xml", "m.md", "h.html", "r.json")]
    for content in Content:
        for redact in (RedactSection(fields=("password",)), RedactSection(patterns=("hunter2",))):
            if content == Content.NONE:
                redact = RedactSection(patterns=("hunter2",))
            Files(junit=files[0], markdown=files[1], html=files[2], json=files[3], content=content).write(
                result, compared, redact=redact
            )
            for path in files:
                assert "hunter2" not in path.read_text(encoding="utf-8"), (path, content)
