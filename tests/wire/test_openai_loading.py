"""When the packages that send requests are loaded, and what loading `openai` leaves behind in a server."""

import subprocess
import sys

_LOADED = "print([name for name in ('openai', 'aiohttp', 'httpx2') if name in sys.modules])"
_NATIVE = f"""
import sys
from bough_server.models.anthropic.request import MessagesApi
from bough_server.models.gemini.request import GeminiApi
from bough_server.models.http import HttpConnection
for api in (MessagesApi(), GeminiApi(model="m")):
    HttpConnection(lambda: api.address(api.base_url, "")).open()
{_LOADED}
"""
_FROZEN = """
import gc
from bough_server.models.openai.client import client_address
before = gc.get_freeze_count()
client_address("http://127.0.0.1", key="")
first = gc.get_freeze_count()
client_address("http://127.0.0.1", key="")
print(before, first > 10_000, gc.get_freeze_count() == first)
"""


def run(program: str) -> str:
    """What a program prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_importing_the_models_imports_no_package_that_sends_requests() -> None:
    assert run(f"import sys, bough_server.models.registry; {_LOADED}") == "[]"


def test_other_providers_do_not_load_the_package_of_openai() -> None:
    assert run(_NATIVE) == "['aiohttp', 'httpx2']"


def test_a_collection_does_not_look_at_what_the_package_is_made_of() -> None:
    assert run(_FROZEN).split() == ["0", "True", "True"]
