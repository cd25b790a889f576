"""What `--data` names (a file, a saved folder, a pattern, a dataset on the hub), how much of it is wanted, and how it lies on disk.

In: the texts that the user gave. Out: one `Source` for each thing to read, its size, the lines of a text file as bytes,
compressed or not, and the batches of a columnar one. What a line or a batch says is `dataset`'s.

    PATH                    .jsonl .ndjson (also .gz .bz2 .xz .zst), .json, .csv, .parquet, .arrow
    FOLDER, FOLDER:SPLIT    written by `datasets.save_to_disk`
    'PATTERN/*.jsonl'       every file that matches, in the order of their names (part-9 before part-10)
    NAME[@CONFIG][:SPLIT]   on the Hugging Face hub; the split is `train` unless named
    ...:20000               only its first 20,000 rows
    ...:25%                 a quarter of its rows, chosen by the seed

What exists under the whole text is taken literally, even when the text ends like a suffix.
"""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal

from ..common.errors import InputError

Kind = Literal["lines", "json", "csv", "parquet", "arrow", "saved", "hub"]
KINDS: dict[str, Kind] = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
FORMS = f"a file ending in {', '.join(KINDS)} (.jsonl and .ndjson also with {', '.join(COMPRESSIONS)}), a folder written by save_to_disk, a pattern of such files, or a dataset on the hub (NAME, NAME:SPLIT, NAME@CONFIG:SPLIT)"
DEFAULT_SPLIT = "train"
MAX_ROW_BYTES = 64 << 20
"""Longest line; no chat is that long, and it has to fit into memory."""
BLOCK_BYTES = 1 << 20
"""Read at once where there is no reason for another number."""

_AMOUNT = re.compile(r"(?P<rest>.+):(?:(?P<rows>\d+)|(?P<percent>\d+(?:\.\d+)?)%)", re.S)
_ON_THE_HUB = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<config>[^@:/]+))?(?::(?P<split>[\w.+-]+))?")


