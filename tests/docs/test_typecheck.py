"""Programs of pages are checked with their types, and a mistake is reported with its line in the page."""

from tests.docs.typecheck import problems, programs

ASK = """# Ask

```python
# ask.py
from bough import Client

with Client() as client:
    answer: int = client.ask("lead", "hi")
```
"""
TOOLS = """
```python
# tools.py
from math import floor
```

```yaml
# bough.yaml
python: [tools]
```

```python
def double(number: float) -> int:
    return 2 * floor(numbr)
```

```python
# ask.py
print("the next program")
```
"""
DOUBLE = ["def double(number: float) -> int:", "    return 2 * floor(numbr)"]


def test_a_block_without_a_name_continues_the_program_before_it() -> None:
    (tools, text), (ask, _) = programs("page.md", TOOLS)

    assert (tools, ask) == ("tools.py", "ask.py")
    assert [text.splitlines().index(line) for line in DOUBLE] == [TOOLS.splitlines().index(line) for line in DOUBLE]


def test_a_mistake_is_reported_with_its_line_in_the_page() -> None:
    right = ASK.replace("answer: int", "answer")
    found = problems({"docs/ask.md": ASK, "docs/right.md": right, "docs/tools.md": TOOLS, "README.md": "No program."})

    assert {line.partition(" error: ")[0] for line in found.splitlines()} == {"docs/ask.md:8:", "docs/tools.md:14:"}
    assert 'has type "str", variable has type "int"' in found
