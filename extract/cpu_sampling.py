"""Sampling of vLLM on a CPU, put right: each request's temperature, top-p and top-k reach its tokens.

Capturing decodes through vLLM's rejection sampler. There `expand_batch_to_tokens` gives every token its request's setting; vLLM's version
for CPUs (0.32: `cpu_triton_utils._expand_kernel_impl`) fills a copy and returns memory that nobody wrote, so that answers are sampled at
arbitrary temperatures and a top-k ends the engine. A top-k also ends it in a step that has nothing to verify, as every first one has.
Greedy decoding never gets there. Runs in vLLM's worker; on a GPU it does nothing.
"""

from __future__ import annotations

from typing import Any

import torch


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """x [S] -> [num_tokens]: x[s] for each token of request s, `replace_from` replaced. cu_num_tokens: int [S], the requests' last ends."""
    counts_S = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(counts_S, output_size=num_tokens)


def repair_sampling() -> None:
    """Put it in the place of vLLM's own, on a CPU. Harmless when called twice."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu() or rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_some(logits: torch.Tensor, *settings: Any) -> torch.Tensor:
        constrained: torch.Tensor = constrain(logits, *settings) if len(logits) else logits
        return constrained

    rejection_sampler.apply_sampling_constraints = constrain_some
