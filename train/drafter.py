"""The drafter: Qwen3-style decoder layers whose queries come from blocks and whose keys come from context and blocks.

In: context features, block embeddings, positions and finished masks of one packed row. Out: normed hidden states of all
slots; the target's head, which is not in here, turns them into logits. Knows nothing of losses, anchors or how masks arise.
Parameters are float32 and are cast to the type of the inputs at each use. Tensor names are those that serving engines load.

Source of the architecture: the DFlash paper, arXiv 2602.06036, and Qwen3; checked against the `dflash` 0.1.0 package.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from .attention import Mask, attend
from .drafter_spec import DrafterSpec
from .float8 import linear8

INITIAL_SPREAD = 0.02


class Linear(nn.Module):
    """A matrix without bias, float32 [out, in], applied in the type of its input, or in 8 bits."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.float8 = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear8(x, self.weight) if self.float8 else F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean in float32 (at least), the product with the weight in the type of the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * normed.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of Q slots over T context rows and the Q slots themselves."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.heads, self.groups, self.size = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
        self.q_proj = Linear(spec.hidden_size, self.heads * self.size)
        self.k_proj = Linear(spec.hidden_size, self.groups * self.size)
        self.v_proj = Linear(spec.hidden_size, self.groups * self.size)
        self.o_proj = Linear(self.heads * self.size, spec.hidden_size)
        self.q_norm = RMSNorm(self.size, spec.rms_norm_eps)
        self.k_norm = RMSNorm(self.size, spec.rms_norm_eps)

    def forward(self, block_QH: torch.Tensor, context_TH: torch.Tensor, rotary: Rotary, mask: Mask) -> torch.Tensor:
        both = torch.cat((context_TH, block_QH))  # T + Q rows: keys and values of both come from the same projections
        query_QNE = self.q_norm(self.q_proj(block_QH).unflatten(-1, (self.heads, self.size)))
        key_GE = self.k_norm(self.k_proj(both).unflatten(-1, (self.groups, self.size)))
        value_GE = self.v_proj(both).unflatten(-1, (self.groups, self.size))
        query_QNE, key_GE = rotary(query_QNE, last=len(block_QH)), rotary(key_GE)
        attended_QNE = attend(query_QNE, key_GE, value_GE, mask)
        return self.o_proj(attended_QNE.flatten(1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer; the context enters only as keys and values and is the same for all layers."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, block_QH: torch.Tensor, context_TH: torch.Tensor, rotary: Rotary, mask: Mask) -> torch.Tensor:
        block_QH = block_QH + self.self_attn(self.input_layernorm(block_QH), context_TH, rotary, mask)
        return block_QH + self.mlp(self.post_attention_layernorm(block_QH))


class Rotary:
    """Rotary positions of T context rows followed by Q slots; the whole head is rotated, angles in float32."""

    def __init__(self, position: torch.Tensor, size: int, theta: float) -> None:
        exponent = torch.arange(0, size, 2, device=position.device, dtype=torch.float32) / size
        angle = position.float()[:, None, None] * (1.0 / theta**exponent)
        self.cos, self.sin = angle.cos(), angle.sin()

    def __call__(self, x: torch.Tensor, last: int | None = None) -> torch.Tensor:
        """Rotate x [n, heads, E]; its rows are all positions, or the last `last` of them."""
        cos, sin = (self.cos, self.sin) if last is None else (self.cos[-last:], self.sin[-last:])
        first, second = x.chunk(2, dim=-1)  # pairs are (i, i + E/2), as in Qwen3
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Drafter(nn.Module):
    """11 tensors a layer and 3 more; no embedding and no head, which are the target's. With a pruned vocabulary also `d2t`,
    int64 [D], not trained: which rows of the target's head are used (see `draft_head`)."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList([Layer(spec) for _ in range(spec.num_layers)])
        self.fc = Linear(len(spec.target_layer_ids) * spec.hidden_size, spec.hidden_size)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        kept = spec.draft_vocab_size
        self.d2t: torch.Tensor | None
        self.register_buffer("d2t", None if kept is None else torch.zeros(kept, dtype=torch.int64))

    def initialize(self, generator: torch.Generator) -> Drafter:
        """Draw every matrix from N(0, 0.02); norms are 1. generator: on the CPU."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * INITIAL_SPREAD)
                else:
                    parameter.fill_(1.0)
        return self

    def compile_layers(self) -> None:
        """Compile each layer by itself, and what is around them: all layers are of one shape, so that one of them is compiled for all."""
        for module in (*self.layers, self.fc, self.hidden_norm, self.norm):
            module.compile(dynamic=False)

    def multiply_in_float8(self) -> None:
        """All products with the drafter's matrices in 8 bits, from now on."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.float8 = True

    def forward(
        self,
        features_TF: torch.Tensor,
        context_position_T: torch.Tensor,
        block_QH: torch.Tensor,
        block_position_Q: torch.Tensor,
        masks: Mapping[str, Mask],
    ) -> torch.Tensor:
        """Hidden states of all slots, [Q, H], ready for the target's head.

        features_TF: [T, K * H], the selected layers of a row side by side, ascending. masks: for each layer type, over
        [Q, T + Q]. All of one floating type, which is the type of the products.
        """
        context_TH = self.hidden_norm(self.fc(features_TF))
        rotary = Rotary(torch.cat((context_position_T, block_position_Q)), self.spec.head_dim, self.spec.rope_theta)
        for layer, kind in zip(self.layers.children(), self.spec.layer_types):
            block_QH = layer(block_QH, context_TH, rotary, masks[kind])
        return self.norm(block_QH)
