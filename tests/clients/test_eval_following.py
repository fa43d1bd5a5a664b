"""Commands that follow an evaluation: its id, Ctrl-C twice, failures, and a server that stays away."""

import signal
from pathlib import Path

import pytest

from bough import Rejoining
from bough.v1 import error_pb2, eval_service_pb2, evaluation_pb2
from bough_server.cli.connection import Connection
from bough_server.cli.eval.follow import Following
from bough_server.cli.follow import ConnectionLost
from tests.clients.cli_process import bough, started
from tests.clients.durable_server import Drop, Moment
from tests.clients.eval_project import write_set
from tests.clients.evaluation_server import EVALUATION_ID, EvaluatingService, connected, evaluating, log_of

LOG = log_of(2)
ALLOWED = ("--allow-removed", "--allow-incomplete-baseline")


async def test_a_connection_that_stays_lost_names_the_evaluation_and_the_command_that_rejoins_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = EvaluatingService(LOG, [Drop(events=2), *[Drop(moment=Moment.UNHEARD)] * 100_000])
    rejoining = Rejoining(first_delay=0.0, longest_delay=0.0, timeout=0.2)
    async with connected(service, rejoining) as client:
        following = Following(Connection(client=client, command="bough --address HERE"), evaluation_id=EVALUATION_ID)
        with pytest.raises(ConnectionLost) as lost:
            await following.watch(client.evaluations.watch(EVALUATION_ID))

    assert str(lost.value).splitlines() == [
        "The connection to the server was lost, and it did not come back.",
        f"  evaluation: {EVALUATION_ID}",
        f"The evaluation may continue there. To rejoin it: bough --address HERE eval watch {EVALUATION_ID}",
    ]
    assert capsys.readouterr().err == "case-0 passed\n"


async def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    service = EvaluatingService(LOG[:-1], holds=True)
    async with evaluating(service) as address:
        port = int(address.rpartition(":")[2])
        running = await started("eval", "run", write_set(tmp_path), port=port)
        assert running.stderr is not None
        lines = [(await running.stderr.readline()).decode() for _ in range(3)]
        running.send_signal(signal.SIGINT)
        lines.append((await running.stderr.readline()).decode())
        running.send_signal(signal.SIGINT)
        out, err = await running.communicate()

    assert lines == [
        f"evaluation {EVALUATION_ID}\n",
        "case-0 passed\n",
        "case-1 passed\n",
        "Cancelling the evaluation; Ctrl-C again to leave at once.\n",
    ]
    assert (running.returncode, out, err) == (130, b"", b"")


async def test_an_evaluation_that_could_not_continue_says_why_and_exits_with_2(tmp_path: Path) -> None:
    error = error_pb2.AgentError(message="The disk is full.")
    failed = evaluation_pb2.EvaluationEvent(
        evaluation_id=EVALUATION_ID, sequence=2, evaluation_failed=evaluation_pb2.EvaluationFailed(error=error)
    )
    async with evaluating(EvaluatingService([*LOG[:1], failed])) as address:
        ended = await bough("eval", "run", write_set(tmp_path), port=int(address.rpartition(":")[2]))

    assert ended.code == 2
    assert ended.err.splitlines() == [f"evaluation {EVALUATION_ID}", "The evaluation failed: The disk is full."]


async def test_the_command_line_is_the_request(tmp_path: Path) -> None:
    service = EvaluatingService(LOG)
    options = ("--agent", "guide", "--trials", "3", "--max-concurrency", "2", "--gate", "pass_rate >= 0.5", *ALLOWED)
    budget = ("--budget", "cost=2.5", "--budget", "time=10m", "--budget", "tokens=1000", "--label", "pr=7")
    async with evaluating(service) as address:
        port = int(address.rpartition(":")[2])
        await bough("eval", "run", write_set(tmp_path), *options, *budget, "--request-id", "ci-1", port=port)

    (asked,) = service.asked
    assert isinstance(asked, eval_service_pb2.EvaluateRequest)
    asked.ClearField("eval_set")
    asked.ClearField("follow")
    wanted = eval_service_pb2.EvaluateRequest(
        request_id="ci-1",
        agent="guide",
        trials=3,
        max_concurrency=2,
        gates=["pass_rate >= 0.5"],
        allow_removed=True,
        allow_incomplete_baseline=True,
    )
    wanted.labels["pr"] = "7"
    wanted.budget.cost_nanos, wanted.budget.tokens = 2_500_000_000, 1000
    wanted.budget.wall_duration.FromSeconds(600)
    assert asked == wanted
