"""What a shell runs as `bough`: the fork server forks a process with its streams, and it ends with its exit code.

It imports nothing of ours, so that it starts at once. FORK_SERVER is the number of the fork server's socket.
"""

import json
import os
import signal
import socket
import sys
from types import FrameType


def main() -> int:
    """Run the command and return its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "FORK_SERVER"}
    command = {"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": environment}
    status, its_status = os.pipe()
    with socket.socket(fileno=os.dup(int(os.environ["FORK_SERVER"]))) as fork_server:
        socket.send_fds(fork_server, [json.dumps(command).encode() + b"\n"], [0, 1, 2, its_status])
    os.close(its_status)
    with os.fdopen(status) as reports:
        process_id = int(reports.readline())

        def forward(number: int, frame: FrameType | None) -> None:
            os.kill(process_id, number)

        signal.signal(signal.SIGTERM, forward)
        code = int(reports.readline())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
