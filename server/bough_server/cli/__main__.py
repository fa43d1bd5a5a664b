"""`python -m bough_server.cli` is `bough`."""

from bough_server.cli import main

if __name__ == "__main__":
    main()
