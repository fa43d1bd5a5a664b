"""JUnit and Markdown reports: what CI servers and pull requests show, whatever a result says."""

import os
import re
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml

from bough.v1 import eval_result_pb2
from bough_server.cli.eval.files import why_unwritable, write_whole
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
    root = ElementTree.parse(path).getroot()
    first = root.find(".//testcase")
    assert first is not None
    found = {one.get("name"): one.get("value") for one in first.iter("property")}
    assert found["run_id.0.0"] == "run-1"
    assert found["trace_id.1.0"] == "0af7651916cd43dd8448eb211c80319c"
    assert (found["score.agent_trajectory"], found["pass_rate.lower"], found["flaky"]) == ("0.8333", "0.0945", "true")


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
    table = shown[shown.index("| verdict |") :].splitlines()
    assert len(table) == 3
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", table[2])) == 5
    assert not re.search(r"[@#]\w|://\w|www\.|(?i:GH)-\d", shown)
    assert not re.search(r"(?<!\\)(?:\\\\)*[<>`\[\]$]", shown)


def test_a_comment_shows_characters_that_turn_text_around_or_are_none_by_their_numbers() -> None:
    result = example()
    result.reason = "a\u202eb\ufffec"
    assert r"a\\u202eb\\ufffec" in markdown_text(result)


def test_passing_cases_are_left_out_first_and_counted() -> None:
    shown = markdown_text(example(passed=3_000), comparison())
    assert len(shown) <= 65_000
    assert all(f"| {name} |" in shown for name in ("who-calls-whom", "crash", "approval", "easy-0"))
    (left_out,) = re.findall(r"^(\d+) more cases are left out\.$", shown, re.MULTILINE)
    assert int(left_out) + shown.count("| passed | easy") == 3_000


def test_a_comment_is_bounded_however_much_there_is_to_say() -> None:
    result, compared = example(passed=500), comparison()
    for number in range(2_000):
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
