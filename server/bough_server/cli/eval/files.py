"""Files that evaluations write and read: results, reports, baselines."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bough_server.cli.exit_codes import print_stderr
from bough_server.documents.files import is_special, write_whole

if TYPE_CHECKING:
    from bough.v1 import eval_result_pb2
    from bough_server.settings_sections import RedactSection

MAX_RESULT_BYTES: Final = 256 * 1024 * 1024


class Content(StrEnum):
    """How much of texts, arguments and results files hold."""

    NONE = "none"
    CUT = "cut"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files that a command writes a result to; None for those that it does not."""

    junit: Path | None = None
    markdown: Path | None = None
    html: Path | None = None
    json: Path | None = None
    baseline: Path | None = None
    """A file of the same form as `json`, written only if the evaluation passed."""
    content: Content = Content.CUT

    def check(self, redact: "RedactSection") -> None:
        """Raise ConfigurationError for a file that could not be written, before anything runs."""
        from bough.v1 import eval_result_pb2
        from bough_server.errors import ConfigurationError
        from bough_server.evals.results.content import reduce_result

        paths = [path for path in (self.junit, self.markdown, self.html, self.json) if path is not None]
        if self.baseline is not None:
            paths.append(self.baseline)
        for path in paths:
            if why := why_unwritable(path):
                raise ConfigurationError(f"{path}: {why}")
        if len({path.resolve() for path in paths}) < len(paths):
            also = "" if self.baseline is None else ", and --baseline with --update-baseline,"
            raise ConfigurationError(f"Two of --junit, --markdown, --html and --json{also} name the same file.")
        reduce_result(
            eval_result_pb2.EvalResult(), None, self.content.value, fields=redact.fields, patterns=redact.patterns
        )

    def write(
        self,
        result: "eval_result_pb2.EvalResult",
        comparison: "eval_result_pb2.EvalComparison | None" = None,
        *,
        redact: "RedactSection",
    ) -> None:
        """Write every file, each whole or not at all. Raises ConfigurationError and OSError."""
        if not any((self.junit, self.markdown, self.html, self.json, self.baseline)):
            return
        from bough.v1.eval_result_pb2 import VERDICT_PASSED
        from bough_server.cli.output import json_text
        from bough_server.evals.reports.html import html_page
        from bough_server.evals.reports.junit import junit_text
        from bough_server.evals.reports.markdown import markdown_text
        from bough_server.evals.results.content import reduce_result

        shown, compared = reduce_result(
            result, comparison, self.content.value, fields=redact.fields, patterns=redact.patterns
        )
        writers: tuple[tuple[Path | None, Callable[[], str]], ...] = (
            (self.json, lambda: json_text(shown) + "\n"),
            (self.junit, lambda: junit_text(shown, compared)),
            (self.markdown, lambda: markdown_text(shown, compared)),
            (self.html, lambda: html_page(shown, compared)),
            (self.baseline if result.verdict == VERDICT_PASSED else None, lambda: json_text(shown) + "\n"),
        )
        for path, text in writers:
            if path is not None:
                write_whole(path, text())
                print_stderr(f"wrote {path}")


def redact_result(
    result: "eval_result_pb2.EvalResult",
    comparison: "eval_result_pb2.EvalComparison | None" = None,
    *,
    redact: "RedactSection",
) -> "tuple[eval_result_pb2.EvalResult, eval_result_pb2.EvalComparison | None]":
    """Return a result and its comparison as a command prints them: whole, without secrets."""
    if not redact.fields and not redact.patterns:
        return result, comparison
    from bough_server.evals.results.content import reduce_result

    return reduce_result(result, comparison, Content.FULL.value, fields=redact.fields, patterns=redact.patterns)


def why_unwritable(path: Path) -> str:
    """Return why a file cannot be written, as a sentence; empty if it can."""
    folder = path.resolve().parent
    if path.is_dir():
        return "This is a folder."
    if is_special(path):
        return "" if os.access(path, os.W_OK) else "It is not writable."
    if not folder.is_dir():
        return f"The folder {folder} does not exist."
    # A file is replaced as a whole, for which its folder has to be writable.
    return "" if os.access(folder, os.W_OK) else f"The folder {folder} is not writable."


def read_baseline(text: str) -> "str | eval_result_pb2.EvalResult":
    """Return the result in a file, or the id of an evaluation if there is no such file.

    Raises ConfigurationError for a file that holds no result.
    """
    path = Path(text)
    return read_result(path) if path.exists() or path.suffix == ".json" else text


def find_baseline_file(text: str) -> Path:
    """Return the file that --baseline names and --update-baseline writes. Raises ConfigurationError if it is none."""
    from bough_server.errors import ConfigurationError

    if not text:
        raise ConfigurationError("--update-baseline needs --baseline FILE: the file to write.")
    path = Path(text)
    if not path.exists() and path.suffix != ".json":
        raise ConfigurationError(
            f"--update-baseline: --baseline {text} names an evaluation, and no file: name a file, one that exists or "
            "a new one that ends in .json."
        )
    return path


def read_result(path: Path) -> "eval_result_pb2.EvalResult":
    """Return the result that a file of --json holds. Raises ConfigurationError."""
    from google.protobuf import json_format

    from bough.v1 import eval_result_pb2
    from bough_server.errors import ConfigurationError

    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            raise ConfigurationError(f"{path}: The file is larger than {MAX_RESULT_BYTES >> 20} MiB.")
        # A later version may have written fields that this one does not know.
        document = json.loads(path.read_bytes())
        if isinstance(document, dict) and "cases" in document and "state" not in document:
            raise ConfigurationError(
                f"{path}: The result has no `state`, as those of version 0.1: make a new one with"
                " `bough eval run --json`."
            )
        result = json_format.ParseDict(document, eval_result_pb2.EvalResult(), ignore_unknown_fields=True)
    except OSError as error:
        raise ConfigurationError(f"{path}: The file cannot be read: {error.strerror}.") from error
    except (json_format.ParseError, ValueError, RecursionError) as error:
        why = str(error).rstrip(".")
        raise ConfigurationError(f"{path}: The file is no result of an evaluation: {why}.") from error
    if not result.cases:  # as of any other JSON file, whose fields are all unknown
        raise ConfigurationError(f"{path}: The file is no result of an evaluation: it has no cases.")
    return result
