"""A client that stops reading, and one that is cut off: neither delays the run or grows the server's memory."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.v1 import execution_pb2, follow_pb2, policy_pb2
from tests.support.cutting_proxy import proxying
from tests.support.log_laws import check_laws
from tests.support.processes import serving
from tests.support.projects import llm, write_project
from tests.support.tool_gate import Gate, standing_gate
from tests.support.wire_client import NARROW, connected

LINES, WIDTH = 50_000, 800
"""40 MB of outputs, so that keeping them all in memory would be detected."""

MOST_GROWTH = 32 * 1024 * 1024
PASSTHROUGH = policy_pb2.RunPolicy(deltas=policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas()))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for a temporary database, deleted afterwards."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _printing(lines: int) -> list[object]:
    return [{"calls": [{"name": "print_lines", "arguments": {"count": lines, "width": WIDTH}}]}, "Printed."]


@pytest.mark.skipif(sys.platform != "linux", reason="a process's memory is read as Linux tells it")
async def test_a_reader_that_pauses_costs_the_run_nothing_and_then_gets_everything(folder: Path) -> None:
    team = (llm("printer", tools=["print_lines"]), llm("warm", tools=["print_lines"]))
    config = write_project(folder, *team, script={"printer": _printing(LINES), "warm": _printing(100)})
    async with (
        serving(config) as server,
        connected(server.address) as other,
        connected(server.address, options=NARROW) as reader,
    ):
        await other.begin("warm", policy=PASSTHROUGH).to_the_end()
        before = server.resident_bytes()
        turn = await reader.begin("printer", policy=PASSTHROUGH).until("tool_output")
        run_id = await turn.run_id()
        # Reading stops here; only the run's own events are followed, elsewhere, to its end.
        ended = await other.watch(run_id, follow=follow_pb2.FollowOptions(event_names=["agent.run.*"])).to_the_end()
        seen = len(turn.events)
        grown = server.peak_bytes() - before
        await turn.to_the_end()
        grown_after = server.peak_bytes() - before
    assert ended.kinds == ["run_started", "run_completed"]
    assert seen < LINES / 2, "the reader was far behind when the run ended"
    assert grown < MOST_GROWTH
    assert grown_after < MOST_GROWTH
    check_laws(turn.events)
    outputs = [event.tool_output.text for event in turn.events if event.HasField("tool_output")]
    assert [int(text[:7]) for text in outputs] == list(range(LINES))
    assert {len(text) for text in outputs} == {WIDTH}


def _when_cut(on_disconnect: policy_pb2.DisconnectPolicy.ValueType) -> policy_pb2.RunPolicy:
    policy = policy_pb2.RunPolicy(on_disconnect=on_disconnect)
    policy.disconnect_grace.FromNanoseconds(0)
    return policy


def _waiting(gate: Gate) -> list[object]:
    return [{"calls": [{"name": "wait_at", "arguments": {"port": gate.port}}]}, "It is over."]


async def test_what_becomes_of_the_runs_of_a_client_that_is_cut_off_is_their_policy(tmp_path: Path) -> None:
    async with standing_gate() as gate, standing_gate() as other_gate:
        team = (llm("waiter", tools=["wait_at"]), llm("stayer", tools=["wait_at"]))
        config = write_project(tmp_path, *team, script={"waiter": _waiting(gate), "stayer": _waiting(other_gate)})
        async with serving(config) as server, connected(server.address) as other, proxying(server.address) as proxy:
            async with connected(proxy.address) as remote:
                waiter = remote.begin("waiter", policy=_when_cut(policy_pb2.DISCONNECT_POLICY_CANCEL))
                stayer = remote.begin("stayer", policy=_when_cut(policy_pb2.DISCONNECT_POLICY_CONTINUE))
                for turn, place in ((waiter, gate), (stayer, other_gate)):
                    await turn.until("tool_started")
                    await place.arrived.wait()
                proxy.cut()
                await waiter.call.code()
            # Once one run is cancelled, the server has noticed that the connection of both is closed.
            await gate.left.wait()
            other_gate.open()
            cancelled = await other.log(await waiter.run_id())
            completed = await other.log(await stayer.run_id())
    assert cancelled[: len(waiter.events)] == waiter.events
    assert completed[: len(stayer.events)] == stayer.events
    check_laws(cancelled)
    check_laws(completed)
    assert completed[-1].HasField("run_completed")
    assert cancelled[-1].HasField("run_cancelled")
    (wish,) = [event.cancel_requested for event in cancelled if event.HasField("cancel_requested")]
    assert wish.reason == execution_pb2.CANCEL_REASON_DISCONNECTED
