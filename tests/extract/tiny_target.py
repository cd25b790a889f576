"""Tiny random targets that vLLM and transformers can load, made in a second: 6 blocks, 64 wide, a byte-level tokenizer.

Plain functions, so that other tests can build their own. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOS, START, END, PAD = "<bos>", "<|im_start|>", "<|im_end|>", "<pad>"
SPECIAL = (BOS, START, END, PAD)
VOCAB_SIZE = 320
NUM_LAYERS = 6
HIDDEN_SIZE = 64

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Like most shipped templates it has no generation tags."""
CHATML_BOS = "{{ bos_token }}" + CHATML
CHATML_THINK = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
"""The generation prompt ends in an empty thought."""
CHATML_REWRITES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>' + m.get('reasoning_content', '') + '</think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Only the last assistant turn keeps its thought."""
CHATML_STRIPS = CHATML.replace("(m['content'] or '')", "m['content'].split('</t>')[-1]")
"""The history has no thoughts."""
CHATML_OPENS = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<t></t>' }}")
"""The generation prompt ends in an empty thought, which the history lacks."""


def build_tokenizer(template: str | None = CHATML, *, prepend_bos: bool = False) -> Any:
    """Byte-level, no merges: one token a byte, and four special tokens. `prepend_bos`: adds <bos> unless told not to."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index + len(SPECIAL) for index, character in enumerate(alphabet)}
    vocab |= {token: index for index, token in enumerate(SPECIAL)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if prepend_bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=END, pad_token=PAD, additional_special_tokens=[START])
    tokenizer.chat_template = template
    return tokenizer


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""A gated delta net; vLLM on the CPU takes no smaller heads."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 32, "sliding_window": 16, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 32, "sliding_window": 16}),
    "gemma4": ("Gemma4TextConfig", {"sliding_window": 16, "hidden_size_per_layer_input": 0, "global_head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "mixtral": ("MixtralConfig", EXPERTS),
    "qwen3_next": ("Qwen3NextConfig", {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5TextConfig", LINEAR),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.2}),
    "hyperclovax": ("HyperCLOVAXConfig", {"logits_scaling": 0.125}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "stablelm": ("StableLmConfig", {}),
    "gpt_oss": ("GptOssConfig", {**EXPERTS, "sliding_window": 16}),
}
"""Every kind's config class, and what it needs besides SIZES."""


def build_target(folder: Path, kind: str = "llama", *, seed: int = 0, tied: bool = False, template: str | None = CHATML, **overrides: Any) -> Path:
    """Save a random bfloat16 target, `kind` one of KINDS. Its weights are large enough for sharp, different predictions."""
    import torch
    import transformers

    class_name, needs = KINDS[kind]
    config = getattr(transformers, class_name)(**{**SIZES, "tie_word_embeddings": tied, **needs, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    build_tokenizer(template).save_pretrained(folder)
    return folder


def chat(*texts: str, system: str | None = None) -> dict[str, Any]:
    """A row: user and assistant in turn."""
    turns = [{"role": "system", "content": system}] if system is not None else []
    turns += [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"messages": turns}


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    """One row a line; a str is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def build_drafter(
    folder: Path, target: Path, *, layer_ids: Sequence[int] = (1, 2, 3), block_size: int = 4, mask_token_id: int = 319, seed: int = 0
) -> Path:
    """A random drafter for `target` in the form that vLLM's method `dflash` loads: two blocks, no embedding, no head."""
    import torch
    from safetensors.torch import save_file

    text = json.loads((target / "config.json").read_text())
    hidden, vocab, depth, heads, width = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"], 2, 32
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).bfloat16()

    tensors = {
        "fc.weight": random(hidden, len(layer_ids) * hidden),
        "hidden_norm.weight": torch.ones(hidden).bfloat16(),
        "norm.weight": torch.ones(hidden).bfloat16(),
    }
    for layer in range(2):
        prefix = f"layers.{layer}"
        tensors |= {f"{prefix}.self_attn.{name}_proj.weight": random(heads * width, hidden) for name in ("q", "k", "v")}
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random(hidden, heads * width)
        tensors |= {f"{prefix}.self_attn.{name}_norm.weight": torch.ones(width).bfloat16() for name in ("q", "k")}
        tensors |= {f"{prefix}.mlp.{name}_proj.weight": random(2 * hidden, hidden) for name in ("gate", "up")}
        tensors[f"{prefix}.mlp.down_proj.weight"] = random(hidden, 2 * hidden)
        tensors |= {f"{prefix}.{name}.weight": torch.ones(hidden).bfloat16() for name in ("input_layernorm", "post_attention_layernorm")}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": text["max_position_embeddings"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": depth,
        "block_size": block_size,
        "dflash_config": {"target_layer_ids": list(layer_ids), "mask_token_id": mask_token_id, "block_size": block_size},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
