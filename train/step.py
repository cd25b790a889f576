"""One row through drafter and loss. The only place that sees anchors, masks, drafter, labels and loss together.

In: a Batch on the CPU, the drafter, the target's head, and generators. Out: a differentiable loss sum and LossSums. Weights,
gradients and steps are the trainer's. Anchors and labels are made on the CPU; features are merged where the drafter lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .anchors import Anchors, draw_anchors
from .attention import Mask
from .batch import Batch
from .config import LossConfig
from .device import Compute
from .drafter_spec import SLIDING, DrafterSpec
from .features import merge_planes
from .labels import SlotLabels, slot_labels
from .loss import LossSums, TeacherLogits, chunked_loss, slot_weights
from .masks import block_mask, queries, query_positions, segment_mask
from .metrics import count_blocks
from .seeds import derive_seed
from .target_head import TargetHead
from .teacher import TeacherCache, take_rows, teacher_tokens

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


def row_inputs(batch: Batch, compute: Compute, noise: float = 0.0, generator: torch.Generator | None = None) -> RowInputs:
    """Move a row to the device and merge its planes; add uniform noise in [-noise, noise) to the features, and only there."""
    features_TF = merge_planes(batch.features.to(compute.device)).flatten(1).to(compute.dtype)
    if noise:
        features_TF = features_TF + torch.empty_like(features_TF, dtype=torch.float32).uniform_(-noise, noise, generator=generator).to(compute.dtype)
    tokens = (tensor.to(compute.device, non_blocking=True) for tensor in (batch.input_ids_T, batch.document_T, batch.position_T))
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


def labels_of(batch: Batch, anchors: Anchors, block_size: int) -> SlotLabels:
    """Labels of the blocks at `anchors`, all on the CPU."""
    return slot_labels(anchors.row_A, anchors.keep_A, batch.document_T, batch.next_ids_T, batch.next_supervised_T, block_size)


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
) -> RowLoss:
    """Draw anchors, draft, and compare with the labels. Never changes a weight or a gradient."""
    anchors = draw_anchors(
        batch.document_T,
        batch.loss_mask_T,
        batch.next_supervised_T,
        per_document=config.anchors_per_document,
        per_row=config.anchors_per_row,
        generator=seeds.anchors,
        pad_multiple=pad_multiple(config, spec, compute),
    )
    if not len(anchors):
        return RowLoss(None, LossSums.none(spec.block_size, compute.device))
    labels = labels_of(batch, anchors, spec.block_size)
    block_M, slot_M = labels.carries_AS.nonzero(as_tuple=True)
    row_M = labels.teacher_row_AS[block_M, slot_M]
    label_M, teacher = _teaching(batch, labels, row_M, head, config, cache)
    weight_M = slot_weights(spec.block_size, config.position_weights, config.gamma)[slot_M].to(compute.device)

    row = row_inputs(batch, compute, config.feature_noise, seeds.noise)
    hidden_QH = draft(forward, spec, head, row, anchors.to(compute.device), compute)
    query_M = (block_M * spec.block_size + slot_M + 1).to(compute.device)  # slot 0 is the anchor
    loss, predicted_M, target_M = chunked_loss(
        hidden_QH[query_M], head.head, weight_M, chunk_slots=chunk_slots(config, compute.device), label_M=label_M, teacher=teacher
    )
    right_AS = torch.zeros_like(labels.carries_AS, device=compute.device)
    right_AS[block_M.to(compute.device), slot_M.to(compute.device)] = predicted_M == target_M
    counts = count_blocks(right_AS, labels.carries_AS.to(compute.device))
    return RowLoss(loss, LossSums(loss.detach(), weight_M.sum(dtype=torch.float64), counts))


def _teaching(
    batch: Batch, labels: SlotLabels, row_M: torch.Tensor, head: TargetHead, config: LossConfig, cache: TeacherCache | None
) -> tuple[torch.Tensor | None, TeacherLogits | None]:
    """Label tokens of M slots, or the source of their teacher's logits."""
    if config.label == "data":
        return labels.data_AS[labels.carries_AS].to(head.device), None
    if config.label == "teacher":
        needed_T = torch.zeros(len(batch.document_T), dtype=torch.bool)
        needed_T[row_M] = True
        return teacher_tokens(batch, needed_T, head, cache)[row_M].to(head.device), None
    assert batch.verifier is not None, "a soft label needs verifier states"
    rows, where_M = torch.unique(row_M, return_inverse=True)
    verifier_nH, where_M = merge_planes(take_rows(batch.verifier, rows).to(head.device)), where_M.to(head.device)
    return None, lambda part: head.teacher_logits(verifier_nH[where_M[part]])
