"""Makes the links of README.md absolute, and adds the addresses of a release to its metadata.

A package index shows README.md by itself: no link within the repository leads anywhere there. Where
the repository lives is known to the forge alone, when it builds a release:

    python .github/absolute_links.py https://forge.example/owner/name v1.2.3
"""

import datetime
import re
import sys
from pathlib import Path

IMAGES = (".png", ".svg")
LINK = re.compile(r'(\]\(|(?:src|href)=")(?!https?:|mailto:|#)([^)"\s]+)')


def absolute(text: str, home: str, tag: str) -> str:
    """Text with absolute links outside of code, and the address that it clones from."""

    def whole(found: re.Match[str]) -> str:
        kind = "raw" if found[2].endswith(IMAGES) else "blob"
        return f"{found[1]}{home}/{kind}/{tag}/{found[2]}"

    parts = re.split(r"(```.*?```)", text, flags=re.S)
    parts[::2] = [LINK.sub(whole, part) for part in parts[::2]]
    clone = "In a clone of this repository"
    return "".join(parts).replace(clone, f"{clone} (`git clone {home} && cd steadygrad`)")


def main(home: str, tag: str, root: str = ".") -> None:
    """Rewrites README.md, pyproject.toml and CITATION.cff in ``root``."""
    readme, project, citation = (
        Path(root, name) for name in ("README.md", "pyproject.toml", "CITATION.cff")
    )
    readme.write_text(absolute(readme.read_text(), home, tag))
    pages = f"{home}/blob/{tag}"
    urls = {
        "Repository": home,
        "Documentation": f"{pages}/docs/index.md",
        "Changelog": f"{pages}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    project.write_text(f"{project.read_text()}\n[project.urls]\n{lines}")
    today = datetime.datetime.now(datetime.timezone.utc).date()
    dated = f"repository-code: {home}\ndate-released: {today}\n"
    citation.write_text(citation.read_text() + dated)


if __name__ == "__main__":
    main(*sys.argv[1:])
