"""The target as files: finds its folder, reads its sizes, its final norm's class and where its head's weights lie.

In: a folder, or a hub name. Out: a Target; its `spec` goes into cache.json. Loads no weights (three tensors are read later
by `target_files`) and builds the model only as shapes. Every unusable model is refused here, before any row is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import InputError
from ..common.spec import TargetSpec
from .parameters import active_parameters
from .target_model import build_shapes, config_value, find_final_norm, load_config
from .weights import content_hash, find_head, find_key, list_weights, same_tensor, tensor_shape

MULTIPLIES_LOGITS = ("hyperclovax",)
"""Model types whose `logits_scaling` multiplies the logits; Granite's and MiniCPM's divides them."""


@dataclass(frozen=True)
class Target:
    """A model folder that has been found usable."""

    name: str
    """As the user named it."""
    folder: Path
    spec: TargetSpec
    embedding_key: str
    """Name of the embedding in the weights."""
    head_key: str | None
    """Name of the output head; None when it is the embedding."""
    norm_keys: dict[str, str]
    """The final norm's parameters, each by its name in the weights."""
    weight_files: dict[str, Path]
    """The file of every tensor."""
    revision: str | None
    """Commit of the model repository, when known."""
    active_parameters: int = 0
    """Parameters that multiply a token, embedding and head aside."""


def read_target(name: str, *, trust_remote_code: bool = False, quantization: str | None = None) -> Target:
    """Find and check a model. Raises InputError that says what is missing or not supported.

    quantization: of the engine's own making (vLLM's `quantization` argument), else the model's config says.
    """
    folder, revision = find_folder(name)
    place = f"--model {name}"
    raw = _read_config(folder, place)
    config = load_config(folder, trust_remote_code, place)
    text = config.get_text_config(decoder=True)
    weight_files = list_weights(folder, place)
    with_head = build_shapes(config, trust_remote_code, place)
    norm_path, norm = find_final_norm(with_head, text.num_hidden_layers, place)
    names = {id(module): path for path, module in with_head.named_modules()}
    embedding_path = names[id(with_head.get_input_embeddings())]
    embedding_key = find_key(weight_files, embedding_path, "weight", place)
    head_key = find_head(weight_files, names.get(id(with_head.get_output_embeddings()), "lm_head"), place)
    head_key = _own_head(weight_files, embedding_key, head_key, _says_tied(raw, config, text), place)
    prefix = embedding_key.removesuffix(f"{embedding_path}.weight") if embedding_key.endswith(f"{embedding_path}.weight") else None
    norm_keys = {parameter: find_key(weight_files, norm_path, parameter, place, prefix) for parameter, _ in norm.named_parameters()}
    quantized = quantization or (raw.get("quantization_config") or text_section(raw).get("quantization_config") or {}).get("quant_method")
    spec = TargetSpec(
        content_hash=content_hash(folder, weight_files),
        architecture=str((raw.get("architectures") or [type(with_head).__name__])[0]),
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=tensor_shape(weight_files[embedding_key], embedding_key)[0],
        final_norm=f"{type(norm).__module__}:{type(norm).__name__}",
        final_norm_eps=_first(norm, "variance_epsilon", "eps", "epsilon"),
        tied_embeddings=head_key is None,
        logit_scale=_logit_scale(text),
        logit_softcap=config_value(text, "final_logit_softcapping"),
        quantization=None if quantized is None else str(quantized),
    )
    return Target(name, folder, spec, embedding_key, head_key, norm_keys, weight_files, revision, active_parameters(with_head, text))


def find_folder(name: str) -> tuple[Path, str | None]:
    """(folder, revision) of a local folder or a hub model, whose files are fetched when they are not there yet."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        in_hub_cache = folder.parent.name == "snapshots"
        return folder, folder.name if in_hub_cache else None
    place = f"--model {name}"
    if folder.exists():
        raise InputError(
            "is a file", place=place, expected="a model folder, or a model name on the hub", fix="name the folder that holds config.json"
        )
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise InputError("no such folder", place=place, expected="a model folder, or a model name on the hub", fix="check the path")
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "*.py"]))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"is no folder here and could not be fetched: {reason}",
            place=place,
            expected="a model folder, or a model name on the hub",
            fix="check the name and the network, or give a local folder",
        ) from None
    return found, found.name


def text_section(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that holds the text model's sizes: `text_config` when it is there and not null."""
    nested = raw.get("text_config")
    return nested if isinstance(nested, dict) else raw


def _read_config(folder: Path, place: str) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError("the model folder has no config.json", place=place, found=folder, fix="name a folder saved with save_pretrained")
    try:
        raw = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"config.json is not valid JSON: {error}", place=place) from None
    if not isinstance(raw, dict):
        raise InputError("config.json is no JSON object", place=place)
    return raw


def _own_head(weight_files: dict[str, Path], embedding_key: str, head_key: str | None, says_tied: bool, place: str) -> str | None:
    """The head to use; None when that is the embedding. Where the config says tied and the weights hold another head, the weights are right.

    transformers 5 and vLLM decide alike (vLLM: `maybe_untie_word_embeddings`); an older vLLM drops such a head, which teacher fidelity
    shows. Raises InputError when there is no head and nothing says that the embedding is it.
    """
    if head_key is None and not says_tied:
        raise InputError(
            "the weights have no output head, and the config does not say that it is the embedding",
            place=place,
            expected="a tensor named ...lm_head.weight",
            fix='fetch the model again; if its head is its embedding, write "tie_word_embeddings": true into config.json',
        )
    return None if head_key is not None and says_tied and same_tensor(weight_files, embedding_key, head_key) else head_key


def _says_tied(raw: dict[str, Any], config: Any, text: Any) -> bool:
    for section in (raw, text_section(raw)):
        if isinstance(section.get("tie_word_embeddings"), bool):
            return bool(section["tie_word_embeddings"])
    return bool(getattr(text, "tie_word_embeddings", getattr(config, "tie_word_embeddings", True)))


def _logit_scale(text: Any) -> float:
    """What the target multiplies its logits by: Cohere's logit_scale, Granite's 1 / logits_scaling, Falcon-H1's multiplier."""
    scaling = config_value(text, "logits_scaling")
    if scaling:
        return float(scaling) if text.model_type in MULTIPLIES_LOGITS else 1.0 / float(scaling)
    return float(_first(text, "logit_scale", "lm_head_multiplier", "output_multiplier") or 1.0)


def _first(thing: Any, *names: str) -> float | None:
    values = [config_value(thing, name) for name in names]
    return next((float(value) for value in values if isinstance(value, (int, float))), None)
