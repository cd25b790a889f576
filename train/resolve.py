"""RunPlan: a training run resolved and checked before anything heavy is loaded; what `--dry-run` prints.

In: a TrainConfig and cache folders. Out: open readers, the drafter's spec, the mask token and what the data holds. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common.errors import InputError
from ..common.fingerprint import canonical, differences, digest_bytes
from .config import TrainConfig
from .drafter_spec import DrafterSpec, resolve
from .mask_token import MaskToken, choose, read_tokens
from .packer import pack
from .reader import CacheReader
from .target_shape import read_target_config, target_shape


@dataclass(frozen=True)
class DataFacts:
    """What the caches hold, counted from their tokens alone."""

    samples: int
    """Documents."""
    tokens: int
    """Tokens."""
    anchors: int
    """Valid anchors, before any limit."""
    samples_without_anchor: int
    """Documents that teach nothing: no supervised token is followed by another."""
    samples_cut: int
    """Documents longer than a row, which are cut to it."""
    rows: int
    """Packed rows of an epoch; with shuffling the number differs a little from epoch to epoch."""


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run needs to know before it starts."""

    config: TrainConfig
    readers: tuple[CacheReader, ...]
    drafter: DrafterSpec
    mask_token: MaskToken
    facts: DataFacts

    @property
    def steps(self) -> int:
        """Optimizer steps: exact when configured, else about what `epochs` gives."""
        optim = self.config.optim
        return optim.steps or max(-(-int(np.ceil(optim.epochs * self.facts.rows)) // optim.accumulate_rows), 1)

    def caches(self) -> list[dict[str, Any]]:
        """What identifies the data: a resumed run must find the same."""
        return [
            {"fingerprint": r.spec.fingerprint, "samples": r.num_samples, "tokens": int(r.lengths.sum()), "parts": _digest(r)} for r in self.readers
        ]

    def to_dict(self) -> dict[str, Any]:
        """For `--dry-run`."""
        return {
            "config": self.config.model_dump(mode="json"),
            "drafter": {**self.drafter.model_dump(mode="json"), "parameters": self.drafter.num_parameters},
            "mask_token": {"id": self.mask_token.id, "reason": self.mask_token.reason},
            "gamma": self.config.loss.gamma,
            "target": {"model": self.readers[0].spec.provenance.model, "architecture": self.readers[0].spec.settings.target.architecture},
            "caches": [{"path": str(r.path), **facts} for r, facts in zip(self.readers, self.caches())],
            "data": vars(self.facts),
            "steps": self.steps,
            "warnings": self.warnings(),
        }

    def warnings(self) -> list[str]:
        """What is allowed and still worth a second look."""
        found = []
        features, depth = self.readers[0].spec.settings.features, self.readers[0].spec.settings.target.num_layers
        if features.verifier_layer != depth - 1 and self.config.loss.label != "data":
            found.append(f"teacher states were forced to block {features.verifier_layer}; the target's output is block {depth - 1}")
        if self.facts.samples_without_anchor:
            found.append(f"{self.facts.samples_without_anchor} of {self.facts.samples} samples have no anchor and teach nothing")
        if self.facts.samples_cut:
            found.append(f"{self.facts.samples_cut} samples are longer than data.row_tokens={self.config.data.row_tokens} and are cut")
        return found

    def summary(self) -> list[str]:
        """The lines that every run starts with."""
        config, spec = self.config, self.drafter
        decays, count = config.loss.position_weights == "exp", len(spec.target_layer_ids)
        decay = f"exp(-(k-1)/gamma), gamma {config.loss.gamma}" if decays else f"all 1 (gamma {config.loss.gamma} is not used)"
        layers, about = ", ".join(map(str, spec.target_layer_ids)), "" if config.optim.steps else "about "
        heads = f"{spec.num_attention_heads}/{spec.num_key_value_heads} heads of {spec.head_dim}"
        loss, facts = config.loss, self.facts
        return [
            f"drafter   {spec.num_layers} layers of {spec.hidden_size}, {heads}, {spec.num_parameters:,} parameters, rope_theta {spec.rope_theta:g}",
            f"fc reads  outputs of blocks {layers} of {spec.num_target_layers} (0-based): {count} x {spec.hidden_size} -> {spec.hidden_size}",
            f"block     {spec.block_size} slots; mask token {spec.mask_token_id} ({self.mask_token.reason})",
            f"loss      label {loss.label}; slot weights {decay}",
            f"anchors   at most {loss.anchors_per_document} a document, {loss.anchors_per_row} a row; {facts.anchors:,} valid in all",
            f"data      {facts.samples:,} samples, {facts.tokens:,} tokens, about {facts.rows:,} rows of {config.data.row_tokens:,} an epoch",
            f"steps     {about}{self.steps:,} of {config.optim.accumulate_rows} rows; peak learning rate {config.optim.lr:g}",
            *(f"note      {line}" for line in self.warnings()),
        ]


def _digest(reader: CacheReader) -> str:
    """Stands for the very rows and their order: parts that were extracted anew are other data to a resumed run."""
    return digest_bytes(canonical([part.manifest.digest for part in reader.parts]))


def dry_run(config: TrainConfig, caches: Sequence[Path]) -> dict[str, Any]:
    """Resolve and validate everything; read no states, write nothing, import no torch."""
    return make_plan(config, caches).to_dict()


def make_plan(config: TrainConfig, caches: Sequence[Path]) -> RunPlan:
    """Resolve and check. Raises InputError for caches of different targets, layers that are not stored, sizes that cannot be
    read, a bad mask token, and data without a single anchor; CacheDamaged as the readers do."""
    if not caches:
        raise InputError("no cache is given", place="--cache", expected="at least one folder written by `dflash extract`")
    readers = tuple(CacheReader(path) for path in caches)
    check_same_target(readers, same_layers=config.model.target_layer_ids is None)
    tokens = read_tokens(readers[0].path)
    mask_token = choose(tokens, [reader.token_counts() for reader in readers], config.model.mask_token_id)
    shape = target_shape(read_target_config(readers[0].path))
    spec = resolve(config.model, readers[0].spec, shape, mask_token.id)
    facts = count_data(readers, config.data.row_tokens)
    if not facts.anchors:
        raise InputError(
            "no sample has an anchor: a supervised token that is followed by another",
            place=", ".join(str(path) for path in caches),
            found=f"{facts.samples} samples",
            fix="look at the loss masks with `dflash inspect`",
        )
    return RunPlan(config, readers, spec, mask_token, facts)


def check_same_target(readers: Sequence[CacheReader], same_layers: bool) -> None:
    """Raise InputError naming every difference between the targets (and stored layers) of caches that are used together."""

    def identity(reader: CacheReader) -> dict[str, Any]:
        settings = reader.spec.settings
        target, verifier = settings.target.model_dump(mode="json"), settings.features.verifier_layer
        document: dict[str, Any] = {"target": target, "verifier_layer": verifier}
        return {**document, "layer_ids": list(settings.features.layer_ids)} if same_layers else document

    first = readers[0]
    for other in readers[1:]:
        found = list(differences(identity(first), identity(other)))
        if found:
            lines = "".join(f"\n  - {name}: {first.path} has {ours!r}, {other.path} has {theirs!r}" for name, ours, theirs in found)
            layers_only = all(name == "layer_ids" for name, _, _ in found)
            fix = "choose layers that both hold: --set model.target_layer_ids=[...]" if layers_only else "use caches of one target"
            raise InputError(f"caches that are used together must come from one target:{lines}", place="--cache", fix=fix)


def count_data(readers: Sequence[CacheReader], row_tokens: int) -> DataFacts:
    """Count samples, tokens and valid anchors; from the small arrays only."""
    anchors = without = 0
    for reader in readers:
        for part in range(len(reader.parts)):
            loss_mask = reader.column(part, "loss_mask").astype(bool)
            offsets = reader.parts[part].offsets
            following = np.append(loss_mask[1:], False)
            following[offsets[1:] - 1] = reader.column(part, "next_token") >= 0
            valid = np.add.reduceat((loss_mask & following).astype(np.int64), offsets[:-1])
            anchors, without = anchors + int(valid.sum()), without + int((valid == 0).sum())
    lengths = np.concatenate([reader.lengths for reader in readers])
    rows = len(pack(np.arange(len(lengths)), lengths, row_tokens))
    return DataFacts(len(lengths), int(lengths.sum()), anchors, without, int((lengths > row_tokens).sum()), rows)
