"""JUnit and Markdown reports: what CI servers and pull requests show, whatever a result says."""

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml
from markdown_it import MarkdownIt

from bough.v1 import eval_result_pb2, execution_pb2
from bough_server.cli.eval.files import why_unwritable
from bough_server.cli.render.evaluations import result_lines
from bough_server.documents.files import write_whole
from bough_server.evals.reports.html import html_page
from bough_server.evals.reports.junit import junit_text
from bough_server.evals.reports.markdown import markdown_text
from tests.evals.report_results import comparison, example, fill
from tests.golden import reports

_EVIL = ["a|b\n| c |", "@everyone", "#12", "www.x.org", "&lt;b>", "GH-1"]
_TEXTS = (st.text(max_size=40) | st.sampled_from(_EVIL)).map(lambda text: text.encode(errors="replace").decode())


def _of(text: str) -> tuple[eval_result_pb2.EvalResult, eval_result_pb2.EvalComparison]:
    result, compared = eval_result_pb2.EvalResult(), eval_result_pb2.EvalComparison()
    fill(result, lambda name: text)
    fill(compared, lambda name: text)
    compared.cases[0].change = eval_result_pb2.CASE_CHANGE_WORSE
    return result, compared


def test_the_reports_are_what_the_golden_files_hold() -> None:
    """After a change that is meant to change them: `python -m tests.golden.reports`, and read the diff."""
    assert reports.made() == {path: path.read_text(encoding="utf-8") for path in reports.FILES}


