"""Entry point of `python -m bough_server`, the same program as `bough`."""

from bough_server.cli import main

if __name__ == "__main__":
    main()
