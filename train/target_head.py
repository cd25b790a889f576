"""TargetHead: what training needs of the target: embedding, final norm and output head, frozen.

In: a cache's `target/` files and what its spec says of them. Out: embeddings, teacher logits and teacher tokens. This is the
one place where the final norm is applied, exactly once, to the raw output of the last block. The norm is the target's own
class; the head is the embedding when tied, and nothing missing is ever made up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..common import layout, target_folder
from ..common.errors import CacheDamaged, InputError
from ..common.spec import CacheSpec, TargetSpec
from .loss import Head

EMBEDDING, HEAD, NORM_PREFIX = "embed_tokens.weight", "lm_head.weight", "norm."
PLACE = "cache.json target.final_norm"
ALLOWED_NORM_MODULES = ("transformers.", "torch.nn.")


class TargetHead:
    """Frozen tensors in `dtype` on `device`; the norm runs in the type that the target runs it in, bfloat16.

    Raises CacheDamaged for files that are missing or changed, do not fit the spec or contradict it, InputError for a norm class that is
    not taken from transformers or torch.nn.
    """

    def __init__(self, cache: Path, spec: CacheSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        target, path = spec.settings.target, target_folder.check(cache, layout.HEAD_FILE) / layout.HEAD_FILE
        tensors = _read(path)
        shape = (target.vocab_size, target.hidden_size)
        embedding = _matrix(tensors, EMBEDDING, shape, path)
        weight = _head_weight(tensors, embedding, target, shape, path)
        norm = {name.removeprefix(NORM_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(NORM_PREFIX)}
        self.norm = load_norm(target, norm, str(path)).to(device)
        self.embedding_VH = embedding.to(device, dtype)
        same = weight is embedding
        self.head = Head(self.embedding_VH if same else weight.to(device, dtype), target.logit_scale, target.logit_softcap)
        self._norm_dtype = next((p.dtype for p in self.norm.parameters()), torch.bfloat16)
        # A fixed number of rows a product: the result of a row then never depends on which rows were asked for with it.
        self.chunk_rows = 2048 if device.type == "cuda" else 128
        self._compiled: Callable[[torch.Tensor], torch.Tensor] | None = None

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Raw rows of the embedding, [..., H], unscaled as all serving engines feed them to the drafter."""
        return F.embedding(ids, self.embedding_VH)

    @torch.no_grad()
    def normed(self, verifier_nH: torch.Tensor) -> torch.Tensor:
        """The final norm of raw verifier states, [n, H]."""
        return self.norm(verifier_nH.to(self.device, self._norm_dtype)).to(self.dtype)

    @torch.no_grad()
    def teacher_logits(self, verifier_nH: torch.Tensor) -> torch.Tensor:
        """The target's own logits, [n, V], float32, from raw verifier states [n, H]."""
        return self.head.logits(self.normed(verifier_nH))

    @torch.no_grad()
    def teacher_tokens(self, verifier_nH: torch.Tensor) -> torch.Tensor:
        """The target's most likely next token after each raw verifier state: int64 [n]."""
        out = torch.empty(len(verifier_nH), dtype=torch.int64, device=self.device)
        for start in range(0, len(verifier_nH), self.chunk_rows):
            rows = verifier_nH[start : start + self.chunk_rows]
            filled = F.pad(rows, (0, 0, 0, self.chunk_rows - len(rows)))
            out[start : start + len(rows)] = self._most_likely(self.head.product(self.normed(filled)))[: len(rows)]
        return out

    def _most_likely(self, product_nV: torch.Tensor) -> torch.Tensor:
        """Tokens of the head's products; on a GPU compiled, so that their logits are never written out in float32."""
        if product_nV.device.type == "cuda" and self._compiled is None:
            self._compiled = torch.compile(self._largest)
        return (self._compiled or self._largest)(product_nV)

    def _largest(self, product_nV: torch.Tensor) -> torch.Tensor:
        return self.head.shape(product_nV).max(-1).indices


def load_norm(target: TargetSpec, tensors: dict[str, torch.Tensor], place: str) -> nn.Module:
    """The target's final norm from its own class (`module:name`), its parameters loaded strictly and frozen.

    Built with (hidden_size, eps), or (hidden_size) for a class without epsilon. Raises InputError for a class from anywhere
    but transformers and torch.nn, CacheDamaged for parameters that do not fit.
    """
    module_name, _, class_name = target.final_norm.partition(":")
    if not f"{module_name}.".startswith(ALLOWED_NORM_MODULES):
        problem = "the final norm's class may not be loaded from there"
        raise InputError(problem, place=PLACE, found=target.final_norm, expected="a class of transformers or torch.nn")
    try:
        cls: Any = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        problem, fix = f"the final norm's class cannot be loaded: {error}", "install the transformers version of the extraction"
        raise InputError(problem, place=PLACE, found=target.final_norm, fix=fix) from None
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InputError("is no module class", place=PLACE, found=target.final_norm, expected="a class such as module:RMSNorm")
    norm = _build(cls, target)
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if dtypes:
        norm = norm.to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    try:
        norm.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise CacheDamaged(f"the final norm's parameters do not fit {target.final_norm}: {error}", place=place) from None
    return norm.requires_grad_(False).eval()


def _build(cls: Any, target: TargetSpec) -> nn.Module:
    if target.final_norm_eps is not None:
        try:
            return cls(target.hidden_size, target.final_norm_eps)
        except TypeError:
            try:
                return cls(target.hidden_size, eps=target.final_norm_eps)
            except TypeError:
                pass
    return cls(target.hidden_size)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CacheDamaged(f"cannot be read: {error}", place=str(path), fix="extract again, or copy the file from a good copy of the cache") from None


def _matrix(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, int], path: Path) -> torch.Tensor:
    if name not in tensors:
        raise CacheDamaged(f"has no {name}; it is never made up", place=str(path), found=sorted(tensors), expected=f"{name} {list(shape)}")
    if tuple(tensors[name].shape) != shape:
        found = list(tensors[name].shape)
        raise CacheDamaged(f"{name} has another shape than cache.json says", place=str(path), found=found, expected=str(list(shape)))
    return tensors[name]


def _head_weight(tensors: dict[str, torch.Tensor], embedding: torch.Tensor, target: TargetSpec, shape: tuple[int, int], path: Path) -> torch.Tensor:
    if not target.tied_embeddings:
        return _matrix(tensors, HEAD, shape, path)
    if HEAD in tensors and not torch.equal(tensors[HEAD], embedding):
        raise CacheDamaged("the embeddings are said to be tied, yet a different lm_head is stored; which is right cannot be told", place=str(path))
    return embedding
