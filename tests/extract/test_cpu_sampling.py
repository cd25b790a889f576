"""Each token gets its request's setting. That vLLM uses it is tested in test_engine_vllm.py."""

from __future__ import annotations

import torch

from dflash_cache.extract.cpu_sampling import expand_batch_to_tokens


def test_every_token_has_its_requests_setting_and_greedy_ones_the_replacement():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(torch.tensor([0.5, 9.0, -1.0]), ends, 5, -1, 1).tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    top_k = expand_batch_to_tokens(torch.tensor([7, 8], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32), 0)
    assert (top_k.tolist(), top_k.dtype) == ([], torch.int32)
