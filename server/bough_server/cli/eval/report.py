"""Results on standard output and in files, and the exit codes that stand for them."""

from bough.v1 import eval_result_pb2, execution_pb2
from bough_server.cli.eval.files import Files, redact_result
from bough_server.cli.exit_codes import ExitCode
from bough_server.cli.output import print_lines, whole_width
from bough_server.cli.render.evaluations import result_lines
from bough_server.settings_sections import RedactSection


def report(
    result: eval_result_pb2.EvalResult,
    comparison: eval_result_pb2.EvalComparison | None = None,
    *,
    files: Files,
    redact: RedactSection,
) -> ExitCode:
    """Print a result, write it to files, and return its exit code. Raises ConfigurationError."""
    shown, compared = redact_result(result, comparison, redact=redact)
    print_lines(result_lines(shown, compared, width=whole_width()))
    files.write(result, comparison, redact=redact)
    return exit_code(result)


def exit_code(result: eval_result_pb2.EvalResult) -> ExitCode:
    """Return the exit code of a result."""
    if result.state == execution_pb2.EXECUTION_STATE_CANCELLED:
        return ExitCode.CANCELLED
    if result.verdict == eval_result_pb2.VERDICT_PASSED:
        return ExitCode.YES
    return ExitCode.FAILED if result.verdict == eval_result_pb2.VERDICT_FAILED else ExitCode.IMPOSSIBLE
