"""Every relative link of the front pages, and of HTML in the documentation, leads somewhere."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "AGENTS.md", "llms.txt"]
# Sphinx checks Markdown links between the documentation's own pages, but no links in HTML.
HTML = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))


def targets(text):
    """Targets of Markdown links and of HTML attributes, outside of code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    found = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    return [target for target in found if not re.match(r"https?:|mailto:|#", target)]


def exists(page, target):
    path = (ROOT / page).parent / target.partition("#")[0]
    # Drawn from a record while the pages are built.
    drawn = re.fullmatch(r"reports/(\w+)\.html", target)
    return path.exists() or bool(drawn and (ROOT / "docs/records" / drawn[1]).is_dir())


def test_links():
    found = [(page, target) for page in PAGES for target in targets((ROOT / page).read_text())]
    for page in HTML:
        prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
        inner = re.findall(r'(?:src|href)="([^"]+)"', prose)
        found += [(page, target) for target in inner if not target.startswith("http")]
    assert len(found) > 100
    assert [(page, target) for page, target in found if not exists(page, target)] == []


@pytest.mark.skipif(
    "[project.urls]" in (ROOT / "pyproject.toml").read_text(), reason="these are a release's files"
)
def test_links_of_a_release_are_absolute(tmp_path):
    for name in ("README.md", "pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    home = "https://forge.example/owner/steadygrad"
    script = runpy.run_path(str(ROOT / ".github" / "absolute_links.py"))
    before = targets((tmp_path / "README.md").read_text())

    script["main"](home, "v1.2.3", tmp_path)

    readme = (tmp_path / "README.md").read_text()
    assert len(before) > 20
    assert targets(readme) == []
    for target in before:
        kind = "raw" if target.endswith((".png", ".svg")) else "blob"
        assert f"{home}/{kind}/v1.2.3/{target}" in readme
    assert f"git clone {home} &&" in readme
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    urls = toml.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls == {
        "Repository": home,
        "Documentation": f"{home}/blob/v1.2.3/docs/index.md",
        "Changelog": f"{home}/blob/v1.2.3/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    citation = (tmp_path / "CITATION.cff").read_text()
    assert f"\nrepository-code: {home}\n" in citation
    assert re.search(r"\ndate-released: \d{4}-\d\d-\d\d\n", citation)
