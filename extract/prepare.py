"""From rows to documents: reads the datasets, tokenizes, and says of every row what became of it.

In: sources and the target's tokenizer. Out: documents in dataset order, and rejects; together they are all rows, and those
that `--turns each` made more of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from .config import ExtractConfig, RowsConfig
from .conversation import Conversation
from .dataset import Row, read_rows
from .document_store import DocumentStore
from .engine import Document
from .rejects import Reject, RowRejected
from .shapes import ParsedRow, parse_row
from .sources import Source
from .target import Target
from .tokens import ConversationTokenizer, RefusedTurn, Tokenized, eos_token_ids, sample_key, special_token_ids

LATER_TURNS = "later turns of a prompt without answers are not asked"


class Passed:
    """The rows that were looked at: those of a source up to where it was read, of a share only the chosen ones."""

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self._sources, self._seed = {source.name: source for source in sources}, seed
        self._upto: dict[str, int] = {}

    def add(self, row: Row) -> None:
        """Rows of a source come in order."""
        self._upto[row.source] = row.number + 1

    def __contains__(self, place: object) -> bool:
        assert isinstance(place, tuple)
        source, number = place
        return number < self._upto.get(source, 0) and self._sources[source].takes(number, self._seed)


@dataclass
class Prepared:
    """Every row that was read."""

    documents: DocumentStore
    passed: Passed
    rows: int = 0
    """Read."""
    more_turns: int = 0
    """Documents and rejects above one a row."""
    rejects: list[Reject] = field(default_factory=list)
    shapes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by (source, shape)."""
    notes: Counter[str] = field(default_factory=Counter)
    """Documents by what happened to them that was no reason to reject them."""


def make_converter(config: ExtractConfig, target: Target, tokenizer: Any, now: datetime) -> ConversationTokenizer:
    """The tokenizer of an extraction; `now` is the date for templates that print one."""
    return ConversationTokenizer(
        tokenizer,
        {*special_token_ids(tokenizer), *eos_token_ids(target.folder, tokenizer)},
        config.max_length,
        now,
        template_args=config.template_args,
        supervise=config.supervise,
        turns=config.turns,
        overlong=config.overlong,
        min_supervised=config.min_supervised,
    )


def prepare(
    config: ExtractConfig,
    sources: Sequence[Source],
    target: Target,
    converter: ConversationTokenizer,
    folder: Path | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Prepared:
    """Read and tokenize all rows. `folder`: where documents wait. Raises InputError for a dataset that cannot be read, DiskFull."""
    prepared = Prepared(DocumentStore(folder), Passed(sources, config.seed))
    first_with: dict[bytes, int] = {}
    for row in read_rows(sources, config.limit, config.seed):
        on_row(row)
        prepared.rows += 1
        prepared.passed.add(row)
        items = 0
        for item in documents_of(row, config, converter, target.spec.vocab_size, prepared.shapes, prepared.notes):
            items += 1
            if isinstance(item, Reject):
                prepared.rejects.append(item)
            elif (earlier := first_with.setdefault(item.key, len(prepared.documents))) < len(prepared.documents):
                source, number = prepared.documents.place(earlier)
                of = f" of {source}" if source != row.source else ""
                prepared.rejects.append(Reject(row.source, row.number, f"duplicate of row {number}{of}"))
            else:
                prepared.documents.add(item)
        prepared.more_turns += items - 1
    return prepared


def documents_of(
    row: Row,
    config: ExtractConfig,
    converter: ConversationTokenizer,
    vocab_size: int,
    shapes: Counter[tuple[str, str]],
    notes: Counter[str],
) -> Iterator[Document | Reject]:
    """What a row gives: at least one document or reject. Counts its shape and what there is to note."""
    try:
        parsed = parse(row, config)
        shapes[row.source, parsed.shape] += 1
        for item in _tokenize(parsed, converter, config.generate):
            if isinstance(item, RefusedTurn):
                yield Reject(row.source, row.number, f"{item.reason} (message {item.turn})")
                continue
            if int(item.input_ids.max()) >= vocab_size or int(item.input_ids.min()) < 0:
                yield Reject(row.source, row.number, f"token {int(item.input_ids.max())} is not in the target's embedding of {vocab_size} rows")
                continue  # other turns of the row have a fate of their own
            notes.update(item.notes)
            key = sample_key(item.input_ids, b"generate" if config.generate else item.loss_mask.tobytes())
            yield Document(key, row.source, row.number, item.input_ids, item.loss_mask)
    except RowRejected as rejected:
        yield Reject(row.source, row.number, str(rejected))


def parse(row: Row, config: RowsConfig) -> ParsedRow:
    """What the row holds. Raises RowRejected."""
    if row.reject is not None:
        raise RowRejected(row.reject)
    return parse_row(row.value, config.data_format, config.columns, config.roles)


def _tokenize(parsed: ParsedRow, converter: ConversationTokenizer, generate: bool) -> Iterable[Tokenized | RefusedTurn]:
    if not generate:
        return converter.documents(parsed.value)
    if not isinstance(parsed.value, Conversation):
        raise RowRejected(f"a row of shape {parsed.shape} holds no question to answer")
    input_ids = converter.prompt(parsed.value)
    notes = (LATER_TURNS,) if parsed.value.pending else ()
    return [Tokenized(input_ids, np.zeros(len(input_ids), np.uint8), None, notes)]
