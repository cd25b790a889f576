"""Rows made by hand: packed Batches with known states, and a drafter and target head of eight numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_cache.train.batch import PADDING, Batch
from dflash_cache.train.device import Compute
from dflash_cache.train.drafter import Drafter
from dflash_cache.train.drafter_spec import DrafterSpec
from dflash_cache.train.loss import Head

H, V, K = 8, 32, 3
CPU32 = Compute(torch.device("cpu"), torch.float32, "dense")


@dataclass(frozen=True)
class Document:
    """A document of a row. States are drawn from `seed`; `supervised` is its loss mask (default: all but the first two)."""

    length: int
    seed: int = 0
    supervised: Sequence[int] | None = None
    next_token: int = -1
    ids: Sequence[int] | None = None
    features: torch.Tensor | None = field(default=None, compare=False)
    verifier: torch.Tensor | None = field(default=None, compare=False)


def states_of(document: Document, *, hidden: int = H, layers: int = K, vocab: int = V) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [T], features [T, K, H], verifier [T, H]) of a document."""
    generator = torch.Generator().manual_seed(document.seed)
    ids = torch.randint(4, vocab, (document.length,), generator=generator)
    features = torch.randn(document.length, layers, hidden, generator=generator).bfloat16()
    verifier = torch.randn(document.length, hidden, generator=generator).bfloat16()
    return (
        ids if document.ids is None else torch.tensor(document.ids),
        features if document.features is None else document.features,
        verifier if document.verifier is None else document.verifier,
    )


def make_batch(documents: Sequence[Document], row_tokens: int | None = None, *, first_sample: int = 0, **sizes: int) -> Batch:
    """The documents one after the other, padded to `row_tokens`."""
    hidden, layers = sizes.get("hidden", H), sizes.get("layers", K)
    total = row_tokens or sum(d.length for d in documents)
    ids, following = torch.zeros(total, dtype=torch.int64), torch.full((total,), -1)
    document_T, position = torch.full((total,), PADDING, dtype=torch.int32), torch.zeros(total, dtype=torch.int32)
    mask, following_mask = torch.zeros(total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    features, verifier = torch.zeros(total, layers, hidden, dtype=torch.bfloat16), torch.zeros(total, hidden, dtype=torch.bfloat16)
    at = 0
    for number, document in enumerate(documents):
        here = slice(at, at + document.length)
        ids[here], features[here], verifier[here] = states_of(document, **sizes)
        default = [0, 0] + [1] * (document.length - 2)
        mask[here] = torch.tensor(list(document.supervised or default), dtype=torch.bool)
        following[at : at + document.length - 1] = ids[at + 1 : at + document.length]
        following_mask[at : at + document.length - 1] = mask[at + 1 : at + document.length]
        if document.next_token >= 0:
            following[at + document.length - 1], following_mask[at + document.length - 1] = document.next_token, True
        document_T[here], position[here] = number, torch.arange(document.length, dtype=torch.int32)
        at += document.length
    return Batch(
        input_ids_T=ids,
        document_T=document_T,
        position_T=position,
        loss_mask_T=mask,
        next_ids_T=following,
        next_supervised_T=following_mask,
        features=features,
        verifier=verifier,
        sample_ids=tuple((0, first_sample + number) for number in range(len(documents))),
        sources=("data.jsonl",) * len(documents),
    )


def tiny_spec(**changes: Any) -> DrafterSpec:
    """Two layers of width 8, blocks of four."""
    sizes: dict[str, Any] = {
        "hidden_size": H,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "layer_types": ("full_attention", "full_attention"),
        "block_size": 4,
        "mask_token_id": 3,
        "target_layer_ids": (1, 2, 4),
        "num_target_layers": 6,
        "vocab_size": V,
    }
    return DrafterSpec(**{**sizes, **changes})


def tiny_drafter(seed: int = 0, spread: float = 0.5, **changes: Any) -> Drafter:
    """A random drafter whose every number matters (norms are not 1)."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(tiny_spec(**changes)).initialize(generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return drafter


class TinyHead:
    """A target head without files: the norm is x / rms(x); float32 unless told otherwise."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = torch.device("cpu"), dtype
        self.embedding_VH = torch.randn(V, H, generator=generator).to(dtype)
        self.head = Head(torch.randn(V, H, generator=generator).to(dtype))
        self.rows_asked = 0

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding_VH[ids]

    def teacher_logits(self, verifier_nH: torch.Tensor) -> torch.Tensor:
        states = verifier_nH.to(self.dtype)
        return self.head.logits(states * states.square().mean(-1, keepdim=True).rsqrt())

    def teacher_tokens(self, verifier_nH: torch.Tensor) -> torch.Tensor:
        self.rows_asked += len(verifier_nH)
        return self.teacher_logits(verifier_nH).argmax(-1)
