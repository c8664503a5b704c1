"""How Sphinx builds the pages: `make docs` writes them to docs/_build/html."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent), str(HERE / "sphinx")]

project = "zerobubble"
author = "the zerobubble authors"
release = metadata.version("zerobubble")
html_title = f"zerobubble {release}"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["code.css"]
copybutton_prompt_text = "$ "

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "namespaces", "docstrings"]
root_doc = "index"
exclude_patterns = ["_build", "api"]  # the reference has these names, with types
myst_heading_anchors = 3
default_role = "code"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 100
smartquotes = False
