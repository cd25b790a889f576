"""Export: a drafter's weights as one folder that serving engines load, proven before it appears.

In: a run folder, a checkpoint or an exported folder, and the format. Out: config.json, model.safetensors and README.md.
zlab: for vLLM (method dflash), SGLang (DFLASH) and the reference implementation; speculators: for vLLM and the speculators
library. Sources of the names: the loaders of vLLM 0.32 and SGLang, `dflash` 0.1.0, speculators 0.9.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from .. import __version__
from ..common import atomic
from ..common.errors import DflashError, InputError, guard_writing
from . import checkpoint
from .draft_head import draft_head, is_kept
from .drafter import Drafter
from .drafter_folder import CONFIG, EMBEDDING, HEAD, KEPT, MODEL, README, cast_floats, load_drafter
from .drafter_spec import FULL, SLIDING, DrafterSpec
from .export_proof import ExportProof, prove
from .reader import CacheReader
from .run_facts import choose, data_sources, find_cache, read_facts
from .serving_config import serving_config
from .serving_readme import Provenance, serving_readme
from .speculators_config import Verifier, speculators_config
from .target_head import TargetHead
from .target_shape import read_target_config
from .tensor_files import TensorFacts, TensorFiles

ExportFormat = Literal["zlab", "speculators"]
ExportType = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class ExportResult:
    """What was written, or with `dry_run` would be."""

    folder: Path | None
    """None where a dry run was given none."""
    format: ExportFormat
    source: Path
    """The checkpoint, or the folder, that the weights come from."""
    drafter: DrafterSpec
    dtype: str
    config: dict[str, Any]
    """config.json."""
    tensors: tuple[TensorFacts, ...]
    warnings: tuple[str, ...]
    """What is written and still worth knowing."""
    proof: ExportProof | None
    """None for a dry run."""

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "folder": str(self.folder) if self.folder is not None else None,
            "format": self.format,
            "source": str(self.source),
            "dtype": self.dtype,
            "num_speculative_tokens": self.drafter.num_drafted,
            "drafter": self.drafter.model_dump(mode="json"),
            "config": self.config,
            "tensors": [{**asdict(tensor), "shape": list(tensor.shape)} for tensor in self.tensors],
            "bytes": sum(tensor.bytes for tensor in self.tensors),
            "warnings": list(self.warnings),
            "written": self.proof is not None,
            "proof": self.proof.to_dict() if self.proof is not None else None,
        }

    def to_text(self) -> str:
        """For people."""
        size = f"{len(self.tensors)} tensors, {sum(tensor.bytes for tensor in self.tensors):,} bytes"
        warnings = [f"warning   {line}" for line in self.warnings]
        if self.proof is None:
            lines = [
                f"would write {self.folder or 'a folder'} ({self.format}, {self.dtype}; {size}) from {self.source}",
                json.dumps(self.config, indent=2),
            ]
            rows = [f"{tensor.name:44} {tensor.dtype:9} {'x'.join(map(str, tensor.shape)):>16} {tensor.bytes:>14,}" for tensor in self.tensors]
            return "\n".join([*lines, *rows, *warnings])
        served = f"serve with {self.drafter.num_drafted} speculative tokens, see {README} in it"
        return "\n".join([f"wrote {self.folder} ({self.format}, {self.dtype}; {size}); {served}", self.proof.to_text(), *warnings])


def export(
    source: Path,
    to: Path | None,
    dtype: ExportType = "bfloat16",
    *,
    format: ExportFormat = "zlab",
    step: int | None = None,
    best: bool = False,
    include_embeddings: bool = False,
    cache: Path | None = None,
    model: str | None = None,
    dry_run: bool = False,
) -> ExportResult:
    """Write the drafter at `source` to the folder `to`, read it back, and draft a few blocks with it and with the checkpoint.

    step, best: which checkpoint of a run; the newest by default. cache: one that the run was trained on, where it is no longer
    at the place that the run knows; the speculators format, and include_embeddings, take the target's embedding and head from
    it. model: the target's name in the folder. The folder appears under its name only when complete. Raises InputError when
    `to` holds something already, `source` holds no drafter or the format has no words for it; DflashError when weights are not
    finite, or when what was written does not read back equal or computes something else.
    """
    if to is None and not dry_run:
        raise InputError("needs a folder to write", place="--to")
    if to is not None and not dry_run:
        _check_destination(to, source)
    chosen = choose(source, step, best)
    facts = read_facts(chosen)
    drafter = load_drafter(chosen, CacheReader(cache).spec.settings.target.num_layers if cache is not None else None)
    check_servable(drafter.spec, source, format)
    reader, missing = find_cache(cache, facts, drafter.spec)
    with_target = include_embeddings or format == "speculators"
    if reader is None and with_target:
        problem = f"the target's embedding and head are not at hand: {missing}"
        raise InputError(problem, place=str(source), expected="a cache that the run was trained on", fix="name it with --cache")
    head = TargetHead(reader.path, reader.spec, torch.device("cpu"), torch.bfloat16) if reader is not None else None
    tensors = _tensors(drafter, getattr(torch, dtype), head if with_target else None, format)
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        problem = f"weights are not finite in {dtype}; such a drafter is not exported"
        raise DflashError(problem, place=str(chosen), found=", ".join(broken[:5]))
    name = model or (facts.target if facts is not None else None) or (reader.spec.provenance.model if reader is not None else None) or None
    if format == "zlab":
        config = serving_config(drafter.spec, dtype)
    else:
        architectures = read_target_config(reader.path).get("architectures") if reader is not None else None
        config = speculators_config(drafter.spec, dtype, Verifier(name, tuple(architectures or ())))
    result = ExportResult(
        to, format, chosen, drafter.spec, dtype, config, _facts(tensors), _warnings(drafter.spec, format, with_target, missing, name), None
    )
    if to is None or dry_run:
        return result
    provenance = Provenance(name, chosen, facts, reader.spec.fingerprint if reader else None, data_sources(reader) if reader else ())
    with guard_writing(to):
        proof = _write(result, to, drafter, tensors, provenance, reader, head)
    return replace(result, proof=proof)


def _check_destination(to: Path, source: Path) -> None:
    """Raise InputError when no folder can appear at `to`; before anything is computed."""
    place, choose_another = f"--to {to}", "choose another folder"
    try:
        if to.is_symlink():
            raise InputError("is a symbolic link", place=place, found=os.readlink(to), expected="a new or empty folder", fix="name what it points at")
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise InputError("holds something already", place=place, expected="a new or empty folder", fix=choose_another)
        above = next(folder for folder in to.absolute().parents if folder.exists())
        inside = to.resolve().is_relative_to(_kept_clean(source).resolve())
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", place=place, fix=choose_another) from None
    if not above.is_dir():
        raise InputError("lies below a file", place=place, found=above, expected="a folder", fix=choose_another)
    if inside:
        raise InputError(
            "lies inside of what is exported", place=place, found=_kept_clean(source), expected="a folder outside of it", fix=choose_another
        )


def _kept_clean(source: Path) -> Path:
    """A run's checkpoints, which training lists and clears; else the folder that is exported."""
    if (source / checkpoint.CHECKPOINTS).is_dir():
        return source / checkpoint.CHECKPOINTS
    return source.parent if source.parent.name == checkpoint.CHECKPOINTS else source


