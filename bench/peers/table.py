"""A report of the peers as Markdown, and between two marks of a page."""

from collections.abc import Sequence
from statistics import median
from typing import Final, Literal

from bench.peers.contestants import BOUGH
from bench.peers.race import Laps, PeersReport, Result

BEGIN: Final = "<!-- bench-peers:begin -->"
END: Final = "<!-- bench-peers:end -->"


def markdown(report: PeersReport) -> str:
    """Return tables: the CPU and memory of a turn, its time, and what is kept of it; then what went wrong."""
    tables = (_costs(report), _times(report), _keeping(report))
    return "\n".join([*_head(report), *(line for table in tables for line in ("", *table)), *_troubles(report)])


def rewritten(page: str, report: PeersReport) -> str:
    """The page with the report between its marks. Raises ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page needs the lines {BEGIN} and {END}; the tables go between them.")
    return f"{before}{BEGIN}\n{markdown(report)}\n{END}{after}"


def _head(report: PeersReport) -> list[str]:
    told = {**report["machine"], "python": report["versions"]["python"], "sqlite": report["versions"]["sqlite"]}
    machine = "; ".join(f"{name} {value}" for name, value in told.items())
    return [
        f"Measured on {report['date']}. {machine}. Rounds: {report['rounds']}; medians, and their range in brackets."
    ]


def _costs(report: PeersReport) -> list[str]:
    kinds = _kinds(report)
    bough = next((one for one in report["results"] if one["name"] == BOUGH.name), None)
    columns = ["CPU of a turn", "version"]
    for kind in kinds:
        columns += [f"ms, {kind}", "x Bough"]
    rows = []
    for one in report["results"]:
        row = [one["name"], one["version"]]
        for kind in kinds:
            row += [_cell(one["laps"][kind], "cpu"), _ratio(one, bough, kind)]
        rows.append([*row, f"{one['peak']:.0f}"])
    return _table([*columns, "peak memory, MB"], rows, right=range(2, len(columns) + 1))


def _times(report: PeersReport) -> list[str]:
    kinds = _kinds(report)
    columns = [
        "time of a turn, p50",
        *(f"ms, {kind}" for kind in kinds),
        *(f"first text, {kind}" for kind in kinds),
    ]
    rows = [
        [
            one["name"],
            *(_cell(one["laps"][kind], "p50") for kind in kinds),
            *(_cell(one["laps"][kind], "first") if one["is_streamed"] else "" for kind in kinds),
        ]
        for one in report["results"]
    ]
    return _table(columns, rows, right=range(1, len(columns)))


def _kinds(report: PeersReport) -> list[str]:
    return list(report["results"][0]["laps"]) if report["results"] else []


def _keeping(report: PeersReport) -> list[str]:
    rows = [
        [one["name"], "yes" if one["is_streamed"] else "no", one["kept"], one["durable"], one["tree"]]
        for one in report["results"]
    ]
    return _table(["what remains", "texts of sub-agents streamed", "kept of a turn", "durable", "tree of agents"], rows)


def _troubles(report: PeersReport) -> list[str]:
    troubles = [*(f"Left out: {why}" for why in report["left_out"]), *report["failures"]]
    return ["", *(f"- {_inline(trouble)}" for trouble in troubles)] if troubles else []


def _cell(laps: Laps, quantity: Literal["cpu", "p50", "first"]) -> str:
    """The median and the range; for turns that failed, how many, as their figures mean nothing."""
    if laps["failed"]:
        return f"{laps['failed']} of {laps['turns']} failed" if quantity == "cpu" else ""
    values = laps[quantity]
    return f"{_number(median(values))} ({_number(min(values))}-{_number(max(values))})"


def _ratio(one: Result, bough: Result | None, kind: str) -> str:
    if bough is None or one["laps"][kind]["failed"] or bough["laps"][kind]["failed"]:
        return ""
    return f"{median(one['laps'][kind]['cpu']) / median(bough['laps'][kind]['cpu']):.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _inline(text: str) -> str:
    return " ".join(text.replace("|", "/").replace("<", "(").replace(">", ")").split())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    marks = ["---:" if index in right else "---" for index in range(len(columns))]
    return ["| " + " | ".join(row) + " |" for row in (columns, marks, *rows)]
