"""The golden desk: its log and its tree are what the files say, word for word."""

from google.protobuf import json_format

from bough.v1 import event_pb2
from bough_server.tree.fold import fold
from tests.golden import desk
from tests.support.log_readings import masked


async def test_the_desk_says_and_does_what_its_golden_files_hold() -> None:
    """After a change that is meant to change them: `python -m tests.golden.desk`, and read the diff."""
    log, tree = await desk.recorded()
    assert log == desk.LOG.read_text(encoding="utf-8")
    assert tree == desk.TREE.read_text(encoding="utf-8")


def test_the_golden_log_is_read_back_unchanged_and_folds_into_the_same_nodes() -> None:
    text = desk.LOG.read_text(encoding="utf-8")
    log = [json_format.ParseDict(one, event_pb2.AgentEvent()) for one in desk.read(desk.LOG)]
    assert desk.text_of(log) == text
    (golden,) = desk.read(desk.TREE)
    (folded,) = desk.plain(masked([fold(log)]))
    names = [(one["name"], one.get("depth", 0), one["state"]) for one in golden["agents"]]
    assert [(one["name"], one.get("depth", 0), one["state"]) for one in folded["agents"]] == names
