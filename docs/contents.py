"""Writes ``llms.txt`` and ``AGENTS.md`` from the documentation's own table of contents.

``make contents`` runs it, and a test compares. ``llms.txt`` lists every page with the questions
that it answers; ``AGENTS.md`` tells a coding assistant how to work here, as CONTRIBUTING.md does.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
INDEX = (DOCS / "index.md").read_text()
# Pages that are made of scripts while the documentation is built.
SCRIPTS = {"tutorials/index": "examples/tutorials"}


def entries(page: str) -> Iterator[tuple[str, str]]:
    """Captions and names of the pages in a page's tables of contents, in their order."""
    for block in re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S):
        caption = re.search(r":caption: (.+)", block)
        for name in re.findall(r"^\w\S*$", block, re.M):
            yield caption[1] if caption else "", (Path(page).parent / name).as_posix()


def questions(name: str) -> str:
    """The questions for which the first page names a page."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", INDEX, re.M)
    return "; ".join(ask for ask, look in rows if re.search(rf"\({name}\.md[#)]", look))


def line(name: str) -> str:
    """A page's line: its title, its file, and the questions that it answers."""
    title = (DOCS / f"{name}.md").read_text().partition("\n")[0].lstrip("# ")
    return f"- [{title}](docs/{name}.md): {questions(name)}".removesuffix(": ")


def lines(name: str) -> list[str]:
    """The lines of a page and of those below it, or of the scripts that it is made of."""
    if name not in SCRIPTS:
        return [line(name), *(line(inner) for _, inner in entries(name))]
    texts = {path.name: path.read_text() for path in sorted((ROOT / SCRIPTS[name]).glob("*.py"))}
    heads = {file: text.splitlines()[1] for file, text in texts.items()}
    return [f"- [{title}]({SCRIPTS[name]}/{file})" for file, title in heads.items()]


def listing(level: str) -> str:
    """All pages under the captions of the first page."""
    parts: dict[str, list[str]] = {}
    for caption, name in entries("index"):
        parts.setdefault(caption, []).extend(lines(name))
    return "\n\n".join("\n".join([f"{level} {head}", "", *rows]) for head, rows in parts.items())


def written() -> dict[str, str]:
    """The text of each file, by its name."""
    about = INDEX.split("\n\n")[1]
    rules = (ROOT / "CONTRIBUTING.md").read_text().partition("\n")[2].strip()
    note = "<!-- `make contents` writes this from docs/index.md and CONTRIBUTING.md. -->"
    return {
        "llms.txt": f"# steadygrad\n\n> {about}\n\n{listing('##')}\n",
        "AGENTS.md": f"# Working on steadygrad\n\n{note}\n\n{about}\n\n{rules}\n\n"
        f"## Pages\n\n{listing('###')}\n",
    }


if __name__ == "__main__":
    for file, text in written().items():
        (ROOT / file).write_text(text)
