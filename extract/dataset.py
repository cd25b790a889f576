"""Rows of the datasets that the user named: all of them in order, how many there are, or a sample. Alone imports `datasets`.

In: sources. Out: `Row`s, each with its source, its 0-based number, and its value or the reason why it could not be read. A row
of a source is in memory at a time, or a few: JSON and CSV are decoded here as they are read, Parquet and Arrow come in slices
from pyarrow, and what is on the hub through `datasets`, which streams it. A broken row is one reject; a source that cannot be
read on ends the run with the row that was reached.
"""

from __future__ import annotations

import csv
import io
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from types import TracebackType
from typing import Any

from ..common.errors import InputError
from .rejects import RowRejected
from .sources import BLOCK_BYTES, MAX_ROW_BYTES, Source, parquet_file, parse_sources, read_lines, row_pieces, scan_lines, size_bytes

SLICE_ROWS = 64
"""Rows of a columnar file that are Python objects at once."""
SAMPLED_WHOLE_BYTES = 4 << 20
"""A smaller file is sampled by reading all of it."""
SAMPLED_GROUPS = 8
"""Row groups of a Parquet file that a sample reads at most."""
UNCOUNTED = -1
"""The number of a sampled row whose place in the file is not known."""


@dataclass(frozen=True)
class Row:
    """One row of a dataset: its value, or why it could not be read."""

    source: str
    number: int
    """0-based: the line of a JSONL file, the record of any other."""
    value: object = None
    reject: str | None = None
    end_byte: int | None = None
    """About how many of the source's `size_bytes` had been read when this row was; None when that is not known."""


Takes = Callable[[int], bool]
Values = Iterator[tuple[Any, str | None]]
"""A value, or None and the reason."""


def read_rows(sources: Iterable[str | Source], limit: int | None = None, seed: int = 0) -> Iterator[Row]:
    """The rows of all `sources`, one source after the other; the first `limit` of them. `seed` chooses the rows of shares.

    Raises InputError at once for a source that is not there, later for one that cannot be read to its end.
    """
    parsed = [source for item in sources for source in ([item] if isinstance(item, Source) else parse_sources([item]))]
    return islice((row for source in parsed for row in _read(source, seed)), limit)


def check_sources(sources: Iterable[str]) -> None:
    """Raise InputError for a source that `parse_sources` refuses, without reading any row."""
    parse_sources(sources)


def count_rows(source: Source) -> int | None:
    """How many rows `source` gives where that is found quickly (plain lines, Parquet, Arrow, a saved folder), else None.

    With a share it is the number to expect. Raises InputError for files that cannot be read.
    """
    if source.kind not in ("lines", "parquet", "arrow", "saved") or source.compression:
        return None
    with _Guard(source):
        rows = scan_lines(source.path)[0] if source.kind == "lines" and source.path else sum(rows for rows, _ in row_pieces(source))
    rows = rows if source.limit is None else min(rows, source.limit)
    return rows if source.share is None else round(rows * source.share)


def sample_rows(source: Source, count: int, seed: int = 0) -> list[Row]:
    """At most `count` rows of `source` for an estimate, chosen by `seed`, in the source's order.

    A large plain file of lines is read only where random bytes fall (each time the line after the one that was hit, so that
    long lines are not preferred; its rows are UNCOUNTED), columnar files at random rows. Of what cannot be entered in the
    middle (compressed, CSV, JSON arrays, the hub) it is the first rows. Raises InputError for files that cannot be read.
    """
    seeded = random.Random(f"{seed} {source.name}")
    with _Guard(source):
        if source.kind in ("parquet", "arrow", "saved"):
            return _sample_pieces(source, count, seeded)
        if source.kind != "lines" or source.compression:
            return list(islice(_read(source, seed), count))
        if (size_bytes(source) or 0) > SAMPLED_WHOLE_BYTES:
            return _sample_lines(source, count, seeded)
    rows = list(_read(source, seed))
    return [rows[place] for place in sorted(seeded.sample(range(len(rows)), min(count, len(rows))))]


def _read(source: Source, seed: int) -> Iterator[Row]:
    readers = {"lines": _json_lines, "json": _json_file, "csv": _csv_rows}
    with _Guard(source) as guard:
        rows = readers.get(source.kind, _columnar_rows)(source, lambda number: source.takes(number, seed))
        for row in islice(rows, source.limit):
            guard.reached = row.number
            yield row


class _Guard:
    """Turns what libraries raise about a source into InputError that names the row reached. InputError passes."""

    def __init__(self, source: Source) -> None:
        self.source, self.reached = source, -1

    def __enter__(self) -> _Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, InputError):
            return
        reason = (error.strerror if isinstance(error, OSError) else None) or next(iter(str(error).strip().splitlines()), type(error).__name__)
        if self.source.kind == "hub" and self.reached < 0:
            raise InputError(
                f"is no file here, and no dataset of that name could be loaded: {reason}",
                place=f"--data {self.source.name}",
                fix="check the name, its CONFIG and SPLIT (NAME@CONFIG:SPLIT) and the network, or give its files",
            ) from error
        raise _unreadable(self.source, self.reached, reason) from error