def test_a_case_is_a_test_case_that_failed_crashed_or_could_not_be_scored(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(junit_text(example()), encoding="utf-8")
    (suite,) = JUnitXml.fromfile(str(path))
    assert (suite.name, suite.tests, suite.failures, suite.errors) == ("desk", 6, 2, 2)
    cases = list(suite)
    assert [(one.classname, one.name) for one in cases][:2] == [("desk", "who-calls-whom"), ("desk", "crash")]
    assert [[type(found) for found in one.result] for one in cases] == [[Failure], [Error], [Error], [], [Failure], []]
    assert cases[0].time == 3.0
    assert cases[1].result[0].message == "The trial crashed: the model is gone."
    output = cases[0].system_out.splitlines()
    for fact in (
        "run_id.0.0: run-1",
        "trace_id.1.0: 0af7651916cd43dd8448eb211c80319c",
        "score.agent_trajectory: 0.8333",
        "pass_rate.lower: 0.0945",
        "flaky: true",
        "label.topic: nature",
    ):
        assert fact in output


def test_the_trees_of_what_did_not_pass_have_numbered_calls_and_the_differences() -> None:
    """Calls of agents have no number: differences count those of tools."""
    (suite,) = JUnitXml.fromstring(junit_text(example(), comparison()))
    output = next(iter(suite)).system_out
    assert "against the baseline: worse, pass rate 1.00 to 0.50\n  - 3 of 20 trials passed, 18 of 20" in output
    tree = output[output.index("expected:") :]
    assert tree.startswith("expected:\n  lead: in order\n    researcher: at least 1 time, calls in any order")
    for line in (
        "      1. search_notes: result: matches: red",
        "    checker [missing]",
        "  lead [matched]: succeeded, 2 steps, 700 tokens",
        '    - call_researcher succeeded: arguments: { "topic": "leaves" }; result: It fades.',
        "      writer [moved]",
        "  - agent_trajectory: checker was expected below lead and is missing",
    ):
        assert line in tree.splitlines()
    fence = f"```text\n{output[output.index('trial 1: failed') :]}\n```"
    assert f"<details><summary>who-calls-whom: expected and actual tree</summary>\n\n{fence}\n\n</details>" in (
        markdown_text(example())
    )


@pytest.mark.parametrize(
    ("state", "verdict", "sentence"),
    [
        (
            execution_pb2.EXECUTION_STATE_CANCELLED,
            "cancelled",
            "The evaluation was cancelled: Ann did it. It has no verdict: 3 of 40 trials ended.",
        ),
        (
            execution_pb2.EXECUTION_STATE_FAILED,
            "ended without a verdict",
            "The evaluation failed: Ann did it. It has no verdict: 3 of 40 trials ended.",
        ),
        (
            execution_pb2.EXECUTION_STATE_RUNNING,
            "running",
            "The evaluation has not ended: Ann did it. It has no verdict: 3 of 40 trials ended.",
        ),
    ],
)
def test_an_evaluation_that_did_not_succeed_says_so_in_every_file_and_is_no_success(
    state: execution_pb2.ExecutionState.ValueType, verdict: str, sentence: str
) -> None:
    result = example()
    result.ClearField("gates")
    del result.cases[:-1]  # the last one passed
    result.verdict, result.state = eval_result_pb2.VERDICT_UNSPECIFIED, state
    result.error.message = "Ann did it."
    result.totals.trials, result.totals.trials_ended = 40, 3
    (suite,) = JUnitXml.fromstring(junit_text(result))
    assert (suite.tests, suite.failures, suite.errors) == (2, 0, 1)
    assert [found.message for case in suite for found in case.result] == [sentence]
    assert markdown_text(result).startswith(f"### desk: {verdict}\n\n{sentence}\n")
    page = html_page(result)
    assert f'<span class="cancelled">{verdict}</span></h1>' in page
    assert f'<p class="cancelled">{sentence}</p>' in page
    lines = [line.plain for line in result_lines(result, width=200)]
    assert sentence in lines
    assert lines[-1].startswith(f"{verdict}: ")


@pytest.mark.parametrize("schema", ["jenkins_junit.xsd", "surefire_report.xsd"])
def test_a_junit_file_is_one_that_jenkins_and_surefire_accept(schema: str) -> None:
    result, compared = _of("a text")
    result.cases[0].trials[0].duration.nanos = 100_000_000
    result.cases[0].trials.add().duration.nanos = 200_000_001
    result.state = execution_pb2.EXECUTION_STATE_CANCELLED
    known = xmlschema.XMLSchema(Path(__file__).parent / "schemas" / schema)
    for text in (
        junit_text(example(), comparison()),
        junit_text(result, compared),
        junit_text(eval_result_pb2.EvalResult()),
    ):
        known.validate(text)
    assert not known.is_valid("<testsuites/>")


def test_kinds_of_differences_and_marks_of_a_later_version_are_shown_by_their_messages() -> None:
    result = example()
    trial = result.cases[0].trials[0]
    trial.turns[0].agents[0].mark = 99  # type: ignore[assignment]
    trial.scores[1].tree_comparisons[0].differences[0].kind = 99  # type: ignore[assignment]
    for text in (junit_text(result), markdown_text(result), html_page(result)):
        assert "checker was expected below lead and is missing" in text


def test_every_report_has_the_reason_of_a_verdict_that_no_gate_has() -> None:
    passed, failed = eval_result_pb2.VERDICT_PASSED, eval_result_pb2.VERDICT_FAILED
    gate = eval_result_pb2.GateResult(gate="cost.total <= 2", verdict=passed)
    result = eval_result_pb2.EvalResult(verdict=failed, gates=[gate], reason="1 trial crashed.")
    suite = ElementTree.fromstring(junit_text(result))
    (failure,) = suite.iter("failure")
    assert failure.get("message") == "1 trial crashed."
    assert "\n1 trial crashed.\n" in markdown_text(result)
    assert "1 trial crashed." in html_page(result)


@settings(deadline=None)
@given(text=_TEXTS)
def test_any_text_makes_xml_that_is_read_back_with_messages_of_one_line(text: str) -> None:
    result, _ = _of(text)
    result.cases[0].verdict = eval_result_pb2.VERDICT_FAILED
    xml = junit_text(result)
    ElementTree.fromstring(xml)
    (suite,) = JUnitXml.fromstring(xml)
    for case in suite:
        for found in case.result:
            assert "\n" not in (found.message or "")
            assert len(found.message or "") <= 300


@settings(deadline=None)
@given(text=_TEXTS)
def test_no_text_breaks_out_of_the_table_or_notifies_anyone(text: str) -> None:
    result, compared = _of(text)
    shown = markdown_text(result, compared)
    first, second, *folded = MarkdownIt().parse(shown[shown.index("<details>") :])
    assert [token.type for token in (first, second, *folded)] == ["html_block", "fence", "html_block"]
    assert (first.content.count("<"), folded[0].content) == (3, "</details>\n")
    shown = shown[: shown.index("<details>")]
    table = shown[shown.index("| verdict |") :].strip().splitlines()
    assert len(table) == 3
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", table[2])) == 5
    assert not re.search(r"[@#]\w|://\w|www\.|(?i:GH)-\d", shown)
    assert not re.search(r"(?<!\\)(?:\\\\)*[<>`\[\]$]", shown)


def test_a_comment_shows_characters_that_turn_text_around_or_are_none_by_their_numbers() -> None:
    result = example()
    result.reason = "a\u202eb\ufffec"
    assert r"a\\u202eb\\ufffec" in markdown_text(result)


def test_trees_are_left_out_before_cases_and_both_are_counted() -> None:
    result = example()
    for number in range(100):
        result.cases.add().CopyFrom(result.cases[0])
        result.cases[-1].case_id = f"again-{number}"
    shown = markdown_text(result)
    assert len(shown) <= 65_000
    assert "| again-99 |" in shown
    (left_out,) = re.findall(r"^The trees of (\d+) more cases are left out\.$", shown, re.MULTILINE)
    assert int(left_out) + shown.count("<details>") == 103
    assert shown.count("<details>") == shown.count("</details>") > 0


def test_passing_cases_are_left_out_first_and_counted() -> None:
    result = example()
    for number in range(1, 3_000):
        result.cases.add(case_id=f"easy-{number}", verdict=eval_result_pb2.VERDICT_PASSED)
    shown = markdown_text(result, comparison())
    assert len(shown) <= 65_000
    assert all(f"| {name} |" in shown for name in ("who-calls-whom", "crash", "approval", "easy-0"))
    (left_out,) = re.findall(r"^(\d+) more cases are left out\.$", shown, re.MULTILINE)
    assert int(left_out) + shown.count("| passed | easy") == 3_000
    assert shown.endswith("\nThe trees of 3 more cases are left out.\n")


def test_a_comment_says_of_many_metrics_how_each_changed() -> None:
    compared = comparison()
    compared.changes.extend(eval_result_pb2.EstimatedChange(name=f"metric-{one}.mean", value=-0.5) for one in range(40))
    assert "metric-39.mean -0.5." in markdown_text(example(), compared)


def test_a_comment_is_bounded_however_much_there_is_to_say() -> None:
    result, compared = example(), comparison()
    for number in range(1_000):
        compared.pins_changed.append(f"{number} {'|' * 400}")
        result.gates.add(gate=f"{number} {'*' * 400}")
        result.totals.flaky_cases.append("_" * 256)
        result.totals.metric_means[f"{'m_' * 60}{number}"] = 1
        compared.cases.add(case_id=f"{number}", change=eval_result_pb2.CASE_CHANGE_WORSE)
    assert len(markdown_text(result, compared)) <= 65_000


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert why_unwritable(pipe) == ""
        write_whole(pipe, "a result")
        assert os.read(reader, 100) == b"a result"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
