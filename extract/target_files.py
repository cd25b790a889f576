"""`target/` of a cache: what training needs of the target, copied once so that the target itself is never needed again.

Writes config.json, tokenizer files, chat template, generation config, `head.safetensors` (embed_tokens.weight,
lm_head.weight unless tied, norm.*) and `tokens.json` (sizes and special ids). The folder appears whole or not at all.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from ..common import atomic, layout, target_folder
from ..common.errors import InputError, guard_writing
from ..common.quarantine import set_aside
from .target import Target
from .tokens import CHAT_TEMPLATE_FILES, TOKENIZER_FILES, eos_token_ids, special_token_ids

COPIED_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, *CHAT_TEMPLATE_FILES)


def write_target_files(cache: Path, target: Target, tokenizer: Any) -> None:
    """Write `cache`/target, unless it is there. Raises InputError for weights that cannot be used, DiskFull."""
    destination = cache / layout.TARGET
    if (destination / target_folder.SEAL).is_file():
        return
    sibling = atomic.sibling_of(destination)
    with guard_writing(cache):
        try:
            sibling.mkdir()
            for name in COPIED_FILES:
                if (target.folder / name).is_file():
                    shutil.copyfile(target.folder / name, sibling / name)
            if isinstance(tokenizer.chat_template, str):  # the one in use, which may be the user's own
                (sibling / CHAT_TEMPLATE_FILES[0]).write_text(tokenizer.chat_template, encoding="utf-8")
            _write_head(sibling / layout.HEAD_FILE, target)
            atomic.write_json(sibling / layout.TOKENS_JSON, token_table(target, tokenizer))
            target_folder.seal(sibling)
            if os.path.lexists(destination):
                set_aside(cache, destination)  # it has no seal, so it is not what a run of ours published
            atomic.publish_folder(sibling, destination)
        finally:
            shutil.rmtree(sibling, ignore_errors=True)


def token_table(target: Target, tokenizer: Any) -> dict[str, Any]:
    """What `tokens.json` says: sizes, and the ids that mean something."""
    return {
        "vocab_size": target.spec.vocab_size,
        "tokenizer_size": len(tokenizer),
        "mask_token_id": tokenizer.mask_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": eos_token_ids(target.folder, tokenizer),
        "special_token_ids": special_token_ids(tokenizer),
    }


def _write_head(path: Path, target: Target) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    width, rows = target.spec.hidden_size, target.spec.vocab_size
    tensors = {"embed_tokens.weight": _read(target, target.embedding_key, (rows, width))}
    if target.head_key is not None:
        tensors["lm_head.weight"] = _read(target, target.head_key, (rows, width))
    for parameter, key in target.norm_keys.items():
        tensors[f"norm.{parameter}"] = _read(target, key, (width,))
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # it hides the system's own error, which alone tells a full disk
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _read(target: Target, key: str, shape: tuple[int, ...]) -> Any:
    """One tensor as bfloat16, the type in which the engine computes."""
    import torch
    from safetensors import safe_open

    with safe_open(target.weight_files[key], framework="pt") as file:
        tensor = file.get_tensor(key)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise InputError(
            "the embedding, head and final norm must not be quantised",
            place=f"--model {target.name}: {key}",
            found=tensor.dtype,
            expected="bfloat16, float16 or float32",
            fix="use a checkpoint that leaves them as they are",
        )
    if tuple(tensor.shape) != shape:
        raise InputError(
            "has another shape than the config says", place=f"--model {target.name}: {key}", found=tuple(tensor.shape), expected=str(shape)
        )
    return tensor.to(torch.bfloat16).contiguous()
