"""The README.md of an exported folder: how to serve it, where it comes from, what was measured.

In: the drafter's spec, the format, facts of its run and the proof of the export. Out: text. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from .checkpoint import EMA, served_weights
from .drafter_spec import FULL, SLIDING, DrafterSpec
from .export_proof import ExportProof
from .run_facts import RunFacts

VERSIONS = ("dflash-cache", "torch", "transformers", "safetensors")


@dataclass(frozen=True)
class Provenance:
    """Where a drafter comes from."""

    target: str | None
    """As its user named it."""
    source: Path
    """Checkpoint or folder."""
    facts: RunFacts | None
    """None when made from an exported folder."""
    fingerprint: str | None
    """Of the cache at hand."""
    data_sources: tuple[str, ...]
    """Datasets behind that cache."""


def serving_readme(spec: DrafterSpec, format: str, dtype: str, provenance: Provenance, proof: ExportProof, warnings: tuple[str, ...]) -> str:
    """The whole file."""
    parts = [_title(spec, format, dtype, provenance), _serve(spec, format, provenance.target or "TARGET")]
    parts += [_origin(provenance), _measured(provenance.facts, proof), _differs()]
    if warnings:
        parts.append("## Notes\n\n" + "\n".join(f"- {line}" for line in warnings))
    return "\n\n".join(parts) + f"\n\nWritten by dflash-cache {__version__}.\n"


def _title(spec: DrafterSpec, format: str, dtype: str, provenance: Provenance) -> str:
    blocks = ", ".join(map(str, spec.target_layer_ids))
    own = "holds copies of the target's embedding and head" if format == "speculators" else "uses the target's own embedding and output head"
    kept = f" It can draft {spec.draft_vocab_size} of the {spec.vocab_size} tokens." if spec.draft_vocab_size is not None else ""
    window = f"\nIts sliding layers see {spec.sliding_window} positions and are causal inside a block." if SLIDING in spec.layer_types else ""
    return f"""# DFlash drafter{f" for {provenance.target}" if provenance.target else ""}

Drafts {spec.num_drafted} tokens at a time (blocks of {spec.block_size}, the last known token included) for a target with
{spec.num_target_layers} blocks, hidden size {spec.hidden_size} and {spec.vocab_size} embedding rows. It reads the outputs of the
target's blocks {blocks} (counted from 0) and {own}.{kept}
Mask token: {spec.mask_token_id}. Weights: {dtype}. Format: {format}.{window}"""


def _serve(spec: DrafterSpec, format: str, target: str) -> str:
    drafts = spec.num_drafted
    speculative = json.dumps({"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": drafts})
    mixed = "VLLM_USE_V2_MODEL_RUNNER=1 " if {SLIDING, FULL} <= set(spec.layer_types) else ""
    text = f"""## Serve

DRAFTER is this folder. vLLM (0.25 or later); the number of speculative tokens is what a block drafts, {drafts}:

    {mixed}vllm serve {target} --speculative-config '{speculative}'
"""
    if format == "speculators":
        return f"""{text}
or, with target and numbers taken from the folder's config.json:

    vllm serve DRAFTER

SGLang and the reference implementation do not read this format; `dflash export --format zlab` writes theirs.

The speculators library:

    from speculators import SpeculatorModel
    drafter = SpeculatorModel.from_pretrained("DRAFTER")"""
    return f"""{text}
SGLang; the number of draft tokens is the block size:

    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
        --speculative-draft-model-path DRAFTER --speculative-num-draft-tokens {spec.block_size}

The reference implementation (`pip install dflash`):

    from dflash.model import DFlashDraftModel
    drafter = DFlashDraftModel.from_pretrained("DRAFTER", dtype="auto")"""


def _origin(provenance: Provenance) -> str:
    facts, rows = provenance.facts, [("target", provenance.target or "not recorded")]
    if facts is None:
        rows.append(("made from", f"the exported folder {provenance.source.name}, which does not say more"))
        return _table("Where it comes from", rows)
    state, record = facts.state, facts.record or {}
    caches = record.get("caches", ())
    rows += [("cache", f"fingerprint {c['fingerprint']}: {c['samples']:,} samples, {c['tokens']:,} tokens") for c in caches]
    if provenance.data_sources:
        rows.append(("data", ", ".join(provenance.data_sources)))
    read = f"{state.tokens:,} tokens read" + (f", {state.skipped_steps:,} steps skipped" if state.skipped_steps else "")
    total = f" of {record['total_steps']:,}" if record.get("total_steps") else ""
    rows.append(("steps", f"{state.step:,}{total}; {read}; epoch {state.epoch}"))
    rows.append(("weights", "the running mean (EMA)" if served_weights(state) == EMA else "of the last step"))
    rows.append(("loss", f"label {state.config.loss.label}, slot weights {state.config.loss.weights_text}"))
    rows.append(("configuration", f"xxh3-128 {facts.config_digest}"))
    if lives := record.get("lives"):
        versions = lives[-1].get("versions", {})
        rows.append(("trained with", ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)))
        if commit := (lives[-1].get("git") or {}).get("commit"):
            rows.append(("commit", commit))
    return _table("Where it comes from", rows)


def _measured(facts: RunFacts | None, proof: ExportProof) -> str:
    training = facts.training if facts is not None else None
    evaluation = facts.evaluation if facts is not None else None
    rows = [("training", _numbers(training, "accuracy", "tau") if training else "not recorded")]
    rows.append(("held-out", _numbers(evaluation, "accuracy", "tau", "tau_walk") if evaluation else "nothing was held out"))
    rows.append(("this folder", proof.to_text()))
    return _table("Measured", rows)


def _numbers(line: dict[str, Any], *names: str) -> str:
    loss = [f"loss {line['loss']:.4f}"] if isinstance(line.get("loss"), float) else []
    found = loss + [f"{name} {line[name]:.3f}" for name in names if isinstance(line.get(name), (int, float))]
    documents = [f"{line['documents']:,} documents"] if "documents" in line else []
    return ", ".join([f"after step {line['step']:,}", *found, *documents])


def _differs() -> str:
    return """## What serving makes of it

`tau` counts every anchor of a text, `tau_walk` walks through it as serving does: from each token that the target adds to the next.
Both count the target's own token, and both are over stored text: where the target did not write it, serving leaves the path that
the walk stays on. A served acceptance length also depends on prompts, temperature and the engine's number formats. Measure it:

    dflash eval --engine vllm --model TARGET --drafter DRAFTER --data prompts.jsonl"""


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    return "\n".join([f"## {title}", "", "| | |", "| --- | --- |", *(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows)])
