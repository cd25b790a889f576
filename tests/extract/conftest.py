"""What the tests of extraction share: tiny targets, and a slow, obvious teacher-fidelity check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import tiny_target


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama target with a ChatML template."""
    return tiny_target.build_target(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 target with tied embeddings."""
    return tiny_target.build_target(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


@pytest.fixture(scope="session")
def make_check() -> Callable[[Path], Any]:
    """Builds the check of RMSNorm targets: argmax(lm_head(norm(h))) is the engine's token, near ties aside."""

    def build(cache: Path) -> Any:
        import torch
        from safetensors.torch import load_file

        head = load_file(cache / "target" / "head.safetensors")
        eps = json.loads((cache / "cache.json").read_text())["settings"]["target"]["final_norm_eps"]
        weight_VH = head.get("lm_head.weight", head["embed_tokens.weight"]).float()

        def check(bits_SH: np.ndarray, top1_S: np.ndarray) -> np.ndarray:
            states_SH = torch.from_numpy((bits_SH.astype(np.uint32) << 16).view(np.float32).copy())
            normed_SH = states_SH * torch.rsqrt(states_SH.pow(2).mean(-1, keepdim=True) + eps) * head["norm.weight"].float()
            logits_SV = normed_SH @ weight_VH.T
            chosen_S = logits_SV[torch.arange(len(top1_S)), torch.from_numpy(top1_S.astype(np.int64))]
            return (logits_SV.amax(-1) - chosen_S < 0.02 * logits_SV.std(-1)).numpy()

        return check

    return build


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target.write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", forked.ROWS)


@pytest.fixture(scope="session")
def server(tiny_llama: Path, rows_file: Path) -> Iterator[forked.Server]:
    server = forked.Server(tiny_llama, rows_file)
    yield server
    server.process.kill()
    server.process.communicate()


@pytest.fixture(scope="session")
def whole_cache(server: forked.Server, tiny_llama: Path, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of an uninterrupted run of one process. Not to be changed."""
    cache = tmp_path_factory.mktemp("reference") / "cache"
    assert server.do(**forked.extraction(tiny_llama, rows_file, cache)) == [0]
    stored = forked.samples_by_key(cache)
    rejects = (cache / "rejects.jsonl").read_text().splitlines()
    assert len(stored) + len(rejects) == len(forked.ROWS)
    assert sum("infinite or NaN" in line for line in rejects) == 7
    return cache
