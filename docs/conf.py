"""Sphinx settings."""

import steadygrad

project = "steadygrad"
author = "the steadygrad authors"
version = release = steadygrad.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
myst_heading_anchors = 3
napoleon_use_ivar = True
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "steadygrad"
