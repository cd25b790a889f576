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
from ..common.layers import layer_slots
from .config import TrainConfig
from .drafter_spec import DrafterSpec, resolve
from .mask_token import MaskToken, choose, read_tokens
from .packer import row_sizes
from .reader import CacheReader
from .split import EpochSamples, held_out, key_hashes, pick
from .target_shape import read_target_config, target_shape
from .targets_report import kept_targets
from .trackers import check_installed


@dataclass(frozen=True)
class DataFacts:
    """What the first epoch reads, counted from tokens alone. Other epochs differ a little where weights are fractions."""

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
    """Packed rows; with shuffling the number differs a little from epoch to epoch."""
    samples_held_out: int
    """Documents that are evaluated on."""


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run needs to know before it starts."""

    config: TrainConfig
    readers: tuple[CacheReader, ...]
    drafter: DrafterSpec
    mask_token: MaskToken
    facts: DataFacts
    samples: EpochSamples
    """What each epoch reads."""
    held_readers: tuple[CacheReader, ...]
    """Caches that samples are held out of, or that --eval-cache names; none without evaluation."""
    held: np.ndarray
    """bool [samples of `held_readers`]: those that are evaluated on."""

    @property
    def steps(self) -> int:
        """Optimizer steps: exact when configured, else about what `epochs` gives."""
        optim, facts = self.config.optim, self.facts
        rows = optim.accumulate_rows or 1
        if optim.accumulate_tokens is not None:
            rows = max(round(optim.accumulate_tokens * facts.rows / max(facts.tokens, 1)), 1)
        return optim.steps or max(-(-int(np.ceil(optim.epochs * facts.rows)) // rows), 1)

    @property
    def stores_targets(self) -> bool:
        """Compute the teacher's tokens first and keep them: as configured, else where they are labels and all data is read at least once."""
        optim, facts, wanted = self.config.optim, self.facts, self.config.run.store_targets
        if wanted is not None or self.config.loss.label != "teacher":
            return bool(wanted)
        if optim.steps is None:
            return optim.epochs >= 1
        of, whole = (optim.accumulate_tokens, facts.tokens) if optim.accumulate_tokens else (optim.accumulate_rows or 1, facts.rows)
        return optim.steps * of >= whole

    def caches(self) -> list[dict[str, Any]]:
        """What identifies the data: a resumed run must find the same."""
        return [_identity(reader) for reader in self.readers]

    def eval_caches(self) -> list[dict[str, Any]]:
        """The same for what is evaluated on."""
        return [_identity(reader) for reader in self.held_readers]

    def to_dict(self) -> dict[str, Any]:
        """For `--dry-run`."""
        return {
            "config": self.config.model_dump(mode="json"),
            "drafter": {**self.drafter.model_dump(mode="json"), "parameters": self.drafter.num_parameters},
            "mask_token": {"id": self.mask_token.id, "reason": self.mask_token.reason},
            "gamma": self.config.loss.gamma,
            "target": {"model": self.readers[0].spec.provenance.model, "architecture": self.readers[0].spec.settings.target.architecture},
            "caches": [{"path": str(r.path), **facts} for r, facts in zip(self.readers, self.caches())],
            "eval_caches": [{"path": str(r.path), **facts} for r, facts in zip(self.held_readers, self.eval_caches())],
            "data": vars(self.facts),
            "targets": {"store": self.stores_targets, "kept": [line.to_dict() for reader in self.readers for line in kept_targets(reader)]},
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
        if twice := self._trained_and_evaluated():
            found.append(f"{twice} of {self.facts.samples_held_out} held-out samples are also in the caches that are trained on")
        return found

    def _trained_and_evaluated(self) -> int:
        if not self.held_readers or self.config.data.eval_fraction:
            return 0
        trained = np.concatenate([key_hashes(reader) for reader in self.readers])
        return int(np.isin(np.concatenate([key_hashes(reader) for reader in self.held_readers])[self.held], trained).sum())

    def summary(self) -> list[str]:
        """The lines that every run starts with."""
        config, spec = self.config, self.drafter
        count, terms = len(spec.target_layer_ids), " + ".join(f"{factor:g} {name}" for name, factor in config.loss.factors.items())
        layers, about = ", ".join(map(str, spec.target_layer_ids)), "" if config.optim.steps else "about "
        heads = f"{spec.num_attention_heads}/{spec.num_key_value_heads} heads of {spec.head_dim}"
        loss, facts, optim = config.loss, self.facts, config.optim
        size = f"about {optim.accumulate_tokens:,} tokens" if optim.accumulate_tokens else f"{optim.accumulate_rows or 1} rows"
        held = [f"held out  {facts.samples_held_out:,} samples, every {config.eval.every:,} steps"] if facts.samples_held_out else []
        return [
            f"drafter   {spec.num_layers} layers of {spec.hidden_size}, {heads}, {spec.num_parameters:,} parameters, rope_theta {spec.rope_theta:g}",
            f"fc reads  outputs of blocks {layers} of {spec.num_target_layers} (0-based): {count} x {spec.hidden_size} -> {spec.hidden_size}",
            f"block     {spec.block_size} slots; mask token {spec.mask_token_id} ({self.mask_token.reason})",
            f"loss      label {loss.label}; {terms}; slot weights {loss.weights_text}",
            f"anchors   at most {loss.anchors_per_document} a document, {loss.anchors_per_row} a row; {facts.anchors:,} valid in all",
            f"data      {facts.samples:,} samples, {facts.tokens:,} tokens, about {facts.rows:,} rows of {config.data.row_tokens:,} an epoch",
            *held,
            f"steps     {about}{self.steps:,} of {size}; {optim.name}, {optim.schedule}, peak learning rate {optim.lr:g}",
            *(f"note      {line}" for line in self.warnings()),
        ]


def _identity(reader: CacheReader) -> dict[str, Any]:
    tokens = int(reader.lengths.sum())
    return {"fingerprint": reader.spec.fingerprint, "samples": reader.num_samples, "tokens": tokens, "parts": _digest(reader)}


def _digest(reader: CacheReader) -> str:
    """Stands for the very rows and their order: parts that were extracted anew are other data to a resumed run."""
    return digest_bytes(canonical([part.manifest.digest for part in reader.parts]))


def dry_run(config: TrainConfig, caches: Sequence[Path], eval_caches: Sequence[Path] = ()) -> dict[str, Any]:
    """Resolve and validate everything; read no states, write nothing, import no torch."""
    return make_plan(config, caches, eval_caches).to_dict()


def make_plan(config: TrainConfig, caches: Sequence[Path], eval_caches: Sequence[Path] = ()) -> RunPlan:
    """Resolve and check. Raises InputError for caches of different targets, layers that are not stored, sizes that cannot be
    read, a bad mask token, a tracker that is not installed, and data without a single anchor; CacheDamaged as the readers do."""
    check_installed(config.run.trackers)
    if not caches:
        raise InputError("no cache is given", place="--cache", expected="at least one folder written by `dflash extract`")
    readers = tuple(CacheReader(path) for path in caches)
    check_same_target(readers, same_layers=config.model.target_layer_ids is None)
    tokens = read_tokens(readers[0].path)
    mask_token = choose(tokens, [reader.token_counts() for reader in readers], config.model.mask_token_id)
    shape = target_shape(read_target_config(readers[0].path))
    spec = resolve(config.model, readers[0].spec, shape, mask_token.id)
    held = [held_out(reader, config.data.eval_fraction) for reader in readers]
    samples = EpochSamples(readers, config.data.weights, held, config.data.seed)
    held_readers, picked = _evaluated(config, readers, held, tuple(CacheReader(path) for path in eval_caches), spec)
    facts = count_data(samples, config.data.row_tokens, int(picked.sum()))
    if not facts.anchors:
        raise InputError(
            "no sample has an anchor: a supervised token that is followed by another",
            place=", ".join(str(path) for path in caches),
            found=f"{facts.samples} samples",
            fix="look at the loss masks with `dflash inspect`",
        )
    return RunPlan(config, readers, spec, mask_token, facts, samples, held_readers, picked)


def _evaluated(
    config: TrainConfig, readers: Sequence[CacheReader], held: Sequence[np.ndarray], eval_readers: tuple[CacheReader, ...], spec: DrafterSpec
) -> tuple[tuple[CacheReader, ...], np.ndarray]:
    """The caches and the samples (bool, over all of these caches) that are evaluated on."""
    fraction = config.data.eval_fraction
    if not fraction and not eval_readers:
        return (), np.zeros(0, bool)
    if fraction and eval_readers:
        raise InputError("samples are held out twice", place="--eval-cache, data.eval_fraction", fix="leave one of the two out")
    if eval_readers:
        check_same_target((readers[0], *eval_readers), same_layers=False)
        for reader in eval_readers:
            layer_slots(spec.target_layer_ids, reader.spec.layer_ids, str(reader.path))
        return eval_readers, pick(eval_readers, [np.ones(reader.num_samples, bool) for reader in eval_readers], config.eval.samples)
    picked = pick(readers, held, config.eval.samples)
    if not picked.any():
        raise InputError("holds out no sample", place=f"data.eval_fraction={fraction}", found=f"{len(picked)} samples", fix="hold out more")
    return tuple(readers), picked


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


def count_data(samples: EpochSamples, row_tokens: int, held_out_samples: int = 0) -> DataFacts:
    """Count samples, tokens and valid anchors of the first epoch; from the small arrays only."""
    valid_of = {reader.path: _valid_anchors(reader) for reader in samples.readers}
    read = samples.chosen(0)
    valid = np.concatenate([valid_of[reader.path] for reader in samples.readers])[read]
    lengths = np.concatenate([reader.lengths for reader in samples.readers])
    rows = len(row_sizes(np.flatnonzero(read), lengths, row_tokens))
    lengths = lengths[read]
    return DataFacts(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        anchors=int(valid.sum()),
        samples_without_anchor=int((valid == 0).sum()),
        samples_cut=int((lengths > row_tokens).sum()),
        rows=rows,
        samples_held_out=held_out_samples,
    )


def _valid_anchors(reader: CacheReader) -> np.ndarray:
    """int64 [S]: valid anchors of each sample."""
    counts = []
    for part, (mask, next_token) in zip(reader.parts, reader.columns("loss_mask", "next_token")):
        loss_mask, offsets = mask.astype(bool), part.offsets
        following = np.append(loss_mask[1:], False)
        following[offsets[1:] - 1] = next_token >= 0
        counts.append(np.add.reduceat((loss_mask & following).astype(np.int64), offsets[:-1]))
    return np.concatenate(counts)
