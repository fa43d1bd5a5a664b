"""The arithmetic of the benchmarks and the page they write; nothing is measured here."""

import pytest

from bench.figures import Aim, Figure, Report
from bench.table import BEGIN, END, rewritten


def figure(*rounds: float, floor: tuple[float, ...] = (), aim: Aim | None = None) -> Figure:
    return Figure(case="desk", what="CPU", unit="ms", rounds=rounds, floor="loop", floor_rounds=floor, aim=aim)


def test_a_figure_is_the_median_of_its_rounds_and_its_ratio_that_of_the_medians() -> None:
    measured = figure(30.0, 10.0, 20.0, floor=(10.0, 50.0, 8.0))
    assert (measured.median, measured.floor_median, measured.ratio) == (20.0, 10.0, 2.0)


@pytest.mark.parametrize(
    ("aim", "is_met"),
    [
        (Aim("at most", 2.0), True),
        (Aim("under", 2.0), False),
        (Aim("more than", 1.9), True),
        (Aim("under", 20.5, "median"), True),
        (Aim("more than", 20.0, "median"), False),
        (None, None),
    ],
)
def test_an_aim_bounds_the_ratio_or_the_median(aim: Aim | None, is_met: bool | None) -> None:
    assert figure(20.0, floor=(10.0,), aim=aim).is_met is is_met


def test_an_aim_of_a_ratio_is_missed_where_there_is_no_floor() -> None:
    assert figure(20.0, aim=Aim("at most", 100.0)).is_met is False


def test_the_page_gets_the_table_between_its_marks_and_keeps_the_rest() -> None:
    aim = Aim("at most", 1.3)
    report = Report(
        date="2026-01-02",
        machine={"cores": "2"},
        versions={"python": "3.11.7"},
        figures=[figure(1500.0, floor=(1000.0,), aim=aim).written()],
        failures=[],
        seconds={"desk": 1.0},
    )
    page = f"Before\n{BEGIN}\nold\n{END}\nafter\n"
    assert rewritten(page, report) == (
        f"Before\n{BEGIN}\n"
        "Measured on 2026-01-02. cores 2; python 3.11.7.\n"
        "\n"
        "| case | what | bough | floor | of | ratio | aim |  |\n"
        "| --- | --- | ---: | ---: | --- | ---: | --- | --- |\n"
        "| desk | CPU | 1,500 ms | 1,000 | loop | 1.50 | at most 1.3 x | missed |\n"
        f"{END}\nafter\n"
    )


def test_a_page_without_marks_is_refused() -> None:
    report = Report(date="", machine={}, versions={}, figures=[], failures=[], seconds={})
    with pytest.raises(ValueError, match="needs the lines"):
        rewritten("nothing", report)
