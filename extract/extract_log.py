"""`extract.log.jsonl` of a cache: what extractions did and when, one JSON object a line, for people and their tools.

Only ever appended to, each line in one write, so that several processes may share it. Nothing reads it back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..common import layout
from ..common.errors import guard_writing


class ExtractLog:
    """Appends to a cache's log. `common` stands in every line. Raises DiskFull, and InputError when it may not be written."""

    def __init__(self, cache: Path, **common: Any) -> None:
        self._path, self._common = cache / layout.LOG, common
        with guard_writing(self._path):
            self._handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._handle).st_size
            if size and os.pread(self._handle, 1, size - 1) != b"\n":
                os.write(self._handle, b"\n")  # a kill or a full disk cut the last line

    def write(self, event: str, **fields: Any) -> None:
        """Append a line: the time, the event and its fields."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **self._common, **fields}
        with guard_writing(self._path):
            os.write(self._handle, (json.dumps(line, ensure_ascii=False, default=str) + "\n").encode())

    def close(self) -> None:
        """Let go of the file. Harmless when called twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


@contextmanager
def logged(cache: Path, started: dict[str, Any], **common: Any) -> Iterator[ExtractLog]:
    """The log of one run: a `started` line with `started`, and a `failed` line with the error that ends it, if one does."""
    log = ExtractLog(cache, **common)
    try:
        log.write("started", **started)
        yield log
    except BaseException as error:
        try:
            log.write("failed", error=type(error).__name__, message=str(error))
        except Exception:
            pass  # the error that ends the run is the one to show
        raise
    finally:
        log.close()
