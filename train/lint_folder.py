"""DrafterFiles: an exported folder as a linter sees it, of whatever origin; and TargetFacts, what it may be held against.

In: paths. Out: parsed documents and tensor headers; nothing is taken for granted, and nothing is judged here. Formats: z-lab's,
with its fields at the top level or in `dflash_config`, and the speculators library's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..common import layout, target_folder
from ..common.errors import InputError
from ..common.spec import load as load_spec
from ..common.spec import read_json
from .drafter_folder import CONFIG, read_config
from .drafter_spec import MOST_LAYERS
from .lint_finding import NOT_READ, Finding, Severity
from .speculators_config import DEFAULTS, MARK
from .target_shape import read_target_config, rope_theta, text_config
from .tensor_files import TensorFacts, TensorFiles

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class TargetFacts:
    """What is known of the target."""

    place: str
    hidden_size: int | None
    vocab_size: int | None
    """Rows of its embedding."""
    num_layers: int | None
    rope_theta: float | None
    eos: tuple[int, ...]
    pad: int | None


@dataclass(frozen=True)
class DrafterFiles:
    """A folder, read."""

    folder: Path
    config: Mapping[str, Any]
    """config.json."""
    files: TensorFiles | None
    """None where no safetensors can be read."""
    unreadable: str
    """Why not."""
    target: TargetFacts | None

    @property
    def format(self) -> Literal["zlab", "speculators"]:
        return "speculators" if MARK in self.config else "zlab"

    @property
    def own(self) -> Mapping[str, Any]:
        """The document that describes the decoder layers, as it stands."""
        found = self.config.get("transformer_layer_config") if self.format == "speculators" else self.config
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def layer(self) -> dict[str, Any]:
        """The same with Qwen3's defaults for what is left out."""
        return {**DEFAULTS, **self.own}

    @property
    def nested(self) -> Mapping[str, Any]:
        """`dflash_config`."""
        found = self.config.get("dflash_config")
        return found if isinstance(found, Mapping) else {}

    @property
    def layer_place(self) -> str:
        return f"{CONFIG} transformer_layer_config" if self.format == "speculators" else CONFIG

    def size(self, name: str) -> int | None:
        """A positive whole number of the layers' document, or None; of layers no more than a drafter may have."""
        value = whole(self.layer.get(name), 1)
        return value if value is None or name != "num_hidden_layers" or value <= MOST_LAYERS else None

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """layer_types; all full where left out."""
        given = self.own.get("layer_types")
        return tuple(map(str, given)) if isinstance(given, list) else ("full_attention",) * (self.size("num_hidden_layers") or 0)

    @cached_property
    def layer_ids(self) -> tuple[int, ...] | None:
        """0-based outputs of blocks that the config names, in whichever convention; None where it names none."""
        if self.format == "speculators":
            aux = numbers(self.config.get("aux_hidden_state_layer_ids"))
            return tuple(number - 1 for number in aux) if aux is not None else None
        return numbers(self.nested.get("target_layer_ids", self.config.get("target_layer_ids")))

    @property
    def depth(self) -> int | None:
        """The target's depth: its own word, else the drafter's."""
        return (self.target.num_layers if self.target else None) or whole(self.config.get("num_target_layers"), 1)

    @cached_property
    def tensors(self) -> dict[str, TensorFacts]:
        """By name, without a `model.` that stands before all of them."""
        facts = self.files.facts if self.files is not None else {}
        return {name.removeprefix("model.") if self.prefixed else name: of for name, of in facts.items()}

    @cached_property
    def prefixed(self) -> bool:
        """Names of the decoder's tensors begin with `model.`."""
        facts = self.files.facts if self.files is not None else {}
        return any(name.startswith("model.layers.") for name in facts)

    def stored_name(self, name: str) -> str:
        """A name of `tensors` as it stands in the file."""
        return name if self.files is None or name in self.files.facts else f"model.{name}"

    def finding(
        self,
        code: str,
        severity: Severity,
        place: str,
        problem: str,
        found: object = "",
        expected: object = "",
        *,
        vllm: str,
        sglang: str,
        reference: str,
    ) -> Finding:
        """A finding in this folder. sglang, reference: of the z-lab format; neither reads the other."""
        if self.format == "speculators":
            sglang = reference = NOT_READ
        return Finding(code, severity, place, problem, str(found), str(expected), vllm, sglang, reference)


def read_folder(folder: Path, target: TargetFacts | None) -> DrafterFiles:
    """Raises InputError where there is no readable config.json: then nothing can be said."""
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"holds no {CONFIG}", place=f"--check {folder}", expected="an exported folder", fix="check the path, or export the run first"
        )
    config = read_config(folder / CONFIG)
    try:
        files = TensorFiles(folder)
        _ = files.facts
    except InputError as error:
        return DrafterFiles(folder, config, None, error.problem, target)
    return DrafterFiles(folder, config, files, "", target)


def target_of_folder(folder: Path) -> TargetFacts:
    """From a target's own folder. Raises InputError."""
    if not (folder / "config.json").is_file():
        raise InputError(
            "holds no config.json", place=f"--model {folder}", expected="the folder of the target", fix="download the target first, or give --cache"
        )
    config = read_config(folder / "config.json")
    generation = folder / "generation_config.json"
    more = read_config(generation) if generation.is_file() else {}
    eos = [*_ids(config.get("eos_token_id")), *_ids(text_config(config).get("eos_token_id")), *_ids(more.get("eos_token_id"))]
    pads = (holder.get("pad_token_id") for holder in (more, config, text_config(config)))
    found = _facts(str(folder), config, eos, next((whole(pad, 0) for pad in pads if whole(pad, 0) is not None), None))
    if None in (found.hidden_size, found.vocab_size, found.num_layers):
        problem, expected = (
            "does not give the target's sizes, so that nothing can be held against it",
            "hidden_size, vocab_size and num_hidden_layers",
        )
        raise InputError(problem, place=f"--model {folder}", expected=expected, fix="name the target's own folder, or give --cache")
    return found


def target_of_cache(cache: Path) -> TargetFacts:
    """From a feature cache, which holds what training needs of its target. Raises InputError, CacheDamaged."""
    target = load_spec(cache).settings.target
    tokens = read_json(target_folder.check(cache, layout.TOKENS_JSON) / layout.TOKENS_JSON)
    found = _facts(str(cache), read_target_config(cache), _ids(tokens.get("eos_token_ids")), whole(tokens.get("pad_token_id"), 0))
    return TargetFacts(found.place, target.hidden_size, target.vocab_size, target.num_layers, found.rope_theta, found.eos, found.pad)


def whole(value: object, least: int) -> int | None:
    """A whole number of at least `least`, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None


def numbers(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers, or None."""
    plain = isinstance(value, list) and value and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    return tuple(value) if plain and isinstance(value, list) else None


def shown(value: object) -> str:
    """As it stands in the file."""
    return json.dumps(value) if value is not None else "nothing"


def _facts(place: str, config: Mapping[str, Any], eos: list[int], pad: int | None) -> TargetFacts:
    text = text_config(config)
    hidden, rows, layers = (whole(text.get(name), 1) for name in ("hidden_size", "vocab_size", "num_hidden_layers"))
    return TargetFacts(place, hidden, rows, layers, rope_theta(text), tuple(dict.fromkeys(eos)), pad)


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in (whole(item, 0) for item in values) if number is not None]
