"""Files: written in one step; those from others regular, of a bounded size, JSON not too deep."""

import errno
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

# Bytes of a file of a run; a result with ten thousand layers has a hundredth of it.
MOST = 1 << 28
# Lists and objects in one another, which are gone through by recursion; a run has less than ten.
DEEPEST = 32


def read_file(path: Path, most: int = MOST) -> bytes:
    """The content of a regular file of at most ``most`` bytes; ``OSError`` if it is none."""
    # A pipe would be waited for as it is opened.
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "It is no regular file", str(path))
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"It is larger than {most:,} bytes", str(path))
        return file.read(size)


def read_json(path: Path) -> Any:
    """The content of a file of JSON; ``ValueError`` if it is none, or nested too deeply."""
    try:
        found = json.loads(read_file(path))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    level = [found]
    for _ in range(DEEPEST):
        nests = [one for one in level if isinstance(one, (dict, list))]
        level = [x for one in nests for x in (one.values() if isinstance(one, dict) else one)]
    if level:
        raise ValueError(f"more than {DEEPEST} levels")
    return found


def replace(path: Path, data: bytes) -> None:
    """Writes ``path`` in one step: a reader, also after an error, sees the old file or the new."""
    # A name that nobody can guess, made anew: it is no link that came with the folder, and no
    # other process writes it. The rename replaces a link at `path`, and does not follow it.
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
