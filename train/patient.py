"""Patient: everything that the doctor looks at, loaded and checked: cache, folder, run, documents, and what is known of all three.

In: paths. Out: a Patient that drafts in the trainer's way and in the plain one. Compares nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..common.errors import InputError
from ..common.layers import layer_slots
from ..common.progress import ProgressBar
from . import checkpoint
from .conventions import trained_conventions
from .device import Compute, resolve_compute
from .drafter import Drafter
from .drafter_folder import CONFIG, load_drafter
from .evaluate import check_fits
from .hypotheses import Situation
from .mask_token import read_tokens
from .plain_forward import PlainDrafter
from .reader import CacheReader
from .replay import NO_LAYER, Document, Walked, plain_drafts, read_document, trainer_drafts, walk_document
from .target_head import TargetHead
from .target_shape import read_target_config, target_shape
from .tensor_files import TensorFiles
from .tensor_story import tell

FIXED = ("fc.weight", "hidden_norm.weight", "norm.weight")
ATTENTION = tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
PER_LAYER = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *ATTENTION)


class Patient:
    """A drafter in its folder, the run that it came from (or None), and the cache's first `limit` documents that can be drafted.

    Raises InputError when they do not belong together, or the folder is none that an engine would load.
    """

    def __init__(self, cache: Path, folder: Path, run: Path | None, limit: int, device: str) -> None:
        where = resolve_compute(device, "float32", "dense").device
        self.compute = Compute(where, torch.float32, "dense")
        self.reader, self.folder, self.run = CacheReader(cache), folder, run
        self.stored = self.reader.spec.layer_ids
        self.notes: list[str] = []
        if not (folder / CONFIG).is_file():
            raise InputError("is no exported drafter", place=f"--drafter {folder}", fix="`dflash export` it, and give the run with --run")
        self.plain = PlainDrafter.load(folder, where)
        self._check_tensors()
        self.drafter = self._trained()
        self.head = TargetHead(cache, self.reader.spec, where, torch.float32)
        if self.drafter is not None:
            check_fits(self.drafter.spec, self.reader, run or folder)
            self.slots = layer_slots(self.drafter.spec.target_layer_ids, self.stored, str(cache))
        self._check_layers()
        self.situation = self._situation()
        self.documents = self._documents(limit)

    def trainer_walks(self, documents: Sequence[Document]) -> list[Walked]:
        """The trainer's way."""
        assert self.drafter is not None
        with ProgressBar("the trainer's step", len(documents)) as bar:
            walks = []
            for document in documents:
                walks.append(walk_document(document, trainer_drafts(self.drafter, self.head, self.slots, document, self.compute)))
                bar.update(1)
        return walks

    def plain_walks(self, documents: Sequence[Document], plain: PlainDrafter, title: str | None = None) -> list[Walked]:
        """The plain way; with a title, it shows its progress."""

        def walk(document: Document) -> Walked:
            return walk_document(document, plain_drafts(plain, self.head, self.stored, document))

        if title is None:
            return [walk(document) for document in documents]
        with ProgressBar(title, len(documents)) as bar:
            walks = []
            for document in documents:
                walks.append(walk(document))
                bar.update(1)
        return walks

    def agreement(self, plain: PlainDrafter, documents: Sequence[Document], walks: Sequence[Walked]) -> float:
        """Share of the tokens of `walks` that `plain` drafts too, at the same anchors; a token that one of both lacks counts as different."""
        same = total = 0
        for document, walked in zip(documents, walks, strict=True):
            draft_at = plain_drafts(plain, self.head, self.stored, document)
            for row, tokens in walked.drafts.items():
                found = draft_at(row)
                total += max(len(tokens), len(found))
                same += sum(one == other for one, other in zip(tokens, found, strict=False))
        return same / total if total else 1.0

    def as_it_should_be(self) -> PlainDrafter | None:
        """The run's tensors in the folder's type, run as trained; None without a run."""
        if self.situation.trained is None or self.situation.trained_tensors is None:
            return None
        kinds = {name: getattr(torch, facts.dtype, torch.float32) for name, facts in TensorFiles(self.folder).facts.items()}
        tensors = {name: tensor.to(kinds.get(name, tensor.dtype)).to(tensor.dtype) for name, tensor in self.situation.trained_tensors.items()}
        return PlainDrafter(tensors, self.situation.trained)

    def _trained(self) -> Drafter | None:
        try:
            return load_drafter(self.run or self.folder, self.reader.spec.settings.target.num_layers).to(self.compute.device).eval()
        except InputError as error:
            if self.run is not None:
                raise
            self.notes.append(f"the trainer does not load the folder: {error.problem}, {error.found}")
            return None

    def _check_tensors(self) -> None:
        how, place = self.plain.conventions, str(self.folder)
        names = [*FIXED, *(f"layers.{layer}.{name}.weight" for layer in range(how.num_layers) for name in PER_LAYER)]
        if missing := [name for name in names if name not in self.plain.tensors]:
            raise InputError("lacks tensors that its config.json calls for; no engine loads it", place=place, found=", ".join(missing[:4]))
        self._check_shapes(names)
        columns, expected = self.plain.tensors["fc.weight"].shape[1], len(how.layer_ids) * self.reader.spec.hidden_size
        if columns != expected:
            wanted = f"{expected}: layers {list(how.layer_ids)} of {self.reader.spec.hidden_size} numbers each"
            problem = "does not read the layers that config.json names; no engine loads it"
            raise InputError(problem, place=place, found=f"fc.weight with {columns} columns", expected=wanted, fix="export the run again")

    def _check_shapes(self, names: Sequence[str]) -> None:
        """Of all but the columns of `fc`, which have a word of their own."""
        how, hidden, rows = self.plain.conventions, self.reader.spec.hidden_size, self.reader.spec.settings.target.vocab_size
        if how.mask_token_id >= rows:
            problem, place = "names a mask token that the target lacks", str(self.folder / CONFIG)
            raise InputError(problem, place=place, found=f"mask_token_id {how.mask_token_id}", expected=f"below {rows}")
        found = {name: tuple(self.plain.tensors[name].shape) for name in names}
        wide, narrow = how.num_heads * how.head_dim, how.num_groups * how.head_dim
        inner = next(iter(found["layers.0.mlp.up_proj.weight"]), 0)
        expected = {
            "fc": (hidden, found["fc.weight"][-1] if found["fc.weight"] else 0),
            "self_attn.q_proj": (wide, hidden),
            "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden),
            "self_attn.o_proj": (hidden, wide),
            "self_attn.q_norm": (how.head_dim,),
            "self_attn.k_norm": (how.head_dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        wanted = {name: expected.get(name.removesuffix(".weight").split(".", 2)[-1], (hidden,)) for name in names}
        odd = [f"{name} {list(shape)}, not {list(wanted[name])}" for name, shape in found.items() if shape != wanted[name]]
        kept = self.plain.tensors.get("d2t")
        if kept is not None:
            ids = kept + torch.arange(len(kept), device=kept.device) if kept.dim() == 1 and not kept.is_floating_point() else None
            if ids is None or not bool((ids >= 0).all() and (ids < rows).all()):
                odd.append(f"d2t, whose offsets lead to no tokens of a vocabulary of {rows}")
        if odd:
            problem = "has tensors of other shapes than its config.json and the target have; no engine loads it"
            raise InputError(problem, place=str(self.folder), found="; ".join(odd[:4]), fix="`dflash export --check` says more")

    def _check_layers(self) -> None:
        named = self.plain.conventions.layer_ids
        if not (lacking := sorted(set(named) - set(self.stored))):
            return
        if self.run is None:
            place, expected = str(self.folder / CONFIG), f"some of {list(self.stored)}"
            fix = "give the run with --run, or a cache with these layers"
            raise InputError("reads layers that the cache does not hold", place=place, found=lacking, expected=expected, fix=fix)
        self.notes.append(
            f"the folder reads layers {list(named)}; the cache lacks {lacking}, which are zeros here, so the folder's length is a guess"
        )
        ids = tuple(layer if layer in self.stored else NO_LAYER for layer in named)
        self.plain = replace(self.plain, conventions=replace(self.plain.conventions, layer_ids=ids))

    def _situation(self) -> Situation:
        target, tokens = self.reader.spec.settings.target, read_tokens(self.reader.path)
        roles = {"eos": next(iter(tokens.eos_token_ids), None), "pad": tokens.pad_token_id, "bos": tokens.bos_token_id, "mask": tokens.mask_token_id}
        roles |= {"the first": 0, "the last row": target.vocab_size - 1}
        if tokens.tokenizer_size < target.vocab_size:
            roles["the first padding row"] = tokens.tokenizer_size
        found = Situation(
            stored=self.stored,
            num_target_layers=target.num_layers,
            hidden_size=target.hidden_size,
            target_rope_theta=target_shape(read_target_config(self.reader.path)).rope_theta,
            special={role: token for role, token in roles.items() if token is not None},
        )
        if self.run is None or self.drafter is None:
            return found
        tensors = self.drafter.state_dict()
        kinds = {name: facts.dtype for name, facts in TensorFiles(self.folder).facts.items()}
        place = self.run if (self.run / checkpoint.CHECKPOINTS).is_dir() else None
        story = tell(tensors, self.plain.tensors, kinds, len(self.drafter.spec.target_layer_ids), place)
        return replace(
            found, trained=trained_conventions(self.drafter.spec), trained_tensors=tensors, tensor_story=story.text, differing=story.differing
        )

    def _documents(self, limit: int) -> list[Document]:
        found: list[Document] = []
        for number in range(self.reader.num_samples):
            document = read_document(self.reader, number, self.head)
            if document.anchors:
                found.append(document)
            if len(found) == limit:
                break
        if not found:
            raise InputError("has nothing to draft", place=f"--cache {self.reader.path}", expected="documents with two supervised tokens in a row")
        return found
