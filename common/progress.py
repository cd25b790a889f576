"""Progress of long work: a rich bar on a terminal, one line every few seconds elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 5.0


class ProgressBar:
    """`with ProgressBar("extract", total=1000) as bar: bar.update(advance=3, note="512 tok/s")`.

    total: units of work; None when unknown. start: units that an earlier run did. The note is free text: rate, bytes, loss.
    """

    def __init__(self, title: str, total: int | None, start: int = 0) -> None:
        self.title, self.total, self.done, self._start = title, total, start, start
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._started = self._last_line = time.monotonic()
        self._note = ""

    def __enter__(self) -> ProgressBar:
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, completed=self._start, note="")
        return self

    def update(self, advance: int = 0, note: str | None = None) -> None:
        """Add `advance` units of finished work and, when given, show `note` beside the bar."""
        self.done += advance
        self._note = note if note is not None else self._note
        if self._bar is not None:
            self._bar.update(self._task, advance=advance, note=self._note)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            self._line()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._line()

    def _line(self) -> None:
        self._last_line = time.monotonic()
        elapsed = self._last_line - self._started
        done_now = self.done - self._start
        left = f", {duration(elapsed / done_now * (self.total - self.done))} left" if self.total and done_now else ""
        of = f"/{self.total}" if self.total else ""
        print(f"{self.title}: {self.done}{of} in {duration(elapsed)}{left}  {self._note}".rstrip(), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
