"""CacheSpec: what `cache.json` says of a cache, the fingerprint of its settings, and the shapes that follow from it.

Everything a reader may rely on is checked here once; what was parsed is never checked again.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from . import atomic, layout
from .config import Config
from .errors import CacheDamaged, InputError
from .fingerprint import canonical, differences, digest_bytes, fingerprint

MAX_JSON_BYTES = 16 << 20
MAX_CHUNK_BYTES = 1 << 30
NO_REPAIR = (
    "it cannot be repaired, but an equal one can be had: `dflash extract` with the same settings and --limit 1 into a new folder "
    "writes it; copy its cache.json here (its fingerprint is checked against every part)"
)
"""The way out of a damaged cache.json."""


class TargetSpec(Config):
    """The model whose states are stored."""

    content_hash: str
    """sha256 of its config and of its weights index (or of the weights' headers when there is no index)."""
    architecture: str
    """Class name, for example LlamaForCausalLM."""
    num_layers: int = Field(gt=0, le=100_000)
    """Number of blocks."""
    hidden_size: int = Field(gt=0, le=1 << 20)
    """Width of the residual stream (H)."""
    vocab_size: int = Field(gt=0, le=1 << 31)
    """Rows of the embedding."""
    final_norm: str
    """Class of the final norm, as module:name; its parameters are `norm.*` in target/head.safetensors."""
    final_norm_eps: float | None = None
    """Its epsilon, when it has one."""
    tied_embeddings: bool
    """The output head is the embedding."""
    logit_scale: float = 1.0
    """The target multiplies its logits by this."""
    logit_softcap: float | None = None
    """The target bounds its logits by c * tanh(logits / c) after scaling."""
    dtype: Literal["bfloat16"] = "bfloat16"
    """Type of the stored states."""
    quantization: str | None = None
    """The target's quantisation method, when it has one."""


class FeatureSpec(Config):
    """Which states are stored and how exactly."""

    layer_ids: tuple[int, ...] = Field(min_length=1, max_length=1024)
    """Blocks whose output is stored, 0-based, ascending."""
    verifier_layer: int
    """The block whose raw output is the verifier state."""
    verifier_state: Literal["raw"] = "raw"
    """Before the final norm."""
    mantissa_bits: Literal[7, 3] = 7
    """7 is lossless. Concerns the features only; verifier states are always lossless."""


class TextSpec(Config):
    """How rows became tokens."""

    tokenizer_hash: str
    """sha256 of the tokenizer's files."""
    chat_template_hash: str
    """sha256 of the chat template; empty when there is none."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments that every row's rendering was given."""
    max_length: int = Field(gt=0)
    """Longest document, tokens."""
    overlong: Literal["reject", "truncate"] = "reject"
    """What was done with longer ones."""
    supervise: Literal["all", "assistant", "last"] = "assistant"
    """Which tokens of a conversation may be learned from."""
    turns: Literal["all", "each"] = "all"
    """each: every assistant turn ends a sample of its own."""


LATER_TEXT_FIELDS = {"template_args", "overlong", "supervise", "turns"}
"""Fields of TextSpec that caches of format version 1 may lack. Whatever is added to the settings must be left out alike."""
LATER_GENERATION_FIELDS = {"top_p", "top_k"}
"""Those of GenerationSpec."""


class GenerationSpec(Config):
    """How the target wrote the answers."""

    max_new_tokens: int
    """Tokens at most."""
    temperature: float
    """0 is greedy."""
    seed: int
    """Of the sampler."""
    top_p: float = 1.0
    """Sampled from the likeliest tokens that have this much probability together; 1 is all."""
    top_k: int = 0
    """Sampled from so many likeliest tokens; 0 is all."""


class EngineSpec(Config):
    """What ran the target."""

    name: Literal["vllm", "transformers", "fake"]
    """Engine."""
    version: str
    """Its version."""


class Settings(Config):
    """The ingredients of the fingerprint: a second extraction into a cache must agree in all of them."""

    format_version: Literal[1] = 1
    """Of FORMAT.md."""
    target: TargetSpec
    features: FeatureSpec
    text: TextSpec
    generation: GenerationSpec | None = None
    """None when the data's own answers are used."""
    engine: EngineSpec

    @model_validator(mode="after")
    def _layers_fit(self) -> Settings:
        ids = self.features.layer_ids
        if list(ids) != sorted(set(ids)) or not all(0 <= i < self.target.num_layers for i in (*ids, self.features.verifier_layer)):
            raise ValueError(
                f"layer ids {list(ids)} and verifier layer {self.features.verifier_layer} are no ascending choice of {self.target.num_layers} blocks"
            )
        if self.features.mantissa_bits == 3 and self.target.hidden_size % 2:
            raise ValueError("3 mantissa bits are packed two to a byte and need an even hidden size")
        return self


class Limits(Config):
    """Sizes that a writer keeps to; a resumed run takes those of the cache."""

    chunk_tokens: int = Field(512, gt=0, le=1 << 20)
    """Tokens in a chunk of one layer."""
    part_tokens: int = Field(131_072, gt=0)
    """A part is published once it holds this many tokens."""
    part_seconds: float = Field(600.0, gt=0)
    """A part is published once it is this old, seconds."""


class Provenance(Config):
    """For people; compared with nothing."""

    model: str = ""
    """The target as the user named it."""
    revision: str | None = None
    """Commit of the model repository, when known; what counts is the content hash."""
    created_at: str = ""
    """ISO 8601, UTC."""
    dflash_version: str = ""
    """The program that wrote it."""


class CacheSpec(Config):
    """The whole of `cache.json`."""

    format: Literal["dflash-cache"] = "dflash-cache"
    """Marks the folder as one of ours."""
    settings: Settings
    fingerprint: str = ""
    """sha256 of the canonical JSON of `settings`; filled in when empty, checked otherwise."""
    limits: Limits = Limits()  # type: ignore[call-arg]
    provenance: Provenance = Provenance()

    @model_validator(mode="before")
    @classmethod
    def _fingerprint_fits(cls, document: Any) -> Any:
        """It is that of the settings as they stand in the file."""
        given = document if isinstance(document, dict) and isinstance(document.get("settings"), dict) else {}
        if given.get("fingerprint") and given["fingerprint"] != fingerprint(given["settings"]):
            raise ValueError("the fingerprint does not belong to these settings; cache.json was edited or damaged")
        return document

    @model_validator(mode="after")
    def _complete(self) -> CacheSpec:
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", fingerprint(as_written(self.settings)))
        chunk = self.limits.chunk_tokens * self.hidden_size
        if chunk > MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk of {self.limits.chunk_tokens} tokens would have {chunk} bytes; the limit is {MAX_CHUNK_BYTES}")
        return self

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.settings.target.hidden_size

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The stored layers, ascending."""
        return self.settings.features.layer_ids

    @property
    def mantissa_bits(self) -> int:
        """Kept in the features: 7 or 3."""
        return self.settings.features.mantissa_bits

    @property
    def raw_bytes_per_token(self) -> int:
        """What a token's states take as plain bfloat16."""
        return (len(self.layer_ids) + 1) * self.hidden_size * 2


def as_written(settings: Settings) -> dict[str, Any]:
    """The settings as they stand in `cache.json`: what format version 1 did not begin with is left out where it has its default.

    So a cache of an earlier program is read and continued, and equal settings have one fingerprint whichever program wrote them.
    """
    document = settings.model_dump(mode="json")
    for section, kind, later in (("text", TextSpec, LATER_TEXT_FIELDS), ("generation", GenerationSpec, LATER_GENERATION_FIELDS)):
        if document[section] is not None:
            defaults = kind.model_construct().model_dump(mode="json", include=later)
            document[section] = {name: value for name, value in document[section].items() if name not in defaults or value != defaults[name]}
    return document


def save(cache: Path, spec: CacheSpec) -> None:
    """Write `cache.json`, atomically, sealed with a digest over all of it."""
    document = {**spec.model_dump(mode="json"), "settings": as_written(spec.settings)}
    atomic.write_json(cache / layout.CACHE_JSON, {**document, "digest": digest_bytes(canonical(document))})


def has_parts(cache: Path) -> bool:
    """Does the folder hold anything that looks like a part of a cache?"""
    folder = cache / layout.PARTS
    return folder.is_dir() and any(layout.parse_part_name(entry.name) for entry in folder.iterdir())


def load(cache: Path) -> CacheSpec:
    """Read and check `cache.json`.

    Raises InputError when `cache` is no cache or of another format version, CacheDamaged when the file is unreadable.
    """
    path = cache / layout.CACHE_JSON
    if not os.path.lexists(path):
        if has_parts(cache):
            raise CacheDamaged("is missing, though there are parts", place=str(path), fix=NO_REPAIR)
        raise InputError(
            "is no feature cache: it has no cache.json", place=str(cache), expected="a folder written by `dflash extract`", fix="check the path"
        )
    document = read_json(path, NO_REPAIR)
    version = document.get("settings", {}).get("format_version") if isinstance(document.get("settings"), dict) else None
    if document.get("format") != layout.FORMAT_NAME or version != layout.FORMAT_VERSION:
        raise InputError(
            "is of another format",
            place=str(path),
            found=f"{document.get('format')!r} version {version!r}",
            expected=f"{layout.FORMAT_NAME!r} version {layout.FORMAT_VERSION}",
            fix="use the program version that wrote it",
        )
    if document.pop("digest", None) != digest_bytes(canonical(document)):
        raise CacheDamaged("is not as it was written: its digest does not match", place=str(path), fix=NO_REPAIR)
    try:
        return CacheSpec.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CacheDamaged(f"cannot be trusted: {problems}", place=str(path), fix=NO_REPAIR) from None


def read_json(path: Path, fix: str = "") -> dict[str, Any]:
    """A JSON object from a plain file of bounded size. Raises CacheDamaged for anything else; never takes it for a new cache."""
    return read_bounded(path, fix)[1]


def read_bounded(path: Path, fix: str = "") -> tuple[bytes, dict[str, Any]]:
    """The bytes of such a file, and the object. Raises as `read_json` does."""
    place = str(path)
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CacheDamaged("is no plain file", place=place, fix=fix)
        if status.st_size > MAX_JSON_BYTES:
            raise CacheDamaged("is larger than any such file can be", place=place, found=f"{status.st_size} bytes", fix=fix)
        data = path.read_bytes()
        document = json.loads(data, parse_float=_finite, parse_constant=_finite)
    except OSError as error:
        raise CacheDamaged("is missing" if error.errno == errno.ENOENT else f"cannot be read: {error.strerror}", place=place, fix=fix) from None
    except (ValueError, RecursionError) as error:
        raise CacheDamaged(f"is not valid JSON: {error}", place=place, fix=fix) from None
    if not isinstance(document, dict):
        raise CacheDamaged("must be a JSON object", place=place, found=type(document).__name__, fix=fix)
    return data, document


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"{text} is no finite number")


def check_same_settings(cache: Path, existing: CacheSpec, wanted: CacheSpec) -> None:
    """Raise InputError, naming every setting that differs, when `wanted` may not be written into `existing`."""
    if existing.settings == wanted.settings:
        return
    found = differences(existing.settings.model_dump(mode="json"), wanted.settings.model_dump(mode="json"))
    lines = "".join(f"\n  - {name}: the cache has {have!r}, this run has {want!r}" for name, have, want in found)
    raise InputError(f"was extracted with other settings:{lines}", place=f"--cache {cache}", fix="use the same settings, or another --cache folder")
