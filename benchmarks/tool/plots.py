"""The plot of each benchmark, and how it is drawn; drawing needs matplotlib.

`tool/report.py` makes the tables and the figures of the README.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tdcopier._commands.tables import number
from tool.sections import DIRECTIONS, WORKLOAD_NAMES
from tool.tables import LIMIT_PREFIX, OURS, RESIDENT, leaves_and_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEN, GREY, AMBER = "#2a9d63", "#8c96a3", "#d29922"
OTHERS = ("#4f7cac", AMBER, "#a4548b", GREY)
TEXT = "#7d8590"  # reads on light and on dark pages
WIDTH_IN = 5.0  # texts stay legible where a phone shows the whole picture
TITLE_LETTERS = 42  # of a line
COPIED, REPLAYED, NESTED = "detection_batch", "atari_256", "flat"
LEARNER = "4 ms of large kernels"  # of a replay
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tdcopier",  # names of parts are the same in each run
    "font.size": 10,
    "axes.edgecolor": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT),
}


class Bars(NamedTuple):
    """A plot of one time per way."""

    heading: str
    us: dict[str, float]


class Trends(NamedTuple):
    """Plots of values over commits, one below the other, with a line for each card."""

    heading: str
    panels: dict[str, dict[str, list[tuple[str, float]]]]
    commits: list[str]
    """All commits, in the order of time."""


Plot = Bars | Trends


def as_svg(plot: Plot) -> str:
    """Draw a plot. The same plot gives the same text."""
    drawn = io.BytesIO()
    with drawn_figure(plot) as figure:
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return drawn.getvalue().decode()


@contextmanager
def drawn_figure(plot: Plot) -> Iterator[Figure]:
    """Draw a plot as a figure, in its style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        panels = len(plot.panels) if isinstance(plot, Trends) else 1
        height_in = (1.9 * panels if isinstance(plot, Trends) else 0.5 * len(plot.us)) + 0.6
        title = textwrap.wrap(plot.heading, TITLE_LETTERS)
        figure = Figure(figsize=(WIDTH_IN, height_in + 0.2 * len(title)), layout="constrained")
        figure.suptitle("\n".join(title), weight="bold", x=0.02, ha="left")
        every = figure.subplots(panels, squeeze=False)[:, 0]
        for axes in every:
            axes.spines[["top", "right"]].set_visible(False)
        if isinstance(plot, Trends):
            _trends(figure, every, plot)
        else:
            _bars(every[0], plot)
        yield figure


def _trends(figure: Figure, every: Any, plot: Trends) -> None:
    """Draw a panel per value. A line ends where its card has no more results."""
    cards = sorted({card for panel in plot.panels.values() for card in panel})
    colours = dict(zip(cards, (GREEN, *OTHERS), strict=False))
    for axes, (what, lines) in zip(every, plot.panels.items(), strict=True):
        here = {commit for line in lines.values() for commit, _ in line}
        commits = [commit for commit in plot.commits if commit in here]
        for card, line in lines.items():
            places = [commits.index(commit) for commit, _ in line]
            axes.plot(
                places,
                [value for _, value in line],
                marker="o",
                markersize=4,
                color=colours[card],
                label=card,
            )
        axes.set_title(what, loc="left", fontsize=10, color=TEXT)
        axes.set_xticks(range(len(commits)), commits, rotation=45, ha="right", fontsize=7)
        values = [value for line in lines.values() for _, value in line]
        is_flat = min(values) > max(values) / 2 and max(values) < 2  # steps differ by little
        axes.set_ylim(0.9 * min(values) if is_flat else 0, 1.1 * max(values))
        axes.grid()
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
    legend = {line.get_label(): line for axes in every for line in axes.get_lines()}
    figure.legend(legend.values(), legend, loc="outside lower left", frameon=False)


def _bars(axes: Axes, plot: Bars) -> None:
    """Draw horizontal bars from 0, with the way above each bar and the time after it.

    The axis is linear: the length of a bar is its time, also where times differ by far.
    """
    from matplotlib.ticker import MaxNLocator

    values = list(plot.us.values())
    most, least = max(*values, 0), min(*values, 0)
    axes.barh(range(len(values)), values, height=0.4, color=[_colour(way) for way in plot.us])
    for row, (way, us) in enumerate(plot.us.items()):
        axes.annotate(way, (0, row - 0.26), (3, 0), textcoords="offset points", va="bottom")
        axes.annotate(
            f"{number(us)} us", (max(us, 0), row), (4, 0), textcoords="offset points", va="center"
        )
    axes.set_xlim(least, most + 0.3 * (most - least))
    axes.set_ylim(len(values) - 0.6, -0.9)
    axes.set_yticks([])
    axes.spines["left"].set_position("zero")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel("us")
    axes.xaxis.set_major_formatter(lambda value, _: number(value))


def _colour(way: str) -> str:
    if way.startswith(OURS):
        return GREEN
    return AMBER if way.startswith(LIMIT_PREFIX) else GREY


# ---- what each benchmark's plot shows ------------------------------------------------------------


class Shown(NamedTuple):
    """The bars of a benchmark's plot."""

    part: Callable[[dict[str, Any]], dict[str, Any] | None]
    """Returns the part of a result that is shown; None if it is not there."""
    heading: str
    """With ``{what}`` for the leaves and bytes of the part, ``{gpu}``, and ``{resident}`` for the
    time that the bars are added to."""
    times: str = "contenders"


def plot_of(result: dict[str, Any]) -> Bars | None:
    shown, gpu = BARS.get(result["name"]), result["machine"]["gpu"]
    part = shown and shown.part(result)
    if not part:
        return None
    us = {way: taken["median_us"] for way, taken in part[shown.times].items()}
    resident = us.pop(RESIDENT, 0.0)
    what = leaves_and_bytes(part) if "leaves" in part else ""
    heading = shown.heading.format(what=what, gpu=gpu, resident=number(resident))
    return Bars(heading, {way: each - resident for way, each in us.items()})


def _replayed(result: dict[str, Any]) -> dict[str, Any] | None:
    replay = result["replays"].get(REPLAYED)
    return replay and replay["learners"][LEARNER]  # None if it was not run


ADDED = ": {resident} us on the device already ({gpu})"
BARS = {
    **{
        name: Shown(
            lambda result: result["workloads"].get(COPIED),
            f"{words}, {WORKLOAD_NAMES[COPIED]}: {{what}} ({{gpu}})",
        )
        for name, words in DIRECTIONS.items()
    },
    "loop": Shown(
        lambda result: result["loops"][COPIED],
        f"Time added to a training step by {{what}}{ADDED}",
        "step",
    ),
    "replay": Shown(
        _replayed,
        f"Time added to a learner's step by Atari frames, 256 rows, {LEARNER}{ADDED}",
        "step",
    ),
    "tensordict": Shown(
        lambda result: result["copies"]["h2d"][NESTED], "TensorDict to device, {what} ({gpu})"
    ),
}
"""By benchmark; the others have only tables."""
