"""Completions that a shell offers for values, in the form that shtab reads."""

from collections.abc import Sequence
from typing import Any

__all__ = ["FOLDERS", "words_or_files"]

FOLDERS = {"bash": "_shtab_compgen_dirs", "zsh": "_files -/"}

# bash takes what a function prints; shtab knows by its name that it completes files.
BASH = """_steadygrad_words_or_files() {{
  compgen -W "{0}" -- "$1"
  compgen -f -- "$1"
}}"""


def words_or_files(words: Sequence[str]) -> dict[str, Any]:
    """Some words, and the files of the folder."""
    listed = " ".join(words)
    return {
        "preamble": {"bash": BASH.format(listed)},
        "bash": "_steadygrad_words_or_files",
        "zsh": f"{{compadd {listed}; _files}}",
    }
