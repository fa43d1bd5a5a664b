"""What a shell runs as `bough`: it has the zygote fork a process with its own streams, and ends with its exit code.

It imports nothing of ours, so that it starts at once. ZYGOTE is the number of the zygote's socket.
"""

import json
import os
import signal
import socket
import sys
from types import FrameType


def main() -> int:
    """Run the command and return its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "ZYGOTE"}
    command = {"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": environment}
    status, its_status = os.pipe()
    with socket.socket(fileno=os.dup(int(os.environ["ZYGOTE"]))) as zygote:
        socket.send_fds(zygote, [json.dumps(command).encode() + b"\n"], [0, 1, 2, its_status])
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
