"""Trackers: other programs that show a run's metrics, by name and only when asked for.

In: names, and numbers as they come. Out: TensorBoard events in the run's folder, or what wandb, trackio and mlflow make of
them. Each is a package of its own, imported when a run starts that names it. metrics.jsonl does not depend on any.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..common.errors import InputError
from ..common.fingerprint import digest_bytes
from .config import TrackerName

TENSORBOARD = "tensorboard"
PROJECT = "dflash"
_ODD = re.compile(r"[^\w\-. /]")


class Tracker(Protocol):
    """One of them."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        ...

    def close(self) -> None:
        """Everything is sent or written when this returns."""
        ...


def check_installed(names: Sequence[TrackerName]) -> None:
    """Raise InputError, naming the packages, when one that is asked for is not installed. Imports none."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        fix = f"pip install {' '.join(missing)}, or leave {'it' if len(missing) == 1 else 'them'} out"
        raise InputError(f"not installed: {', '.join(missing)}", place="run.trackers", fix=fix)


class Trackers:
    """All that a run asked for. One that fails is closed and named on stderr; training goes on."""

    def __init__(self, names: Sequence[TrackerName], run: Path, settings: Mapping[str, Any], step: int) -> None:
        self._open: dict[str, Tracker] = {name: _OPENERS[name](run, settings, step) for name in names}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, to each."""
        clean = {_ODD.sub("_", name): value for name, value in values.items()}
        self._each(lambda tracker: tracker.log(step, clean))

    def close(self) -> None:
        """Finish each."""
        self._each(lambda tracker: tracker.close())
        self._open.clear()

    def _each(self, work: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                work(tracker)
            except Exception as error:  # whatever a foreign program raises: its network, its disk
                del self._open[name]
                print(f"warning: {name} failed and gets nothing more; metrics.jsonl has everything: {error}", file=sys.stderr)


class _TensorBoard:
    """Events under RUN/tensorboard."""

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter  # slow to import
        self._writer = writer(str(run / TENSORBOARD), purge_step=step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Weights & Biases. A resumed run goes on under the same id."""

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=PROJECT, name=run.name, dir=str(run), config=dict(settings), id=_identity(run), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Trackio: wandb's calls on a local database."""

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(project=PROJECT, name=f"{run.name}-{_identity(run)}", config=dict(settings), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


class _MLflow:
    """MLflow, where MLFLOW_TRACKING_URI says."""

    def __init__(self, run: Path, settings: Mapping[str, Any], step: int) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=run.name)
        self._mlflow.log_params(_flat(settings))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_OPENERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
    "mlflow": _MLflow,
}


def _identity(run: Path) -> str:
    """The same for each life of a run, another for each run."""
    return digest_bytes(str(run.resolve()).encode())[:16]


def _flat(settings: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat.update(_flat(value, f"{name}{key}.") if isinstance(value, Mapping) else {f"{name}{key}": value})
    return flat
