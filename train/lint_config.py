"""Rules of `dflash export --check` on a config.json: form, sizes, attention, rotary positions, causal flags, speculators' own fields.

In: DrafterFiles. Out: findings. Sources, for what each engine does: vLLM 0.32 `qwen3_dflash.py`, `eagle.py`, `algos.py` and
`config/speculative.py`; SGLang `models/dflash.py`, `dflash_utils.py`; `dflash` 0.1.0 `model.py`; transformers 5 `Qwen3Config`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .drafter_folder import CONFIG
from .drafter_spec import FULL, SLIDING
from .lint_finding import AS_IT_STANDS, Finding
from .lint_folder import SIZES, DrafterFiles, numbers, shown, whole
from .serving_config import ARCHITECTURE
from .speculators_config import DEFAULTS, MARK

REFUSES = "refuses to start"
OTHERS = ("mrope_section", "mrope_interleaved", "xdrope_section", "partial_rotary_factor")
"""Rotary settings that a target may have and no DFlash drafter has."""


def form(it: DrafterFiles) -> Iterator[Finding]:
    """Architecture and model type, by which engines choose their class."""
    if it.format == "speculators":
        if it.config.get(MARK) != "dflash":
            yield it.finding(
                "architecture", "error", f"{CONFIG} {MARK}", "is no DFlash drafter", shown(it.config.get(MARK)), "dflash",
                vllm="loads another method", sglang="", reference="",
            )  # fmt: skip
        if it.config.get("model_type") is not None:
            yield it.finding(
                "model-type", "error", f"{CONFIG} model_type", "stands at the top, so that vLLM does not see a speculators folder",
                shown(it.config["model_type"]), "no model_type there", vllm="reads it as a plain config and finds no layers", sglang="", reference="",
            )  # fmt: skip
        return
    if it.config.get("architectures") != [ARCHITECTURE]:
        yield it.finding(
            "architecture", "error", f"{CONFIG} architectures", "is no DFlash drafter", shown(it.config.get("architectures")), f'["{ARCHITECTURE}"]',
            vllm="looks for that name, with DFlash before it where it does not begin so", sglang="looks for that name among its models",
            reference="does not look at it",
        )  # fmt: skip
    if it.config.get("model_type") != "qwen3":
        yield it.finding(
            "model-type", "error", f"{CONFIG} model_type", "is not that of the decoder layers", shown(it.config.get("model_type")), "qwen3",
            vllm="takes that model's config class, or refuses one that transformers lacks", sglang="the same", reference="takes Qwen3's all the same",
        )  # fmt: skip


def sizes(it: DrafterFiles) -> Iterator[Finding]:
    """Sizes of the decoder layers."""
    for name in (*SIZES, "rms_norm_eps", "max_position_embeddings"):
        value = it.own.get(name)
        if value is None:
            yield it.finding(
                "size-missing", "warning", f"{it.layer_place} {name}", "is left out", "nothing", "the drafter's own",
                vllm=f"takes {DEFAULTS[name]}" if it.format == "zlab" else "has no default for some, others from other sizes",
                sglang=f"takes {DEFAULTS[name]}, transformers' default", reference=f"takes {DEFAULTS[name]}",
            )  # fmt: skip
        elif it.size(name) is None and not (name == "rms_norm_eps" and isinstance(value, float) and value > 0):
            yield it.finding(
                "size-wrong", "error", f"{it.layer_place} {name}", "is no size", shown(value), "a positive number",
                vllm=REFUSES, sglang=REFUSES, reference=REFUSES,
            )  # fmt: skip
    heads, groups = it.size("num_attention_heads"), it.size("num_key_value_heads")
    if heads and groups and heads % groups:
        yield it.finding(
            "heads", "error", f"{it.layer_place} num_key_value_heads", "query heads cannot share these evenly", groups, f"a divisor of {heads}",
            vllm=REFUSES, sglang=REFUSES, reference="fails at the first block",
        )  # fmt: skip
    if it.own.get("hidden_act", "silu") != "silu":
        yield it.finding(
            "activation", "error", f"{it.layer_place} hidden_act", "is not the activation of a DFlash drafter", shown(it.own["hidden_act"]), "silu",
            vllm=REFUSES, sglang=REFUSES, reference="computes with it",
        )  # fmt: skip
    if it.own.get("quantization_config") is not None:
        yield it.finding(
            "quantised", "note", f"{it.layer_place} quantization_config", "the drafter is quantised, which is not looked into here",
            vllm="uses it", sglang="uses it but for q, k and v", reference="does not read it",
        )  # fmt: skip


def attention(it: DrafterFiles) -> Iterator[Finding]:
    """layer_types, window and causal flags."""
    place, layers = it.layer_place, it.size("num_hidden_layers")
    if (layers is not None and len(it.kinds) != layers) or not set(it.kinds) <= {FULL, SLIDING}:
        yield it.finding(
            "layer-types", "error", f"{place} layer_types", "does not say of every layer whether it is full or sliding", shown(list(it.kinds)),
            f"{layers} of {FULL}, {SLIDING}", vllm=REFUSES, sglang=REFUSES, reference=REFUSES,
        )  # fmt: skip
        return
    if SLIDING in it.kinds and (whole(it.own.get("sliding_window"), 1) is None or it.own.get("use_sliding_window") is not True):
        found = f"sliding_window {shown(it.own.get('sliding_window'))}, use_sliding_window {shown(it.own.get('use_sliding_window'))}"
        yield it.finding(
            "window", "error", f"{place} sliding_window", "layers slide and no window is in force", found, "a number, and use_sliding_window true",
            vllm="refuses to start, or with the speculators format takes the number alone", sglang=REFUSES, reference="sees the whole context",
        )  # fmt: skip
    yield from _causal(it)
    if {FULL, SLIDING} <= set(it.kinds) and it.format == "zlab":
        yield it.finding(
            "mixed-layers", "note", f"{place} layer_types", "sliding and full layers together", shown(list(it.kinds)), "",
            vllm="serves them with VLLM_USE_V2_MODEL_RUNNER=1 only", sglang="serves them", reference="runs them",
        )  # fmt: skip


def _causal(it: DrafterFiles) -> Iterator[Finding]:
    """Full layers see their whole block, sliding layers the slots up to their own, unless a flag says otherwise."""
    wanted = {kind == SLIDING for kind in it.kinds}
    if it.format == "speculators":
        given = it.config.get("sliding_window_non_causal")
        vllm = not (True if given is None else given)  # one flag for all layers
        if wanted != {vllm} and not (given is True and wanted == {True}):
            right = "true" if wanted == {False} else "false" if wanted == {True} else "one kind of layers: no value serves both"
            ways = "causally" if vllm else "not causally"
            yield it.finding(
                "causal", "error", f"{CONFIG} sliding_window_non_causal", "vLLM takes it for all layers, the library for sliding ones alone",
                shown(given), right, vllm=f"serves all layers {ways} inside a block", sglang="", reference="",
            )  # fmt: skip
        elif given is True and wanted == {True}:
            yield it.finding(
                "causal", "note", f"{CONFIG} sliding_window_non_causal", "sliding layers that see later slots: right if they were trained so", "true",
                "false for a drafter of `dflash train`", vllm="serves all layers not causally", sglang="", reference="",
            )  # fmt: skip
        return
    top, inner = it.config.get("is_causal"), it.nested.get("causal")
    if top is not None and wanted != {bool(top)}:
        yield it.finding(
            "causal", "error", f"{CONFIG} is_causal", "overrides what the kinds of layers mean, and not in every engine", shown(top),
            "left out" if len(wanted) > 1 else shown(wanted == {True}), vllm="takes it for all layers", sglang="does not look at it",
            reference="takes it for all layers",
        )  # fmt: skip
    if top is None and inner is not None and wanted != {bool(inner)}:
        yield it.finding(
            "causal", "error", f"{CONFIG} dflash_config.causal", "overrides what the kinds of layers mean, in one engine alone", shown(inner),
            "left out", vllm="takes it for all layers", sglang="does not look at it", reference="does not look at it",
        )  # fmt: skip


def rotary(it: DrafterFiles) -> Iterator[Finding]:
    """rope_theta in both spellings, and kinds of rotary positions that a drafter does not have."""
    place = it.layer_place
    nested: Mapping[str, Any] = it.own["rope_parameters"] if isinstance(it.own.get("rope_parameters"), Mapping) else {}
    flat, inner = it.own.get("rope_theta"), nested.get("rope_theta")
    if flat is None and inner is None:
        yield it.finding(
            "rope-missing", "error", f"{place} rope_theta", "the rotary base is left out", "nothing", "the one of the training",
            vllm="takes 10000, transformers' default" if it.format == "zlab" else "takes 1000000, where the library takes 10000",
            sglang="takes 10000", reference="takes 10000",
        )  # fmt: skip
    elif flat is not None and inner is not None and flat != inner:
        yield it.finding(
            "rope-differs", "error", f"{place} rope_theta", "its two spellings differ", f"{flat} and rope_parameters {inner}", "one number",
            vllm=f"takes {inner}", sglang=f"takes {inner}, with transformers 4 {flat}", reference=f"takes {inner}",
        )  # fmt: skip
    elif it.format == "zlab" and (inner is None or flat is None):
        missing = "rope_parameters" if inner is None else "rope_theta"
        older = "takes 10000 with transformers 4" if flat is None else "reads it"
        yield it.finding(
            "rope-spelling", "warning" if flat is None else "note", f"{place} {missing}", "stands in one of its two spellings only",
            f"{inner if flat is None else flat} in the other", "both, equal", vllm="reads either", sglang=older, reference="reads either",
        )  # fmt: skip
    kind, odd = nested.get("rope_type", "default"), [name for name in OTHERS if name in nested or name in it.own]
    if odd == ["partial_rotary_factor"] and 1.0 in (nested.get(odd[0]), it.own.get(odd[0])):
        odd = []
    if kind != "default" or odd or it.own.get("rope_scaling"):
        yield it.finding(
            "rope-kind", "warning", f"{place} rope_parameters", "rotary positions of a kind that engines read differently",
            ", ".join([*([f"rope_type {kind}"] if kind != "default" else []), *odd, *(["rope_scaling"] if it.own.get("rope_scaling") else [])]),
            "rope_type default over the whole head", vllm="follows it", sglang="rotates the whole head in any case",
            reference="follows what Qwen3 knows of it",
        )  # fmt: skip
    target = it.target.rope_theta if it.target is not None else None
    theta = inner if inner is not None else flat
    if target is not None and isinstance(theta, (int, float)) and theta != target:
        yield it.finding(
            "target-rope", "note", f"{place} rope_theta", "is not the target's, which it need not be", theta, f"{target:g} in {it.target.place}"
            if it.target else "", vllm=AS_IT_STANDS, sglang=AS_IT_STANDS, reference=AS_IT_STANDS,
        )  # fmt: skip


def speculators_fields(it: DrafterFiles) -> Iterator[Finding]:
    """What the speculators format says of serving."""
    anchor = it.config.get("sample_from_anchor", it.nested.get("sample_from_anchor"))
    if anchor:
        yield it.finding(
            "sample-from-anchor", "error", f"{CONFIG} sample_from_anchor", "the drafter drafts from the anchor too, which no engine serves",
            "true", "false", vllm="refuses it, or without the V2 model runner reads every token one slot late",
            sglang="reads every token one slot late", reference="reads every token one slot late",
        )  # fmt: skip
    if it.format == "zlab":
        return
    own = it.config.get("speculators_config")
    own = own if isinstance(own, Mapping) else {}
    methods, size = own.get("proposal_methods"), whole(it.config.get("block_size"), 2)
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    drafts, wanted = first.get("speculative_tokens"), size - (0 if anchor else 1) if size is not None else None
    if drafts is None or (wanted is not None and drafts != wanted):
        yield it.finding(
            "speculative-tokens", "error", f"{CONFIG} speculators_config.proposal_methods[0].speculative_tokens",
            "is not what a block of this size drafts", shown(drafts), wanted if wanted is not None else "block_size - 1",
            vllm=REFUSES if drafts is None else f"drafts {drafts} tokens where its own command line says nothing else", sglang="", reference="",
        )  # fmt: skip
    verifier = own.get("verifier")
    if not isinstance(verifier, Mapping) or not verifier.get("name_or_path"):
        there = isinstance(verifier, Mapping) and "name_or_path" in verifier
        yield it.finding(
            "verifier", "warning", f"{CONFIG} speculators_config.verifier.name_or_path", "the folder does not name its target", "nothing",
            "a name or a path", vllm=f"{'fails on' if there else 'refuses'} `vllm serve FOLDER`; an explicit target and --speculative-config work",
            sglang="", reference="",
        )  # fmt: skip


def aux_ids(it: DrafterFiles) -> tuple[int, ...] | None:
    """`eagle_aux_hidden_state_layer_ids`, which vLLM takes before all others."""
    return numbers(it.config.get("eagle_aux_hidden_state_layer_ids"))
