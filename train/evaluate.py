"""Offline evaluation: what acceptance length a drafter would reach on held-out documents of a cache.

In: a drafter (run folder, checkpoint or exported folder) and caches that it was not trained on. Out: an EvalResult. Every valid anchor
of every document is drafted, greedily; nothing is drawn. A slot is right when it equals the target's own most likely
token; `data` says the same against the text, which differs unless the target wrote it. Acceptance under sampling is expected
from the two models' distributions (`sampled_acceptance`), of which only `CACHED_LOGITS_ROWS` rows ever exist.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ..common.errors import DflashError, InputError
from ..common.progress import ProgressBar
from .anchors import Anchors, candidate_rows, pad_anchors
from .batch import Batch
from .config import EvalConfig
from .device import Compute, resolve_compute
from .device_feed import fed
from .draft_head import DraftHead, draft_head
from .drafter import Drafter
from .drafter_folder import load_drafter
from .drafter_spec import DrafterSpec
from .eval_report import EvalResult, report
from .labels import SlotLabels
from .loader import RowLoader
from .page_locked import row_memory
from .reader import CacheReader
from .resolve import check_same_target
from .sampled_acceptance import slot_acceptance, ways
from .seen_before import documents_seen
from .step import RowInputs, draft, labels_of, row_inputs
from .tally import DraftedBlocks, Tally
from .target_head import TargetHead
from .teacher import teacher_tokens

CACHED_LOGITS_ROWS = 128


def evaluate(drafter_path: Path, caches: Sequence[Path], config: EvalConfig | None = None, *, limit: int | None = None) -> EvalResult:
    """Evaluate the drafter at `drafter_path` on every document of `caches` (or its first `limit`).

    Raises InputError when the drafter does not belong to the caches' target, or reads layers that they do not hold.
    """
    config = config or EvalConfig()
    compute = resolve_compute(config.device, config.dtype, config.attention)
    if len({path.resolve() for path in caches}) < len(caches):
        raise InputError("a cache is named twice, and its documents would count twice", place="--cache", found=", ".join(map(str, caches)))
    readers = [CacheReader(path) for path in caches]
    drafter = load_drafter(drafter_path, readers[0].spec.settings.target.num_layers).to(compute.device).eval()
    check_same_target(readers, same_layers=False)
    check_fits(drafter.spec, readers[0], drafter_path)
    if broken := [name for name, tensor in drafter.state_dict().items() if not tensor.isfinite().all()]:
        raise DflashError("weights are not finite, so that nothing is drafted", place=str(drafter_path), found=", ".join(broken[:5]))
    head = TargetHead(readers[0].path, readers[0].spec, compute.device, compute.dtype)
    longest = max(int(reader.lengths.max()) for reader in readers)
    layers, memory = drafter.spec.target_layer_ids, row_memory(compute.device)
    loader = RowLoader(readers, layer_ids=layers, row_tokens=longest, need_verifier=True, seed=0, shuffle=False, allocate=memory)
    temperatures = sorted(set(config.temperatures) - {0.0})
    tally = Tally(drafter.spec, ways(temperatures), config.position_bounds)
    evaluated: list[bytes] = []
    first_of = [sum(reader.num_samples for reader in readers[:cache]) for cache in range(len(readers))]
    documents = min(sum(reader.num_samples for reader in readers), limit or sys.maxsize)
    with fed(loader, compute.device) as ready, ProgressBar("evaluate", documents) as bar, torch.inference_mode():
        for batch in ready.epoch(0):
            wanted = [first_of[cache] + sample < documents for cache, sample in batch.sample_ids]
            tally.add(batch, wanted, *draft_row(drafter, head, only_documents(batch, wanted), compute, config.chunk_blocks, temperatures))
            evaluated += [sample_key(readers[cache], sample) for (cache, sample), want in zip(batch.sample_ids, wanted) if want]
            bar.update(sum(wanted), f"tau {tally.walk.tau:.2f}")
            if tally.documents == documents:
                break
    fingerprints, digest = tuple(reader.spec.fingerprint for reader in readers), documents_digest(evaluated)
    return report(tally, config, str(drafter_path), fingerprints, digest, documents_seen(drafter_path, evaluated))


def sample_key(reader: CacheReader, sample: int) -> bytes:
    """What stands for a sample's tokens and mask."""
    part = int(reader.part_of[sample])
    first = int(np.searchsorted(reader.part_of, part))
    return reader.column(part, "sample_key")[sample - first].tobytes()


