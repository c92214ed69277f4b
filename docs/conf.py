"""Sphinx settings. The build runs the tutorials and draws the benchmark page from result files."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

os.environ.setdefault("MPLBACKEND", "Agg")
DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "benchmarks"), str(DOCS.parent / "tests/support")]

import play_all  # noqa: E402
from tool import history, plots, report  # noqa: E402

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
    "api_page",
]
exclude_patterns = ["_build", "tutorials/*.py", "tutorials/*.ipynb", "tutorials/GALLERY_HEADER.rst"]
default_role = "py:obj"  # single backticks in docstrings are code, linked where possible
nitpicky = True  # references to public names of tdcopier must lead somewhere
nitpick_ignore_regex = [("py:.*", r"(?s)(?!tdcopier\.).*|.*\._.*")]

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


def wheels_table() -> str:
    """Return the pairs of Python and torch whose wheel was installed and tested, with the dates."""
    pairs = json.loads((DOCS / "design" / "wheels.json").read_text())
    found = {tuple(pair.replace(",", "").split()[1::2]): told for pair, told in pairs.items()}

    def oldest_first(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    pythons = sorted({python for python, _ in found}, key=oldest_first)
    torches = sorted({torch for _, torch in found}, key=oldest_first)

    def cell(told: dict[str, str] | None) -> str:
        if told is None:
            return ""
        return told["date"] if told["import"] and told["demo"] and told["tests"] else "fails"

    rows = [["torch", *(f"Python {python}" for python in pythons)], ["---"] * (len(pythons) + 1)]
    rows += [
        [torch, *(cell(found.get((python, torch))) for python in pythons)] for torch in torches
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


# Written beside the output, never by hand: the figures of the benchmark page, an example.
GENERATED = DOCS / "_build" / "generated"
GENERATED.mkdir(parents=True, exist_ok=True)
_results = report.load(report.RESULTS)
report.write_plots(_results, GENERATED)
(GENERATED / "benchmarks.md").write_text(report.page(_results, "/_build/generated"))
_history = history.load()
(GENERATED / "history.md").write_text(history.page(_history, "/_build/generated/history.svg"))
(GENERATED / "history.svg").write_text(plots.as_svg(history.trends(_history)))
(GENERATED / "ways_of_loaders.md").write_text(report.ways_of_loaders(_results))
(GENERATED / "ways_of_learners.md").write_text(report.ways_of_learners(_results))
(GENERATED / "ways_of_torch.md").write_text(report.ways_of_torch(_results))
(GENERATED / "wheels.md").write_text(wheels_table())
(GENERATED / "played.md").write_text(play_all.hours_table())
with (GENERATED / "info.txt").open("wb") as file:
    command = [sys.executable, "-m", "tdcopier", "info"]
    subprocess.run(command, stdout=file, check=True, cwd=GENERATED)
