"""The rouge_1 and similarity metrics: an answer's text compared with a reference, as a number from 0 to 1."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from bough.v1 import eval_result_pb2, eval_set_pb2
from bough_server.evals.metrics.turn import Turn, TurnScore, mean_score, no_turn_score
from bough_server.matching.work import spend
from bough_server.messages import text_of

_WORD: Final = re.compile("[a-z0-9]+")

_WORD_STEPS: Final = 3
"""The steps of a character in which words are found and counted, measured."""

_COLUMN_STEPS: Final = 25
_COLUMN_CHARACTERS: Final = 170
"""The steps for a character of either text, and how many characters of the longer one take one more; measured."""


def find_words(text: str) -> list[str]:
    """Return the words of a text as Google's rouge-score does without a stemmer: runs of a-z and 0-9, lower-cased."""
    return _WORD.findall(text.lower())


def compare_words(answer: str, reference: str) -> TurnScore:
    """Return the F1 of ROUGE-1: of the words that two texts share; 0 if either has none. Raises TooMuchWork."""
    spend(_WORD_STEPS * (len(answer) + len(reference)))
    found, wanted = Counter(find_words(answer)), Counter(find_words(reference))
    shared, of_answer, of_reference = (found & wanted).total(), found.total(), wanted.total()
    # The harmonic mean of precision and recall, without their rounding.
    value = 2 * shared / max(of_answer + of_reference, 1)
    said = f"{shared} of {of_answer} words of the answer are among the {of_reference} of the reference"
    return TurnScore(value=value, reason=said if value < 1 else "")


def compare_characters(answer: str, reference: str) -> TurnScore:
    """Return 1 less the Levenshtein distance of two texts by the longer one's length. Raises TooMuchWork.

    White space around the texts does not count. Two empty texts are equal.
    """
    first, second = answer.strip(), reference.strip()
    longest = max(len(first), len(second))
    distance = levenshtein_distance(first, second)
    said = f"the answer differs from the reference in {distance:,} of {longest:,} characters" if distance else ""
    return TurnScore(value=(longest - distance) / max(longest, 1) if distance else 1.0, reason=said)


def levenshtein_distance(first: str, second: str) -> int:
    """Return the fewest insertions, deletions and replacements of characters that make one text of the other.

    A column of the matrix of distances is a pair of integers, a bit for each character of the longer text: Myers, "A
    fast bit-vector algorithm for approximate string matching" (1999), as Hyyrö (2003) has it for whole texts. Raises
    TooMuchWork.
    """
    long, short = (first, second) if len(first) >= len(second) else (second, first)
    # Of both: the masks are built in a step for each character of the longer text.
    spend((len(long) + len(short)) * (_COLUMN_STEPS + len(long) // _COLUMN_CHARACTERS))
    masks: dict[str, int] = {}
    for position, character in enumerate(long):
        masks[character] = masks.get(character, 0) | 1 << position
    whole, last = (1 << len(long)) - 1, 1 << len(long) >> 1
    # The cells of a column that are one more, and one less, than the cell above; and its lowest cell.
    more, less, distance = whole, 0, len(long)
    for character in short:
        equal = masks.get(character, 0)
        across = (((equal & more) + more) ^ more) | equal
        grows, shrinks = less | whole & ~(across | more), more & across
        distance += bool(grows & last) - bool(shrinks & last)
        grows, shrinks = grows << 1 | 1, shrinks << 1
        down = equal | less
        more, less = whole & (shrinks | ~(down | grows)), whole & grows & down
    return distance


_COMPARE: Final[Mapping[str, Callable[[str, str], TurnScore]]] = MappingProxyType(
    {"rouge_1": compare_words, "similarity": compare_characters}
)

KINDS: Final = frozenset(_COMPARE)
"""The kinds of metrics that compare an answer with a reference."""


def find_reference(metric: eval_set_pb2.EvalMetric) -> str:
    """Return the reference that a metric of these kinds has for the last turn; empty if each turn has its own."""
    return metric.rouge_1.reference or metric.similarity.reference


def has_expected_reference(metric: eval_set_pb2.EvalMetric) -> bool:
    """Return whether a metric compares answers with those that the turns expect."""
    return metric.WhichOneof("kind") in KINDS and not find_reference(metric)


def reference_mistake(kind: str, reference: str) -> str:
    """Return why every answer would score alike by a reference, as a sentence; empty if it can be compared."""
    if not reference.strip():
        return "is blank: there is nothing to compare."
    if kind == "rouge_1" and not find_words(reference):
        return "has no word of the letters a to z or digits, which are all that ROUGE-1 counts: use `similarity`."
    return ""


def score(
    metric: eval_set_pb2.EvalMetric, case: eval_set_pb2.EvalCase, turns: Sequence[Turn]
) -> eval_result_pb2.MetricScore | None:
    """Return the mean over the turns with a reference; None if there are none. Raises TooMuchWork."""
    if reference := find_reference(metric):
        compared = [(turn, reference) for turn in turns[-1:]]
    else:
        wanted = [(turn, turn.expect.answer) for turn in turns if turn.expect is not None]
        compared = [(turn, answer.exact) for turn, answer in wanted if answer.HasField("exact")]
    compare = _COMPARE[metric.WhichOneof("kind") or ""]
    return mean_score(metric, case, {turn.index: _score_turn(turn, text, compare) for turn, text in compared})


def _score_turn(turn: Turn, reference: str, compare: Callable[[str, str], TurnScore]) -> TurnScore:
    if not turn.invocation.HasField("final_response"):
        return TurnScore(value=0.0, reason="there is no answer")
    said = turn.invocation.final_response
    if any(part.truncated for part in said.parts):
        return no_turn_score("The answer was cut in the record, so it cannot be compared.")
    return compare(text_of(said), reference)
