"""DocumentStore: tokenized documents on disk until their turn comes, so that a dataset of any size fits into memory.

Ids, masks and scripts lie in a temporary file without a name; in memory stay some eighty bytes a document, and 16 for each of its samples.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import numpy as np

from ..common.errors import guard_writing
from .engine import Document
from .script import Script, most_rows

KEY_BYTES = 16
BUFFER_BYTES = 1 << 20
"""Written at once."""


class DocumentStore:
    """Documents in the order in which they were added. Raises DiskFull when their file finds no space."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: where the temporary file lies; None is the system's own place for such."""
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder, buffering=BUFFER_BYTES)  # noqa: SIM115  # lives as long as the store
        self._flushed = True
        self._keys, self._first_keys = bytearray(), array("q", [0])
        self._starts, self._lengths = array("q"), array("q")
        self._script_bytes, self._given, self._turns = array("q"), array("q"), array("i")
        self._sources, self._rows = array("l"), array("q")
        self._names: list[str] = []
        self._number_of: dict[str, int] = {}
        self.tokens = self.supervised_tokens = self.longest = 0
        """Of all documents; the longest one's tokens."""

    def __len__(self) -> int:
        return len(self._lengths)

    def add(self, document: Document) -> None:
        """Append one."""
        with guard_writing(self._folder or Path(tempfile.gettempdir())):
            self._starts.append(self._file.tell())
            self._file.write(np.ascontiguousarray(document.input_ids, np.int32).tobytes())
            self._file.write(np.ascontiguousarray(document.loss_mask, np.uint8).tobytes())
            script = b"" if document.script is None else document.script.to_json()
            self._file.write(script)
        self._flushed = False
        self._keys += b"".join(document.keys)
        self._first_keys.append(len(self._keys) // KEY_BYTES)
        self._lengths.append(len(document))
        self._script_bytes.append(len(script))
        self._given.append(len(document) if document.script is None else document.script.given_tokens)
        self._turns.append(1 if document.script is None else len(document.script.rounds))
        if document.source not in self._number_of:
            self._number_of[document.source] = len(self._names)
            self._names.append(document.source)
        self._sources.append(self._number_of[document.source])
        self._rows.append(document.source_row)
        self.tokens += len(document)
        self.supervised_tokens += int(document.loss_mask.sum())
        self.longest = max(self.longest, len(document))

    def __getitem__(self, number: int) -> Document:
        if not self._flushed:
            with guard_writing(self._folder or Path(tempfile.gettempdir())):
                self._file.flush()
            self._flushed = True
        length, size = self._lengths[number], 5 * self._lengths[number] + self._script_bytes[number]
        data = os.pread(self._file.fileno(), size, self._starts[number])
        assert len(data) == size, "the temporary file is shorter than what was written"
        return Document(
            key=self.key(number),
            source=self._names[self._sources[number]],
            source_row=self._rows[number],
            input_ids=np.frombuffer(data, np.int32, length),
            loss_mask=np.frombuffer(data, np.uint8, length, 4 * length),
            script=Script.from_json(data[5 * length :]) if self._script_bytes[number] else None,
        )

    def key(self, number: int) -> bytes:
        """The document's 16-byte key, the first of `keys`."""
        return self.keys(number)[0]

    def keys(self, number: int) -> list[bytes]:
        """Of the document's samples."""
        places = range(self._first_keys[number], self._first_keys[number + 1])
        return [bytes(self._keys[KEY_BYTES * place : KEY_BYTES * (place + 1)]) for place in places]

    def rows(self, number: int, answer: int, longest: int) -> int:
        """Rows that the document's samples take at most; answer: tokens that the target may write each time, 0 for none."""
        if not answer:
            return min(self._lengths[number], longest)
        samples = self._first_keys[number + 1] - self._first_keys[number]
        return most_rows(self._given[number], self._turns[number], samples, answer, longest)

    def place(self, number: int) -> tuple[str, int]:
        """The document's source and row."""
        return self._names[self._sources[number]], self._rows[number]

    def take(self, numbers: Iterable[int], known: Container[bytes] = frozenset()) -> Iterator[Document]:
        """The documents of these numbers, without samples of `known` keys, each read when it is asked for."""
        for number in numbers:
            yield self[number].wanting([key for key in self.keys(number) if key not in known])
