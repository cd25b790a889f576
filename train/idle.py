"""A forward and backward pass whose gradient is zero: what a process does when a step has no row, or no anchor, for it.

Weights that are shared or sharded need every process in every pass; one that stayed away would leave the others waiting.
"""

from __future__ import annotations

import torch

from .anchors import Anchors
from .batch import PADDING
from .config import LossConfig
from .device import Compute
from .drafter_spec import DrafterSpec
from .step import ForwardDrafter, RowInputs, draft, pad_multiple
from .target_head import TargetHead


def idle_loss(forward: ForwardDrafter, spec: DrafterSpec, head: TargetHead, config: LossConfig, compute: Compute, row_tokens: int) -> torch.Tensor:
    """0, differentiable by every weight: padding blocks over a row of padding, in the shapes of other rows."""
    zeros_T = torch.zeros(row_tokens, dtype=torch.int64, device=compute.device)
    width = len(spec.target_layer_ids) * spec.hidden_size
    row = RowInputs(
        features_TF=torch.zeros(row_tokens, width, dtype=compute.dtype, device=compute.device),
        input_ids_T=zeros_T,
        document_T=torch.full_like(zeros_T, PADDING, dtype=torch.int32),
        position_T=zeros_T.int(),
    )
    padded = pad_multiple(config, spec, compute)
    anchors = Anchors(torch.zeros(padded, dtype=torch.int64), torch.zeros(padded, dtype=torch.bool))
    return (draft(forward, spec, head, row, anchors.to(compute.device), compute) * 0).sum()
