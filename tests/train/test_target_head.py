"""The target's head: the norm once, the head never made up, teacher tokens independent of company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cache.common import layout, target_folder
from dflash_cache.common.errors import CacheDamaged, InputError
from dflash_cache.common.spec import CacheSpec, TargetSpec
from dflash_cache.train.target_head import TargetHead, load_norm

CPU = torch.device("cpu")


def target(**changes) -> TargetSpec:
    values = {"content_hash": "0", "architecture": "X", "num_layers": 2, "hidden_size": 2, "vocab_size": 2, "tied_embeddings": False}
    return TargetSpec(**{**values, "final_norm": "transformers.models.llama.modeling_llama:LlamaRMSNorm", "final_norm_eps": 1e-6, **changes})


def rewrite(cache: Path, change) -> None:
    """Change the tensors of head.safetensors and seal the folder again, as an extraction of another target would."""
    path = cache / layout.TARGET / layout.HEAD_FILE
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    target_folder.seal(cache / layout.TARGET)


def with_target(spec: CacheSpec, **changes) -> CacheSpec:
    settings = spec.settings.model_copy(update={"target": spec.settings.target.model_copy(update=changes)})
    return CacheSpec(settings=settings, limits=spec.limits)


def test_the_final_norm_is_applied_exactly_once(write_cache):
    """Raw [3, 1] with norm weight [0.1, 10] and an identity head: raw picks 0, normed once picks 1."""
    cache, spec, _ = write_cache(hidden=2, vocab=8)

    def change(tensors):
        tensors["lm_head.weight"] = torch.eye(8, 2).bfloat16()  # tokens 2..7 always have logit 0
        tensors["norm.weight"] = torch.tensor([0.1, 10.0]).bfloat16()

    rewrite(cache, change)
    head = TargetHead(cache, spec, CPU, torch.float32)
    raw = torch.tensor([[3.0, 1.0]])
    assert int((raw @ torch.eye(8, 2).T).argmax()) == 0
    assert head.teacher_tokens(raw).tolist() == [1]
    # 3 / sqrt(5) * 0.1 and 1 / sqrt(5) * 10, not normed again (twice would give about 0 and 14.1)
    torch.testing.assert_close(head.teacher_logits(raw)[:, :2], torch.tensor([[0.1342, 4.4721]]), atol=0.02, rtol=0.01)


def test_gemma_style_norms_and_layer_norms_come_from_their_own_class():
    gemma = load_norm(target(final_norm="transformers.models.gemma.modeling_gemma:GemmaRMSNorm"), {"weight": torch.zeros(2)}, "x")
    torch.testing.assert_close(gemma(torch.tensor([[3.0, 1.0]])), torch.tensor([[3.0, 1.0]]) / 5**0.5)  # x * (1 + w), w = 0
    layer = load_norm(target(final_norm="torch.nn:LayerNorm"), {"weight": torch.ones(2), "bias": torch.tensor([0.0, 5.0])}, "x")
    torch.testing.assert_close(layer(torch.tensor([[3.0, 1.0]])), torch.tensor([[1.0, 4.0]]), atol=1e-4, rtol=1e-4)


ELSEWHERE = ["os:system", "dflash_cache.train.drafter:RMSNorm", "torchevil.nn:RMSNorm", "transformersx:RMSNorm", "builtins:exec"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_norm_class_from_elsewhere_is_never_loaded(name: str):
    with pytest.raises(InputError, match="may not be loaded"):
        load_norm(target(final_norm=name), {}, "x")


@pytest.mark.parametrize("name", ["torch.nn:Nothing", "transformers.models.llama.modeling_llama:apply_rotary_pos_emb"])
def test_what_is_no_norm_class_is_refused(name: str):
    with pytest.raises(InputError, match=r"cannot be loaded|is no module class"):
        load_norm(target(final_norm=name), {}, "x")


def test_norm_parameters_are_loaded_strictly():
    with pytest.raises(CacheDamaged, match="do not fit"):
        load_norm(target(final_norm="torch.nn:LayerNorm"), {"weight": torch.ones(2)}, "x")


def test_a_tied_target_uses_its_embedding_as_head(write_cache):
    cache, spec, _ = write_cache()
    rewrite(cache, lambda tensors: tensors.pop("lm_head.weight"))
    head = TargetHead(cache, with_target(spec, tied_embeddings=True), CPU, torch.float32)
    assert head.head.weight_VH is head.embedding_VH


def test_an_untied_target_without_head_is_refused(write_cache):
    cache, spec, _ = write_cache()
    rewrite(cache, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CacheDamaged, match=r"has no lm_head\.weight"):
        TargetHead(cache, spec, CPU, torch.float32)


def test_a_tied_target_with_another_head_is_refused(write_cache):
    cache, spec, _ = write_cache()
    with pytest.raises(CacheDamaged, match="said to be tied"):
        TargetHead(cache, with_target(spec, tied_embeddings=True), CPU, torch.float32)


def test_a_changed_head_file_is_refused(write_cache):
    cache, spec, _ = write_cache()
    path = cache / layout.TARGET / layout.HEAD_FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CacheDamaged, match="not as it was written"):
        TargetHead(cache, spec, CPU, torch.float32)


def test_scale_and_softcap_are_the_targets():
    from dflash_cache.train.loss import Head

    weight, x = torch.eye(2), torch.tensor([[4.0, 2.0]])
    torch.testing.assert_close(Head(weight, 0.5, 3.0).logits(x), 3 * torch.tanh(x * 0.5 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_teacher_token_and_logits_do_not_depend_on_the_rows_asked_for_with_it(write_cache, dtype: torch.dtype):
    cache, spec, samples = write_cache(lengths=[60, 70, 80, 90], hidden=64, vocab=256)
    head = TargetHead(cache, spec, CPU, dtype)
    bits = np.concatenate([sample.verifier_last_hidden_states for sample in samples])
    rows = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    together = head.teacher_tokens(rows)
    assert together.unique().numel() > 50
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.teacher_tokens(rows[order]), together[order])
    for start, stop in ((0, 1), (17, 40), (100, 300)):
        assert torch.equal(head.teacher_tokens(rows[start:stop]), together[start:stop])


def test_a_teacher_token_is_the_argmax_of_the_teacher_logits(write_cache):
    cache, spec, samples = write_cache()
    head = TargetHead(cache, spec, CPU, torch.float32)
    rows = torch.from_numpy(samples[0].verifier_last_hidden_states.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(head.teacher_tokens(rows), head.teacher_logits(rows).argmax(-1))
