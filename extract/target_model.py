"""The target as a transformers model: which class reads it, its blocks, its final norm.

In: a model folder's config. Out: the class, and the model as shapes without memory. Knows nothing of weights files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..common.errors import InputError

FINAL_NORMS = ("norm", "final_norm", "final_layernorm", "final_layer_norm", "norm_f", "ln_f", "embedding_norm")
"""What classes call the norm after their blocks; asked only where several norms stand beside the blocks."""


def load_config(folder: Path, trust_remote_code: bool, place: str) -> Any:
    """The transformers config of a model folder. Raises InputError for an unknown model, or one whose code is not trusted."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise _not_loadable(error, trust_remote_code, place, folder) from None


def config_value(config: Any, name: str) -> Any:
    """A field of a config; None when it has none, or a value of its own for each layer, which transformers answers with RuntimeError."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def model_class(config: Any) -> Any:
    """The Auto class that loads a config: causal language models, else those of images and text, which are fed text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    causal = type(config) in AutoModelForCausalLM._model_mapping or "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    return AutoModelForImageTextToText if not causal and type(config) in AutoModelForImageTextToText._model_mapping else AutoModelForCausalLM


def build_shapes(config: Any, trust_remote_code: bool, place: str) -> Any:
    """The model on the meta device, its head included: modules and shapes, no memory. Of the text part alone where that has a class."""
    import torch
    from transformers import AutoModelForCausalLM

    text = config.get_text_config(decoder=True)
    part = text if type(text) in AutoModelForCausalLM._model_mapping else config
    try:
        with torch.device("meta"):
            return model_class(part).from_config(part, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _not_loadable(error, trust_remote_code, place, None) from None


def _not_loadable(error: Exception, trusted: bool, place: str, folder: Path | None) -> InputError:
    own_code = "trust_remote_code" in str(error)
    reason = (
        "needs Python code of its own"
        if own_code
        else f"transformers cannot use it: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
    )
    fix = "read that code, then add --trust-remote-code" if own_code and not trusted else "use a newer transformers, or another model"
    return InputError(reason, place=place, found=folder, expected="a causal language model that transformers knows", fix=fix)


def find_blocks(model: Any, num_layers: int, place: str) -> tuple[str, Any, Any]:
    """(path of the owner, the owner, the list) of a text model's blocks: its outermost ModuleList of `num_layers`."""
    import torch

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    decoder = model if decoder is None else decoder
    names = {id(module): path for path, module in model.named_modules()}
    lists = [
        (names[id(module)].count("."), names[id(owner)], owner, module)
        for owner in decoder.modules()
        for module in owner.children()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        raise InputError(f"its list of {num_layers} blocks was not found", place=place, found=type(model).__name__)
    _, path, owner, blocks = min(lists, key=lambda item: item[0])
    return path, owner, blocks


def find_final_norm(model: Any, num_layers: int, place: str) -> tuple[str, Any]:
    """(path, module) of the norm that follows the last block: the one registered beside the blocks, after them if there is one."""
    owner_path, owner, blocks = find_blocks(model, num_layers, place)
    beside = [(name, child) for name, child in owner.named_children() if "norm" in f"{name} {type(child).__name__}".lower() or child is blocks]
    where = next(number for number, (_, child) in enumerate(beside) if child is blocks)
    norms = beside[where + 1 :] or beside[:where]
    if len(norms) > 1:
        norms = [(name, child) for name, child in norms if name in FINAL_NORMS]
    if len(norms) != 1:
        found = [name for name, child in beside if child is not blocks]
        raise InputError("its final norm was not found", place=place, found=found, expected="one norm after the blocks")
    name, norm = norms[0]
    return f"{owner_path}.{name}" if owner_path else name, norm
