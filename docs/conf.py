"""How the manual is built: ``make docs``. A warning is an error, a dangling reference too."""

import tomllib
from pathlib import Path

_project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]

project = "Penstock"
author = "The Penstock developers"
project_copyright = "The Penstock developers. Apache-2.0"
release = version = _project["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# what is not documented here but appears in signatures: other packages, and our own inner types
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|typing|collections|pathlib|os|enum|concurrent)(\..*)?"),
    ("py:class", r"(optional|Any|NDArray.*|StrPath|Path)"),
    ("py:.*", r"penstock\..*"),
    ("py:.*", r"[A-Z]\w*"),
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "Penstock"
html_show_sourcelink = False
