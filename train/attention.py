"""Attention of Q slots over T context rows and themselves, under a mask in one of three forms.

In: queries [Q, N, E], keys and values [T + Q, G, E], a finished mask. Out: [Q, N, E]. Knows nothing of how masks arise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention


@dataclass(frozen=True)
class Segment:
    """Some consecutive queries, and the only keys that they may see: some consecutive context rows, and themselves."""

    queries: slice
    rows: slice
    mask: torch.Tensor
    """bool [q, r + q] for q queries and r rows."""


Mask = torch.Tensor | BlockMask | tuple[Segment, ...]
"""A dense bool matrix [Q, T + Q]; flex attention's block-sparse form of it; or its non-empty pieces."""
_compiled_flex: Callable[..., torch.Tensor] | None = None


def attend(query_QNE: torch.Tensor, key_GE: torch.Tensor, value_GE: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Softmax attention; N / G query heads share a key head."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_QNE, key_GE, value_GE))  # [1, heads, length, E]
    if isinstance(mask, BlockMask):
        flex: Any = _flex() if query.device.type == "cuda" else flex_attention
        return flex(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])[0].transpose(0, 1)
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, dim=1) for x in (key, value))
    if isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0].transpose(0, 1)
    length = key.shape[2] - query.shape[2]
    done = []
    for segment in mask:
        own = slice(length + segment.queries.start, length + segment.queries.stop)
        some_key, some_value = (torch.cat((x[:, :, segment.rows], x[:, :, own]), dim=2) for x in (key, value))
        done.append(F.scaled_dot_product_attention(query[:, :, segment.queries], some_key, some_value, attn_mask=segment.mask))
    return torch.cat(done, dim=2)[0].transpose(0, 1)


def _flex() -> Callable[..., torch.Tensor]:
    global _compiled_flex
    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    return _compiled_flex
