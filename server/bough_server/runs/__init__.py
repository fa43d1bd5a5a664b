"""Runs of this process and access to those of other workers: start, follow, resume, fork, cancel, recover."""

from bough_server.runs.admission import RunDefaults
from bough_server.runs.runs import Runs

__all__ = ["RunDefaults", "Runs"]
