"""The HTML report: what it shows, that it loads nothing, and that no text in a result becomes markup."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bough.v1 import error_pb2, eval_result_pb2, eval_set_pb2, execution_pb2
from bough_server.evals import reports
from bough_server.evals.reports.expectations import agent_words, answer_words, expectation_blocks, matcher_words
from bough_server.evals.reports.html import html_page
from tests.evals.report_results import comparison, example, fill

_VOID = {"meta", "!doctype", "input"}
_TAGS = {*("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "a", "pre", "code", "b", "span", "div")}
_TAGS |= {"details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td", "script", "noscript"}
_TAGS |= {"form", "label", "input", "select", "option", "button", "output"}
_ATTRIBUTES = {"lang", "charset", "name", "content", "http-equiv", "class", "id", "style", "href", "open", "title"}
_ATTRIBUTES |= {"role", "tabindex", "scope", "colspan", "hidden", "type", "value", "placeholder", "data-order"}
_ATTRIBUTES |= {"data-verdict", "data-name", "for", "aria-label", "aria-live", "aria-pressed"}

_SCRIPT = hashlib.sha256(Path(reports.__path__[0], "templates", "result.js").read_bytes()).hexdigest()


class _Page(HTMLParser):
    """A page's texts and tags, all of which have to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif data.strip() and self.open[-1] != "style":
            self.texts.append(data.strip())

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


_EVIL = st.text(max_size=30) | st.sampled_from(
    [
        "<script>alert(1)</script>",
        '" onclick="alert(1)',
        "'><img src=x onerror=alert(1)>",
        "</pre></details><style>*{}</style>",
        "<!-- ",
        "]]>",
        "{{ 7 * 7 }}{% raw %}",
        "javascript:alert(1)",
        "&lt;b&gt;",
        "\x00\x1b[31m\u2028\u202e",
    ]
)


@settings(deadline=None, max_examples=30)
@given(text=_EVIL, value=_EVIL)
def test_no_text_of_a_result_becomes_markup(text: str, value: str) -> None:
    text, value = (one.encode(errors="replace").decode() for one in (text, value))

    def said(name: str) -> str:
        return value if name.endswith("_json") else text

    result, compared = eval_result_pb2.EvalResult(), eval_result_pb2.EvalComparison()
    fill(result, said)
    fill(compared, said)
    compared.cases[0].change = eval_result_pb2.CASE_CHANGE_WORSE
    shown = html_page(result, compared)
    assert shown.isascii()
    page = _Page(shown)
    assert {tag for tag, _ in page.tags} <= _TAGS
    assert {name for _, attributes in page.tags for name in attributes} <= _ATTRIBUTES
    hrefs = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert hrefs == {"#case-0", "#case-0-trial-0"}  # fresh trials are below, without links
    assert [hashlib.sha256(script.encode()).hexdigest() for script in page.scripts] == [_SCRIPT]


def test_a_page_has_a_strict_policy_and_runs_only_the_script_that_the_policy_names() -> None:
    page = _Page(html_page(example(), comparison()))
    (policy,) = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert all((attributes.get("href") or "#").startswith("#") for _, attributes in page.tags)


def test_a_page_shows_what_a_simulated_user_said_and_what_is_expected_of_the_conversation() -> None:
    case = eval_result_pb2.CaseResult(case_id="stamps", turns=[eval_set_pb2.EvalTurn(id="hello", user="Good day.")])
    case.user.goal, case.user.expect.answer.exact = "A stamp.", "Done."
    case.user.expect.agents.add(name="clerk")
    trial = case.trials.add(case_id="stamps", user_finished=False)
    trial.turns.add(run_id="r1", user="Good day.")
    trial.turns.add(run_id="r2", user="A stamp.", user_run_id="u1")
    missing = trial.scores.add(name="agent_trajectory").tree_comparisons.add(turn=2)
    missing.differences.add(kind=eval_result_pb2.DIFFERENCE_KIND_MISSING, agent="clerk")
    texts = _Page(html_page(eval_result_pb2.EvalResult(cases=[case]))).texts
    first = texts.index("turn 1 (hello), user")
    assert [text for text in texts[first:] if text not in ("expected", "actual", "no tree", "show all")] == [
        *("turn 1 (hello), user", "Good day.", "run r1"),
        *("turn 2, user", "A stamp.", "run r2", "run of the simulated user u1"),
        *("all turns", "The simulated user did not end the conversation."),
        *("clerk", "missing", "answer", "is: Done."),
    ]


def test_a_page_marks_the_differences_of_both_trees_and_shows_steps_and_calls() -> None:
    page = _Page(html_page(example(), comparison()))
    marks = [attributes["class"] for _, attributes in page.tags if (attributes.get("class") or "").startswith("mark ")]
    both = [f"mark {name}" for name in ("matched", "violated", "moved", "unexpected", "allowed")]
    # The first trial; the second passed and has the same tree without differences; and a case that passed.
    assert marks == ["mark moved", "mark missing", *both, *both, *both]
    for text in (
        "step 1",
        "Let me ask the researcher.",
        "The notes <are> closed & locked.",
        "contains: chlorophyll\ncontains: red\ndoes not contain: As an AI\nmatches: fade[sd]\ncase is ignored\n"
        'is JSON that contains {\n  "a": 1\n}\nignored: a.id\nnumbers may be 0.5 apart',
        "calls in any order, others may be made",
        "never below it: researcher",
        "at least 1 time",
        '1. search_notes\n  arguments contains {\n    "topic": "leaves"\n  }',
        "edited arguments",
        '{\n  "topic": "leaves",\n  "limit": 1\n}',
        "asked by lead / mailer",
        "Send the mail?",
        "flaky: who-calls-whom",
        "against the baseline: 0 better, 1 worse, 0 unclear, 1 removed, 0 added, pass rate -0.25",
        "1.00 to 0.50",
        "3 of 20 trials passed, 18 of 20 in the baseline (p = 2.6e-06).\n"
        "writer was called by researcher, expected by lead",
        "1 regression: over 1 case 3 of 20 trials passed, 18 of 20 in the baseline (p = 2.6e-06).",
        "This comparison finds what it can.",
        "Mean changes of a case: pass_rate -0.25 (-0.5 to +0), cost +0.0005.",
        "0.5 is below 0.9.",
        "runs: 3,720 tokens · 0.0075 USD",
        "means: agent_trajectory 0.833",
        "polite, kind: does not hold: It is | rude\n@everyone",
    ):
        assert text in page.texts, text


