"""`bough fork`: its changes reach the server, the fork is followed, and both trees are shown."""

from collections.abc import Mapping
from pathlib import Path

from bough.v1 import agent_service_pb2, fork_pb2, message_pb2
from tests.clients.cli_process import Finished, bough
from tests.clients.run_events import RUN_ID, Turn, desk
from tests.clients.stream_server import listening
from tests.clients.waiting_run_server import FORK_ID, WaitingService, approval, ended, interrupted


async def served(service: WaitingService, *arguments: str, environment: Mapping[str, str] | None = None) -> Finished:
    async with listening(service) as port:
        return await bough(*arguments, port=port, environment=environment)


async def test_a_fork_sends_its_changes_and_is_followed(tmp_path: Path) -> None:
    instruction = tmp_path / "instruction.txt"
    instruction.write_text("Be brief.\n", encoding="utf-8")
    service = WaitingService(desk(), ended("Owls again."))
    forked = await served(
        service,
        *("fork", RUN_ID, "--after", "1", "--allow-open-effects", "--request-id", "mine", "--output", "answer"),
        *("--model", "writer=big", "--instruction", f"lead=@{instruction}", "--instruction", "writer=Say a=b."),
        *("--tool-result", 'c1="Owls are cats."', "--tool-result", f'{FORK_ID}/c2={{"error": "away"}}'),
        *("--tool-result", 'c3={"error": "away", "result": [1]}'),
        *("--input", "Write about cats."),
    )
    assert forked == Finished(code=0, out="Owls again.\n", err=f"run {FORK_ID}\n")
    (request,) = service.forked
    request.ClearField("follow")
    away = message_pb2.ToolFailure(message="away")
    half = message_pb2.ToolOutcome(failure=away, parts=[message_pb2.Part(data_json="[1]")])
    changes = fork_pb2.ForkChanges(
        agents={
            "lead": fork_pb2.AgentOverride(instruction="Be brief.\n"),
            "writer": fork_pb2.AgentOverride(model="big", instruction="Say a=b."),
        },
        input=message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.Part(text="Write about cats.")]),
        tool_results=[
            fork_pb2.EditedResult(
                call_id="c1", outcome=message_pb2.ToolOutcome(parts=[message_pb2.Part(text="Owls are cats.")])
            ),
            fork_pb2.EditedResult(call_id="c2", invocation_id=FORK_ID, outcome=message_pb2.ToolOutcome(failure=away)),
            fork_pb2.EditedResult(call_id="c3", outcome=half),
        ],
    )
    assert request == agent_service_pb2.ForkRunRequest(
        request_id="mine", run_id=RUN_ID, after_sequence=1, changes=changes, allow_open_effects=True
    )


async def test_a_result_is_that_of_the_call_whose_event_has_the_sequence() -> None:
    service = WaitingService(desk(), ended())
    [started, completed] = [
        event.sequence
        for event in desk()
        if event.invocation_id.endswith("researcher")
        and (event.HasField("tool_started") or event.HasField("tool_completed"))
    ]
    for sequence in (started, completed):
        await served(service, "fork", RUN_ID, "--after", "20", "--tool-result", f'{sequence}="Owls are cats."')
    outcome = message_pb2.ToolOutcome(parts=[message_pb2.Part(text="Owls are cats.")])
    edited = fork_pb2.EditedResult(call_id="c2", invocation_id="id-of-lead/researcher", outcome=outcome)
    assert [list(request.changes.tool_results) for request in service.forked] == [[edited], [edited]]


async def test_a_number_that_is_the_id_of_a_call_is_that_call() -> None:
    turn = Turn()
    turn.start()
    turn.tool_start("lead", "search", call="1")
    turn.tool_end("lead", "search", "Owls.", call="1")
    turn.end("Owls.")
    service = WaitingService(turn.events, ended())
    await served(service, "fork", RUN_ID, "--after", "2", "--tool-result", '1="Cats."')
    assert [(each.call_id, each.invocation_id) for each in service.forked[0].changes.tool_results] == [("1", "")]


async def test_a_sequence_that_is_not_of_a_tool_call_is_a_sentence() -> None:
    service = WaitingService(desk(), ended())
    forked = await served(service, "fork", RUN_ID, "--after", "20", "--tool-result", '1="Cats."')
    words = (
        f"Event 1 of run {RUN_ID} is not of a tool call: `bough events {RUN_ID} --types 'tool.*'` shows which are.\n"
    )
    assert (forked, service.forked) == (Finished(code=2, out="", err=words), [])


async def test_both_trees_come_after_the_answer_side_by_side_on_a_wide_terminal() -> None:
    wide = await served(WaitingService(desk(), ended()), "fork", "last", "--after", "6", environment={"COLUMNS": "160"})
    narrow = await served(WaitingService(desk(), ended()), "fork", "last", "--after", "6")
    alone = await served(WaitingService(desk(), ended()), "fork", "last", "--after", "6", "--no-tree")
    assert alone.out.endswith("│ All done.\n✓ lead  0 ms, 1,204 tokens\n")  # counted from where it was forked
    titles = [line for line in wide.out.splitlines() if line.startswith("origin ")]
    assert [title.split() for title in titles] == [["origin", RUN_ID, "│", "fork", FORK_ID]]
    below = narrow.out.removeprefix(alone.out).splitlines()
    assert [line for line in below if line.startswith(("origin ", f"fork {FORK_ID}", "succeeded "))] == [
        f"origin {RUN_ID}",
        "succeeded · 2 agents · 4 model calls · 2 tool calls · 27.0 s",
        f"fork {FORK_ID}",
        "succeeded · 1 agent · 2 model calls · 0 tool calls · 0 ms",
    ]
    assert (wide.code, narrow.code, alone.code) == (0, 0, 0)


async def test_a_fork_that_waits_exits_3() -> None:
    forked = await served(
        WaitingService(desk(), interrupted(approval())[-2:]), "fork", RUN_ID, "--after", "1", "--output", "answer"
    )
    assert (forked.code, f" resume {FORK_ID} --answer" in forked.err) == (3, True)


async def test_changes_that_cannot_be_read_are_sentences_and_nothing_is_forked(tmp_path: Path) -> None:
    service = WaitingService(desk())
    for flags, words in (
        (("--model", "big"), "--model 'big' cannot be parsed: write AGENT=MODEL."),
        (("--model", "a=x", "--model", "a=y"), "--model names 'a' twice: give one value."),
        (("--instruction", f"a=@{tmp_path}/none"), f"{tmp_path}/none: The file cannot be read"),
        (("--tool-result", "c1=yes"), "A result is not JSON"),
    ):
        forked = await served(service, "fork", RUN_ID, "--after", "1", *flags)
        assert (forked.code, forked.out, words in forked.err) == (2, "", True), forked.err
    assert (await served(service, "fork", RUN_ID)).code == 2
    assert (await served(service, "fork", RUN_ID, "--after", "0")).code == 2
    assert service.forked == []
