"""Metrics of other tools that have no counterpart: they stay in the set, and their cases are not judged.

They are custom metrics whose names have a dot, which no registered function can have: `trpc.NAME` and `adk.NAME`.
"""

import re
from typing import Final

from bough.v1 import eval_set_pb2
from bough_server.evals.importers.values import JsonValue, Notes, as_json

MAX_NAME: Final = 128

_SECRET_NAME: Final = re.compile(
    r"api[_-]?key|secret|token$|passw(or)?d|passphrase|credential|authori[sz]ation|^auth$|cookie|bearer|signature",
    re.IGNORECASE,
)
_KEY_NAME: Final = re.compile(r"(^|[_-])[Kk]ey$|[a-z]Key$|KEY$")
"""Names such as access_key and accessKey, but not "monkey"."""
_SECRET_VALUE: Final = re.compile(
    r"^(sk|pk|rk|xai|gsk|ghp|gho|ghs|glpat|hf|xox[abpr])[-_][A-Za-z0-9_-]{8,}"
    r"|^AKIA[0-9A-Z]{12,}|^AIza[0-9A-Za-z_-]{20,}|^eyJ[A-Za-z0-9_-]{8,}\.|^(bearer|basic)\s+\S"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY",
    re.IGNORECASE,
)
_SECRET_URL: Final = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/\s]*@|[?&][^=&\s]*(key|token|secret|sig|signature|password|auth)=", re.IGNORECASE
)


def build_unplaced_metric(
    tool: str, name: str, *, metric_name: str, threshold: float | None, config: JsonValue, notes: Notes
) -> eval_set_pb2.EvalMetric:
    """Return a custom metric that keeps what another tool's metric had, without what looks like a secret.

    Environment variables that the configuration names are never expanded.
    """
    dropped: list[str] = []
    kept = _without_secrets(config, "", dropped)
    for place in dropped:
        notes.add(f"{name}: {place} looks like a secret and was left out.")
    custom = eval_set_pb2.CustomMetric(name=f"{tool}.{name}"[:MAX_NAME], config_json=as_json(kept) if kept else "")
    return eval_set_pb2.EvalMetric(name=metric_name, threshold=threshold, custom=custom)


def _without_secrets(value: JsonValue, place: str, dropped: list[str]) -> JsonValue:
    if isinstance(value, list):
        items = ((f"{place}[{index}]", item) for index, item in enumerate(value))
        return [_without_secrets(item, inner, dropped) for inner, item in items if not _drop("", item, inner, dropped)]
    if not isinstance(value, dict):
        return value
    members = ((name, item, f"{place}.{name}" if place else name) for name, item in value.items())
    return {
        name: _without_secrets(item, inner, dropped)
        for name, item, inner in members
        if not _drop(name, item, inner, dropped)
    }


def _drop(name: str, value: JsonValue, place: str, dropped: list[str]) -> bool:
    """Return whether a value looks like a secret, and note its place if it does."""
    named = bool(_SECRET_NAME.search(name) or _KEY_NAME.search(name)) and isinstance(value, str | list | dict)
    is_secret = bool(value) and (named or (isinstance(value, str) and _is_secret_text(value)))
    if is_secret:
        dropped.append(place)
    return is_secret


def _is_secret_text(text: str) -> bool:
    return bool(_SECRET_VALUE.search(text) or _SECRET_URL.search(text))
