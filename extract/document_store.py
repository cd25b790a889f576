"""DocumentStore: tokenized documents on disk until their turn comes, so that a dataset of any size fits into memory.

Ids and masks lie in a temporary file without a name; in memory stay some fifty bytes a document.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from ..common.errors import guard_writing
from .engine import Document

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
        self._keys = bytearray()
        self._starts, self._lengths = array("q"), array("q")
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
        self._flushed = False
        self._keys += document.key
        self._lengths.append(len(document))
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
        length = self._lengths[number]
        data = os.pread(self._file.fileno(), 5 * length, self._starts[number])
        assert len(data) == 5 * length, "the temporary file is shorter than what was written"
        return Document(
            key=self.key(number),
            source=self._names[self._sources[number]],
            source_row=self._rows[number],
            input_ids=np.frombuffer(data, np.int32, length),
            loss_mask=np.frombuffer(data, np.uint8, length, 4 * length),
        )

    def key(self, number: int) -> bytes:
        """The document's 16-byte key."""
        return bytes(self._keys[KEY_BYTES * number : KEY_BYTES * (number + 1)])

    def length(self, number: int) -> int:
        """The document's tokens."""
        return self._lengths[number]

    def place(self, number: int) -> tuple[str, int]:
        """The document's source and row."""
        return self._names[self._sources[number]], self._rows[number]

    def take(self, numbers: Iterable[int]) -> Iterator[Document]:
        """The documents of these numbers, each read when it is asked for."""
        return (self[number] for number in numbers)
