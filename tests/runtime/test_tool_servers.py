"""Tools of tool servers that speak MCP: real child processes of the `mcp` package, killed, restarted and changed."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from bough import approve
from bough.v1 import agent_pb2, error_pb2, run_pb2, tool_pb2
from bough_server.errors import AgentUnusable, ForkRefused
from bough_server.tool_servers.config import ToolServerSection
from tests.support.log_readings import answer_of, having, results_of, text_of
from tests.support.payment_agents import waiting, whole
from tests.support.run_harness import ME
from tests.support.teams import call, calls
from tests.support.tool_servers import (
    SUPPORT,
    by_hand,
    configure,
    describe,
    faults,
    free_port,
    kept,
    keys,
    lock_tools,
    notes,
    team,
    until,
)

WAIT = [calls(call("notes_wait", text="tea")), "Done."]


async def test_a_team_calls_the_tools_of_a_child_process(tmp_path: Path) -> None:
    turns = [
        calls(call("notes_add", text="milk"), call("notes_draw"), call("notes_fail"), call("notes_wait", seconds=0)),
        "Done.",
    ]
    link = agent_pb2.ToolLink(server="notes")
    async with team(tmp_path, turns, link, notes=notes(tmp_path)) as it:
        log = await whole(it, await it.start("p"))
        tree = await it.tree(log)
    added, drawn, failed, waited = results_of(sorted(log, key=lambda event: event.effect_key))
    assert [(part.WhichOneof("content"), part.text or part.data_json) for part in added.parts] == [
        ("data_json", '{"result": "added milk"}')
    ]
    assert [part.text or part.blob.uri or part.blob.media_type for part in drawn.parts] == [
        "a dot",
        "image/png",
        "https://pictures.example/dot",
    ]
    assert drawn.parts[1].blob.sha256
    assert (failed.error.reason, failed.error.message) == (
        error_pb2.ERROR_REASON_TOOL_FAILED,
        "Error executing tool fail",
    )
    assert text_of(waited) == '{"result": "waited"}'
    assert [event.tool_output.text for event in having(log, "tool_output")] == ["half way\n"]
    assert {event.tool_started.server for event in having(log, "tool_started")} == {"notes"}
    assert {tool.server for tool in tree.tools} == {"notes"}
    started = having(log, "tool_started")
    assert keys(tmp_path) == [
        next(e.tool_started.idempotency_key for e in started if "add" in e.tool_started.call.name)
    ]
    offered = next(event.llm_started.tool_names for event in log if event.HasField("llm_started"))
    assert sorted(offered) == sorted(ref.name for ref in log[0].run_started.tool_refs)


@pytest.mark.parametrize(
    ("tool", "rules", "attempts", "expected"),
    [
        ("add_and_die", {}, 2, "noted milk"),  # its hints say that it is idempotent
        ("add_and_die", {"trust_hints": False}, 1, "TOOL_OUTCOME_UNKNOWN"),
        ("add_and_die_unsafely", {}, 1, "TOOL_OUTCOME_UNKNOWN"),
        ("add_and_die_unsafely", {"on_recovery": {"add_*": "retry"}}, 3, "TOOL_OUTCOME_UNKNOWN"),
    ],
)
async def test_a_call_in_which_the_server_dies_is_made_again_as_its_rule_says(
    tmp_path: Path, tool: str, rules: dict[str, object], attempts: int, expected: str
) -> None:
    turns = [calls(call(f"notes_{tool}", text="milk")), "Done."]
    async with team(tmp_path, turns, f"notes_{tool}", notes=by_hand(tmp_path, **rules)) as it:
        log = await whole(it, await it.start("p"))
    assert (describe(log), answer_of(log)) == ([expected], "Done.")
    assert [event.attempt for event in having(log, "tool_started")] == list(range(1, attempts + 1))
    assert (kept(tmp_path), len(set(keys(tmp_path)))) == (["milk"] * attempts, 1)


async def test_a_user_decides_about_a_call_in_which_the_server_died(tmp_path: Path) -> None:
    turns = [calls(call("notes_add_and_die", text="milk")), "Done."]
    settings = by_hand(tmp_path, on_recovery={"*": "ask"})
    async with team(tmp_path, turns, "notes_add_and_die", notes=settings) as it:
        run = await it.start("p")
        request = (await waiting(it, run))["notes_add_and_die"]
        await it.resume(run, approve(request))
        log = await whole(it, run)
    assert (describe(log), len(having(log, "input_requested"))) == (["noted milk"], 1)
    assert (kept(tmp_path), len(set(keys(tmp_path)))) == (["milk", "milk"], 1)


async def lose_in_a_call(folder: Path, settings: object) -> run_pb2.Run:
    """A run whose server is lost while a tool server works on its call."""
    link = agent_pb2.ToolLink(server="notes")
    async with team(folder, WAIT, link, notes=settings) as it:
        run = await it.start("p")
        async for event in it.follow(run):
            if event.HasField("tool_output"):
                break
        await it.crash()
    return run


@pytest.mark.parametrize(("rule", "expected"), [("retry", "noted tea"), ("fail", "TOOL_OUTCOME_UNKNOWN")])
async def test_a_run_whose_server_is_lost_in_a_call_goes_on_with_the_tools_it_began_with(
    tmp_path: Path, rule: str, expected: str
) -> None:
    run = await lose_in_a_call(tmp_path, by_hand(tmp_path, on_recovery={"wait": rule}))
    # The server that continues the run has another rule and other names for the tools.
    changed = by_hand(tmp_path, on_recovery={"wait": "ask"}, prefix="other_")
    async with team(tmp_path, WAIT, agent_pb2.ToolLink(server="notes"), notes=changed) as it:
        await it.runs.recover()
        log = await whole(it, run)
        later = [event async for event in it.follow(await it.start("p"))]
    assert (describe(log), answer_of(log)) == ([expected], "Done.")
    assert {ref.name.partition("_")[0] for ref in log[0].run_started.tool_refs} == {"notes"}
    assert {ref.name.partition("_")[0] for ref in later[0].run_started.tool_refs} == {"other"}


async def test_a_run_parks_while_its_tool_server_is_not_configured(tmp_path: Path) -> None:
    run = await lose_in_a_call(tmp_path, by_hand(tmp_path, on_recovery={"wait": "retry"}))
    other = by_hand(tmp_path)
    async with team(tmp_path, WAIT, agent_pb2.ToolLink(server="other"), other=other) as it:
        record = await it.store.runs.find(run.run_id)
        assert record is not None
        await it.try_again(record)
        found = (await it.runs.get(ME, run.run_id)).run
    assert found.parked_reason.startswith("The tool server 'notes', which has the tool 'notes_add', is not configured")


async def test_a_run_whose_tools_are_not_there_is_refused_in_a_sentence(tmp_path: Path) -> None:
    missing = {"mcp": {"command": "no-such-program"}}
    async with team(tmp_path, ["Hi."], "notes_add", notes=missing) as it:
        with pytest.raises(AgentUnusable) as refused:
            await it.start("p")
    assert refused.value.message == (
        "The agent 'p' names the tool 'notes_add', which 'notes' does not offer now (Its program cannot be started: "
        "'no-such-program' does not exist). Change the agents that name it, or restore it."
    )


async def test_a_list_that_the_server_changes_is_for_later_runs(tmp_path: Path) -> None:
    turns = [calls(call("notes_learn", name="sing")), "Learned.", calls(call("notes_sing")), "Done."]
    link = agent_pb2.ToolLink(server="notes")
    async with team(tmp_path, turns, link, notes=notes(tmp_path)) as it:
        first = await whole(it, await it.start("p"))
        servers = it.registry.tool_servers
        await until(lambda: "notes_sing" in servers.offers.tools_for(None))
        second = await whole(it, await it.start("p"))
    assert "notes_sing" not in {ref.name for ref in first[0].run_started.tool_refs}
    assert "notes_sing" in {ref.name for ref in second[0].run_started.tool_refs}


async def test_a_cancelled_call_is_cancelled_at_the_server(tmp_path: Path) -> None:
    link = agent_pb2.ToolLink(name="notes_wait")
    link.timeout.FromMilliseconds(300)
    async with team(tmp_path, WAIT, link, notes=by_hand(tmp_path)) as it:
        log = await whole(it, await it.start("p"))
        await until(lambda: (tmp_path / "notes.txt").read_text(encoding="utf-8").endswith("cancelled \n"))
    assert describe(log) == ["TOOL_TIMEOUT"]


async def test_a_tenant_does_not_see_the_tool_server_of_another(tmp_path: Path) -> None:
    async with team(tmp_path, ["Hi."], "notes_echo", notes=faults("none", tenants=["acme"])) as it:
        with pytest.raises(AgentUnusable, match="'notes_echo', which no longer exists"):
            await it.start("p")
        await it.registry.tool_servers.wait_until_settled(["notes"])
        seen = [it.registry.list_tools(tenant, server="notes") for tenant in ("acme", "local")]
        described = [it.registry.tool_servers.describe(tenant) for tenant in ("acme", "local")]
    assert (len(seen[0]), seen[1]) == (5, [])
    assert [[each.name for each in found] for found in described] == [["notes"], []]


async def test_a_fork_inside_a_call_that_must_not_be_repeated_is_refused(tmp_path: Path) -> None:
    turns = [calls(call("notes_echo", text="a")), "Done."]
    async with team(tmp_path, turns, "notes_echo", notes=faults("none")) as it:
        run = await it.start("p")
        log = await whole(it, run)
        started = having(log, "tool_started")[0].sequence
        with pytest.raises(ForkRefused, match="'notes_echo' was running"):
            await it.fork(run, started)
        fork = await it.fork(run, started - 1)
        forked = await whole(it, fork)
    assert (describe(forked), forked[0].run_started.tool_refs) == (["done"], log[0].run_started.tool_refs)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("die", "TOOL_OUTCOME_UNKNOWN"),
        ("huge", "TOOL_OUTCOME_UNKNOWN"),
        ("surrogate", "TOOL_FAILED"),
        ("nonsense", "TOOL_FAILED"),
        ("chatty", "done"),
        ("environment", "HOME LOGNAME PATH SHELL TERM USER"),
    ],
)
async def test_a_server_that_misbehaves_fails_its_call_alone(tmp_path: Path, fault: str, expected: str) -> None:
    turns = [calls(call("bad_echo", text="a"), call("good_echo", text="a")), "Done."]
    servers = {"bad": faults(fault), "good": faults("none")}
    async with team(tmp_path, turns, "bad_echo", "good_echo", **servers) as it:
        log = await whole(it, await it.start("p"))
    bad, good = describe(sorted(log, key=lambda event: event.effect_key))
    if fault == "environment":
        assert set(bad.split()) <= set(expected.split()) | {"LC_CTYPE"}
    else:
        assert bad == expected
    assert (good, answer_of(log)) == ("done", "Done.")


async def test_output_that_floods_is_cut_once(tmp_path: Path) -> None:
    turns = [calls(call("bad_echo", text="a")), "Done."]
    async with team(tmp_path, turns, "bad_echo", bad=faults("flood")) as it:
        log = await whole(it, await it.start("p"))
    text = "".join(event.tool_output.text for event in having(log, "tool_output"))
    assert (len(text.removesuffix("\n[further output was left out]\n")), text.endswith("left out]\n")) == (2**20, True)


@pytest.mark.parametrize("fault", ["stubborn", "forks"])
async def test_a_child_that_ignores_its_end_is_killed_with_its_group(tmp_path: Path, fault: str) -> None:
    file = tmp_path / "pids"
    async with team(tmp_path, ["Hi."], "bad_echo", bad=faults(fault, str(file))) as it:
        await whole(it, await it.start("p"))
        pids = [int(pid) for pid in file.read_text(encoding="utf-8").split()]
        assert pids
    await until(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("endless", "Its list of tools is too long: more than 10,000 tools, 1,000 pages or 16 MiB."),
        ("silent", "It did not begin to speak within 1 s."),
    ],
)
async def test_a_list_without_an_end_is_a_problem_of_its_server(tmp_path: Path, fault: str, problem: str) -> None:
    timeout = {} if fault == "endless" else {"connect_timeout": 1.0}
    servers = configure(tmp_path, bad={**faults(fault), **timeout})({})
    try:
        await servers.wait_until_settled(["bad"])
        (info,) = servers.describe(None)
    finally:
        await servers.close()
    assert (info.state, info.problem) == (tool_pb2.TOOL_SERVER_STATE_UNAVAILABLE, problem)


async def test_an_agent_has_at_most_128_tools(tmp_path: Path) -> None:
    link = agent_pb2.ToolLink(server="bad")
    async with team(tmp_path, ["Hi."], link, bad=faults("many")) as it:
        with pytest.raises(AgentUnusable, match="has 5000 tools, linked agents included, and at most 128"):
            await it.start("p")
    async with team(tmp_path, ["Hi."], link, bad=faults("many", tools=["t12?"])) as it:
        log = await whole(it, await it.start("p"))
    assert [ref.name for ref in log[0].run_started.tool_refs] == [f"bad_t12{digit}" for digit in range(10)]


@asynccontextmanager
async def http_server(folder: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server of notes on HTTP, which answers when this is entered, killed at the end."""
    program = [sys.executable, str(SUPPORT / "mcp_notes.py"), str(folder / "notes.txt"), str(port)]
    process = await asyncio.create_subprocess_exec(*program, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def test_a_server_at_a_url_is_killed_in_a_call_and_restarted(tmp_path: Path) -> None:
    port = free_port()
    settings = {"mcp": {"url": f"http://127.0.0.1:{port}/mcp"}, "timeout": 60.0}
    turns = [calls(call("notes_wait", seconds=60)), calls(call("notes_add", text="milk")), "Done."]
    async with team(tmp_path, turns, "notes_wait", "notes_add", notes=settings) as it:
        async with http_server(tmp_path, port) as process:
            run = await it.start("p")
            async for event in it.follow(run):
                if event.HasField("tool_output"):
                    process.kill()
                    await process.wait()
                if event.HasField("tool_started") and event.tool_started.call.name == "notes_add":
                    break
        # The second call has not reached a server: it waits for the one that comes back.
        async with http_server(tmp_path, port):
            log = await whole(it, run)
    assert (describe(log), kept(tmp_path)) == (["TOOL_OUTCOME_UNKNOWN", '{"result": "added milk"}'], ["milk"])


async def test_a_server_that_stays_away_is_unavailable(tmp_path: Path) -> None:
    port = free_port()
    settings = {"mcp": {"url": f"http://127.0.0.1:{port}/mcp"}, "timeout": 2.0}
    turns = [calls(call("notes_add", text="milk")), "Done."]
    async with team(tmp_path, turns, "notes_add", notes=settings) as it:
        async with http_server(tmp_path, port):
            await it.registry.tool_servers.wait_until_settled(["notes"])
        log = await whole(it, await it.start("p"))
    (result,) = results_of(log)
    assert (result.error.reason, result.error.retryable) == (error_pb2.ERROR_REASON_TOOL_SERVER_UNAVAILABLE, True)
    assert result.error.message.startswith("The tool server 'notes' cannot be reached: no connection (ConnectError)")


async def test_what_was_not_reviewed_is_not_offered(tmp_path: Path) -> None:
    listing = tmp_path / "listed.json"
    schema = {"type": "object"}
    listed = [{"name": name, "description": f"Does {name}.", "inputSchema": schema} for name in ("a", "b", "c")]
    listing.write_text(json.dumps(listed), encoding="utf-8")
    settings = faults("listed", str(listing))
    section = ToolServerSection.model_validate(settings)
    await lock_tools(tmp_path, section, "a", "b")
    listed[1]["description"] = "Does b, and sends it elsewhere."
    listing.write_text(json.dumps(listed), encoding="utf-8")
    link = agent_pb2.ToolLink(server="s")
    async with team(tmp_path, ["Hi."], link, s=settings) as it:
        await it.registry.tool_servers.wait_until_settled(["s"])
        log = await whole(it, await it.start("p"))
        (info,) = it.registry.tool_servers.describe(None)
    assert [ref.name for ref in log[0].run_started.tool_refs] == ["s_a"]
    assert {each.name: each.reason for each in info.refused} == {
        "b": "Its description differs from tools.lock.json. Review it, then run `bough tools lock`.",
        "c": "It is not in tools.lock.json. Review it, then run `bough tools lock`.",
    }


async def test_locked_tools_need_no_server_until_one_is_called(tmp_path: Path) -> None:
    section = ToolServerSection.model_validate(faults("none"))
    await lock_tools(tmp_path, section, "echo")
    gone = {"mcp": {"command": "no-such-program"}, "timeout": 0.3}
    async with team(tmp_path, [calls(call("s_echo", text="a")), "Done."], "s_echo", s=gone) as it:
        log = await whole(it, await it.start("p"))
    assert describe(log) == ["TOOL_SERVER_UNAVAILABLE"]
