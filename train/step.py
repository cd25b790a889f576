"""One row through drafter and loss. The only place that sees anchors, masks, drafter, labels and loss together.

In: a Batch on the CPU, the drafter, the target's head, and generators. Out: a differentiable loss sum and LossSums. Weights,
gradients and steps are the trainer's. Anchors and labels are made on the CPU; features are merged where the drafter lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .anchors import Anchors, draw_anchors
from .attention import Mask
from .batch import Batch
from .config import LossConfig
from .device import Compute, moved
from .draft_head import OUTSIDE, DraftHead
from .drafter_spec import SLIDING, DrafterSpec
from .labels import SlotLabels, slot_labels
from .loss import LossSums, TeacherLogits, Weigh, chunked_loss
from .masks import block_mask, queries, query_positions, segment_mask
from .metrics import count_blocks
from .seeds import derive_seed
from .slot_weights import dpace_weights, slot_weights
from .target_head import TargetHead
from .teacher import TeacherCache, teacher_tokens

ForwardDrafter = Callable[..., torch.Tensor]
"""The drafter, or a compiled form of it."""
SHAPE_BUCKETS = 4
"""Flex attention is compiled for each number of blocks; so many different ones occur at most."""
FLEX_TILE = 128


@dataclass(frozen=True)
class RowInputs:
    """What the drafter reads of a row, on its device."""

    features_TF: torch.Tensor
    """[T, K * H] in the type of the products."""
    input_ids_T: torch.Tensor
    document_T: torch.Tensor
    position_T: torch.Tensor


@dataclass(frozen=True)
class RowLoss:
    """A row's share of a step."""

    loss: torch.Tensor | None
    """Weighted sum, to be differentiated; None when no slot of the row carries loss."""
    sums: LossSums


@dataclass(frozen=True)
class StepSeeds:
    """Generators of one row: anchors on the CPU, noise on the drafter's device."""

    anchors: torch.Generator
    noise: torch.Generator

    @classmethod
    def at(cls, seed: int, step: int, row: int, rank: int, device: torch.device) -> StepSeeds:
        """Those of row number `row` of optimizer step `step` on `rank`; nothing else enters."""
        places = {"anchors": torch.device("cpu"), "noise": device}
        return cls(**{name: torch.Generator(where).manual_seed(derive_seed(name, seed, step, row, rank)) for name, where in places.items()})


def row_inputs(batch: Batch, compute: Compute, noise: float = 0.0, generator: torch.Generator | None = None, kind: str = "uniform") -> RowInputs:
    """Move a row to the device; add noise to the features, and only there.

    kind: uniform in [-noise, noise), or gaussian of standard deviation `noise`.
    """
    features_TF = moved(batch.features, compute.device).flatten(1).to(compute.dtype)
    if noise:
        empty_TF = torch.empty_like(features_TF, dtype=torch.float32)
        drawn_TF = empty_TF.uniform_(-noise, noise, generator=generator) if kind == "uniform" else empty_TF.normal_(0, noise, generator=generator)
        features_TF = features_TF + drawn_TF.to(compute.dtype)
    tokens = (moved(tensor, compute.device) for tensor in (batch.input_ids_T, batch.document_T, batch.position_T))
    return RowInputs(features_TF, *tokens)


def attention_masks(anchors: Anchors, document_T: torch.Tensor, spec: DrafterSpec, compute: Compute) -> dict[str, Mask]:
    """A mask for each layer type that the drafter has."""
    of = queries(anchors.row_A, anchors.keep_A, document_T, spec.block_size)
    make: Callable[..., Mask] = block_mask if compute.attention == "flex" else segment_mask
    return {kind: make(of, document_T, spec.sliding_window if kind == SLIDING else None) for kind in dict.fromkeys(spec.layer_types)}


def draft(forward: ForwardDrafter, spec: DrafterSpec, head: TargetHead, row: RowInputs, anchors: Anchors, compute: Compute) -> torch.Tensor:
    """Hidden states of all slots of the blocks at `anchors` (on the device), [A * B, H]."""
    ids_AB = torch.full((len(anchors), spec.block_size), spec.mask_token_id, device=compute.device)
    ids_AB[:, 0] = row.input_ids_T[anchors.row_A]
    positions_Q = query_positions(anchors.row_A, row.position_T, spec.block_size)
    masks = attention_masks(anchors, row.document_T, spec, compute)
    return forward(row.features_TF, row.position_T, head.embed(ids_AB.flatten()), positions_Q, masks)


def labels_of(batch: Batch, anchors: Anchors, spec: DrafterSpec) -> SlotLabels:
    """Labels of the blocks at `anchors`, all on the CPU."""
    return slot_labels(anchors.row_A, anchors.keep_A, batch.document_T, batch.next_ids_T, batch.next_supervised_T, spec.num_drafted)


