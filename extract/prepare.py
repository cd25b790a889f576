"""From rows to documents: reads the datasets, tokenizes, and says of every row whether it can be used.

In: dataset names and the target's tokenizer. Out: documents in dataset order, and rejects; together they are all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from .config import ExtractConfig
from .conversation import parse_conversation
from .dataset import Row, read_rows
from .engine import Document
from .rejects import Reject, RowRejected
from .target import Target
from .tokens import ConversationTokenizer, eos_token_ids, sample_key, special_token_ids


@dataclass
class Prepared:
    """Every row that was read."""

    documents: list[Document] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    looked_at: set[tuple[str, int]] = field(default_factory=set)
    """(source, row) of each."""

    @property
    def rows(self) -> int:
        """Rows read."""
        return len(self.documents) + len(self.rejects)


def prepare(config: ExtractConfig, target: Target, tokenizer: Any, now: datetime, on_row: Callable[[], None] = lambda: None) -> Prepared:
    """Read and tokenize all rows; `now` is the date for templates that print one. Raises InputError for a dataset that cannot be read."""
    ends = {*special_token_ids(tokenizer), *eos_token_ids(target.folder, tokenizer)}
    converter = ConversationTokenizer(tokenizer, ends, config.max_length, now)
    prepared = Prepared()
    first_with: dict[bytes, Row] = {}
    for row in read_rows(config.data, config.limit):
        on_row()
        prepared.looked_at.add((row.source, row.number))
        try:
            document = _document(row, converter, target.spec.vocab_size, config.generate)
            earlier = first_with.setdefault(document.key, row)
            if earlier is not row:
                raise RowRejected(f"duplicate of row {earlier.number}" + (f" of {earlier.source}" if earlier.source != row.source else ""))
        except RowRejected as rejected:
            prepared.rejects.append(Reject(row.source, row.number, str(rejected)))
        else:
            prepared.documents.append(document)
    return prepared


def _document(row: Row, converter: ConversationTokenizer, vocab_size: int, generate: bool) -> Document:
    if row.reject is not None:
        raise RowRejected(row.reject)
    conversation = parse_conversation(row.value)
    if generate:
        input_ids = converter.prompt(conversation)
        loss_mask = np.zeros(len(input_ids), np.uint8)
        key = sample_key(input_ids, b"generate")
    else:
        input_ids, loss_mask = converter.document(conversation)
        key = sample_key(input_ids, loss_mask.tobytes())
    if int(input_ids.max()) >= vocab_size:
        raise RowRejected(f"token {int(input_ids.max())} is not in the target's embedding of {vocab_size} rows")
    return Document(key, row.source, row.number, input_ids, loss_mask)
