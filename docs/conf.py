"""Sphinx settings."""

import os
import re
import zlib
from pathlib import Path
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

import steadygrad
from steadygrad.studies.folder import read_run
from steadygrad.studies.page import render

project = "steadygrad"
author = project_copyright = "the steadygrad authors"
version = release = steadygrad.__version__

extensions = [
    "myst_parser",
    "sphinx_gallery.gen_gallery",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
templates_path = ["_templates"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 3
napoleon_use_ivar = True
exclude_patterns = ["_build", "sg_execution_times.rst", "tutorials/sg_execution_times.rst"]
# An option such as --budget is copied with its two hyphens.
smartquotes = False
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "steadygrad"

# The tutorials run while the pages are built; a script that fails fails the build.
sphinx_gallery_conf = {
    "examples_dirs": "../examples/tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "parallel": os.cpu_count(),
    # Of what is printed only, not of the last expression.
    "capture_repr": (),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "remove_config_comments": True,
    "doc_module": ("steadygrad",),
    "reference_url": {"steadygrad": None},
}


def inventory(project: str) -> str | None:
    """The file from which links into another project's pages are made.

    With ``DOCS_ONLINE`` it is the project's own (None). Without the network the names that these
    pages use are in ``inventories``, a line each: name, role, and page with an anchor that is the
    name unless another is given.
    """
    if os.environ.get("DOCS_ONLINE"):
        return None
    here = Path(__file__).parent
    rows = [line.split() for line in (here / f"inventories/{project}.txt").open()]
    lines = [f"{n} {role} 1 {p if '#' in p else f'{p}#{n}'} -\n" for n, role, p in rows]
    path = here / f"_build/inventories/{project}.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# zlib\n"
    path.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
    return str(path)


intersphinx_mapping = {
    "python": ("https://docs.python.org/3", inventory("python")),
    "torch": ("https://docs.pytorch.org/docs/stable", inventory("torch")),
}


def draw_reports(app: Any, exception: Exception | None) -> None:
    """Draws the reports of the runs in ``docs/records``, which ``reports.md`` links to."""
    if exception is not None or app.builder.name != "html":
        return
    pages = Path(app.outdir, "reports")
    pages.mkdir(exist_ok=True)
    for run in sorted(Path(app.srcdir, "records").iterdir()):
        (pages / f"{run.name}.html").write_text(render(read_run(run)))


def visit_math(self: Any, node: Any) -> None:
    """Writes a formula as MathML: browsers draw it, without a script from the network."""
    tex, inline = node.astext(), node.tagname == "math"
    if r"\\" in tex and r"\begin" not in tex:  # lines, which Sphinx aligns
        tex = rf"\begin{{split}}{tex}\end{{split}}"
    written = convert(tex, display="inline" if inline else "block")
    if re.search(r"<mi>(&<|\\)", written):  # it passes on as text what it does not know
        raise ValueError(f"Expected TeX that latex2mathml knows. Found {tex!r}.")
    # Chromium goes by the style alone.
    self.body.append(written.replace('columnalign="', 'style="text-align:'))
    raise SkipNode


def setup(app: Any) -> None:
    """Is called by Sphinx."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("build-finished", draw_reports)
