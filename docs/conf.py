"""Sphinx settings. The build runs the tutorials and draws the benchmark page from result files."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

import report  # noqa: E402

project = "tdcopier"
author = "the tdcopier authors"
copyright = author
version = release = metadata.version("tdcopier")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "tutorials/*.py", "tutorials/*.ipynb", "tutorials/GALLERY_HEADER.rst"]
default_role = "py:obj"  # single backticks in docstrings are code, linked where possible

html_theme = "furo"
html_title = f"tdcopier {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
copybutton_exclude = ".linenos, .gp, .go"  # neither prompts nor output

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

sphinx_gallery_conf = {
    "examples_dirs": "../tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"/\d\d_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "run_stale_examples": True,  # the engine may have changed though the tutorial has not
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "plot_gallery": True,
}


# Written beside the output, never by hand: the figures of the benchmark page, an example.
GENERATED = DOCS / "_build" / "generated"
GENERATED.mkdir(parents=True, exist_ok=True)
_results = report.load(report.RESULTS)
report.write_plots(_results, GENERATED)
(GENERATED / "benchmarks.md").write_text(report.page(_results, "/_build/generated"))
(GENERATED / "ways_of_torch.md").write_text(report.ways_of_torch(_results))
with (GENERATED / "info.txt").open("wb") as file:
    command = [sys.executable, "-m", "tdcopier.info"]
    subprocess.run(command, stdout=file, check=True, cwd=GENERATED)
