"""`bough tree --html`: one page that needs nothing else, with all that the record has, and nothing that is executed."""

from html.parser import HTMLParser

from bough.v1 import error_pb2, execution_pb2, invocation_pb2, message_pb2
from bough_server.cli.render.html import tree_page
from bough_server.tree.fold import fold
from tests.clients.cli_process import bough
from tests.clients.run_events import RUN_ID, desk
from tests.clients.stream_server import LoopbackService, listening

_EMPTY = {"meta", "!doctype"}


class Page(HTMLParser):
    """The text of a page and its tags, all of which have to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.texts.append(data.strip())


async def test_the_command_prints_a_page_with_every_agent_its_input_its_tools_and_its_answer() -> None:
    async with listening(LoopbackService(desk())) as port:
        shown = await bough("tree", RUN_ID, "--html", port=port)
        both = await bough("tree", RUN_ID, "--html", "--json", port=port)
    page = Page(shown.out)
    assert (shown.code, shown.err, page.open) == (0, "", [])
    assert shown.out.isascii()
    assert "succeeded · 2 agents · 4 model calls · 2 tool calls · 27.0 s" in page.texts
    for text in ("lead", "researcher", "Write about owls.", "Owls hunt at night.", "search"):
        assert text in page.texts, page.texts
    assert (both.code, "--json and --html exclude each other" in both.err) == (2, True)


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    page = Page(tree_page(fold(desk(), invocation_pb2.InvocationOptions(include_steps=True))))
    policy = [attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes]
    links = [attributes.get("href") or "" for tag, attributes in page.tags if tag == "a"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}


def test_what_a_model_says_is_text_and_never_markup() -> None:
    evil = '<script>alert("1")</script>\x1b[31m'
    message = message_pb2.Message(parts=[message_pb2.Part(text=evil), message_pb2.Part(data_json='{"a": "<b>"}')])
    failed = execution_pb2.EXECUTION_STATE_FAILED
    agent = invocation_pb2.AgentInvocation(
        invocation_id='x" onclick="y',
        name=evil,
        state=failed,
        input=message,
        output=message,
        error=error_pb2.AgentError(message=evil),
    )
    tool = invocation_pb2.ToolInvocation(
        name=evil,
        invocation_id='x" onclick="y',
        arguments_json='{"cut": "',
        arguments_truncated=True,
        result_json="[1]",
    )
    page = Page(
        tree_page(invocation_pb2.Invocation(agent=evil, state=failed, agents=[agent], agents_total=3, tools=[tool]))
    )
    assert "script" not in {tag for tag, _ in page.tags}
    assert sum(text.endswith('"a": "<b>"\n}') for text in page.texts) == 2
    assert not any("onclick" in attributes for _, attributes in page.tags)
    shown = '<script>alert("1")</script>[31m'
    assert page.texts.count(shown) == 7
    assert [text for text in page.texts if text.startswith(("arguments", "result", "…"))] == [
        "arguments, cut",
        "result",
        "… and 2 more agents",
    ]


def test_json_that_is_nested_too_deeply_is_shown_as_it_is() -> None:
    deep = "[" * 5_000 + "]" * 5_000
    tool = invocation_pb2.ToolInvocation(name="look", invocation_id="x", arguments_json=deep)
    agent = invocation_pb2.AgentInvocation(name="lead", invocation_id="x")
    page = Page(tree_page(invocation_pb2.Invocation(agents=[agent], tools=[tool])))
    assert deep in page.texts
