"""RunFacts: what a checkpoint and the run around it say of how a drafter came about, and where the run's caches are.

In: a run's folder, a checkpoint or an exported folder. Out: one checkpoint chosen, and facts for an export's README. Reads
run.json, metrics.jsonl and eval.jsonl; writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common import layout
from ..common.errors import CacheDamaged, DflashError, InputError
from ..common.fingerprint import canonical, digest_bytes
from ..common.spec import read_json
from . import checkpoint
from .checkpoint import CheckpointState
from .drafter_spec import DrafterSpec
from .log import EVALUATIONS, METRICS
from .reader import CacheReader
from .record import RUN_JSON

NO_RECORD = "copy the checkpoint's folder out of the run and export that, with --cache and --model"


@dataclass(frozen=True)
class RunFacts:
    """A checkpoint's own words, and its run's."""

    checkpoint: Path
    state: CheckpointState
    record: dict[str, Any] | None
    """run.json; None where the checkpoint lies outside of its run."""
    training: dict[str, Any] | None
    """The newest line of metrics.jsonl, up to the checkpoint, in which anything was learned."""
    evaluation: dict[str, Any] | None
    """The newest line of eval.jsonl up to the checkpoint."""

    @property
    def config_digest(self) -> str:
        """xxh3-128 of the resolved configuration."""
        return digest_bytes(canonical(self.state.config.model_dump(mode="json")))

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of the caches that were trained on."""
        return tuple(cache["fingerprint"] for cache in (self.record or {}).get("caches", ()))

    @property
    def target(self) -> str | None:
        """The target as its extraction named it."""
        return (self.record or {}).get("target") or None


def choose(source: Path, step: int | None, best: bool) -> Path:
    """The checkpoint or exported folder that `source` stands for: of a run the newest, or the one asked for. Raises InputError."""
    if not (source / checkpoint.CHECKPOINTS).is_dir():
        if step is not None or best:
            flag = "--best" if best else f"--step {step}"
            raise InputError("has no choice of checkpoints", place=f"{flag} {source}", expected="a run's folder", fix=f"leave {flag} out")
        return source
    if step is None and not best:
        return checkpoint.newest(source)
    kept = [int(path.name.removeprefix("step-")) for path in checkpoint.list_checkpoints(source)]
    if best:
        link = source / checkpoint.CHECKPOINTS / checkpoint.BEST
        if not link.is_dir():
            fix = "train with --eval-cache or data.eval_fraction, or export the newest"
            raise InputError("has no best checkpoint, for nothing was held out", place=f"--best {source}", found=f"steps {kept}", fix=fix)
        return link.resolve()
    if step not in kept:
        fix = "run.keep says how many checkpoints a run keeps"
        raise InputError("this step is not kept", place=f"--step {step}", found=f"steps {', '.join(map(str, kept)) or 'none'}", fix=fix)
    return source / checkpoint.CHECKPOINTS / f"step-{step:08d}"


def read_facts(chosen: Path) -> RunFacts | None:
    """Facts of a checkpoint; None for an exported folder, which has none."""
    if not (chosen / checkpoint.STATE).is_file():
        return None
    state, run = checkpoint.load_state(chosen), chosen.parent.parent
    if chosen.parent.name != checkpoint.CHECKPOINTS or not (run / RUN_JSON).is_file():
        return RunFacts(chosen, state, None, None, None)
    training = _newest_line(run / METRICS, state.step, "loss")
    return RunFacts(chosen, state, _read_record(run / RUN_JSON), training, _newest_line(run / EVALUATIONS, state.step, "tau"))


def _read_record(path: Path) -> dict[str, Any]:
    """run.json. Raises CacheDamaged when it is no JSON, or says where its caches are in a form that no run writes."""
    record = read_json(path, NO_RECORD)
    paths, caches, target = record.get("cache_paths", []), record.get("caches", []), record.get("target")
    fits = isinstance(paths, list) and all(isinstance(one, str) for one in paths) and isinstance(target, str | None)
    if not fits or not isinstance(caches, list) or not all(isinstance(one, dict) and isinstance(one.get("fingerprint"), str) for one in caches):
        problem = "does not say what a run says of its caches and target"
        raise CacheDamaged(problem, place=str(path), expected="cache_paths, caches with fingerprints, and a target's name", fix=NO_RECORD)
    return record


def find_cache(given: Path | None, facts: RunFacts | None, spec: DrafterSpec) -> tuple[CacheReader | None, str]:
    """A cache that the run was trained on, and a word on why there is none.

    given: the user's own word, which must be such a cache: InputError otherwise. Without it the places in run.json are tried.
    """
    if given is not None:
        reader = CacheReader(given)
        _check(reader, spec, f"--cache {given}")
        if facts is not None and facts.fingerprints and reader.spec.fingerprint not in facts.fingerprints:
            found, expected = reader.spec.fingerprint, " or ".join(facts.fingerprints)
            raise InputError("is not a cache that the run was trained on", place=f"--cache {given}", found=found, expected=expected)
        return reader, ""
    places = [Path(path) for path in (facts.record or {}).get("cache_paths", ())] if facts is not None else []
    for path in places:
        if not (path / layout.CACHE_JSON).is_file():
            continue
        try:
            reader = CacheReader(path)
            _check(reader, spec, str(path))
        except DflashError as error:
            return None, f"the run's cache {path} cannot be used: {error.problem}"
        if facts is not None and reader.spec.fingerprint in facts.fingerprints:
            return reader, ""
    return None, f"the run's cache is not at {', '.join(map(str, places))}" if places else "nothing says where the run's cache is"


def data_sources(reader: CacheReader) -> tuple[str, ...]:
    """The datasets that the cache's samples came from, as its user named them."""
    return tuple(sorted({source for part in reader.parts for source in part.manifest.sources}))


def _check(reader: CacheReader, spec: DrafterSpec, place: str) -> None:
    target = reader.spec.settings.target
    ours, theirs = (spec.hidden_size, spec.vocab_size, spec.num_target_layers), (target.hidden_size, target.vocab_size, target.num_layers)
    if ours != theirs:
        words = "hidden size {}, {} embedding rows, {} blocks"
        raise InputError("is a cache of another target", place=place, found=words.format(*theirs), expected=words.format(*ours))
    if not set(spec.target_layer_ids) <= set(reader.spec.layer_ids):
        raise InputError("lacks layers of the drafter", place=place, found=list(reader.spec.layer_ids), expected=str(list(spec.target_layer_ids)))


def _newest_line(path: Path, step: int, name: str) -> dict[str, Any] | None:
    """The last whole line up to `step` that has a number under `name`."""
    lines: Sequence[str] = path.read_text(errors="replace").splitlines() if path.is_file() else ()
    for text in reversed(lines):
        try:
            line = json.loads(text)
        except ValueError:  # a run is writing it
            continue
        if isinstance(line, dict) and _is_number(line.get("step")) and line["step"] <= step and _is_number(line.get(name)):
            return dict(line)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
