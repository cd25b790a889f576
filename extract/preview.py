"""What a person sees of a sample: its text, with what is learned from in colour. For `extract --preview` and `inspect --sample`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..common import layout
from ..common.errors import InputError
from .config import ExtractConfig
from .dataset import read_rows
from .engine import Document
from .plan import make_plan
from .prepare import documents_of, make_converter
from .rejects import Reject
from .tokens import load_tokenizer


@dataclass(frozen=True)
class Segment:
    """A run of tokens with one fate."""

    text: str
    """Special tokens included."""
    tokens: int
    supervised: bool


@dataclass(frozen=True)
class Shown:
    """One sample, or why there is none."""

    source: str
    row: int
    segments: tuple[Segment, ...] = ()
    reject: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        segments = [{"text": segment.text, "tokens": segment.tokens, "supervised": segment.supervised} for segment in self.segments]
        return {"source": self.source, "row": self.row, "reject": self.reject, "segments": segments}


@dataclass(frozen=True)
class Preview:
    """Samples as a person is to see them."""

    samples: tuple[Shown, ...]

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        return {"samples": [shown.to_dict() for shown in self.samples]}

    def to_text(self) -> str:
        """For a terminal in colour; elsewhere what is learned from stands between ⟦ and ⟧."""
        from rich.console import Console
        from rich.text import Text

        console = Console()
        with console.capture() as capture:
            for shown in self.samples:
                console.print(Text(f"── {shown.source} row {shown.row}: {_account(shown)}", style="bold"), soft_wrap=True)
                text = Text()
                for segment in shown.segments:
                    plain = segment.text if console.is_terminal or not segment.supervised else f"⟦{segment.text}⟧"
                    text.append(plain, style="black on green" if segment.supervised else "")
                console.print(text, soft_wrap=True)
        return capture.get().rstrip("\n")


def _account(shown: Shown) -> str:
    if shown.reject is not None:
        return f"rejected: {shown.reject}"
    supervised = sum(segment.tokens for segment in shown.segments if segment.supervised)
    return f"{sum(segment.tokens for segment in shown.segments)} tokens, {supervised} of them learned from"


def preview(config: ExtractConfig, count: int) -> Preview:
    """The first `count` samples or rejects that an extraction would make of the data. Writes nothing. Raises InputError."""
    plan = make_plan(config)
    converter = make_converter(config, plan.target, plan.tokenizer, plan.created_at)

    def items() -> Iterator[Document | Reject]:
        for row in read_rows(plan.sources, config.limit, config.seed):
            yield from documents_of(row, config, converter, plan.target.spec.vocab_size, Counter(), Counter())

    found = []
    for item in islice(items(), count):
        if isinstance(item, Reject):
            found.append(Shown(item.source, item.row, reject=item.reason))
        else:
            found.append(Shown(item.source, item.source_row, segments(plan.tokenizer, item.input_ids, item.loss_mask)))
    return Preview(tuple(found))


def stored_sample(cache: Path, source: str, row: int, input_ids: np.ndarray, loss_mask: np.ndarray, next_token: int) -> Preview:
    """A sample of a cache, with the tokenizer that lies in it. next_token: what follows the last row, -1 if that is not known.

    Raises InputError when the cache's tokenizer cannot be loaded.
    """
    folder = cache / layout.TARGET
    if not folder.is_dir():
        raise InputError("has no target folder, so there is no tokenizer", place=str(cache), fix="run `dflash verify` on it")
    tokenizer = load_tokenizer(folder, place=str(folder), need_template=False)
    if next_token >= 0:
        input_ids, loss_mask = np.append(input_ids, next_token), np.append(loss_mask, 1)
    return Preview((Shown(source, row, segments(tokenizer, input_ids, loss_mask)),))


def segments(tokenizer: Any, input_ids: np.ndarray, loss_mask: np.ndarray) -> tuple[Segment, ...]:
    """input_ids and loss_mask [T] as runs of equal mask, decoded whole, because a character may take several tokens."""
    borders = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(loss_mask)]
    return tuple(
        Segment(tokenizer.decode(input_ids[start:stop].tolist()), stop - start, bool(loss_mask[start]))
        for start, stop in pairwise(borders)
        if stop > start
    )
