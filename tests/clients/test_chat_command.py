"""`bough chat`: turns in one session, questions asked in place, Ctrl-C and Ctrl-D, and input from a pipe."""

import json
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from tests.clients.cli_process import Finished, bough, server_of, started
from tests.clients.terminals import at_a_terminal
from tests.support.projects import llm, write_project

TOOLS = '''
from bough_server import Context, agent, tool


@tool(approval=True)
def pay(amount: int) -> str:
    """Pays an amount."""
    return f"Paid {amount}."


@agent
async def clerk(ctx: Context, input: str) -> str:
    """Asks for a name."""
    return "Hello " + await ctx.ask("Your name?", schema={"type": "string"})
'''


@pytest.fixture(scope="module")
async def port(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[int]:
    """The port of a server with a cashier whose payments need an approval, and a clerk who asks a question."""
    folder = tmp_path_factory.mktemp("chat")
    config = write_project(
        folder,
        llm("cashier", tools=["pay", "wait_at"]),
        llm("asker", calls=["cashier"]),
        script={
            "cashier": [
                {"when": "twice", "calls": [{"name": "pay", "arguments": {"amount": one}} for one in (5, 6)]},
                {"when": "pay him", "calls": [{"name": "pay", "arguments": {"amount": 5}}]},
                {"when": "pay", "text": "It is paid."},
                {"when": "hello", "text": "Hello yourself."},
                {"when": "slow", "text": "One two.", "delay_ms": 600_000},
                {"when": "fail", "error": {"reason": "UNAVAILABLE", "message": "Away."}},
            ]
        },
        python=["team_tools", "shop_tools"],
    )
    (folder / "shop_tools.py").write_text(TOOLS, encoding="utf-8")
    async with server_of(config) as port:
        yield port


async def runs_of(port: int, session: str) -> list[Mapping[str, str]]:
    listed = await bough("runs", "--session", session, "--json", port=port)
    return [json.loads(line) for line in reversed(listed.out.splitlines())]


async def states_of(port: int, session: str) -> list[str]:
    return [run["state"].removeprefix("EXECUTION_STATE_") for run in await runs_of(port, session)]


def session_in(text: str) -> str:
    return text.strip().splitlines()[-1].removeprefix("session ")


async def test_lines_of_a_pipe_are_messages_of_one_session_and_answers_to_its_questions(port: int) -> None:
    said = "hello\npay him\ny fine\n\nhello again\n"
    ended = await bough("chat", "cashier", "--output", "answer", port=port, said=said)
    assert (ended.code, ended.out) == (0, "Hello yourself.\nIt is paid.\nHello yourself.\n")
    assert "1/1 cashier asks for approval of pay" in ended.err
    assert await states_of(port, session_in(ended.err)) == ["SUCCEEDED"] * 3


async def test_a_pipe_that_ends_at_a_question_leaves_the_run_waiting_and_a_later_chat_asks_again(port: int) -> None:
    waiting = await bough("chat", "cashier", "--output", "answer", port=port, said="pay him\n")
    session = session_in(waiting.err)
    answered = await bough("chat", "--session", session, "--output", "answer", port=port, said="y\nhello\n")
    assert (waiting.code, waiting.out, "Answer with:" in waiting.err) == (3, "", True)
    assert (answered.code, answered.out) == (0, "It is paid.\nHello yourself.\n")
    assert await states_of(port, session) == ["SUCCEEDED"] * 2


async def test_a_question_that_is_left_open_does_not_block_the_next_message(port: int) -> None:
    ended = await bough("chat", "cashier", "--output", "answer", port=port, said="pay him\n\nhello\n")
    assert (ended.code, ended.out) == (0, "Hello yourself.\n")
    assert await states_of(port, session_in(ended.err)) == ["CANCELLED", "SUCCEEDED"]


async def test_the_exit_code_of_piped_input_is_that_of_the_last_run(port: int) -> None:
    ended = await bough("chat", "cashier", "--output", "answer", port=port, said="hello\nfail\n")
    assert (ended.code, ended.out, "Away." in ended.err) == (1, "Hello yourself.\n", True)


async def test_a_file_is_input_as_a_pipe_is(port: int, tmp_path: Path) -> None:
    typed = tmp_path / "typed.txt"
    typed.write_text("hello\nhello", encoding="utf-8")
    with typed.open("rb") as file:
        process = await started("chat", "cashier", "--output", "answer", port=port, stdin=file.fileno())
    out, _ = await process.communicate()
    assert (process.returncode, out.decode()) == (0, "Hello yourself.\n" * 2)


async def test_an_answer_that_the_live_view_has_shown_is_not_repeated_and_any_other_is(port: int) -> None:
    shown = await bough("chat", "cashier", port=port, said="hello\n")
    other = await bough("chat", "clerk", port=port, said="hello\nAnn\n")
    assert (shown.code, shown.out.count("Hello yourself.")) == (0, 1)
    assert (other.code, "\n\nHello Ann\n\n" in other.out) == (0, True), other


async def test_the_agent_can_be_left_out_only_if_one_is_not_called_by_others(port: int) -> None:
    ended = await bough("chat", port=port, said="hello\n")
    assert ended == Finished(code=2, out="", err="Name the agent to chat with: asker, clerk.\n")
    unknown = await bough("chat", "cashir", port=port, said="hello\n")
    assert (unknown.code, "'cashier'" in unknown.err) == (2, True)


async def test_at_a_terminal_questions_are_asked_in_place_and_ctrl_d_leaves(port: int) -> None:
    async with at_a_terminal("chat", "cashier", "--output", "answer", port=port) as terminal:
        await terminal.until("Ctrl-D leaves, /help shows more.")
        await terminal.until("> ")
        terminal.type("pay him\n")
        await terminal.until("Approve?")
        terminal.type("y\n")
        await terminal.until("> ")
        terminal.type("hello\n")
        await terminal.until("\n> ")
        terminal.type("\x04")
        await terminal.until("session ")
        assert await terminal.end() == (0, "It is paid.\nHello yourself.\n")


async def test_ctrl_c_cancels_a_turn_and_the_conversation_continues(port: int) -> None:
    async with at_a_terminal("chat", "cashier", "--output", "plain", port=port) as terminal:
        await terminal.until("> ")
        terminal.type("slow\n")
        assert terminal.process.stdout is not None
        while "llm.started" not in (await terminal.process.stdout.readline()).decode():
            pass
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("Cancelling the run; Ctrl-C again to leave at once.")
        await terminal.until("The run was cancelled")
        await terminal.until("> ")
        terminal.type("\x04")
        code, out = await terminal.end()
    assert (code, "agent.run.cancelled" in out) == (0, True)


async def test_ctrl_c_at_the_second_question_takes_the_first_answer_back(port: int) -> None:
    async with at_a_terminal("chat", "cashier", "--output", "answer", port=port) as terminal:
        await terminal.until("> ")
        terminal.type("pay twice\n")
        await terminal.until("Approve?")
        terminal.type("y\n")
        await terminal.until("2/2")
        await terminal.until("Approve?")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("The run was cancelled.")
        await terminal.until("> ")
        terminal.type("\x04")
        session = session_in(await terminal.until("\r\n") + await terminal.until("\r\n"))
        assert await terminal.end() == (0, "")
    assert await states_of(port, session) == ["CANCELLED"]
    events = await bough("events", "last", "--types", "control.input_received,tool.completed", port=port)
    assert (events.code, events.out) == (0, "")


async def test_ctrl_c_at_a_question_cancels_the_run_and_at_the_prompt_does_nothing(port: int) -> None:
    async with at_a_terminal("chat", "cashier", "--output", "answer", port=port) as terminal:
        await terminal.until("> ")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("Ctrl-D leaves.\r\n> ")
        terminal.type("pay him\n")
        await terminal.until("Approve?")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.until("The run was cancelled.")
        await terminal.until("> ")
        terminal.type("hello\n")
        await terminal.until("> ")
        terminal.type("\x04")
        session = session_in(await terminal.until("\r\n") + await terminal.until("\r\n"))
        assert await terminal.end() == (0, "Hello yourself.\n")
    assert await states_of(port, session) == ["CANCELLED", "SUCCEEDED"]


async def test_lines_that_begin_with_a_slash_are_commands_and_two_slashes_send_one(port: int) -> None:
    said = "/tree\n/session\nhello\n/session\n/new\nhello\n/tree\n/nwe\n//hello\n/help\n/quit\nhello\n"
    ended = await bough("chat", "cashier", "--output", "answer", port=port, said=said)
    last = session_in(ended.err)
    told = ended.err.splitlines()
    first = next(line for line in told if " chat --session " in line).partition(": ")[0]
    assert (ended.code, ended.out.count("Hello yourself.\n"), first != last) == (0, 3, True)
    assert [len(await runs_of(port, session)) for session in (first, last)] == [1, 2]
    assert "There is no run yet: it begins with a message." in told
    assert "There is no session yet: it begins with a message." in told
    assert "There is no command '/nwe'. Did you mean '/new'? Type two slashes to send it." in told
    assert f"{first}: bough --address 127.0.0.1:{port} chat --session {first}" in told
    assert ended.out.count("cashier") == 1, "the tree of the last run"
    assert [line.split()[0] for line in told if line.startswith("/")] == ["/help", "/new", "/session", "/tree", "/quit"]


async def test_a_session_is_deleted_once_that_is_confirmed(port: int) -> None:
    session = session_in((await bough("chat", "cashier", "--output", "answer", port=port, said="hello\n")).err)
    refused = await bough("sessions", "delete", session, port=port)
    assert refused == Finished(
        code=2, out="", err="Nothing can be asked without a terminal: add --yes to delete the session.\n"
    )
    for answer, code in (("n", 1), ("y", 0)):
        assert len(await runs_of(port, session)) == 1
        async with at_a_terminal("sessions", "delete", session, port=port) as terminal:
            await terminal.until(f"Delete the session {session} with 1 run? y or n:")
            terminal.type(f"{answer}\n")
            assert await terminal.end() == (code, f"{session}\n" if code == 0 else "")
    assert await runs_of(port, session) == []
    gone = await bough("sessions", "delete", session, "--yes", port=port)
    assert (gone.code, gone.out) == (2, "")


async def test_tools_are_listed_with_where_they_run_and_what_they_do(port: int) -> None:
    listed = await bough("tools", "list", port=port)
    lines = listed.out.splitlines()
    assert (listed.code, lines[0].split()) == (0, ["tool", "runs", "in", "what", "it", "does"])
    (pay,) = [line for line in lines if line.startswith("pay ")]
    assert pay.split(maxsplit=2)[1:] == ["code", "(needs an approval) Pays an amount."]
    found = [json.loads(line) for line in (await bough("tools", "list", "--json", port=port)).out.splitlines()]
    assert {"name": "pay", "requiresApproval": True}.items() <= next(
        one for one in found if one["name"] == "pay"
    ).items()
