"""Offline evaluation: what acceptance length a drafter would reach on held-out documents of a cache.

In: a drafter (run folder, checkpoint or export) and caches that it was not trained on. Out: an EvalResult. Every valid anchor
of every document is drafted, greedily; nothing is sampled. A slot is right when it equals the target's own most likely
token; `data` says the same against the text, which differs unless the target wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..common.errors import InputError
from ..common.progress import ProgressBar
from .anchors import Anchors, candidate_rows, pad_anchors
from .batch import Batch
from .config import EvalConfig
from .device import Compute, resolve_compute
from .draft_head import DraftHead, draft_head
from .drafter import Drafter
from .drafter_spec import DrafterSpec
from .export import load_drafter
from .loader import RowLoader
from .metrics import BlockCounts, DraftQuality, Walk, count_blocks, leading_right, quality, walk
from .reader import CacheReader
from .resolve import check_same_target
from .step import RowInputs, draft, labels_of, row_inputs
from .target_head import TargetHead
from .teacher import teacher_tokens

CACHED_LOGITS_ROWS = 128


@dataclass(frozen=True)
class EvalResult:
    """What a drafter reaches."""

    tau_walk: float
    """Mean acceptance length of simulated serving (1 + accepted / steps): the number to compare with a served one."""
    walk: Walk
    """Its steps and accepted tokens, per slot too."""
    walk_by_source: dict[str, Walk]
    """The same for each dataset."""
    quality: DraftQuality
    """Over every anchor, against the target's most likely tokens."""
    data_tau_walk: float
    """The walk against the text's own tokens."""
    data_quality: DraftQuality
    """Over every anchor, against the text's own tokens."""
    documents: int
    """Documents evaluated."""
    documents_without_anchor: int
    """Documents passed over, because nothing in them can be drafted."""
    block_size: int
    """B."""
    fingerprints: tuple[str, ...]
    """Of the caches: results compare only when these are equal."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; acceptance lengths first."""

        def walked(of: Walk) -> dict[str, Any]:
            rates = [accepted / of.steps if of.steps else 0.0 for accepted in of.accepted_at]
            proposed = of.steps * len(of.accepted_at)
            return {"tau": of.tau, "steps": of.steps, "accepted": of.accepted, "proposed": proposed, "acceptance_per_slot": rates}

        return {
            "tau_walk": self.tau_walk,
            "data_tau_walk": self.data_tau_walk,
            "walk": walked(self.walk),
            "walk_by_source": {source: walked(of) for source, of in sorted(self.walk_by_source.items())},
            "quality": self.quality.to_dict(),
            "data_quality": self.data_quality.to_dict(),
            "documents": self.documents,
            "documents_without_anchor": self.documents_without_anchor,
            "block_size": self.block_size,
            "cache_fingerprints": list(self.fingerprints),
        }

    def to_text(self) -> str:
        """For people."""
        rates = [accepted / self.walk.steps if self.walk.steps else 0.0 for accepted in self.walk.accepted_at]
        return "\n".join(
            [
                f"acceptance length  {self.tau_walk:.3f}  ({self.walk.steps:,} simulated steps, {self.walk.accepted:,} accepted; bonus included)",
                f"  accepted at slot {'  '.join(f'{rate:.3f}' for rate in rates)}",
                *(f"  {source}: {of.tau:.3f} ({of.steps:,} steps)" for source, of in sorted(self.walk_by_source.items())),
                f"every anchor       tau {self.quality.tau:.3f}, tau of whole blocks {self.quality.tau_full:.3f}, {self.quality.blocks:,} blocks",
                f"  accuracy by slot {'  '.join(f'{rate:.3f}' for rate in self.quality.accuracy_per_slot)}",
                f"against the text   acceptance length {self.data_tau_walk:.3f}, tau {self.data_quality.tau:.3f}",
                f"documents          {self.documents:,}, of which {self.documents_without_anchor:,} have nothing to draft",
            ]
        )