def check_servable(spec: DrafterSpec, place: Path, format: ExportFormat = "zlab") -> None:
    """Raise InputError for a drafter that the format cannot describe, or that no engine would serve as described."""
    if format == "speculators":
        if {SLIDING, FULL} <= set(spec.layer_types):
            problem = "the speculators format cannot say sliding and full layers to vLLM: it serves all of them with one causal flag"
            raise InputError(problem, place=str(place), found=list(spec.layer_types), expected="one kind of attention", fix="--format zlab")
        return
    odd = f"a draft vocabulary of {spec.draft_vocab_size} tokens" if spec.draft_vocab_size is not None else ""
    odd = odd or ("drafting from the anchor (sample_from_anchor)" if spec.sample_from_anchor else "")
    if odd:
        fix = "--format speculators, or train without it; `dflash eval --cache` measures it as it is"
        raise InputError(f"the z-lab format has no words for {odd}", place=str(place), expected="the speculators format", fix=fix)


def _warnings(spec: DrafterSpec, format: ExportFormat, with_target: bool, missing: str, name: str | None) -> tuple[str, ...]:
    found = []
    if missing:
        found.append(f"the folder is compared with the checkpoint on random states: {missing}")
    if spec.sample_from_anchor:
        found.append("vLLM 0.32 serves no DFlash drafter that drafts from the anchor; the speculators library reads it")
    if {SLIDING, FULL} <= set(spec.layer_types):
        found.append("vLLM serves sliding and full layers together with VLLM_USE_V2_MODEL_RUNNER=1 only")
    if format == "zlab" and with_target:
        found.append("of the target's embedding and head vLLM compares its own with them and then keeps one; SGLang and the reference skip them")
    if format == "speculators" and name is None:
        found.append("the folder does not name its target: `vllm serve FOLDER` needs it, --model gives it")
    if spec.logit_scale != 1.0 or spec.logit_softcap is not None:
        found.append("the target scales or bounds its logits, which not every engine does for a drafter; its most likely tokens stay the same")
    return tuple(found)


