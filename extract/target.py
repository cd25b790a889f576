"""The target as files: finds its folder, reads its sizes, its final norm's class and where its head's weights lie.

In: a folder, or a hub name. Out: a Target; its `spec` goes into cache.json. Loads no weights (three tensors are read later
by `target_files`) and builds the model only as shapes. Every unusable model is refused here, before any row is read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import InputError
from ..common.fingerprint import sha256_files
from ..common.spec import TargetSpec
from .parameters import active_parameters

INDEX_FILE = "model.safetensors.index.json"
HASHED_PIECES, HASHED_PIECE_BYTES = 16, 4096
"""So many evenly spaced pieces of each weights file go into the content hash: fine-tunes of one model share everything else."""


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
    with_head = _build_shapes(text, trust_remote_code, place)
    norm_path, norm = find_final_norm(with_head, text.num_hidden_layers, place)
    names = {id(module): path for path, module in with_head.named_modules()}
    embedding_path = names[id(with_head.get_input_embeddings())]
    head = with_head.get_output_embeddings()
    embedding_key = _find_key(weight_files, embedding_path, "weight", place)
    tied = _is_tied(raw, config, text)
    head_key = None
    if not tied:
        head_path = names.get(id(head), "lm_head")
        head_key = _find_head(weight_files, head_path, place)
        if f"{head_key.removesuffix('weight')}bias" in weight_files:
            raise InputError("has an output head with a bias, which is not supported", place=place, found=head_key)
    prefix = embedding_key.removesuffix(f"{embedding_path}.weight") if embedding_key.endswith(f"{embedding_path}.weight") else None
    norm_keys = {parameter: _find_key(weight_files, norm_path, parameter, place, prefix) for parameter, _ in norm.named_parameters()}
    quantized = quantization or (raw.get("quantization_config") or text_section(raw).get("quantization_config") or {}).get("quant_method")
    spec = TargetSpec(
        content_hash=content_hash(folder, weight_files),
        architecture=str((raw.get("architectures") or [type(with_head).__name__])[0]),
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=tensor_shape(weight_files[embedding_key], embedding_key)[0],
        final_norm=f"{type(norm).__module__}:{type(norm).__name__}",
        final_norm_eps=_first(norm, "variance_epsilon", "eps", "epsilon"),
        tied_embeddings=tied,
        logit_scale=_logit_scale(text),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
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


def load_config(folder: Path, trust_remote_code: bool, place: str) -> Any:
    """The transformers config of a model folder. Raises InputError for an unknown model, or one whose code is not trusted."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        raise _not_loadable(error, trust_remote_code, place, folder) from None


def _not_loadable(error: Exception, trusted: bool, place: str, folder: Path) -> InputError:
    own_code = "trust_remote_code" in str(error)
    reason = (
        "needs Python code of its own"
        if own_code
        else f"transformers cannot use it: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
    )
    fix = "read that code, then add --trust-remote-code" if own_code and not trusted else "use a newer transformers, or another model"
    return InputError(reason, place=place, found=folder, expected="a causal language model that transformers knows", fix=fix)


def _build_shapes(text: Any, trust_remote_code: bool, place: str) -> Any:
    """The text model on the meta device: modules and shapes, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(text, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _not_loadable(error, trust_remote_code, place, Path()) from None


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
    """(path, module) of the norm that follows the last block: the norm registered after the blocks, beside them."""
    owner_path, owner, blocks = find_blocks(model, num_layers, place)
    children = list(owner.named_children())
    after = children[1 + next(i for i, (_, child) in enumerate(children) if child is blocks) :]
    norms = [(name, child) for name, child in after if "norm" in f"{name} {type(child).__name__}".lower()]
    if len(norms) != 1:
        raise InputError("its final norm was not found", place=place, found=[name for name, _ in norms], expected="one norm after the blocks")
    name, norm = norms[0]
    return f"{owner_path}.{name}" if owner_path else name, norm


def list_weights(folder: Path, place: str) -> dict[str, Path]:
    """Every tensor's file. Raises InputError when weights are missing or only there as pickles."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
        if missing:
            raise InputError("weights files that the index names are missing", place=place, found=", ".join(missing[:3]), fix="fetch the model again")
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin"))
        raise InputError(
            "the weights are only there as pickles" if pickled else "the model folder has no weights",
            place=place,
            found=folder,
            expected="*.safetensors",
            fix="save the model again with save_pretrained(safe_serialization=True)" if pickled else "fetch the model again, or name another folder",
        )
    return {name: file for file in files for name in read_header(file)[0] if name != "__metadata__"}


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """(header, where the data begins) of a safetensors file."""
    with open(file, "rb") as handle:
        try:
            (size,) = struct.unpack("<Q", handle.read(8))
            if size > file.stat().st_size:
                raise ValueError("the header is longer than the file")
            return dict(json.loads(handle.read(size))), 8 + size
        except (struct.error, ValueError) as error:
            raise InputError(f"is no whole safetensors file: {error}", place=str(file), fix="fetch the model again") from None


