"""The replicas case: servers on one PostgreSQL, measured together."""

from pathlib import Path
from typing import Final

from bench.figures import CaseResult, Figure
from bench.postgres import postgres
from bench.replicas import follow, load, takeover

KILLS: Final = 5


async def measure(folder: Path, *, kills: int = KILLS) -> CaseResult:
    """Runs the case in an empty folder; `kills` is how many servers are killed for the time of a takeover."""
    figures: list[Figure] = []
    failures: list[str] = []
    with postgres() as database:
        if database is None:
            return CaseResult(figures=[])
        figures += await follow.measured(_made(folder / "follow"), database.new_database(), failures)
        figures += await load.measured(_made(folder / "load"), database, failures)
        figures += await takeover.measured(_made(folder / "takeover"), database.new_database(), failures, kills=kills)
    return CaseResult(figures=figures, failures=failures)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
