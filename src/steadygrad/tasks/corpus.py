"""The Python standard library's own source as a text corpus: real data on every machine."""

import hashlib
import os
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from steadygrad._checks import InputError

__all__ = ["OTHER", "VOCABULARY", "Corpus", "encode", "read_corpus"]

# Printable ASCII and the line feed, then one token that stands for everything else.
VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))
OTHER = len(VOCABULARY)

# Tests, other people's packages and caches come and go with how Python was packaged; `encodings`
# and `pydoc_data` are generated tables, and `config-*` describes the machine Python was built on.
SKIPPED_FOLDERS = re.compile(
    r"tests?|idle_test|__pycache__|(site|dist)-packages|encodings|pydoc_data|config-.*"
)
SKIPPED_FILES = re.compile(r"(_sysconfigdata.*|(site|user)customize)\.py")

_UNKNOWN = re.compile(r"[^ -~\n]")
_TO_TOKEN = bytes(
    VOCABULARY.index(chr(code)) if chr(code) in VOCABULARY else OTHER for code in range(256)
)


@dataclass(frozen=True)
class Corpus:
    """Text of whole files, split into training and held-out files.

    Args:
        train: Training files as pairs (posix path within the corpus, text), sorted by path.
        valid: Held-out files, the same way.
        sha256: SHA-256 of every file's path, length and bytes, in order.
        skipped: Paths of files that are not UTF-8 and were left out.
    """

    train: tuple[tuple[str, str], ...]
    valid: tuple[tuple[str, str], ...]
    sha256: str
    skipped: tuple[str, ...]


def read_corpus(folder: Path | None = None) -> Corpus:
    """Reads all Python source under a folder, in an order that depends on nothing but the paths.

    About 5% of the files, chosen by a hash of their path, are held out whole: no text of a
    training file is ever in the validation set.

    Args:
        folder: Where to look; None: the running Python's standard library.

    Returns:
        The corpus.

    Raises:
        InputError: If the folder has too few files for a held-out set, or is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else Path(folder)
    digest = hashlib.sha256()
    parts: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    skipped: list[str] = []
    for name in source_names(root):
        data = (root / name).read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            skipped.append(name)
            continue
        # The length closes off the name and the text: no two corpora share a byte stream.
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        parts[is_held_out(name)].append((name, text.replace("\r\n", "\n")))
    if not parts[False] or not parts[True]:
        raise InputError(
            "The corpus should have training and held-out files (about one in twenty, by a hash "
            f"of the path). Found {len(parts[False])} and {len(parts[True])} under {root}. "
            "Remedy: a folder with more Python source, as of a regular (no zipped) installation."
        )
    return Corpus(tuple(parts[False]), tuple(parts[True]), digest.hexdigest(), tuple(skipped))


def is_held_out(name: str) -> bool:
    """Whether a file belongs to the validation set: about one path in twenty."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def source_names(root: Path) -> list[str]:
    """Posix paths, relative to ``root``, of the corpus's files in sorted order."""
    found = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not SKIPPED_FOLDERS.fullmatch(name)]
        kept = [f for f in files if f.endswith(".py") and not SKIPPED_FILES.fullmatch(f)]
        found += [(Path(parent) / name).relative_to(root).as_posix() for name in kept]
    return sorted(found)


def encode(text: str) -> bytearray:
    """Turns text into tokens, one byte a character, each in ``[0, OTHER]``."""
    return bytearray(_UNKNOWN.sub("\0", text).encode("ascii").translate(_TO_TOKEN))