def tensor_shape(file: Path, key: str) -> list[int]:
    """Shape of one tensor."""
    return list(read_header(file)[0][key]["shape"])


def content_hash(folder: Path, weight_files: dict[str, Path]) -> str:
    """sha256 over config.json, the index, and each weights file's header, size and some pieces of its data."""
    state = hashlib.sha256(sha256_files([folder / "config.json", folder / INDEX_FILE]).encode())
    for file in sorted(set(weight_files.values())):
        header, start = read_header(file)
        size = file.stat().st_size
        state.update(f"{file.name}\0{size}\0{json.dumps(header, sort_keys=True)}".encode())
        with open(file, "rb") as handle:
            for piece in range(HASHED_PIECES):
                handle.seek(start + (size - start) * piece // HASHED_PIECES)
                state.update(handle.read(HASHED_PIECE_BYTES))
    return state.hexdigest()


def _find_key(weight_files: dict[str, Path], path: str, parameter: str, place: str, prefix: str | None = None) -> str:
    """The name, in the weights, of a module's parameter: wrappers put prefixes before, or inside, the module's path."""
    wanted = f"{path}.{parameter}"
    if prefix is not None and f"{prefix}{wanted}" in weight_files:
        return f"{prefix}{wanted}"
    short = wanted.removeprefix("model.").removeprefix("transformer.")
    candidates = [name for name in weight_files if name in (short, wanted) or name.endswith((f".{wanted}", f".{short}"))]
    outside = [name for name in candidates if not any(part.isdigit() for part in name.split("."))]
    language = [name for name in outside if "vis" not in name and "audio" not in name]
    if not language:
        raise InputError(
            f"the weights have no {wanted}", place=place, expected=f"a tensor named ...{short}", fix="fetch the model again, or use another model"
        )
    return min(language, key=len)


def _find_head(weight_files: dict[str, Path], head_path: str, place: str) -> str:
    suffix = f"{head_path}.weight"
    found = [name for name in weight_files if name == suffix or name.endswith(f".{suffix}")]
    if not found:
        raise InputError(
            "the weights have no output head, and the config does not say that it is the embedding",
            place=place,
            expected=f"a tensor named ...{suffix}",
        )
    return min(found, key=len)


def _is_tied(raw: dict[str, Any], config: Any, text: Any) -> bool:
    for section in (raw, text_section(raw)):
        if isinstance(section.get("tie_word_embeddings"), bool):
            return bool(section["tie_word_embeddings"])
    return bool(getattr(text, "tie_word_embeddings", getattr(config, "tie_word_embeddings", True)))


def _logit_scale(text: Any) -> float:
    """What the target multiplies its logits by: Cohere's logit_scale, Granite's 1 / logits_scaling, Falcon-H1's multiplier."""
    scaling = getattr(text, "logits_scaling", None)
    if scaling:
        return 1.0 / float(scaling)
    return float(_first(text, "logit_scale", "lm_head_multiplier") or 1.0)


def _first(thing: Any, *names: str) -> float | None:
    found = [getattr(thing, name) for name in names if isinstance(getattr(thing, name, None), (int, float))]
    return float(found[0]) if found else None
