"""Compare JSON values and texts with the matchers of eval sets."""

import json
import re

from bough.v1 import eval_set_pb2


def mismatch(matcher: eval_set_pb2.ValueMatcher, value_json: str) -> str:
    """Return how a JSON text differs from what is expected, in a sentence; empty if it matches."""
    expected = matcher.WhichOneof("expected")
    value = json.loads(value_json)
    if expected == "equals_json" and value != json.loads(matcher.equals_json):
        return f"is {value_json} and not {matcher.equals_json}"
    if expected == "regex" and not re.search(matcher.regex, value if isinstance(value, str) else value_json):
        return f"{value_json} does not match {matcher.regex}"
    return ""


def check_matcher(matcher: eval_set_pb2.ValueMatcher) -> str:
    """Return what is wrong with a matcher, in a sentence; empty if it can be used."""
    try:
        json.loads(matcher.equals_json or "null")
        re.compile(matcher.regex)
    except (ValueError, RecursionError, re.error) as error:
        return f"The matcher cannot be used: {error}."
    return ""
