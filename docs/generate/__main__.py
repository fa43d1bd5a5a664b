"""Write the generated reference pages and JSON Schemas, or check that they are up to date.

python -m docs.generate [--check]
"""

import json
import sys
from collections.abc import Mapping
from difflib import unified_diff
from itertools import islice
from pathlib import Path

from docs.generate import agents, eval_sets, settings
from docs.generate.text import Json

ROOT = Path(__file__).parents[2]


def generate_files() -> dict[str, str]:
    """Return the text of each generated file, by its path in the repository."""
    return {
        "docs/reference/agent-fields.md": agents.reference(),
        "docs/reference/bough-yaml.md": settings.reference(),
        "docs/reference/eval-sets.md": eval_sets.reference(),
        "server/bough_server/schemas/agent.schema.json": _json_text(agents.json_schema()),
        "server/bough_server/schemas/bough.schema.json": _json_text(settings.json_schema()),
        "server/bough_server/schemas/eval.schema.json": _json_text(eval_sets.json_schema()),
    }


def find_stale(files: Mapping[str, str]) -> dict[str, str]:
    """The first differing lines of each file that is not as it would be generated."""
    differences: dict[str, str] = {}
    for path, text in files.items():
        file = ROOT / path
        there = file.read_text(encoding="utf-8") if file.is_file() else ""
        if there != text:
            lines = unified_diff(there.splitlines(), text.splitlines(), path, "generated", lineterm="")
            differences[path] = "\n".join(islice(lines, 20))
    return differences


def main() -> int:
    """Write the files, or with --check print how they differ and return 1 if any does."""
    files = generate_files()
    if sys.argv[1:] == ["--check"]:
        differences = find_stale(files)
        for path, lines in differences.items():
            print(f"{path} is not what `make docs` makes:\n{lines}", file=sys.stderr)
        return 1 if differences else 0
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
    return 0


def _json_text(value: Json) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
