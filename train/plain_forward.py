"""The drafter once more, as plainly as it can be written: loops, explicit matrices, one block of one document at a time.

An independent witness: it shares no code with `drafter`, `attention` and `masks`, so that a mistake there does not repeat here. In: a
folder's tensors, and Conventions that say how to run them. Out: hidden states and logits of a block. Float32 throughout. It reads
exported folders of both formats (z-lab, speculators), with the conventions that vLLM would read from their config.json.

    plain = PlainDrafter.load(folder)
    hidden_BH = plain.block(features_TKH, anchor_token, anchor_position, embed)   # row t of the features is position t of the document
    tokens = plain.tokens(hidden_BH, head_VH)                                     # the B - 1 drafted tokens
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..common.errors import InputError
from .conventions import Conventions, served_conventions
from .tensor_files import TensorFiles

FLOATS = ("float32", "bfloat16", "float16", "float64")
TABLES = ("d2t", "t2d")
"""Whole numbers: which tokens a pruned vocabulary keeps."""

Embed = Callable[[torch.Tensor], torch.Tensor]
"""int64 [n] -> [n, H]: raw rows of the target's embedding."""
Context = list[tuple[torch.Tensor, torch.Tensor]]
"""Of each layer, keys and values of the context rows: [T, G, E] each, the keys normed and rotated."""


@dataclass(frozen=True)
class PlainDrafter:
    """Tensors and how to run them."""

    tensors: Mapping[str, torch.Tensor]
    """By their names in the folder: float32, and int64 for `d2t`. A folder's own `embed_tokens.weight` and `lm_head.weight` are among them."""
    conventions: Conventions
    """As the folder's config.json says, read as vLLM reads it."""

    @classmethod
    def load(cls, folder: Path, device: str | torch.device = "cpu") -> PlainDrafter:
        """Of an exported folder. Raises InputError for a config that vLLM would refuse, and for tensors that are no plain numbers."""
        config = folder / "config.json"
        try:
            document = json.loads(config.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"cannot be read: {error}", place=str(config), expected="the config.json of an exported drafter") from None
        if not isinstance(document, dict):
            raise InputError("must be a JSON object", place=str(config), found=type(document).__name__)
        files = TensorFiles(folder)
        odd = [name for name, facts in files.facts.items() if facts.dtype not in FLOATS and name not in TABLES]
        if odd:
            raise InputError("holds quantised tensors, which are not read here", place=str(folder), found=", ".join(odd[:4]))
        stored = {name: files.read(name) for name in files.facts}
        tensors = {name: (tensor.float() if tensor.is_floating_point() else tensor).to(device) for name, tensor in stored.items()}
        return cls(tensors, served_conventions(document, str(config)))

    def block(
        self, features_TKH: torch.Tensor, anchor_token: int, anchor_position: int, embed: Embed, conventions: Conventions | None = None
    ) -> torch.Tensor:
        """Hidden states of the block at an anchor, after the last norm: [B, H], slot 0 is the anchor.

        features_TKH: states of the document's rows from position 0 on, layers in the order of `layer_ids`; those from the anchor on
        are not looked at. conventions: others than the folder's.
        """
        how = conventions or self.conventions
        return self.block_over(self.context(features_TKH[: anchor_position + how.own_row], how), anchor_token, anchor_position, embed, how)

    def context(self, features_TKH: torch.Tensor, how: Conventions) -> Context:
        """Keys and values of context rows, for all layers; they do not depend on the anchor."""
        fused_TH = _norm(features_TKH.float().flatten(1) @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"], how.norm_eps)
        place_T = torch.arange(len(fused_TH), device=fused_TH.device)
        return [self._keys_values(layer, fused_TH, place_T, how) for layer in range(how.num_layers)]

    def block_over(self, context: Context, anchor_token: int, anchor_position: int, embed: Embed, how: Conventions) -> torch.Tensor:
        """`block` over a prepared context, of which it may hold more rows than the block sees."""
        rows, size = anchor_position + how.own_row, how.block_size
        assert all(len(key) >= rows for key, _ in context), "the context lacks rows before the anchor"
        device = self.tensors["fc.weight"].device
        ids_B = torch.tensor([anchor_token] + [how.mask_token_id] * (size - 1), device=device)
        place_B = anchor_position + how.position_offset + torch.arange(size, device=device)
        x_BH = embed(ids_B).float() * how.embedding_scale
        for layer in range(how.num_layers):
            normed_BH = _norm(x_BH, self._of(layer, "input_layernorm"), how.norm_eps)
            key, value = self._keys_values(layer, normed_BH, place_B, how)
            key, value = torch.cat((context[layer][0][:rows], key)), torch.cat((context[layer][1][:rows], value))
            query = (normed_BH @ self._of(layer, "self_attn.q_proj").T).view(size, how.num_heads, how.head_dim)
            query = _rotate(_norm(query, self._of(layer, "self_attn.q_norm"), how.norm_eps), place_B, how)
            sees = visible(rows, anchor_position, how, layer).to(device)
            heads = []
            for head in range(how.num_heads):
                group = head // (how.num_heads // how.num_groups)
                scores = query[:, head] @ key[:, group].T / math.sqrt(how.head_dim)
                heads.append(scores.masked_fill(~sees, -math.inf).softmax(-1) @ value[:, group])
            x_BH = x_BH + torch.cat(heads, dim=1) @ self._of(layer, "self_attn.o_proj").T
            normed_BH = _norm(x_BH, self._of(layer, "post_attention_layernorm"), how.norm_eps)
            gate = normed_BH @ self._of(layer, "mlp.gate_proj").T
            x_BH = x_BH + (gate * torch.sigmoid(gate) * (normed_BH @ self._of(layer, "mlp.up_proj").T)) @ self._of(layer, "mlp.down_proj").T
        return _norm(x_BH, self.tensors["norm.weight"], how.norm_eps)

    def logits(self, hidden_BH: torch.Tensor, head_VH: torch.Tensor, conventions: Conventions | None = None) -> torch.Tensor:
        """[B, V]; with a pruned vocabulary, -inf for tokens that cannot be proposed. head_VH: the target's."""
        how = conventions or self.conventions
        kept = self.tensors.get("d2t")
        rows = None if kept is None else kept + torch.arange(len(kept), device=kept.device)
        head = head_VH.float() if rows is None else head_VH.float()[rows]
        logits = hidden_BH @ head.T * how.logit_scale
        if how.logit_softcap:
            logits = how.logit_softcap * torch.tanh(logits / how.logit_softcap)
        return logits if rows is None else torch.full((len(logits), len(head_VH)), -math.inf, device=logits.device).index_copy(1, rows, logits)

    def tokens(self, hidden_BH: torch.Tensor, head_VH: torch.Tensor, conventions: Conventions | None = None) -> list[int]:
        """The drafted tokens, first after the anchor first."""
        how = conventions or self.conventions
        return [int(row.argmax()) for row in self.logits(hidden_BH[how.first_slot :], head_VH, how)]

    def _of(self, layer: int, name: str) -> torch.Tensor:
        return self.tensors[f"layers.{layer}.{name}.weight"]

    def _keys_values(self, layer: int, x_nH: torch.Tensor, place_n: torch.Tensor, how: Conventions) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(x_nH), how.num_groups, how.head_dim)
        key = _norm((x_nH @ self._of(layer, "self_attn.k_proj").T).view(shape), self._of(layer, "self_attn.k_norm"), how.norm_eps)
        return _rotate(key, place_n, how), (x_nH @ self._of(layer, "self_attn.v_proj").T).view(shape)


