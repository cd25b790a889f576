"""Rules of `dflash export --check` on a folder's tensors: names, shapes, types, values, and the vocabulary mappings.

In: DrafterFiles. Out: findings. Headers alone, but for `d2t` and `t2d`, and for the search for numbers that are not finite, which
reads each tensor once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .drafter_folder import CONFIG, EMBEDDING, HEAD, KEPT, MODEL, NOT_TRAINED
from .lint_config import REFUSES
from .lint_finding import Finding, Severity
from .lint_folder import SIZES, DrafterFiles, shown, whole

MAPPING = "d2t"
FLOATS = ("float32", "bfloat16", "float16")
SILENT = "leaves it at what memory held, without a word"


def names_and_shapes(it: DrafterFiles) -> Iterator[Finding]:
    """Every tensor that the config describes is there, in its shape, and no other."""
    if it.files is None:
        pickled = sorted(path.name for path in it.folder.glob("*.bin"))
        yield it.finding(
            "weights-missing", "error", MODEL, f"cannot be read: {it.unreadable}", ", ".join(pickled) or "no safetensors", MODEL,
            vllm="unpickles a .bin file, else refuses", sglang="the same", reference="refuses, or unpickles with care",
        )  # fmt: skip
        return
    if (it.folder / "mask_embedding.pt").exists():
        yield it.finding(
            "mask-embedding", "warning", "mask_embedding.pt", "an embedding of the mask token of its own, which one engine alone reads",
            vllm="reads it in place of the embedding's row", sglang="does not look at it", reference="does not look at it",
        )  # fmt: skip
    if it.prefixed:
        yield it.finding(
            "tensor-prefix", "error", MODEL, "names begin with `model.`", next(name for name in it.files.facts if name.startswith("model.")),
            "layers.0.…, fc.weight, …", vllm="puts another `model.` before it and refuses", sglang="reads both forms", reference="reads both forms",
        )  # fmt: skip
    wanted = _expected(it)
    if wanted is None:
        return
    for name in sorted(wanted.keys() - it.tensors.keys()):
        yield it.finding(
            "tensor-missing", "error", name, "is not there", "nothing", list(wanted[name]), vllm=SILENT, sglang=SILENT,
            reference="draws it at random, with a warning",
        )  # fmt: skip
    known = wanted.keys() | NOT_TRAINED | {MAPPING}
    for name in sorted(it.tensors.keys() - known):
        yield it.finding(
            "tensor-unknown", "error", it.stored_name(name), "is no tensor of the drafter that the config describes", list(it.tensors[name].shape), "",
            vllm=REFUSES, sglang="passes over it, without a word", reference="passes over it, with a warning",
        )  # fmt: skip
    for name in sorted(wanted.keys() & it.tensors.keys()):
        if it.tensors[name].shape != wanted[name]:
            yield it.finding(
                "tensor-shape", "error", it.stored_name(name), "has another shape than the config says", list(it.tensors[name].shape), list(wanted[name]),
                vllm=REFUSES, sglang=REFUSES, reference=REFUSES,
            )  # fmt: skip


def types(it: DrafterFiles) -> Iterator[Finding]:
    """The types of the tensors, against each other and the config."""
    floats = {of.dtype for name, of in it.tensors.items() if name not in (MAPPING, KEPT)}
    said = it.config.get("dtype", it.own.get("dtype", it.config.get("torch_dtype", it.own.get("torch_dtype"))))
    said = str(said).removeprefix("torch.") if said is not None else None
    if not floats:
        return
    if len(floats) > 1 or not floats <= set(FLOATS):
        severity: Severity = "warning" if floats <= set(FLOATS) else "error"
        yield it.finding(
            "dtype-mixed", severity, MODEL, "the tensors are of several types, or of one that is no plain number", ", ".join(sorted(floats)),
            "one of " + ", ".join(FLOATS), vllm="casts each to the type that it serves in", sglang="the same", reference="the same",
        )  # fmt: skip
    elif said is None or {said} != floats:
        yield it.finding(
            "dtype-differs", "warning", f"{CONFIG} dtype", "is not the type of the tensors", shown(said), next(iter(floats)),
            vllm="serves in the target's type", sglang="serves in its own --dtype", reference="loads in the config's type with dtype=\"auto\"",
        )  # fmt: skip


def values(it: DrafterFiles) -> Iterator[Finding]:
    """Every number is finite."""
    if it.files is None:
        return
    for name, of in it.tensors.items():
        if of.dtype in FLOATS and not bool(it.files.read(it.stored_name(name)).isfinite().all()):
            garbage = "drafts garbage; answers stay right, for the target checks them"
            yield it.finding(
                "not-finite", "error", it.stored_name(name), "holds numbers that are not finite", "inf or nan", "finite numbers",
                vllm=garbage, sglang=garbage, reference=garbage,
            )  # fmt: skip


def vocabulary(it: DrafterFiles) -> Iterator[Finding]:
    """The drafter's vocabulary, its mappings, and the target's matrices."""
    rows, drafts = it.size("vocab_size"), whole(it.config.get("draft_vocab_size", it.own.get("draft_vocab_size")), 1)
    pruned = drafts is not None and rows is not None and drafts != rows
    place = f"{CONFIG} draft_vocab_size"
    if pruned and drafts is not None and rows is not None and drafts > rows:
        yield it.finding(
            "draft-vocabulary", "error", place, "is larger than the vocabulary", drafts, f"at most {rows}", vllm=REFUSES, sglang="does not look at it",
            reference="does not look at it",
        )  # fmt: skip
        return
    if pruned and it.format == "zlab":
        yield it.finding(
            "draft-vocabulary", "error", place, "a pruned vocabulary, which the z-lab format has no words for", drafts, f"{rows}, or nothing",
            vllm="reads it", sglang="drafts over the whole vocabulary with the target's head", reference="the same",
        )  # fmt: skip
    if pruned:
        yield from _mappings(it, drafts or 0, rows or 0)
    elif MAPPING in it.tensors:
        yield it.finding(
            "mapping-unasked", "error", MAPPING, "maps a vocabulary that the config does not prune", list(it.tensors[MAPPING].shape), "no d2t",
            vllm=REFUSES, sglang="passes over it", reference="passes over it, with a warning",
        )  # fmt: skip
    yield from _matrices(it, rows, drafts if pruned else rows)


def _mappings(it: DrafterFiles, drafts: int, rows: int) -> Iterator[Finding]:
    """`d2t`, offsets from draft ids to token ids, and `t2d`, which says of each token whether it is kept."""
    if it.files is None:
        return
    if MAPPING not in it.tensors or it.tensors[MAPPING].shape != (drafts,):
        found = list(it.tensors[MAPPING].shape) if MAPPING in it.tensors else "nothing"
        yield it.finding(
            "mapping-missing", "error", MAPPING, "does not map every draft id to a token", found, [drafts],
            vllm="takes draft ids for token ids" if MAPPING not in it.tensors else REFUSES, sglang="does not look at it", reference="does not look at it",
        )  # fmt: skip
        return
    d2t_D = it.files.read(it.stored_name(MAPPING)).long()
    tokens_D = d2t_D + torch.arange(drafts)
    kept_V = it.files.read(it.stored_name(KEPT)).bool().flatten() if KEPT in it.tensors else None
    absolute = kept_V is not None and torch.equal(kept_V.nonzero().squeeze(1), d2t_D) and not torch.equal(tokens_D, d2t_D)
    if absolute or int(tokens_D.min()) < 0 or int(tokens_D.max()) >= rows or len(tokens_D.unique()) != drafts:
        yield it.finding(
            "mapping-values", "error", MAPPING, "holds token ids, not offsets" if absolute else "is no mapping into the vocabulary",
            f"row + d2t from {int(tokens_D.min())} to {int(tokens_D.max())}, {len(tokens_D.unique())} different", f"{drafts} different of 0 to {rows - 1}",
            vllm="drafts other tokens, or reads past its logits", sglang="does not look at it", reference="does not look at it",
        )  # fmt: skip
        return
    if kept_V is None:
        yield it.finding(
            "mapping-kept", "note", KEPT, "is not there; it follows from d2t", "nothing", [rows], vllm="does not need it",
            sglang="does not look at it", reference="does not look at it",
        )  # fmt: skip
        return
    if kept_V.shape != (rows,) or not torch.equal(kept_V.nonzero().squeeze(1), tokens_D.sort().values):
        yield it.finding(
            "mapping-kept", "error", KEPT, "keeps other tokens than d2t maps to", f"{int(kept_V.sum())} kept of {len(kept_V)}", f"the {drafts} of d2t",
            vllm="does not look at it", sglang="does not look at it", reference="does not look at it; the speculators library trains with it",
        )  # fmt: skip


def _matrices(it: DrafterFiles, rows: int | None, drafts: int | None) -> Iterator[Finding]:
    """The target's embedding and head, where the folder holds them."""
    hidden = it.size("hidden_size")
    for name, count in ((EMBEDDING, rows), (HEAD, drafts)):
        there = name in it.tensors
        if there and hidden and count and it.tensors[name].shape != (count, hidden):
            yield it.finding(
                "matrix-shape", "error", it.stored_name(name), "has another shape than the config says", list(it.tensors[name].shape), [count, hidden],
                vllm=REFUSES, sglang="passes over it", reference="passes over it, with a warning",
            )  # fmt: skip
    if it.files is None:
        return
    if it.format == "speculators" and HEAD not in it.tensors and drafts != rows:
        yield it.finding(
            "head-missing", "error", HEAD, "a pruned vocabulary needs its rows of the head", "nothing", [drafts, hidden],
            vllm="puts the target's head in its place, which has other rows", sglang="", reference="",
        )  # fmt: skip
    elif it.format == "speculators" and (absent := [name for name in (EMBEDDING, HEAD) if name not in it.tensors]):
        yield it.finding(
            "head-missing", "note", ", ".join(absent), "not in the folder", "nothing", "copies of the target's",
            vllm="takes the target's", sglang="", reference="",
        )  # fmt: skip
    elif it.format == "zlab" and {EMBEDDING, HEAD} & it.tensors.keys():
        yield it.finding(
            "head-included", "note", ", ".join(sorted({EMBEDDING, HEAD} & it.tensors.keys())), "in the folder, where engines take the target's own", "there", "",
            vllm="loads them, and drops them when they equal the target's", sglang="passes over them", reference="passes over them, with a warning",
        )  # fmt: skip


def _expected(it: DrafterFiles) -> dict[str, tuple[int, ...]] | None:
    """Names and shapes by the config; None where it does not give the sizes."""
    sizes = [it.size(name) for name in SIZES[:6]]
    if None in sizes or it.layer_ids is None:
        return None
    hidden, layers, heads, groups, size, width = (number or 0 for number in sizes)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * size, hidden),
        "self_attn.k_proj.weight": (groups * size, hidden),
        "self_attn.v_proj.weight": (groups * size, hidden),
        "self_attn.o_proj.weight": (hidden, heads * size),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if it.own.get("attention_bias"):
        layer |= {f"self_attn.{name}_proj.bias": (layer[f"self_attn.{name}_proj.weight"][0],) for name in "qkvo"}
    found = {f"layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}
    return found | {"fc.weight": (hidden, len(it.layer_ids) * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
