"""Every class of target: what is stored is what transformers itself calls the hidden states, and target/ turns it into the model's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
import torch
from safetensors.torch import load_file, save_file
from stored import Stored, read_all

from dflash_cache.common.spec import load
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.run import run
from dflash_cache.train.fidelity import TeacherCheck
from dflash_cache.train.target_head import TargetHead

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(4, 300, length).tolist() for length in (40, 3, 17, 24)]
LAYERS = (0, 2, 3)
DEPTH = 5
TIED = ("gemma", "gemma2", "gemma3", "gemma4", "cohere")
"""Classes whose heads are their embeddings."""


VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": tiny.HIDDEN_SIZE}
ROTARY_3D = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
SEEING: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"text_config": tiny.LINEAR, "vision_config": VISION | {"num_position_embeddings": 16}},
    "Qwen3VL": {
        "text_config": {"rope_parameters": ROTARY_3D},
        "vision_config": VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [1]},
    },
    "Qwen2_5_VL": {"text_config": {"rope_parameters": ROTARY_3D}, "vision_config": VISION},
    "Gemma3": {
        "text_config": {"sliding_window": 16, "query_pre_attn_scalar": 32},
        "vision_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "image_size": 28},
    },
    "Gemma4": {"text_config": {"sliding_window": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": tiny.VOCAB_SIZE}},
    "Mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
}
"""Classes that also see; Gemma3's tower has as many blocks as its language model."""


def disturb_norms(folder: Path) -> None:
    """Weights of norms that are neither 0 nor 1, so that no flavour of norm can be taken for another."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = (tensor.float() + 0.3 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def extract(target: Path, cache: Path, **fields: Any) -> dict[int, Stored]:
    """Everything the transformers engine stores of DOCUMENTS, one at a time; teacher fidelity is complete."""
    rows = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in DOCUMENTS]
    data = tiny.write_jsonl(cache.parent / "data.jsonl", rows)
    given = {"model": str(target), "layers": LAYERS, "data": (str(data),), "cache": cache, "engine": "transformers", "batch_size": 1}
    summary = run(ExtractConfig(**(given | fields)), lambda cache: TeacherCheck(cache, device="cpu"))
    assert (summary.samples, summary.fidelity_agreement) == (len(DOCUMENTS), 1.0)
    return read_all(cache)


def assert_same_as_the_model(model: Any, cache: Path, stored: dict[int, Stored]) -> None:
    """Bit for bit its hidden states; its logits but for rounding."""
    head = TargetHead(cache, load(cache), torch.device("cpu"), torch.bfloat16)
    for row, ids in enumerate(DOCUMENTS):
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        states_TCH = torch.from_numpy(stored[row].states_TCH).bfloat16()
        for column, layer in enumerate(LAYERS):
            assert torch.equal(states_TCH[:, column], output.hidden_states[layer + 1][0])
        verifier_TH, logits_TV = states_TCH[:, -1], output.logits[0].float()
        torch.testing.assert_close(head.normed(verifier_TH), output.hidden_states[DEPTH][0], atol=0, rtol=2.0**-7)
        teacher_TV = head.teacher_logits(verifier_TH)
        assert float((teacher_TV - logits_TV).abs().max()) <= 2.0**-6 * float(logits_TV.abs().max())
        assert stored[row].top1 == int(logits_TV[-1].argmax())


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_target_of_every_class_is_stored_as_it_computes_and_gives_its_own_logits(kind: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    target = tiny.build_target(tmp_path / "target", kind, tied=kind in TIED, num_hidden_layers=DEPTH)
    disturb_norms(target)
    stored = extract(target, tmp_path / "cache")
    assert_same_as_the_model(AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval(), tmp_path / "cache", stored)


@pytest.mark.parametrize("name", SEEING)
def test_a_target_that_also_sees_is_used_for_text_alone(name: str, tmp_path: Path):
    import transformers

    parts = SEEING[name] | {"text_config": tiny.SIZES | {"num_hidden_layers": DEPTH} | SEEING[name]["text_config"]}
    model = getattr(transformers, f"{name}ForConditionalGeneration")(getattr(transformers, f"{name}Config")(**parts)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "target")
    tiny.build_tokenizer().save_pretrained(tmp_path / "target")
    disturb_norms(tmp_path / "target")
    stored = extract(tmp_path / "target", tmp_path / "cache")
    whole = type(model).from_pretrained(tmp_path / "target", dtype=torch.bfloat16).eval()
    assert_same_as_the_model(whole, tmp_path / "cache", stored)


def test_blocks_of_different_sizes_are_no_obstacle(tmp_path: Path):
    """Such a config answers with an error when it is asked for a size that differs from layer to layer."""
    from transformers import AutoModelForCausalLM

    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    target = tiny.build_target(tmp_path / "target", "gemma4", tied=True, num_hidden_layers=DEPTH, layer_types=kinds, global_head_dim=64)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    with pytest.raises(RuntimeError):
        _ = model.config.head_dim
    assert_same_as_the_model(model, tmp_path / "cache", extract(target, tmp_path / "cache"))
