"""The plot of each benchmark, and how it is drawn; drawing needs matplotlib.

`report.py` makes the tables and the figures of the README.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sections import DIRECTIONS, title
from tables import LIMIT_PREFIX, OURS, RESIDENT, leaves_and_bytes

from tdcopier._commands.tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

GREEN, GREY, AMBER = "#2a9d63", "#8c96a3", "#d29922"
OTHERS = ("#4f7cac", AMBER, "#a4548b", GREY)
TEXT = "#7d8590"  # reads on light and on dark pages
WIDTH_IN = 5.0  # texts stay legible where a phone shows the whole picture
TITLE_LETTERS = 42  # of a line
COPIED, REPLAYED, NESTED = "detection_batch", "atari_256", "flat"
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


class Curves(NamedTuple):
    """A plot of times over the number of leaves, by way."""

    heading: str
    us: dict[str, list[tuple[int, float]]]


Plot = Bars | Curves


def plot_of(result: dict[str, Any]) -> Plot | None:
    make = PLOTS.get(result["name"])
    return make(result) if make else None


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
        height_in = 0.5 * len(plot.us) + 0.6 if isinstance(plot, Bars) else 3.6
        title = textwrap.wrap(plot.heading, TITLE_LETTERS)
        figure = Figure(figsize=(WIDTH_IN, height_in + 0.2 * len(title)), layout="constrained")
        figure.suptitle("\n".join(title), weight="bold", x=0.02, ha="left")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        if isinstance(plot, Bars):
            _bars(axes, plot)
        else:
            _curves(axes, plot)
        yield figure


def _bars(axes: Axes, plot: Bars) -> None:
    """Draw horizontal bars from 0, with the way above each bar and the time after it.

    The axis is linear: the length of a bar is its time, also where times differ by far.
    """
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
    axes.xaxis.set_major_locator(_few_ticks())
    axes.set_xlabel("us")
    _plain_ticks(axes, "x")


def _few_ticks() -> MaxNLocator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def _colour(way: str) -> str:
    if way.startswith(OURS):
        return GREEN
    return AMBER if way.startswith(LIMIT_PREFIX) else GREY


def _curves(axes: Axes, plot: Curves) -> None:
    """Draw curves with a label each on two logarithmic axes."""
    others = iter(OTHERS)
    for way, points in plot.us.items():
        colour = GREEN if way.startswith(OURS) else next(others)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=way)
    axes.set(xscale="log", yscale="log", xlabel="leaves", ylabel="us")
    axes.grid()
    _plain_ticks(axes, "x", "y")
    axes.figure.legend(loc="outside lower left", frameon=False)


def _plain_ticks(axes: Axes, *names: str) -> None:
    for name in names:
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(lambda value, _: number(value))
        if axis.get_scale() == "log":
            axis.set_minor_formatter(lambda value, _: "")


# ---- what each benchmark's plot shows ------------------------------------------------------------


def _medians(times: dict[str, Any]) -> dict[str, float]:
    return {way: taken["median_us"] for way, taken in times.items()}


def _copies(result: dict[str, Any]) -> Plot | None:
    found = result["workloads"].get(COPIED)
    if found is None:
        return None
    heading = f"{DIRECTIONS[result['name']]}, {title(COPIED, found)} ({result['machine']['gpu']})"
    return Bars(heading, _medians(found["contenders"]))


def _added(what: str, steps: dict[str, Any], gpu: str) -> Bars:
    """Return what each way adds to the step whose data is on the device already."""
    medians = _medians(steps)
    resident = medians.pop(RESIDENT)
    heading = f"Time added to {what}: {number(resident)} us on the device already ({gpu})"
    return Bars(heading, {way: us - resident for way, us in medians.items()})


def _loop(result: dict[str, Any]) -> Plot:
    found = result["loops"][COPIED]
    what = f"a training step by {leaves_and_bytes(found)}"
    return _added(what, found["step"], result["machine"]["gpu"])


def _replay(result: dict[str, Any]) -> Plot | None:
    replay = result["replays"].get(REPLAYED)
    if replay is None:  # it did not fit in the memory
        return None
    learner, found = next(iter(replay["learners"].items()))
    what = f"a learner's step by {replay['title']}, {learner}"
    return _added(what, found["step"], result["machine"]["gpu"])


def _tensordict(result: dict[str, Any]) -> Plot:
    found = result["copies"]["h2d"][NESTED]
    heading = f"TensorDict to device, {leaves_and_bytes(found)} ({result['machine']['gpu']})"
    return Bars(heading, _medians(found["contenders"]))


def _sizes(result: dict[str, Any]) -> Plot:
    curves: dict[str, list[tuple[int, float]]] = {}
    for found in result["sizes"].values():
        for way, times in found["contenders"].items():
            curves.setdefault(way, []).append((found["leaves"], times["median_us"]))
    heading = f"Host to device: time over leaves of 64 floats ({result['machine']['gpu']})"
    return Curves(heading, curves)


PLOTS: dict[str, Callable[[dict[str, Any]], Plot | None]] = {
    **dict.fromkeys(DIRECTIONS, _copies),
    "loop": _loop,
    "replay": _replay,
    "sizes": _sizes,
    "tensordict": _tensordict,
}
"""By benchmark; the others have only tables."""
