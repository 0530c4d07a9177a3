"""Code and output that the documentation's pages show."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = ROOT / "docs" / "integrations"


def blocks(page, language):
    """The texts of a page's blocks in a language."""
    text = (PAGES / page).read_text()
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def after(diff):
    """Code as it is after a diff."""
    lines = (line for line in diff.splitlines() if not line.startswith("-"))
    return "\n".join(line[1:] for line in lines)


def run(code, names, page):
    """Runs a page's code with these names; returns all names after it."""
    exec(compile(code, str(PAGES / page), "exec"), names)
    return names


def shape(text):
    """A text whose numbers are hidden: they differ in their digits from machine to machine."""
    lines = re.sub(r"-?\d+(\.\d+)?(e[-+]\d+)?|nan|inf", "#", text).splitlines()
    return [" ".join(line.split()) for line in lines]
