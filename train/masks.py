"""Who sees whom: the attention mask of a row's blocks over its context and over each other.

In: anchors and documents of a row. Out: a dense bool matrix [Q, T + Q], its non-empty pieces, or the same rule as a function
for flex attention.
Q = A * B queries, block after block; keys are the T context rows, then the Q slots. Pure functions.

Full layers: a slot of the block at anchor a sees context rows < a of its document (strictly: when serving, the state of the
anchor does not exist yet), and all slots of its own block.
Sliding layers of window W: slot k sees those of them at positions > a+k-W, and of its block only slots up to its own; this
is how the reference implementation and vLLM serve `sliding_attention` layers.
A padding block sees only itself, so that no query is without a key (softmax over nothing is NaN).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from .attention import Segment

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SEGMENT_BLOCKS = 32
"""Blocks in a piece of a mask: enough for whole tiles, few enough that their products with each other cost little."""
_compiled_create: Callable[..., BlockMask] | None = None


@dataclass(frozen=True)
class Queries:
    """What the rules need to know of each query."""

    anchor_Q: torch.Tensor
    """int64 [Q]: row of the query's anchor."""
    document_Q: torch.Tensor
    """int32 [Q]: its document; -2, which no row has, on padding."""
    slot_Q: torch.Tensor
    """int64 [Q]: 0..B-1."""
    block_Q: torch.Tensor
    """int64 [Q]: number of its block."""


def queries(anchor_A: torch.Tensor, keep_A: torch.Tensor, document_T: torch.Tensor, block_size: int) -> Queries:
    """The Q = A * B queries of a row. anchor_A: int64, rows; keep_A: bool, False on padding."""
    number_Q = torch.arange(len(anchor_A) * block_size, device=document_T.device)
    block_Q = number_Q // block_size
    document_A = torch.where(keep_A, document_T[anchor_A], -2)
    return Queries(anchor_A[block_Q], document_A[block_Q], number_Q % block_size, block_Q)


def query_positions(anchor_A: torch.Tensor, position_T: torch.Tensor, block_size: int) -> torch.Tensor:
    """int64 [Q]: slot k of anchor a sits at the anchor's position in its document plus k."""
    return (position_T[anchor_A].long()[:, None] + torch.arange(block_size, device=position_T.device)).flatten()


def dense_mask(of: Queries, document_T: torch.Tensor, window: int | None) -> torch.Tensor:
    """bool [Q, T + Q]. window: W of a sliding layer, None for a full one."""
    row_T = torch.arange(len(document_T), device=document_T.device)
    return _visible(of, document_T, row_T, window)


def segment_mask(of: Queries, document_T: torch.Tensor, window: int | None) -> tuple[Segment, ...]:
    """The non-empty pieces of `dense_mask`: at most SEGMENT_BLOCKS blocks of one document, and its rows before their last anchor.

    Blocks never see each other, so cutting between them changes nothing. Anchors must be ascending.
    """
    first_row = {int(document): int(row) for row, document in reversed(list(enumerate(document_T.tolist())))}
    size = int(of.slot_Q.max()) + 1
    documents, counts = torch.unique_consecutive(of.document_Q, return_counts=True)
    segments, start = [], 0
    for document, count in zip(documents.tolist(), counts.tolist()):
        for begin in range(start, start + count, SEGMENT_BLOCKS * size):
            queries = slice(begin, min(begin + SEGMENT_BLOCKS * size, start + count))
            piece = Queries(of.anchor_Q[queries], of.document_Q[queries], of.slot_Q[queries], of.block_Q[queries])
            first = first_row.get(document, 0)
            rows = slice(first, max(int(piece.anchor_Q.max()), first))
            row = torch.arange(rows.start, rows.stop, device=document_T.device)
            segments.append(Segment(queries, rows, _visible(piece, document_T[rows], row, window)))
        start += count
    return tuple(segments)


def _visible(of: Queries, document: torch.Tensor, row: torch.Tensor, window: int | None) -> torch.Tensor:
    """The rule for some queries over some context rows and these queries themselves."""
    context = (document == of.document_Q[:, None]) & (row < of.anchor_Q[:, None])
    block = of.block_Q[:, None] == of.block_Q
    if window is not None:
        # Rows of a document are consecutive, so a difference of rows is one of positions.
        context &= row > (of.anchor_Q + of.slot_Q - window)[:, None]
        ahead = of.slot_Q[:, None] - of.slot_Q
        block &= (ahead >= 0) & (ahead < window)
    return torch.cat((context, block), dim=1)


def mask_rule(of: Queries, document_T: torch.Tensor, window: int | None) -> MaskRule:
    """The same as `dense_mask`, as flex attention's mask_mod(batch, head, query, key)."""
    length, num_queries = len(document_T), len(of.anchor_Q)

    def rule(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_context = key < length
        row = key.clamp(max=length - 1)
        other = (key - length).clamp(0, num_queries - 1)
        anchor, slot = of.anchor_Q[query], of.slot_Q[query]
        context = is_context & (document_T[row] == of.document_Q[query]) & (row < anchor)
        block = ~is_context & (of.block_Q[other] == of.block_Q[query])
        if window is not None:
            ahead = slot - of.slot_Q[other]
            context = context & (row > anchor + slot - window)  # nothing in place: the rule is compiled into the kernel
            block = block & (ahead >= 0) & (ahead < window)
        return context | block

    return rule


def block_mask(of: Queries, document_T: torch.Tensor, window: int | None) -> BlockMask:
    """The rule as flex attention's block-sparse mask. On CUDA it is built by a compiled kernel, never as a whole matrix."""
    global _compiled_create
    num_queries, num_keys, device = len(of.anchor_Q), len(document_T) + len(of.anchor_Q), document_T.device
    if device.type != "cuda":
        return create_block_mask(mask_rule(of, document_T, window), None, None, num_queries, num_keys, device=device)
    if _compiled_create is None:
        _compiled_create = torch.compile(create_block_mask)
    return _compiled_create(mask_rule(of, document_T, window), None, None, num_queries, num_keys, device=device)
