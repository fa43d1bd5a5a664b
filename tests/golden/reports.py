"""The golden reports: JUnit XML and Markdown of one result.

Usage: python -m tests.golden.reports
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bough_server.evals.reports.junit import junit_text
from bough_server.evals.reports.markdown import markdown_text
from tests.evals.report_results import comparison, example

JUNIT: Final = Path(__file__).parent / "report_junit.xml"
MARKDOWN: Final = Path(__file__).parent / "report.md"
FILES: Final = (JUNIT, MARKDOWN)


def made() -> Mapping[Path, str]:
    """The reports as they are made now."""
    return {JUNIT: junit_text(example()), MARKDOWN: markdown_text(example(), comparison())}


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