def documents_digest(keys: Sequence[bytes]) -> str:
    """A hash of the documents with these keys, in whatever order they were read."""
    return hashlib.blake2b(b"".join(sorted(keys)), digest_size=16).hexdigest()


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


def draft_row(
    drafter: Drafter, head: TargetHead, batch: Batch, compute: Compute, chunk_blocks: int, temperatures: Sequence[float] = ()
) -> tuple[DraftedBlocks, ...]:
    """Draft from every valid anchor of a row, `chunk_blocks` blocks at a time. temperatures: over 0, ascending."""
    rows = candidate_rows(batch.document_T, batch.loss_mask_T, batch.next_supervised_T)
    if not len(rows):
        return ()
    inputs, done = row_inputs(batch, compute), []
    teacher_T = teacher_tokens(batch, batch.next_supervised_T, head)
    kept = draft_head(head.head, drafter.d2t)
    for start in range(0, len(rows), chunk_blocks):
        anchors = pad_anchors(rows[start : start + chunk_blocks], chunk_blocks if compute.attention == "flex" else 1)
        labels = labels_of(batch, anchors, drafter.spec)
        predicted_AS, accept_UAS = _predict(drafter, head, kept, inputs, anchors, batch, labels, compute, temperatures)
        right_AS = (predicted_AS == teacher_T[labels.teacher_row_AS]) & labels.carries_AS
        right_data_AS = (predicted_AS == labels.data_AS) & labels.carries_AS
        real = anchors.keep_A
        accepted = accept_UAS[:, real] if accept_UAS is not None else None
        done.append(DraftedBlocks(anchors.row_A[real], labels.carries_AS[real], right_AS[real], right_data_AS[real], accepted))
    return tuple(done)


def _predict(
    drafter: Drafter,
    head: TargetHead,
    kept: DraftHead,
    inputs: RowInputs,
    anchors: Anchors,
    batch: Batch,
    labels: SlotLabels,
    compute: Compute,
    temperatures: Sequence[float],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int64 [A, S] on the CPU: the drafter's most likely token of each slot that counts, -1 elsewhere; and, when there are
    temperatures, float64 [U, A, S]: the acceptance of each slot in every way to sample, 0 where it does not count."""
    carries_AS = labels.carries_AS
    hidden_QH = draft(drafter, drafter.spec, head, inputs, anchors.to(compute.device), compute)
    hidden_ASH = hidden_QH.unflatten(0, (len(anchors), drafter.spec.block_size))[:, drafter.spec.first_slot :]
    hidden_MH = hidden_ASH[carries_AS.to(compute.device)]
    tokens, accepts = [], []
    for part, row_m in zip(hidden_MH.split(CACHED_LOGITS_ROWS), labels.teacher_row_AS[carries_AS].split(CACHED_LOGITS_ROWS)):
        logits_mD = kept.head.logits(part)
        tokens.append(kept.to_tokens(logits_mD.max(-1).indices).cpu())
        if temperatures:
            assert batch.verifier is not None, "the teacher's distributions need verifier states"
            rows, where_m = torch.unique(row_m, return_inverse=True)  # neighbouring blocks share most of their teacher rows
            target_uV = head.teacher_logits(batch.verifier_rows(rows, head.device))
            accepts.append(slot_acceptance(temperatures, logits_mD, target_uV, where_m.to(head.device), kept))
    predicted_AS = torch.full(carries_AS.shape, -1, dtype=torch.int64)
    predicted_AS[carries_AS] = torch.cat(tokens)
    if not temperatures:
        return predicted_AS, None
    accept_UAS = torch.zeros(len(accepts[0]), *carries_AS.shape, dtype=torch.float64)
    accept_UAS[:, carries_AS] = torch.cat(accepts, 1)
    return predicted_AS, accept_UAS