def pad_multiple(config: LossConfig, spec: DrafterSpec, compute: Compute) -> int:
    """Anchors are padded to a multiple of this: few shapes and whole tiles for flex attention, none for the dense mask."""
    if compute.attention == "dense":
        return 1
    bucket = -(-config.anchors_per_row // SHAPE_BUCKETS)
    tile = max(FLEX_TILE // spec.block_size, 1)
    return -(-bucket // tile) * tile


def chunk_slots(config: LossConfig, device: torch.device) -> int:
    """Slots whose logits exist at once: as configured, or 2048 on a GPU, and on a CPU what its caches hold."""
    return config.chunk_slots or (2048 if device.type == "cuda" else 128)


def row_loss(
    forward: ForwardDrafter,
    spec: DrafterSpec,
    head: TargetHead,
    batch: Batch,
    config: LossConfig,
    compute: Compute,
    seeds: StepSeeds,
    cache: TeacherCache | None = None,
    draft_head: DraftHead | None = None,
) -> RowLoss:
    """Draw anchors, draft, and compare with the labels. Never changes a weight or a gradient.

    draft_head: the drafter's own; None: the target's whole head. A label that it cannot propose carries no loss and counts as
    a mistake.
    """
    anchors = draw_anchors(
        batch.document_T,
        batch.loss_mask_T,
        batch.next_supervised_T,
        per_document=config.anchors_per_document,
        per_row=config.anchors_per_row,
        generator=seeds.anchors,
        pad_multiple=pad_multiple(config, spec, compute),
    )
    none = LossSums.none(spec.num_drafted, compute.device)
    if not len(anchors):
        return RowLoss(None, none)
    draft_head = draft_head or DraftHead(head.head)
    assert (draft_head.kept_D is None) == (spec.draft_vocab_size is None), "a pruned drafter needs its own head"
    labels = labels_of(batch, anchors, spec)
    learned = learned_slots(batch, labels, head, draft_head, config, cache)
    block_M, slot_M, carries_AS = (moved(tensor, compute.device) for tensor in (learned.block_M, learned.slot_M, labels.carries_AS))
    right_AS = torch.zeros_like(carries_AS)
    if not len(block_M):
        return RowLoss(None, replace(none, counts=count_blocks(right_AS, carries_AS)))

    row = row_inputs(batch, compute, config.feature_noise, seeds.noise, config.feature_noise_kind)
    hidden_QH = draft(forward, spec, head, row, anchors.to(compute.device), compute)
    found = chunked_loss(
        hidden_QH[block_M * spec.block_size + slot_M + spec.first_slot],
        draft_head.head,
        weigher(config, carries_AS, block_M, slot_M),
        chunk_slots=chunk_slots(config, compute.device),
        factors=config.factors,
        lk_eta=config.lk_eta,
        label_M=learned.label_M,
        teacher=learned.teacher,
    )
    right_AS[block_M, slot_M] = found.predicted_M == found.label_M
    sums = LossSums(found.loss.detach(), found.weight_M.sum(dtype=torch.float64), count_blocks(right_AS, carries_AS))
    return RowLoss(found.loss, sums)


def weigher(config: LossConfig, carries_AS: torch.Tensor, block_M: torch.Tensor, slot_M: torch.Tensor) -> Weigh:
    """The weights of the M slots at [block_M, slot_M] of a table of drafted slots, all on one device."""
    if config.position_weights != "dpace":
        weight_M = slot_weights(carries_AS.shape[1], config.position_weights, config.gamma)
        weight_M = moved(weight_M, carries_AS.device)[slot_M]
        return lambda _: weight_M

    def weigh(confidence_M: torch.Tensor) -> torch.Tensor:
        confidence_AS = torch.zeros(carries_AS.shape, device=carries_AS.device)
        confidence_AS[block_M, slot_M] = confidence_M.float()
        return dpace_weights(confidence_AS, carries_AS, config.dpace_alpha)[block_M, slot_M]

    return weigh


@dataclass(frozen=True)
class LearnedSlots:
    """The M slots that carry loss, block after block, and what they learn."""

    block_M: torch.Tensor
    """int64 [M]: its block."""
    slot_M: torch.Tensor
    """int64 [M]: the how-many-eth drafted slot of the block, from 0."""
    label_M: torch.Tensor | None
    """int64 [M]: draft ids; None: the teacher's most likely tokens."""
    teacher: TeacherLogits | None
    """Logits over the draft vocabulary, for a loss against distributions."""


def learned_slots(
    batch: Batch, labels: SlotLabels, head: TargetHead, draft_head: DraftHead, config: LossConfig, cache: TeacherCache | None
) -> LearnedSlots:
    """Choose the slots, on the CPU; labels and teacher are on the head's device."""
    block_M, slot_M = labels.carries_AS.nonzero(as_tuple=True)
    row_M, label_M = labels.teacher_row_AS[block_M, slot_M], None
    if config.label == "data":
        label_M = labels.data_AS[block_M, slot_M]
    elif config.label == "teacher" or draft_head.kept_D is not None:
        needed_T = torch.zeros(len(batch.document_T), dtype=torch.bool)
        needed_T[row_M] = True
        label_M = teacher_tokens(batch, needed_T, head, cache)[row_M]
    if label_M is not None and draft_head.kept_D is not None:
        label_M = draft_head.to_draft(label_M)
        kept = label_M != OUTSIDE
        block_M, slot_M, row_M, label_M = block_M[kept], slot_M[kept], row_M[kept], label_M[kept]
    teacher = _teacher_logits(batch, row_M, head, draft_head) if config.label == "soft" else None
    return LearnedSlots(block_M, slot_M, None if label_M is None else moved(label_M, head.device), teacher)


def _teacher_logits(batch: Batch, row_M: torch.Tensor, head: TargetHead, draft_head: DraftHead) -> TeacherLogits:
    assert batch.verifier is not None, "a soft label needs verifier states"
    rows, where_M = torch.unique(row_M, return_inverse=True)
    verifier_nH, where_M = batch.verifier_rows(rows, head.device), where_M.to(head.device)
    return lambda part: draft_head.kept_logits(head.teacher_logits(verifier_nH[where_M[part]]))
