"""What loading the `openai` package leaves behind in a server."""

import subprocess
import sys

_PROGRAM = """
import gc
from bough_server.models.openai.transport import transport_errors
before = gc.get_freeze_count()
transport_errors()
first = gc.get_freeze_count()
transport_errors()
print(before, first > 10_000, gc.get_freeze_count() == first)
"""


def test_a_collection_does_not_look_at_what_the_package_is_made_of() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "True", "True"]
