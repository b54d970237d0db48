"""How Sphinx builds these pages: `pip install -e '.[docs]' && sphinx-build -W docs docs/_build`."""

import twinkle_jax

project = "twinkle_jax"
author = "the twinkle_jax authors"
version = release = twinkle_jax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
autodoc_typehints = "none"
nitpicky = False