def _unreadable(source: Source, reached: int, reason: object) -> InputError:
    where = f" after row {reached}" if reached >= 0 else ""
    fix = f"fetch it again, or take only the rows before that: {source.name}:{reached + 1}" if where else "check the file, or fetch it again"
    return InputError(f"cannot be read{where}: {reason}", place=f"--data {source.name}", fix=fix)


def _row(source: Source, number: int, end_byte: int | None, decode: Callable[[], Any]) -> Row:
    try:
        return Row(source.name, number, decode(), end_byte=end_byte)
    except RowRejected as rejected:
        return Row(source.name, number, reject=str(rejected), end_byte=end_byte)


# JSON


def _json_lines(source: Source, takes: Takes) -> Iterator[Row]:
    for number, (line, end_byte) in enumerate(read_lines(source)):
        if takes(number):
            yield _row(source, number, end_byte, partial(_decode_line, line, first=number == 0))


def _decode_line(line: bytes | None, *, first: bool) -> Any:
    if line is None:
        raise RowRejected(f"the line is longer than {MAX_ROW_BYTES >> 20} MB")
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise RowRejected(f"the line is not valid UTF-8: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise RowRejected("the line is empty")
    try:
        return _whole_text(_JSON.decode(text), text)
    except (ValueError, RecursionError) as error:
        raise RowRejected(f"the line is not valid JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A message with two contents has no right one. NaN is let through: tables write it into columns that nobody reads."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return fields


_JSON = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def _whole_text(value: Any, text: str) -> Any:
    """`value`, decoded from `text`, unless it holds half a character, on which a tokenizer would stop."""
    try:
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        text.encode()
    except UnicodeEncodeError:
        raise RowRejected("the row holds bytes or halves of surrogate pairs that are no text") from None
    return value


def _json_file(source: Source, takes: Takes) -> Iterator[Row]:
    """A list of rows; or one object a line, as many files called .json are."""
    assert source.path is not None
    one_a_line = False
    with open(source.path, "rb") as file:
        if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
            file.seek(0)
            first, more = file.readline(MAX_ROW_BYTES), file.read(1)
            try:
                one_a_line = bool(more) and isinstance(_JSON.decode(first.decode("utf-8-sig")), dict)
            except (ValueError, RecursionError):
                pass
    return _json_lines(source, takes) if one_a_line else _json_list(source, takes)


def _json_list(source: Source, takes: Takes) -> Iterator[Row]:
    """Rows one by one as the text comes in; broken bytes become lone surrogates and are found in their row."""
    assert source.path is not None
    with open(source.path, "rb") as raw, io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="") as file:
        text = file.read(BLOCK_BYTES).lstrip()
        if not text.startswith("["):
            raise InputError("must be a list of rows, or hold one object a line", place=f"--data {source.name}", found=repr(text[:40]))
        number, at = 0, 1
        while True:
            while text[at : at + 1] in _GAP:
                at += 1
            if text[at : at + 1] == "]":
                if text[at + 1 :].strip() or file.read(BLOCK_BYTES).strip():
                    raise _unreadable(source, number - 1, "the list has ended there, and the file goes on")
                return
            problem = "it ends before its list does"
            try:
                value, stop = _JSON.raw_decode(text, at)
                whole = stop < len(text) or not isinstance(value, int | float)  # a number may go on in the next block
            except (ValueError, RecursionError) as error:
                whole = False
                if at < len(text):
                    problem = f"row {number} is cut off or not valid JSON: {getattr(error, 'msg', error)}"
            if whole:
                if takes(number):
                    yield _row(source, number, raw.tell() - (len(text) - stop), partial(_whole_text, value, text[at:stop]))
                number, at = number + 1, stop
                continue
            text, at = text[at:], 0
            more = file.read(max(BLOCK_BYTES, len(text))) if len(text) <= MAX_ROW_BYTES else ""
            if not more:
                raise _unreadable(source, number - 1, problem)
            text += more


_GAP = frozenset(" \n\r\t,")


def _sample_lines(source: Source, count: int, seeded: random.Random) -> list[Row]:
    assert source.path is not None
    end = scan_lines(source.path, source.limit)[1]
    rows: dict[int, Row] = {}
    with open(source.path, "rb") as file:
        for _ in range(4 * count):
            if len(rows) == count:
                break
            file.seek(seeded.randrange(end))
            while (rest := file.readline(BLOCK_BYTES)) and not rest.endswith(b"\n"):
                pass
            start = file.tell() if file.tell() < end else file.seek(0)
            if start not in rows:
                line = file.readline(MAX_ROW_BYTES)
                decode = partial(_decode_line, line if len(line) < MAX_ROW_BYTES else None, first=start == 0)
                rows[start] = _row(source, UNCOUNTED if start else 0, None, decode)
    return [rows[start] for start in sorted(rows)]


# CSV


def _csv_rows(source: Source, takes: Takes) -> Iterator[Row]:
    """Records as objects of text by the header's names; an empty cell is an absent field."""
    csv.field_size_limit(MAX_ROW_BYTES)  # of the process; its 128 KiB are less than a long chat
    end_byte = 0

    def texts() -> Iterator[str]:
        nonlocal end_byte
        for line, end_byte in read_lines(source):  # noqa: B007
            if line is None:
                raise ValueError(f"a line is longer than {MAX_ROW_BYTES >> 20} MB")
            yield line.decode("utf-8", "surrogateescape")

    records = csv.reader(texts(), strict=True)
    header = [name.removeprefix("\ufeff") for name in next(records, [])]
    if len(set(header)) < len(header):
        raise InputError("has two columns of one name", place=f"--data {source.name}", found=", ".join(header))
    number = -1
    while True:
        number += 1
        try:
            decode = partial(_record, header, next(records))
        except StopIteration:
            return
        except csv.Error as error:
            decode = partial(_reject, f"the row is not valid CSV: {error}")
        if takes(number):
            yield _row(source, number, end_byte, decode)


def _record(header: list[str], cells: list[str]) -> dict[str, str]:
    if len(cells) != len(header):
        raise RowRejected(f"the row has {len(cells)} cells, the header {len(header)}" if cells else "the line is empty")
    return _whole_text({name: cell for name, cell in zip(header, cells) if cell}, "".join(cells))


def _reject(reason: str) -> Any:
    raise RowRejected(reason)


# Columns


def _columnar_rows(source: Source, takes: Takes) -> Iterator[Row]:
    total, size = None, size_bytes(source)
    if source.kind == "hub":
        batches = _hub_batches(source)
    else:
        pieces = row_pieces(source)
        total = sum(rows for rows, _ in pieces)
        batches = parquet_file(source).iter_batches(SLICE_ROWS) if source.kind == "parquet" else (load() for _, load in pieces)
    number = 0
    for batch in batches:
        for value, reject in _values(batch):
            if takes(number):
                yield Row(source.name, number, value, reject, None if total is None or size is None else size * (number + 1) // total)
            number += 1


def _hub_batches(source: Source) -> Iterator[Any]:
    import datasets

    streaming = not datasets.config.HF_HUB_OFFLINE  # offline there is only what was fetched before, which cannot be streamed
    loaded: Any = datasets.load_dataset(source.dataset, source.config, split=source.split, streaming=streaming)
    return iter(loaded.with_format("arrow").iter(SLICE_ROWS))


def _values(rows: Any) -> Values:
    """The rows of a table as objects. A column gives every row every field, so the absent ones come as null and are left out."""
    if rows.num_rows > SLICE_ROWS:
        for start in range(0, rows.num_rows, SLICE_ROWS):
            yield from _values(rows.slice(start, SLICE_ROWS))
        return
    import pyarrow

    clean = _without_nulls(pyarrow.struct(list(rows.schema)))
    try:
        values = [clean(value) for value in rows.to_pylist()]
    except (ValueError, RowRejected) as error:
        if rows.num_rows == 1:
            yield None, f"the row cannot be read: {error}"
            return
        for number in range(rows.num_rows):
            yield from _values(rows.slice(number, 1))
        return
    yield from ((value, None) for value in values)


def _without_nulls(kind: Any) -> Callable[[Any], Any]:
    """A function that leaves the nulls out of a value of this Arrow type; in what is stored as JSON they are kept."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return lambda value: None if value is None else _whole_text(_JSON.decode(value), value)
    if pyarrow.types.is_struct(kind):
        fields = [(field.name, _without_nulls(field.type)) for field in kind]
        return lambda value: None if value is None else {name: clean(value[name]) for name, clean in fields if value[name] is not None}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        inner = _without_nulls(kind.value_type)
        return lambda value: value if value is None or inner is _same else [inner(item) for item in value]
    return _same


def _same(value: Any) -> Any:
    return value


def _sample_pieces(source: Source, count: int, seeded: random.Random) -> list[Row]:
    pieces = row_pieces(source)
    starts = [0, *accumulate(rows for rows, _ in pieces)]
    wanted = starts[-1] if source.limit is None else min(starts[-1], source.limit)
    kept = [place for place in range(len(pieces)) if starts[place] < wanted]
    if source.kind == "parquet" and len(kept) > SAMPLED_GROUPS:
        kept = sorted(seeded.sample(kept, SAMPLED_GROUPS))
    ends = list(accumulate(min(starts[place + 1], wanted) - starts[place] for place in kept))
    rows, loaded = [], -1
    piece: Any = None
    for offset in sorted(seeded.sample(range(ends[-1] if ends else 0), min(count, ends[-1] if ends else 0))):
        chosen = bisect_right(ends, offset)
        within = offset - (ends[chosen - 1] if chosen else 0)
        if loaded != chosen:
            loaded, piece = chosen, pieces[kept[chosen]][1]()
        ((value, reject),) = _values(piece.slice(within, 1))
        rows.append(Row(source.name, starts[kept[chosen]] + within, value, reject))
    return rows
