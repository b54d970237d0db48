"""How Sphinx builds these pages: `pip install -e '.[docs]' && sphinx-build -W docs docs/_build`."""

import re
from typing import get_origin

import twinkle_jax

project = "twinkle_jax"
author = "the twinkle_jax authors"
version = release = twinkle_jax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
autodoc_typehints = "none"
napoleon_use_ivar = True
napoleon_attr_annotations = False


def _markdown_to_rst(app, what, name, obj, options, lines):
    """Docstrings are written in Markdown: turn its formulas, links and code into reST."""
    del app, what, name, obj, options
    text = "\n".join(lines)
    text = re.sub(r"\[`([^`\n]+)`\]\[[^\]\n]+\]", r"`\1`", text)
    text = re.sub(r"(?<![`:\w])`([^`\n]+)`(?![`_])", r"``\1``", text)

    def display(match):
        return "\n\n.. math::\n\n   " + " ".join(match[1].split()) + "\n\n"

    text = re.sub(r"\$\$(.+?)\$\$[.,]?", display, text, flags=re.DOTALL)
    text = re.sub(r"(?<![`$\\])\$([^$\n]+)\$", r":math:`\1`\\ ", text)
    text = re.sub(r"\[([^\]\n]+)\]\((https?://[^)\s]+)\)", r"`\1 <\2>`__", text)
    lines[:] = text.split("\n")


def _without_docstring_of_type(app, what, name, obj, options, lines):
    """Leave out the docstring of `dict` under a dictionary or a name for `dict[str, Any]`.

    Sphinx falls back to it where the docstring below a name is in another file than the name.
    """
    del app, name, options
    if what == "data" and (isinstance(obj, dict) or isinstance(get_origin(obj), type)):
        lines.clear()


def setup(app):
    """Register the conversions, before napoleon reads the sections."""
    app.connect("autodoc-process-docstring", _without_docstring_of_type, priority=50)
    app.connect("autodoc-process-docstring", _markdown_to_rst, priority=100)