def _tensors(drafter: Drafter, kind: torch.dtype, head: TargetHead | None, format: ExportFormat) -> dict[str, torch.Tensor]:
    """Everything that the file holds. head: whose embedding and head are written too."""
    tensors = {name: cast_floats(tensor.detach(), kind).contiguous() for name, tensor in drafter.state_dict().items()}
    if head is not None:
        rows_DH = draft_head(head.head, drafter.d2t).head.weight_VH.to(kind)
        tensors |= {EMBEDDING: head.embedding_VH.to(kind), HEAD: rows_DH}
        if rows_DH.data_ptr() == tensors[EMBEDDING].data_ptr():  # tied; a file holds each tensor by itself
            tensors[HEAD] = rows_DH.clone()
    if drafter.d2t is not None and format == "speculators":
        tensors[KEPT] = is_kept(drafter.d2t, drafter.spec.vocab_size)
    return tensors


def _facts(tensors: dict[str, torch.Tensor]) -> tuple[TensorFacts, ...]:
    dtype = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    return tuple(TensorFacts(name, dtype[name], tuple(tensor.shape), tensor.nbytes) for name, tensor in sorted(tensors.items()))


def _write(
    plan: ExportResult,
    to: Path,
    drafter: Drafter,
    tensors: dict[str, torch.Tensor],
    provenance: Provenance,
    reader: CacheReader | None,
    head: TargetHead | None,
) -> ExportProof:
    """Write beside the folder, read back, compare, rename."""
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        try:
            partial.mkdir()
        except FileNotFoundError as error:  # a file system that makes no folders
            raise InputError(f"cannot be written: {error.strerror}", place=str(to), fix="choose another folder") from None
        (partial / CONFIG).write_text(json.dumps(plan.config, indent=2) + "\n")
        save_file(tensors, partial / MODEL, metadata={"format": "pt", "dflash-cache": __version__})
        (partial / MODEL).chmod((partial / CONFIG).stat().st_mode)  # safetensors writes for its user alone; a server may be another
        _compare(partial, tensors, drafter.spec)
        proof = prove(partial, drafter, reader, head)
        (partial / README).write_text(serving_readme(drafter.spec, plan.format, plan.dtype, provenance, proof, plan.warnings))
        if to.is_dir():
            to.rmdir()
        atomic.publish_folder(partial, to)
        return proof
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _compare(folder: Path, tensors: dict[str, torch.Tensor], spec: DrafterSpec) -> None:
    written = TensorFiles(folder)
    equal = written.facts.keys() == tensors.keys() and all(torch.equal(written.read(name), tensor) for name, tensor in tensors.items())
    if not equal or load_drafter(folder).spec != spec:
        raise DflashError("what was written does not read back equal; the folder was not published", place="export")
