"""``llms.txt`` and ``AGENTS.md`` are what ``make contents`` writes, and name every page."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WRITTEN = runpy.run_path(str(ROOT / "docs" / "contents.py"))["written"]()


@pytest.mark.parametrize("file", WRITTEN)
def test_the_files_are_up_to_date(file):
    assert (ROOT / file).read_text() == WRITTEN[file], "Remedy: make contents"


@pytest.mark.parametrize("file", WRITTEN)
def test_every_page_is_there(file):
    pages = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")]
    pages += [f"examples/tutorials/{path.name}" for path in ROOT.glob("examples/tutorials/*.py")]
    pages = [
        page
        for page in pages
        if not page.startswith(("docs/_build", "docs/tutorials", "docs/index"))
    ]
    assert len(pages) > 30
    assert [page for page in pages if f"({page})" not in WRITTEN[file]] == []