@dataclass(frozen=True)
class Source:
    """One thing to read rows from."""

    name: str
    """As the user spelled it, without the amount; of a pattern the file that matched. Stands in the cache and among the rejects."""
    kind: Kind
    path: Path | None = None
    """The file, or the folder of the split; None on the hub."""
    compression: str = ""
    """One of COMPRESSIONS, or nothing."""
    dataset: str = ""
    """On the hub."""
    config: str | None = None
    """On the hub."""
    split: str = DEFAULT_SPLIT
    """On the hub."""
    limit: int | None = None
    """Only so many of the first rows."""
    share: float | None = None
    """Only this share of the rows, over 0 and at most 1."""

    def takes(self, number: int, seed: int) -> bool:
        """Whether row `number` is in the share. It depends on nothing else, so it is the same in every run; a larger share keeps a smaller one's rows."""
        if self.share is None:
            return True
        digest = blake2b(f"{seed}\0{self.name}\0{number}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64


def parse_sources(texts: Iterable[str]) -> tuple[Source, ...]:
    """The sources that `texts` name, in order.

    Raises InputError for a file that is not there or of an unknown kind, a pattern that nothing matches, a folder that holds no
    dataset or not that split, an impossible amount, and for a name that comes twice.
    """
    sources = tuple(source for text in texts for source in _parse(text))
    twice = [name for name, count in Counter(source.name for source in sources).items() if count > 1]
    if twice:
        raise InputError("is named twice, so its rows could not be told apart", place=f"--data {twice[0]}", fix="name it once")
    return sources


def size_bytes(source: Source) -> int | None:
    """Bytes on disk, as they lie there; None on the hub. Raises InputError when the files cannot be looked at."""
    if source.path is None:
        return None
    try:
        return sum(path.stat().st_size for path in ([source.path] if source.kind != "saved" else _saved_files(source)))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", place=f"--data {source.name}") from error


def row_pieces(source: Source) -> list[tuple[int, Callable[[], Any]]]:
    """(rows, how to load them as an Arrow table or batch) of each row group or record batch; Arrow's are mapped, not read."""
    if source.kind == "parquet":
        file = parquet_file(source)
        return [(file.metadata.row_group(group).num_rows, partial(file.read_row_group, group)) for group in range(file.num_row_groups)]
    paths = _saved_files(source) if source.kind == "saved" else [source.path]
    return [(batch.num_rows, partial(batch.slice, 0)) for path in paths for batch in _arrow_batches(str(path))]


def parquet_file(source: Source) -> Any:
    """The opened Parquet file."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(source.path)


def _arrow_batches(path: str) -> Iterator[Any]:
    import pyarrow

    try:
        file = pyarrow.ipc.open_file(pyarrow.memory_map(path))
    except pyarrow.ArrowInvalid:  # `datasets` writes the other of Arrow's two forms
        return iter(pyarrow.ipc.open_stream(pyarrow.memory_map(path)))
    return (file.get_batch(number) for number in range(file.num_record_batches))


def _saved_files(source: Source) -> list[Path]:
    """The Arrow files of a saved folder, in order. Raises InputError when its index cannot be read."""
    assert source.path is not None
    index = source.path / "state.json"
    try:
        return [source.path / entry["filename"] for entry in json.loads(index.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the folder's index cannot be read: {error}", place=f"--data {source.name}", found=index, fix="save it again") from error


def read_lines(source: Source) -> Iterator[tuple[bytes | None, int]]:
    """(a line with its end, or None for one over MAX_ROW_BYTES; bytes of the file read by then).

    Raises whatever the decompressor raises for a file that is cut off or damaged.
    """
    assert source.path is not None
    end = 0
    with open(source.path, "rb") as raw, _decompressed(raw, source.compression) as file:
        while line := file.readline(MAX_ROW_BYTES):
            end += len(line)
            whole = len(line) < MAX_ROW_BYTES or line.endswith(b"\n")
            last = line
            while not last.endswith(b"\n") and not whole and (last := file.readline(BLOCK_BYTES)):
                end += len(last)
            yield line if whole else None, raw.tell() if source.compression else end


def scan_lines(path: Path, limit: int | None = None) -> tuple[int, int]:
    """(lines, bytes) of a plain file, or of its first `limit` lines."""
    lines = size = 0
    last = b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            found = block.count(b"\n")
            if limit is not None and lines + found >= limit:
                end = 0
                for _ in range(limit - lines):
                    end = block.index(b"\n", end) + 1
                return limit, size + end
            lines, size, last = lines + found, size + len(block), block[-1:]
    return lines + (last != b"\n"), size


def _decompressed(raw: IO[bytes], compression: str) -> Any:
    if compression == ".gz":
        import gzip

        return gzip.open(raw)
    if compression == ".bz2":
        import bz2

        return bz2.open(raw)
    if compression == ".xz":
        import lzma

        return lzma.open(raw)
    if compression == ".zst":
        import io

        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), BLOCK_BYTES)
    return raw


def _parse(text: str) -> Iterator[Source]:
    if not text.strip():
        raise InputError("is empty", place="--data", expected=FORMS)
    if (literal := _on_disk(text)) is not None:
        yield literal
        return
    rest, limit, share = _amount(text)
    for source in [found] if (found := _on_disk(rest)) is not None else _matches(rest) if glob.has_magic(rest) else [_elsewhere(rest)]:
        yield replace(source, limit=limit, share=share)


def _amount(text: str) -> tuple[str, int | None, float | None]:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        return text, None, None
    limit = int(match["rows"]) if match["rows"] else None
    share = float(match["percent"]) / 100 if match["percent"] else None
    if limit == 0 or (share is not None and not 0 < share <= 1):
        raise InputError("is no amount of rows", place=f"--data {text}", expected="a number of rows from 1, as :20000, or a share up to 100, as :25%")
    if _on_disk(match["rest"]) is None and _AMOUNT.fullmatch(match["rest"]):
        raise InputError("has two amounts of rows", place=f"--data {text}", expected="one, as :20000 or :25%")
    return match["rest"], limit, share


def _on_disk(text: str) -> Source | None:
    folder, _, split = text.rpartition(":")
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _saved(text, path, None)
        if path.exists():
            return _file(text, path)
        if folder and Path(folder).expanduser().is_dir():
            return None if _AMOUNT.fullmatch(text) else _saved(text, Path(folder).expanduser(), split)
    except (OSError, ValueError, RuntimeError):  # too long for a name, a null character in it, a home that nobody has
        return None
    return None


def _file(name: str, path: Path) -> Source:
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    kind = KINDS.get(Path(path.stem).suffix if compression else path.suffix)
    if kind is None or (compression and kind != "lines"):
        raise InputError("is no dataset file", place=f"--data {name}", expected=FORMS)
    return Source(name, kind, path, compression)


def _saved(name: str, folder: Path, split: str | None) -> Source:
    if (folder / "dataset_dict.json").is_file():
        try:
            splits = [str(known) for known in json.loads((folder / "dataset_dict.json").read_bytes())["splits"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"the folder's index cannot be read: {error}", place=f"--data {name}", fix="save it again") from error
        wanted = split or (splits[0] if len(splits) == 1 else DEFAULT_SPLIT)
        if wanted not in splits:
            raise InputError(f"the folder has no split {wanted}", place=f"--data {name}", expected=f"FOLDER:SPLIT with one of {', '.join(splits)}")
        return Source(name, "saved", folder / wanted)
    if not (folder / "state.json").is_file():
        raise InputError("is a folder that save_to_disk did not write", place=f"--data {name}", fix=f"name the files in it: '{folder}/*.jsonl'")
    if split:
        raise InputError("the folder has no splits", place=f"--data {name}", fix=f"leave :{split} out")
    return Source(name, "saved", folder)


def _matches(pattern: str) -> list[Source]:
    paths = sorted(glob.glob(str(Path(pattern).expanduser()) if pattern.startswith("~") else pattern, recursive=True), key=_natural)
    if not paths:
        raise InputError(
            "no file matches", place=f"--data {pattern}", expected=FORMS, fix="check the pattern; of a dataset on the hub take NAME:SPLIT:20000"
        )
    return [_saved(path, Path(path), None) if Path(path).is_dir() else _file(path, Path(path)) for path in paths]


def _natural(path: str) -> list[tuple[int, str]]:
    """Sorts numbers by their value."""
    return [(int(piece), piece) if piece.isdecimal() else (-1, piece) for piece in re.split(r"(\d+)", path)]


def _elsewhere(text: str) -> Source:
    """What is not on this disk: a name on the hub, or a mistake."""
    stem = text.removesuffix(Path(text).suffix) if Path(text).suffix in COMPRESSIONS else text
    if Path(stem).suffix in KINDS or text.startswith((".", "/", "~")):
        raise InputError("no such file", place=f"--data {text}", fix="check the path")
    match = _ON_THE_HUB.fullmatch(text)
    if match is None:
        raise InputError("is no file here and no dataset's name", place=f"--data {text}", expected=FORMS)
    return Source(text, "hub", dataset=match["name"], config=match["config"], split=match["split"] or DEFAULT_SPLIT)
