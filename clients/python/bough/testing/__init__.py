"""A fake server for tests of programs that use this client: it answers what is scripted, and drops streams as told.

    with FakeServer() as server:
        server.add("lead", answer("It works."), drops=[1])
        with Client(server.address) as client:
            assert client.ask("lead", "hi") == "It works."

It keeps the rules that a client sees: sequences from 1, a repeated request id starts nothing twice, streams end at an
interruption, and answers make the run continue. It runs no agents; `bough_server.testing` starts a real server with
scripted models.
"""

from bough.testing.scripts import answer, interruption, verdict
from bough.testing.server import FakeServer

__all__ = ["FakeServer", "answer", "interruption", "verdict"]