def evaluate(drafter_path: Path, caches: Sequence[Path], config: EvalConfig | None = None, *, limit: int | None = None) -> EvalResult:
    """Evaluate the drafter at `drafter_path` on every document of `caches` (or its first `limit`).

    Raises InputError when the drafter does not belong to the caches' target, or reads layers that they do not hold.
    """
    config = config or EvalConfig()
    compute = resolve_compute(config.device, config.dtype, config.attention)
    drafter = load_drafter(drafter_path).to(compute.device).eval()
    readers = [CacheReader(path) for path in caches]
    check_same_target(readers, same_layers=False)
    check_fits(drafter.spec, readers[0], drafter_path)
    head = TargetHead(readers[0].path, readers[0].spec, compute.device, compute.dtype)
    longest = max(int(reader.lengths.max()) for reader in readers)
    loader = RowLoader(readers, layer_ids=drafter.spec.target_layer_ids, row_tokens=longest, need_verifier=True, seed=0, shuffle=False)
    tally = Tally(drafter.spec)
    first_of = [sum(reader.num_samples for reader in readers[:cache]) for cache in range(len(readers))]
    documents = min(sum(reader.num_samples for reader in readers), limit or sys.maxsize)
    try:
        with ProgressBar("evaluate", documents) as bar, torch.inference_mode():
            for batch in loader.epoch(0):
                wanted = [first_of[cache] + sample < documents for cache, sample in batch.sample_ids]
                tally.add(batch, wanted, *draft_row(drafter, head, only_documents(batch, wanted), compute, config.chunk_blocks))
                bar.update(sum(wanted), f"tau {tally.walk.tau:.2f}")
                if tally.documents == documents:
                    break
    finally:
        loader.close()
    return tally.result(tuple(reader.spec.fingerprint for reader in readers))


def check_fits(spec: DrafterSpec, reader: CacheReader, place: Path) -> None:
    """Raise InputError when the drafter was trained for a target of another shape."""
    target = reader.spec.settings.target
    ours = (spec.hidden_size, spec.vocab_size, spec.num_target_layers)
    theirs = (target.hidden_size, target.vocab_size, target.num_layers)
    if ours != theirs:
        names = "hidden size {}, {} embedding rows, {} blocks"
        wanted = f"{names.format(*theirs)}, as {reader.path}"
        raise InputError("the drafter was trained for another target", place=str(place), found=names.format(*ours), expected=wanted)


def only_documents(batch: Batch, wanted: Sequence[bool]) -> Batch:
    """The row with nothing supervised in the documents that are not wanted."""
    wanted_T = torch.tensor([*wanted, False])[batch.document_T.long()]  # padding is -1, the last entry
    return replace(batch, loss_mask_T=batch.loss_mask_T & wanted_T, next_supervised_T=batch.next_supervised_T & wanted_T)


@dataclass(frozen=True)
class DraftedBlocks:
    """Some blocks of a row and what was drafted for them. All on the CPU."""

    row_A: torch.Tensor
    """int64 [A]: anchors, ascending."""
    carries_AS: torch.Tensor
    """bool [A, S]: slots that count."""
    right_AS: torch.Tensor
    """bool [A, S]: equal to the target's most likely token."""
    right_data_AS: torch.Tensor
    """bool [A, S]: equal to the text."""


