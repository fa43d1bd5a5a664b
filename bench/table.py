"""A report as a table: on a terminal, and as Markdown between two marks of a page; it measures nothing."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench.figures import Report, WrittenFigure

COLUMNS = ("case", "what", "bough", "floor", "of", "ratio", "aim", "")
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def show(report: Report, console: Console) -> None:
    """Prints the figures and the failures."""
    table = Table(box=box.SIMPLE_HEAD, title="; ".join(_machine(report)), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("bough", "floor", "ratio") else "left")
    for figure in report["figures"]:
        table.add_row(*_cells(figure))
    console.print(table)
    for failure in report["failures"]:
        console.print(f"failed: {failure}", markup=False, style="red")


def rewritten(page: str, report: Report) -> str:
    """The page with the report between its marks. Raises ValueError where a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page needs the lines {BEGIN} and {END}; the table goes between them.")
    lines = [f"Measured on {report['date']}. {'; '.join(_machine(report))}.", "", *_markdown(report["figures"])]
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}"


def _machine(report: Report) -> list[str]:
    told = {**report["machine"], **report["versions"]}
    return [f"{name} {value}" for name, value in told.items()]


def _markdown(figures: Sequence[WrittenFigure]) -> list[str]:
    rows = [COLUMNS, ("---", "---", "---:", "---:", "---", "---:", "---", "---")]
    rows += [_cells(figure) for figure in figures]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _cells(figure: WrittenFigure) -> tuple[str, str, str, str, str, str, str, str]:
    floor, ratio, is_met = figure["floor_median"], figure["ratio"], figure["is_met"]
    return (
        figure["case"],
        figure["what"],
        f"{_number(figure['median'])} {figure['unit']}",
        "" if floor is None else _number(floor),
        figure["floor"],
        "" if ratio is None else f"{ratio:.2f}",
        figure["aim"],
        "" if is_met is None else "met" if is_met else "missed",
    )


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"
