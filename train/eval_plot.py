"""A picture of an offline evaluation: acceptance by slot, and acceptance length by source, position and temperature.

In: an EvalResult and a file to write. Needs matplotlib, which nothing else here does; it is looked for before any work is done.
"""

from __future__ import annotations

from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import Any

from ..common.errors import InputError, guard_writing
from .eval_report import EvalResult

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise InputError when no picture could be written to `path`: no matplotlib, no such folder, another kind of file."""
    place = f"--plot {path}"
    if path.suffix.lower() not in SUFFIXES:
        raise InputError("is no picture's name", place=place, expected=f"a file that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise InputError("no such folder", place=place, found=path.parent, fix="make it first")
    if find_spec("matplotlib") is None:
        raise InputError(
            "matplotlib is not installed", place=place, fix="pip install 'dflash-cache[plot]', or leave --plot out: the text has bars too"
        )


def plot(result: EvalResult, path: Path) -> None:
    """Write the picture. Raises as `check_plot` does, and InputError or DiskFull when the file cannot be written."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # never a window
    by_slot, lengths = figure.subplots(1, 2)
    slots = [result.first_slot + number for number in range(len(result.quality.accuracy_per_slot))]
    by_slot.plot(slots, result.conditional_per_slot, marker="o", label="right when all before it are")
    by_slot.plot(slots, result.quality.accuracy_per_slot, marker="o", label="right (every anchor)")
    by_slot.plot(slots, result.walk.acceptance or [0.0] * len(slots), marker="o", label="accepted (simulated serving)")
    by_slot.set(xlabel="slot of the block", ylabel="share", ylim=(0, 1), xticks=slots, title=f"block of {result.block_size}")
    by_slot.legend()
    names, taus, errors = length_bars(result)
    lengths.barh(range(len(names)), taus)
    lengths.errorbar(taus, range(len(names)), xerr=errors, fmt="none", ecolor="black", capsize=3)  # nan: none is drawn
    lengths.set(yticks=range(len(names)), yticklabels=names, xlim=(1, None), xlabel="acceptance length, bonus token included; bars: 95 %")
    lengths.invert_yaxis()
    with guard_writing(path.parent):
        figure.savefig(path, dpi=150)


def length_bars(result: EvalResult) -> tuple[list[str], list[float], list[list[float]]]:
    """(names, acceptance lengths, [how far each interval reaches below, above]) of the right half; nan where there is no interval."""
    rows: list[tuple[str, float, Any]] = [("all, greedy", result.tau_walk, result.certainty.tau_walk)]
    if len(result.by_source) > 1:
        rows += [(Path(name).name, found["tau_walk"], result.certainty_by_source[name].tau_walk) for name, found in result.by_source.items()]
    for found in result.by_position:
        if found["blocks"]:
            end = f"-{found['to']}" if found["to"] is not None else "+"
            rows.append((f"position {found['from']}{end}", found["tau_walk"], None))
    for found in result.by_temperature:
        rows.append((f"T={found['temperature']:g}, draft {found['drafting']}", found["tau_walk"], found["confidence"]["tau_walk"]))
    below = [max(0.0, tau - interval[0]) if interval else nan for _, tau, interval in rows]
    above = [max(0.0, interval[1] - tau) if interval else nan for _, tau, interval in rows]
    return [name for name, _, _ in rows], [tau for _, tau, _ in rows], [below, above]
