"""From rows to documents: reads the datasets, tokenizes, and says of every row what became of it.

In: sources and the target's tokenizer. Out: documents in dataset order, and rejects; together they are all rows, and those
that `--turns each` made more of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from .sample_key import sample_key
from .script import Script, rounds_of, turn_keys
from .shapes import ParsedRow, parse_row
from .sources import Source
from .target import Target
from .tokens import ConversationTokenizer, RefusedTurn, eos_token_ids, special_token_ids

LATER_TURNS = "later turns of a prompt without answers are not asked"
"""Noted where prompts are only served; an extraction asks them all."""


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
            if isinstance(item, Reject):
                items += 1
                prepared.rejects.append(item)
                continue
            items += len(item.keys)
            new = [key for key in item.keys if first_with.setdefault(key, len(prepared.documents)) == len(prepared.documents)]
            prepared.rejects += [_duplicate(row, prepared, first_with[key], item, key) for key in item.keys if key not in new]
            if new:
                prepared.documents.add(item.wanting(new))
        prepared.more_turns += items - 1
    return prepared


def _duplicate(row: Row, prepared: Prepared, earlier: int, document: Document, key: bytes) -> Reject:
    source, number = prepared.documents.place(earlier)
    of = f" of {source}" if source != row.source else ""
    turn = f" (turn {document.script.keys.index(key) + 1})" if document.script is not None and len(document.keys) > 1 else ""
    return Reject(row.source, row.number, f"duplicate of row {number}{of}{turn}")


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
        if config.generate:
            yield _to_be_answered(row, parsed, config, converter, vocab_size)
            return
        for item in converter.documents(parsed.value):
            if isinstance(item, RefusedTurn):
                yield Reject(row.source, row.number, f"{item.reason} (message {item.turn})")
                continue
            if (reason := _outside(item.input_ids, vocab_size)) is not None:
                yield Reject(row.source, row.number, reason)
                continue  # other turns of the row have a fate of their own
            notes.update(item.notes)
            yield Document(sample_key(item.input_ids, item.loss_mask.tobytes()), row.source, row.number, item.input_ids, item.loss_mask)
    except RowRejected as rejected:
        yield Reject(row.source, row.number, str(rejected))


def parse(row: Row, config: RowsConfig) -> ParsedRow:
    """What the row holds. Raises RowRejected."""
    if row.reject is not None:
        raise RowRejected(row.reject)
    return parse_row(row.value, config.data_format, config.columns, config.roles)


def _outside(input_ids: np.ndarray, vocab_size: int) -> str | None:
    """Why the target cannot take these ids."""
    inside = int(input_ids.min()) >= 0 and int(input_ids.max()) < vocab_size
    return None if inside else f"token {int(input_ids.max())} is not in the target's embedding of {vocab_size} rows"


def _to_be_answered(row: Row, parsed: ParsedRow, config: ExtractConfig, converter: ConversationTokenizer, vocab_size: int) -> Document:
    """The conversation whose answers the target will write: its first prompt, and a script when there are more. Raises RowRejected."""
    conversation = parsed.value
    if not isinstance(conversation, Conversation):
        raise RowRejected(f"a row of shape {parsed.shape} holds no question to answer")
    rounds = rounds_of(conversation)
    input_ids = converter.question(replace(conversation, messages=rounds[0])).input_ids
    if (reason := _outside(input_ids, vocab_size)) is not None:
        raise RowRejected(reason)
    keys = turn_keys(conversation, rounds, input_ids)
    script = None
    if len(rounds) > 1:
        script = Script(tuple(rounds), keys, keys if config.turns == "each" else keys[-1:], 0, conversation.tools, conversation.template_args)
        script = replace(script, given_tokens=_given_tokens(script, config, converter))
    mask = np.full(len(input_ids), config.supervise == "all", np.uint8)
    return Document(keys[0] if script is None else script.stored[0], row.source, row.number, input_ids, mask, script)


def _given_tokens(script: Script, config: ExtractConfig, converter: ConversationTokenizer) -> int:
    """Tokens of the last prompt with next to nothing for answers. Raises RowRejected when that is too long, or the template refuses it."""
    try:
        return len(converter.question(script.conversation(["."] * (len(script.rounds) - 1))).input_ids)
    except RowRejected:
        if config.turns == "each":  # the first turns may do
            return config.max_length
        raise