def test_cases_that_did_not_pass_come_first_and_each_trial_has_a_link_to_its_trees() -> None:
    result = example(passed=2)
    result.cases.insert(0, result.cases.pop())
    page = _Page(html_page(result))
    verdicts = [attributes["data-verdict"] for tag, attributes in page.tags if tag == "tbody" and "id" in attributes]
    assert verdicts == ["failed flaky", "failed", "not-scored", "passed", "passed"]
    links = [href[1:] for tag, attributes in page.tags if tag == "a" and (href := attributes["href"] or "")]
    anchors = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(links) == 11
    assert set(links) <= set(anchors)
    assert len(set(anchors)) == len(anchors)


def test_the_first_trial_that_did_not_pass_is_unfolded() -> None:
    page = _Page(html_page(example()))
    trials = [attributes for _, attributes in page.tags if "-trial-" in (attributes.get("id") or "")]
    assert ["open" in attributes for attributes in trials] == [True, False, True, True, False]


def test_each_metric_has_a_column_and_cases_without_it_an_empty_cell() -> None:
    text = html_page(example())
    heads = [text for text in _Page(text).texts if text in ("agent_trajectory", "polite")]
    assert heads[:2] == ["agent_trajectory", "polite"]
    assert '<td class="failed number" data-name="agent_trajectory" data-order="0.8333">0.833</td>' in text
    assert '<td class="not-scored number" data-name="polite" data-order="">-</td>' in text


def test_what_the_text_of_a_page_is_colored_with_can_be_read() -> None:
    """WCAG 2 AA: at least 4.5 to 1, on the page and on boxes, light and dark."""
    palettes = re.findall(r":root \{ (?:color-scheme: light dark; )?(--text.*?)\}", html_page(example()), re.DOTALL)
    assert len(palettes) == 2
    for colors in palettes:
        found = dict(re.findall(r"--(\w+): (#\w{6})", colors))
        pairs = [(one, other) for one in ("text", "dim", "good", "bad", "warn", "note") for other in ("back", "box")]
        assert {pair: ratio for pair in pairs if (ratio := _contrast(*(found[name] for name in pair))) < 4.5} == {}


def _contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_a_state_of_a_later_version_has_no_words() -> None:
    result = example()
    result.cases[0].trials[0].turns[0].agents[0].state = 99  # type: ignore[assignment]
    assert "99" not in _Page(html_page(result)).texts


def test_a_page_of_250_cases_is_less_than_a_megabyte() -> None:
    assert len(html_page(example(passed=250))) < 1 << 20


def test_expectations_are_words() -> None:
    matcher = eval_set_pb2.ValueMatcher
    assert matcher_words(matcher(equals_json='{"a":[1]}')) == 'equals {\n  "a": [\n    1\n  ]\n}'
    assert matcher_words(matcher(regex="^a$")) == "matches: ^a$"
    assert matcher_words(matcher(schema_json='{"type":"object"}')) == 'fits the JSON Schema {\n  "type": "object"\n}'
    assert matcher_words(matcher()) == "is anything"
    assert answer_words(eval_set_pb2.ExpectedAnswer(exact="", ignore_case=True)) == "is: \ncase is ignored"
    assert answer_words(eval_set_pb2.ExpectedAnswer()) == "any"

    run = eval_set_pb2.ExpectedRun(
        state=execution_pb2.EXECUTION_STATE_FAILED,
        reason=error_pb2.ERROR_REASON_TOOL_FAILED,
        session_state=[
            eval_set_pb2.ExpectedStateValue(path="order", value_match=matcher(regex="tea")),
            eval_set_pb2.ExpectedStateValue(path="refund", absent=True),
        ],
        handoffs=[eval_set_pb2.ExpectedHandoff(from_agent="desk", to_agent="billing")],
    )
    tool = eval_set_pb2.ExpectedTool(name="search", nth=2, state=execution_pb2.EXECUTION_STATE_SUCCEEDED)
    agent = eval_set_pb2.ExpectedAgent(
        name="writer", state=execution_pb2.EXECUTION_STATE_FAILED, input_match=matcher(regex="Oslo")
    )
    blocks = expectation_blocks(eval_set_pb2.EvalExpectation(run=run, tools=[tool]))
    assert [(block.title, block.text) for block in blocks] == [
        (
            "run",
            "is FAILED\nfor the reason TOOL_FAILED\nsession state order matches: tea\nsession state refund is absent\n"
            "handoffs in this order, and no others: desk to billing",
        ),
        ("tool calls", "1. search, call 2 of it, is SUCCEEDED"),
    ]
    assert list(agent_words(agent)) == ["is FAILED", "its input matches: Oslo"]