def draft_row(drafter: Drafter, head: TargetHead, batch: Batch, compute: Compute, chunk_blocks: int) -> tuple[DraftedBlocks, ...]:
    """Draft from every valid anchor of a row, `chunk_blocks` blocks at a time."""
    rows = candidate_rows(batch.document_T, batch.loss_mask_T, batch.next_supervised_T)
    if not len(rows):
        return ()
    inputs, done = row_inputs(batch, compute), []
    teacher_T = teacher_tokens(batch, batch.next_supervised_T, head)
    kept = draft_head(head.head, drafter.d2t)
    for start in range(0, len(rows), chunk_blocks):
        anchors = pad_anchors(rows[start : start + chunk_blocks], chunk_blocks if compute.attention == "flex" else 1)
        labels = labels_of(batch, anchors, drafter.spec)
        predicted_AS = _predict(drafter, head, kept, inputs, anchors, labels.carries_AS, compute)
        right_AS = (predicted_AS == teacher_T[labels.teacher_row_AS]) & labels.carries_AS
        right_data_AS = (predicted_AS == labels.data_AS) & labels.carries_AS
        real = anchors.keep_A
        done.append(DraftedBlocks(anchors.row_A[real], labels.carries_AS[real], right_AS[real], right_data_AS[real]))
    return tuple(done)


def _predict(
    drafter: Drafter, head: TargetHead, draft_head: DraftHead, inputs: RowInputs, anchors: Anchors, carries_AS: torch.Tensor, compute: Compute
) -> torch.Tensor:
    """int64 [A, S] on the CPU: the drafter's most likely token of each slot that counts, -1 elsewhere."""
    hidden_QH = draft(drafter, drafter.spec, head, inputs, anchors.to(compute.device), compute)
    hidden_ASH = hidden_QH.unflatten(0, (len(anchors), drafter.spec.block_size))[:, drafter.spec.first_slot :]
    hidden_MH = hidden_ASH[carries_AS.to(compute.device)]
    tokens = [draft_head.to_tokens(draft_head.head.logits(part).max(-1).indices).cpu() for part in hidden_MH.split(CACHED_LOGITS_ROWS)]
    predicted_AS = torch.full(carries_AS.shape, -1, dtype=torch.int64)
    predicted_AS[carries_AS] = torch.cat(tokens)
    return predicted_AS


class Tally:
    """Adds rows up."""

    def __init__(self, spec: DrafterSpec) -> None:
        self.slots, self.block_size = spec.num_drafted, spec.block_size
        self.counts = self.data_counts = BlockCounts.none(spec.num_drafted)
        self.walk, self.data_walk, self.by_source = Walk(), Walk(), dict[str, Walk]()
        self.documents = self.without = 0

    def add(self, batch: Batch, wanted: Sequence[bool], *blocks: DraftedBlocks) -> None:
        anchors: dict[int, list[int]] = {}
        streaks: dict[int, tuple[list[int], list[int]]] = {}
        for drafted in blocks:
            self.counts += count_blocks(drafted.right_AS, drafted.carries_AS)
            self.data_counts += count_blocks(drafted.right_data_AS, drafted.carries_AS)
            ours = leading_right(drafted.right_AS, drafted.carries_AS).tolist()
            texts = leading_right(drafted.right_data_AS, drafted.carries_AS).tolist()
            for row, document, streak, text in zip(drafted.row_A.tolist(), batch.document_T[drafted.row_A].tolist(), ours, texts):
                anchors.setdefault(document, []).append(row)
                both = streaks.setdefault(document, ([], []))
                both[0].append(streak)
                both[1].append(text)
        for document, rows in anchors.items():
            walked = walk(rows, streaks[document][0], self.slots)
            source = batch.sources[document]
            self.walk += walked
            self.by_source[source] = self.by_source.get(source, Walk()) + walked
            self.data_walk += walk(rows, streaks[document][1], self.slots)
        self.documents += sum(wanted)
        self.without += sum(wanted) - len(anchors)

    def result(self, fingerprints: tuple[str, ...]) -> EvalResult:
        return EvalResult(
            tau_walk=self.walk.tau,
            walk=self.walk,
            walk_by_source=self.by_source,
            quality=quality(self.counts),
            data_tau_walk=self.data_walk.tau,
            data_quality=quality(self.data_counts),
            documents=self.documents,
            documents_without_anchor=self.without,
            block_size=self.block_size,
            fingerprints=fingerprints,
        )
