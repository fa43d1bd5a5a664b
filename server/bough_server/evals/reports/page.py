"""Self-contained HTML pages with agent trees: what templates show, and the environment that renders them.

Pages load nothing and run no script but one of ours, which their policy names by its hash. What models and tools said
is text in them, whatever it is.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bough_server.plain_text import printable

_DEEPEST: Final = 12
"""Levels that are indented; deeper agents are indented as far as these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A text with a title."""

    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line with a style: a state, "anomaly" or "dim"."""

    text: str
    style: str = "dim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call; `target` and `target_name` are the id and the name of the agent that it called.

    `number` is its number among the agent's calls, from 1; 0 for one without.
    """

    name: str
    state: str
    number: int = 0
    facts: Sequence[str] = ()
    blocks: Sequence[Block] = ()
    notes: Sequence[Note] = ()
    target: str = ""
    target_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an agent said and called in one step; calls outside of steps are one without a title."""

    blocks: Sequence[Block] = ()
    notes: Sequence[Note] = ()
    calls: Sequence[Call] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """An agent of a tree, in preorder with its depth; `mark` says how it compares with the expected tree."""

    name: str
    depth: int
    state: str = ""
    id: str = ""
    mark: str = ""
    facts: Sequence[str] = ()
    blocks: Sequence[Block] = ()
    steps: Sequence[Step] = ()
    answer: Sequence[Block] = ()
    notes: Sequence[Note] = ()
    is_open: bool = False

    @property
    def indent(self) -> int:
        """How many levels the node is indented."""
        return min(max(0, self.depth), _DEEPEST)


def indent_json(text: str) -> str:
    """Return JSON indented; a text that is no JSON, as one that was cut, as it is."""
    try:
        value = json.loads(text)
        return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):  # deep nesting is too much for both functions
        return text


def _to_printable(value: object) -> object:
    # What is markup has been made by a template.
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("bough_server.evals.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_to_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, *, script: str = "", **values: Any) -> str:
    """Return a page. It has ASCII characters only, so that it survives any encoding.

    `script` names the one file of `templates` that the page runs. It has to be ASCII without "</script".
    """
    text = (files("bough_server.evals.reports") / "templates" / script).read_text("ascii") if script else ""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'" + (f"; script-src 'sha256-{digest}'" if script else "")
    # Only this file is taken as it is: everything else is escaped.
    page = _environment().get_template(template).render(policy=policy, script=Markup(text), **values)
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")
