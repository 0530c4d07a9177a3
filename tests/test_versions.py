"""Versions that stand in several files are the same in all of them."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def version(file, pattern):
    """First match of a pattern in a file."""
    found = re.search(pattern, (ROOT / file).read_text(), re.M)
    assert found, f"{file} has no {pattern}"
    return found[1]


def test_the_version_of_the_project_is_the_same_everywhere():
    project = version("pyproject.toml", r'^version = "(.+)"$')
    assert re.fullmatch(r"\d+\.\d+\.\d+", project)
    assert version("src/steadygrad/__init__.py", r'^__version__ = "(.+)"$') == project
    assert version("CITATION.cff", r"^version: (.+)$") == project
    # The newest is the first.
    assert version("CHANGELOG.md", r"^## (\S+)") == project


def test_hooks_run_the_ruff_that_is_tested():
    hook = version(".pre-commit-config.yaml", r"ruff-pre-commit\n +rev: v(.+)$")
    assert hook == version("constraints.txt", r"^ruff==(.+)$")
