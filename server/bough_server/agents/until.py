"""Whether a loop is done after a round, by the operator's condition or a value of the state; it ends none.

Both depend on what is recorded alone, so a replay comes to the same and nothing of it is in the log.
"""

from bough.v1 import agent_pb2
from bough_server.functions import Condition
from bough_server.runtime.child_input import situation_of
from bough_server.runtime.lane import Lane
from bough_server.situation import Values
from bough_server.state_paths import value_at


def is_done(lane: Lane, until: agent_pb2.LoopUntil, round: int) -> bool:
    """Whether it says that the loop is done with this round. Raises RunError with what the condition raised."""
    if until.HasField("state"):
        try:
            return value_at(Values(lane.lane_state.values), until.state) is True
        except KeyError:
            return False
    if not until.HasField("predicate"):
        return False
    function = lane.frame.resolver.function(until.predicate)
    assert isinstance(function, Condition)  # judged when the run began
    return function.holds(situation_of(lane, round=round))
