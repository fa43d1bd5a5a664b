"""Files that are written whole or not at all."""

from pathlib import Path


def is_special(path: Path) -> bool:
    """Return whether a path is a pipe or a device, such as /dev/stdout, which must not be replaced by a file."""
    return path.exists() and not path.is_file()


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader never sees part of it, and a failure leaves nothing. Raises OSError."""
    if is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # of a link, the file that it leads to is replaced
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