def visible(rows: int, anchor_position: int, how: Conventions, layer: int) -> torch.Tensor:
    """bool [B, rows + B]: what each slot of a block sees: context rows 0..rows-1, then the slots."""
    slot, row, other = torch.arange(how.block_size)[:, None], torch.arange(rows)[None], torch.arange(how.block_size)[None]
    window = how.windows[layer] or rows + 2 * how.block_size + abs(anchor_position)  # none: wider than all there is
    context = anchor_position + slot - row < window
    block = (slot - other).abs() < window
    return torch.cat((context, block & (other <= slot) if how.causal[layer] else block), dim=1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rotate(x_nGE: torch.Tensor, place_n: torch.Tensor, how: Conventions) -> torch.Tensor:
    """Turn each pair of numbers of a head by its angle."""
    half = how.head_dim // 2
    speed = how.rope_theta ** (-2 / how.head_dim * torch.arange(half, device=x_nGE.device))
    angle = (place_n.float()[:, None] * speed)[:, None, :]
    out = torch.empty_like(x_nGE)
    one, other = (slice(0, None, 2), slice(1, None, 2)) if how.interleaved_rope else (slice(0, half), slice(half, None))
    out[..., one] = x_nGE[..., one] * angle.cos() - x_nGE[..., other] * angle.sin()
    out[..., other] = x_nGE[..., other] * angle.cos() + x_nGE[..., one] * angle.sin()
    return out
