"""Every run that this process executes, and the way to all others; what a run does is the runtime's."""

from bough_server.runs.admission import RunDefaults
from bough_server.runs.runs import Runs

__all__ = ["RunDefaults", "Runs"]
