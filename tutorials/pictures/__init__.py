"""Draw the pictures of the tutorials. Needs matplotlib.

This is a package because sphinx-gallery makes a page of each module beside the tutorials.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

TUTORIALS = Path(__file__).resolve().parents[1]
RESULTS = TUTORIALS.parent / "benchmarks" / "results"
SCRIPT = Path(getattr(sys.modules["__main__"], "__file__", None) or sys.executable).resolve()
IS_SCRIPT = SCRIPT.parent == TUTORIALS  # otherwise the gallery or a notebook takes the figures
if IS_SCRIPT:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path as Outline

COLOURS = ["#2a9d63", "#2b6cb0", "#d97706", "#8b5cf6", "#c2416b"]
GREEN, GREY = COLOURS[0], "#8c96a3"


def results(name: str) -> dict[str, Any]:
    """Return the committed benchmark result of this name, measured on one NVIDIA H200."""
    return json.loads((RESULTS / f"{name}-nvidia-h200.json").read_text())


def bars(title: str, result: Mapping[str, Any], times: Mapping[str, Mapping[str, float]]) -> None:
    """Draw one bar for each way: the median, with the quartiles as whiskers.

    Args:
        title: Printed above the bars.
        result: From :func:`results`; names the machine and the date.
        times: By way, ``median_us``, ``q1_us`` and ``q3_us``.

    """
    medians = [time["median_us"] / 1000 for time in times.values()]
    below = [(time["median_us"] - time["q1_us"]) / 1000 for time in times.values()]
    above = [(time["q3_us"] - time["median_us"]) / 1000 for time in times.values()]
    colours = [GREEN if name.startswith("tdcopier") else GREY for name in times]
    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.45 * len(times)))
    drawn = axes.barh(list(times), medians, xerr=[below, above], color=colours, ecolor="#444c56")
    axes.bar_label(drawn, [f"{median:.3g} ms" for median in medians], padding=6)
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel(f"ms, medians and quartiles; {result['machine']['gpu']}, {result['taken']}")
    axes.spines[["top", "right"]].set_visible(False)
    _finish(figure, title, "times")


def chunks(title: str, leaves: Sequence[tuple[str, Any]], row_bytes: int = 4096) -> None:
    """Draw each chunk as rows of equal length, with one box for each leaf.

    Args:
        title: Printed above.
        leaves: Name and tensor of each leaf. The name selects the colour. Tensors of one
            allocation are in one chunk.
        row_bytes: Length of a row.

    """
    figure, axes = plt.subplots(figsize=(9, 6.5))
    names = dict.fromkeys(name for name, _ in leaves)
    colours = dict(zip(names, plt.cm.tab10.colors, strict=False))
    top, ticks = 0, {}
    for members in _by_chunk(leaves):
        first = members[0][1].data_ptr()
        for name, leaf in members:
            begin = leaf.data_ptr() - first
            end = begin + leaf.nbytes
            while begin < end:
                row, column = divmod(begin, row_bytes)
                width = min(end - begin, row_bytes - column)
                box = Rectangle((column, top + row - 0.4), width, 0.8, facecolor=colours[name])
                axes.add_patch(box)
                box.set(edgecolor="white", linewidth=0.4)
                begin += width
        ticks[top + row / 2] = f"{_dtype(leaf)}\n{len(members)} leaves"
        top += row + 2
    axes.set_xlim(0, row_bytes)
    axes.set_ylim(top - 1, -1)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"byte in a row of {row_bytes} bytes")
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="lower center", ncols=4, fontsize=8, frameon=False)
    _finish(figure, title, below=0.09)


def _by_chunk(leaves: Sequence[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    """Group pairs of a name and a tensor by allocation, each group in the order of addresses."""
    groups: dict[int, list[tuple[Any, Any]]] = {}
    for name, leaf in leaves:
        groups.setdefault(leaf.untyped_storage().data_ptr(), []).append((name, leaf))
    return [sorted(group, key=lambda pair: pair[1].data_ptr()) for group in groups.values()]


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype).removeprefix("torch.")


def places(
    title: str,
    rows: Sequence[tuple[str, str | None, Any]],
    colours: Mapping[str, str],
    own_blocks: Mapping[str, str],
) -> None:
    """Draw a tree on the left, memory on the right, and a band from each value to its place.

    Args:
        title: Printed above.
        rows: Label, kind and value of each node, leaf and opaque value, in the order of the tree.
            A kind of None is a node: it has no place.
        colours: By kind.
        own_blocks: Kinds whose values are not in chunks, with the text for their block.
            All other values are tensors: those of one allocation share a block.

    """
    in_chunks = [
        (index, value)
        for index, (_, kind, value) in enumerate(rows)
        if kind is not None and kind not in own_blocks
    ]
    blocks = [
        (_chunk_text([leaf for _, leaf in group]), [index for index, _ in group])
        for group in _by_chunk(in_chunks)
    ]
    for kind, text in own_blocks.items():
        if members := [index for index, row in enumerate(rows) if row[1] == kind]:
            blocks.append((text, members))

    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.24 * len(rows)))
    placed = sum(len(members) for _, members in blocks)
    gap = (len(rows) * 1.25 - placed) / max(1, len(blocks) - 1)
    place, top = {}, 0.0
    for text, members in blocks:
        for index in members:
            place[index] = top
            colour = colours[rows[index][1]]
            axes.add_patch(Rectangle((6, top), 0.35, 0.9, facecolor=colour))
            top += 1
        axes.text(6.45, top - len(members) / 2 - 0.05, text, va="center", fontsize=8)
        if len(members) > 1:
            outline = (5.96, top - len(members) - 0.1), 0.43, len(members) + 0.1
            axes.add_patch(Rectangle(*outline, fill=False, edgecolor="#444c56", linewidth=1))
        top += gap

    for index, (label, kind, _) in enumerate(rows):
        left = index * 1.25
        axes.text(-3.5, left + 0.45, label, va="center", fontsize=7.5, family="monospace")
        if kind is None:
            continue
        right = place[index]
        axes.add_patch(Rectangle((0, left), 0.25, 0.9, facecolor=colours[kind]))
        corners = [(0.25, left), (3, left), (3, right), (6, right)]
        corners += [(6, right + 0.9), (3, right + 0.9), (3, left + 0.9), (0.25, left + 0.9)]
        codes = [Outline.MOVETO, *[Outline.CURVE4] * 3, Outline.LINETO, *[Outline.CURVE4] * 3]
        outline = Outline(corners, codes)
        axes.add_patch(PathPatch(outline, facecolor=colours[kind], alpha=0.3, linewidth=0))
    for column, (kind, colour) in enumerate(colours.items()):
        count = sum(row[1] == kind for row in rows)
        axes.text(1.7 * column, -1.6, f"{count} {kind}", color=colour, weight="bold")
    axes.set_xlim(-3.6, 9)
    axes.set_ylim(len(rows) * 1.25 + 0.5, -2.5)
    axes.axis("off")
    _finish(figure, title)


def _chunk_text(leaves: Sequence[Any]) -> str:
    total = sum(leaf.nbytes for leaf in leaves)
    number = f"{len(leaves)} leaves" if len(leaves) > 1 else "1 leaf"
    return f"chunk of {_dtype(leaves[0])}: {number}, {total:,} B"


LANES = ["host", "copy stream", "compute stream"]
LEGEND = {
    "copy": "copy: the host in a call; a batch on its way",
    "step": "step on the compute stream",
    "loss": "the host waits for the loss",
}


def _look(what: str, colour: str) -> dict[str, Any]:
    if what == "loss":
        return {"facecolor": "#e3e6ea", "zorder": 0.5}  # below its neighbours' edges
    if what == "step":
        return {"facecolor": colour}
    return {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.8}


def timeline(ways: Mapping[str, Sequence[tuple[str, str, int, float, float]]], axis: str) -> None:
    """Draw one panel for each way, with one lane for the host and one for each of two streams.

    Args:
        ways: By title, the bars: lane, ``copy``, ``step`` or ``loss``, batch, begin and end in ms.
        axis: Label of the horizontal axis.

    """
    figure, panels = plt.subplots(len(ways), 1, figsize=(11, 2.4 * len(ways)), sharex=True)
    duration = max(end for way in ways.values() for *_, end in way)
    for letter, panel, (title, way) in zip("abc", panels, ways.items(), strict=True):
        for lane, what, batch, begin, end in way:
            row, colour = LANES.index(lane), COLOURS[batch % len(COLOURS)]
            panel.broken_barh([(begin, end - begin)], (row - 0.38, 0.76), **_look(what, colour))
            if what != "loss" and end - begin > duration / 60:  # otherwise the label does not fit
                label = panel.text((begin + end) / 2, row, batch, ha="center", va="center")
                label.set(color="white" if what == "step" else colour, weight="bold")
                if what == "copy":
                    label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})
        for row in set(range(len(LANES))) - {LANES.index(bar[0]) for bar in way}:
            panel.text(0, row, "not used", color="#6b7480", va="center", style="italic")
        panel.set_title(f"({letter}) {title}", loc="left")
        panel.set_yticks(range(len(LANES)), LANES)
        panel.set_ylim(len(LANES) - 0.5, -0.5)
        panel.set_xlim(-duration / 100, duration * 1.01)
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel(axis)
    handles = [Patch(label=text, **_look(what, "#555555")) for what, text in LEGEND.items()]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
    _finish(figure, below=0.05)


def parts(title: str, ways: Mapping[str, Mapping[str, Mapping[str, float]]], axis: str) -> None:
    """Draw a bar of full parts for each way, and a pale one below it for the work beside the loop.

    Args:
        title: Printed above.
        ways: By way, the parts in ms: those of the ``loop``, and those ``beside`` it.
        axis: Label of the horizontal axis.

    """
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.9 * len(ways)))
    names = dict.fromkeys(name for way in ways.values() for group in way.values() for name in group)
    colours = dict(zip(names, COLOURS[1:], strict=False))
    for row, way in enumerate(ways.values()):
        for where, alpha, offset in (("loop", 1.0, -0.18), ("beside", 0.35, 0.18)):
            begin = 0.0
            for name, took in way[where].items():
                axes.barh(row + offset, took, 0.34, begin, color=colours[name], alpha=alpha)
                begin += took
            if way[where]:
                label = f" {begin:.2g} ms" + (", beside the loop" if where == "beside" else "")
                axes.text(begin, row + offset, label, va="center", fontsize=9)
    axes.set_yticks(range(len(ways)), list(ways))
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel(axis)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="lower right", frameon=False)
    _finish(figure, title)


def curves(title: str, runs: Mapping[str, Sequence[tuple[int, float]]], mean_of: int) -> None:
    """Draw the running mean of the episodes' returns of two runs, the first as a wide line.

    Args:
        title: Printed above.
        runs: By name, environment steps and return of each episode.
        mean_of: Episodes that one mean covers.

    """
    figure, axes = plt.subplots(figsize=(9, 4))
    looks = [{"color": "#9dc6ec", "linewidth": 7}, {"color": "#b3261e", "linewidth": 1.5}]
    for look, (name, episodes) in zip(looks, runs.items(), strict=True):
        steps, returns = zip(*episodes, strict=True)
        count = min(mean_of, len(returns))
        ends = range(count, len(returns) + 1)
        means = [sum(returns[end - count : end]) / count for end in ends]
        axes.plot(steps[count - 1 :], means, label=f"{name}, mean of {mean_of}", **look)
    axes.scatter(steps, returns, s=5, color="#777777", alpha=0.4, label="episodes of both runs")
    axes.set_xlabel("environment steps")
    axes.set_ylabel("return")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _finish(figure, title)


def memory(title: str, history: Sequence[tuple[str, int]]) -> None:
    """Draw the memory that is in use after each event, as steps.

    Args:
        title: Printed above.
        history: Names of events, and the bytes in use after each, in the order of time.

    """
    figure, axes = plt.subplots(figsize=(9, 3.6))
    used = [bytes_ / 2**20 for _, bytes_ in history]
    places = range(len(history))
    axes.step(places, used, where="post", color=COLOURS[1], linewidth=2)
    axes.fill_between(places, used, step="post", color=COLOURS[1], alpha=0.15)
    axes.set_xticks(places, [what for what, _ in history], rotation=35, ha="right")
    axes.set_ylabel("MiB in use")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    _finish(figure, title)


def _finish(figure: Any, title: str = "", name: str = "", below: float = 0.0) -> None:
    """Set the title, arrange the figure, and save it if a script draws it."""
    if title:
        figure.suptitle(title, x=0.02, ha="left", fontsize=12)
    figure.tight_layout(rect=(0, below, 1, 1))
    if IS_SCRIPT:
        picture = TUTORIALS.parent / "build" / f"{'_'.join(filter(None, (SCRIPT.stem, name)))}.png"
        picture.parent.mkdir(exist_ok=True)
        figure.savefig(picture, dpi=120)
        print(f"picture: {picture.relative_to(TUTORIALS.parent)}")
