"""Rows of the datasets that the user named. The only file that imports `datasets`.

Out: (source, 0-based row, the row or the reason why it could not be read). JSON files are read here, line by line, so that
one broken line is one reject; Parquet, Arrow and hub datasets come through the `datasets` library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..common.errors import InputError

FILE_KINDS = (".jsonl", ".json", ".parquet", ".arrow")


@dataclass(frozen=True)
class Row:
    """One row of a dataset: its value, or why it could not be read."""

    source: str
    number: int
    """0-based."""
    value: object = None
    reject: str | None = None


def read_rows(sources: Iterable[str], limit: int | None = None) -> Iterator[Row]:
    """The rows of all `sources`, in order; the first `limit` of them.

    Raises InputError for a source that is not there or cannot be read at all.
    """
    rows = (row for source in sources for row in _read(source))
    return islice(rows, limit)


def check_sources(sources: Iterable[str]) -> None:
    """Raise InputError for a file that is not there or of an unknown kind, without reading any."""
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir() or (path.exists() and path.suffix not in FILE_KINDS):
            raise InputError("is no dataset file", place=f"--data {source}", expected=f"a file ending in {', '.join(FILE_KINDS)}")
        if not path.exists() and (path.suffix in FILE_KINDS or source.startswith((".", "/", "~"))):
            raise InputError("no such file", place=f"--data {source}", fix="check the path")


def _read(source: str) -> Iterator[Row]:
    check_sources([source])
    path = Path(source).expanduser()
    if path.suffix == ".jsonl" and path.exists():
        return _read_lines(source, path)
    if path.suffix == ".json" and path.exists():
        return _read_array(source, path)
    return _read_with_library(source, path)


def _read_lines(source: str, path: Path) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
            if not text.strip():
                yield Row(source, number, reject="the line is empty")
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                yield Row(source, number, reject=f"the line is not valid JSON: {error}")
                continue
            yield Row(source, number, value)


def _read_array(source: str, path: Path) -> Iterator[Row]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not valid JSON: {error}", place=f"--data {source}", fix="for one object a line, name the file .jsonl") from None
    if not isinstance(values, list):
        raise InputError("must be a list of rows", place=f"--data {source}", found=type(values).__name__)
    for number, value in enumerate(values):
        yield Row(source, number, value)


def _read_with_library(source: str, path: Path) -> Iterator[Row]:
    import datasets

    loaded: Any
    try:
        if path.suffix == ".parquet":
            loaded = datasets.Dataset.from_parquet(str(path))
        elif path.suffix == ".arrow":
            loaded = datasets.Dataset.from_file(str(path))
        else:
            name, _, split = source.partition(":")
            loaded = datasets.load_dataset(name, split=split or "train")
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        known = path.exists()
        raise InputError(
            f"cannot be read: {reason}" if known else f"is no file here, and no dataset of that name could be loaded: {reason}",
            place=f"--data {source}",
            expected=f"a file ending in {', '.join(FILE_KINDS)}, or a dataset name on the hub (NAME or NAME:SPLIT)",
        ) from None
    for number, value in enumerate(loaded):
        yield Row(source, number, _without_nulls(value))


def _without_nulls(value: Any) -> Any:
    """Columnar formats give every message every field; the absent ones come as null and must not reach a template."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
