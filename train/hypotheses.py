"""Hypotheses: the known ways in which a drafter is served otherwise than it was trained, each as one change that undoes it.

In: a drafter as it is served and what is known of target, cache and run. Out: changed conventions or tensors to replay, named, with a fix;
and what cannot be tried with this cache. Every entry is a fault that somebody has reported of some trainer or engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations

import torch

from .conventions import Conventions
from .plain_forward import PlainDrafter
from .replay import NO_LAYER

THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
"""Rotary bases of published models."""
CONFIG = "correct it in config.json, or export again"
ATTENTION = ("windows", "causal")
FIELDS = {
    "layer_ids": "dflash_config.target_layer_ids",
    "windows": "layer_types, sliding_window, use_sliding_window and is_causal",
    "rope_theta": "rope_parameters.rope_theta",
    "mask_token_id": "dflash_config.mask_token_id",
    "block_size": "block_size, and the number of speculative tokens, which is one less",
    "norm_eps": "rms_norm_eps",
    "first_slot": "sample_from_anchor",
}
"""Where config.json says it."""


@dataclass(frozen=True)
class Situation:
    """What the hypotheses are made of."""

    stored: tuple[int, ...]
    """Layers that the cache holds."""
    num_target_layers: int
    hidden_size: int
    target_rope_theta: float | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    """Tokens with a role: eos, pad, bos, mask, first padding row."""
    trained: Conventions | None = None
    """Of the run."""
    trained_tensors: Mapping[str, torch.Tensor] | None = None
    """Of the run, float32."""
    tensor_story: str = ""
    """How the folder's tensors differ from the run's."""
    differing: tuple[str, ...] = ()
    """Names of those that do."""


@dataclass(frozen=True)
class Change:
    """One thing done otherwise."""

    name: str
    fix: str
    drafter: PlainDrafter
    """With the change made."""
    of_the_run: bool = False
    """It restores what the run says."""


def changes(plain: PlainDrafter, situation: Situation) -> tuple[list[Change], list[str]]:
    """All single changes of `plain`, most telling first, none twice; and those that cannot be tried, with the reason."""
    untried: list[str] = []
    found: list[Change] = []
    for change in [*_of_the_run(plain, situation), *_of_conventions(plain, situation, untried), *_of_tensors(plain)]:
        same = change.drafter.tensors is plain.tensors
        known = (other.drafter.conventions == change.drafter.conventions for other in found if other.drafter.tensors is plain.tensors)
        if same and (change.drafter.conventions == plain.conventions or any(known)):
            continue
        found.append(change)
    return found, untried


def _of_the_run(plain: PlainDrafter, situation: Situation) -> Iterator[Change]:
    """Everything in which the folder differs from the run, one thing at a time."""
    served, trained = plain.conventions, situation.trained
    if trained is not None and trained.num_layers == served.num_layers:
        wrong = [one.name for one in fields(Conventions) if getattr(trained, one.name) != getattr(served, one.name)]
        together = [[name] for name in wrong if name not in ATTENTION] + ([list(ATTENTION)] if set(wrong) & set(ATTENTION) else [])
        for names in together:
            ours, theirs = ({name: getattr(of, name) for name in names if name in wrong} for of in (trained, served))
            if _is_stored(ours.get("layer_ids", ()), situation):
                text = " and ".join(f"{name} {_show(ours[name])} as trained, where the folder says {_show(theirs[name])}" for name in ours)
                fix = f"{FIELDS.get(names[0], names[0])}: {CONFIG}"
                yield Change(text, fix, replace(plain, conventions=replace(served, **ours)), of_the_run=True)
    if situation.trained_tensors is not None and situation.differing:
        tensors = {**plain.tensors, **{name: situation.trained_tensors[name] for name in situation.differing}}
        yield Change(f"the tensors of the run: {situation.tensor_story}", "export the run again", replace(plain, tensors=tensors), of_the_run=True)


def _of_conventions(plain: PlainDrafter, situation: Situation, untried: list[str]) -> Iterator[Change]:
    how = plain.conventions

    def change(name: str, fix: str = CONFIG, **fields: object) -> Change:
        return Change(name, fix, replace(plain, conventions=replace(how, **fields)))  # type: ignore[arg-type]

    yield from (change(name, fix, layer_ids=ids) for name, fix, ids in _layers(how.layer_ids, situation, untried))
    yield change(
        "the last selected layer after the target's final norm",
        "the engine hands over normed states: its ids or its capture are off",
        normed_last=not how.normed_last,
    )
    for slot in {0, 1, 2} - {how.first_slot}:
        yield change(
            f"the first token is drafted by slot {slot}, not by slot {how.first_slot}",
            "sample_from_anchor, or the engine's slot shift",
            first_slot=slot,
        )
    for offset in (-1, 1):
        yield change(f"positions of the block shifted by {offset:+d}", "the engine's position ids", position_offset=how.position_offset + offset)
    seen = "sees" if not how.own_row else "does not see"
    yield change(f"a block {seen} the state of its own anchor", "rows <= a in place of rows < a: the engine's context", own_row=not how.own_row)
    for causal in (True, False):
        yield change(
            f"{'causal' if causal else 'bidirectional'} inside the block",
            "is_causal, dflash_config.causal or layer_types",
            causal=(causal,) * how.num_layers,
        )
    slides = tuple(window is not None for window in how.windows)
    yield change("causal inside the block in sliding layers alone", "is_causal, dflash_config.causal or layer_types", causal=slides)
    yield from _windows(how, change)
    for theta in dict.fromkeys((*THETAS, *([situation.target_rope_theta] if situation.target_rope_theta else []))):
        whose = ", the target's own" if theta == situation.target_rope_theta else ""
        yield change(f"rope_theta {_show(theta)}{whose}, not {_show(how.rope_theta)}", f"rope_parameters.rope_theta: {CONFIG}", rope_theta=theta)
    yield change("rotary pairs the other way round", "is_neox_style", interleaved_rope=not how.interleaved_rope)
    for role, token in situation.special.items():
        yield change(f"mask token {token} ({role}), not {how.mask_token_id}", f"mask_token_id: {CONFIG}", mask_token_id=token)
    for scale in (math.sqrt(situation.hidden_size), 1 / math.sqrt(situation.hidden_size)):
        yield change(
            f"embeddings times {scale:.4g}",
            "the engine scales the drafter's embeddings, or the trainer did",
            embedding_scale=how.embedding_scale * scale,
        )
    for size in (how.block_size - 1, how.block_size + 1, how.block_size // 2, how.block_size * 2):
        if size >= 2:
            fix = f"block_size {size} in config.json, and {size - 1} speculative tokens"
            yield change(f"blocks of {size}, not {how.block_size}", fix, block_size=size)
    for eps in (1e-5, 1e-6):
        yield change(f"epsilon {eps:g} of the norms, not {how.norm_eps:g}", f"rms_norm_eps: {CONFIG}", norm_eps=eps)


def _layers(ids: tuple[int, ...], situation: Situation, untried: list[str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    shift_fix = "target_layer_ids count block outputs from 0; vLLM adds 1, and eagle_aux_hidden_state_layer_ids is taken as it is"
    for shift in (-1, 1):
        shifted = tuple(layer + shift for layer in ids)
        if any(not 0 <= layer < situation.num_target_layers for layer in shifted):
            continue
        if _is_stored(shifted, situation):
            yield f"layers {_show(shifted)}, not {_show(ids)}", shift_fix, shifted
        else:
            lacking = sorted(set(shifted) - set(situation.stored))
            untried.append(f"layer ids shifted by {shift:+d}: the cache holds no layer {_show(lacking)}")
    others = [layer for layer in situation.stored if layer not in ids]
    for place, other in ((place, other) for place in range(len(ids)) for other in others):
        changed = (*ids[:place], other, *ids[place + 1 :])
        yield f"layer {other} in place of {ids[place]}", f"target_layer_ids: {CONFIG}", changed
    if others and len(situation.stored) > len(ids):
        for chosen in combinations(situation.stored, len(ids)):
            if len(set(chosen) - set(ids)) > 1 and math.comb(len(situation.stored), len(ids)) <= 60:
                yield f"layers {_show(chosen)}, not {_show(ids)}", f"target_layer_ids: {CONFIG}", chosen
    order_fix = "the columns of fc.weight, and the order in which the engine puts the layers side by side"
    orders = [tuple(reversed(ids)), ids[1:] + ids[:1], ids[-1:] + ids[:-1]]
    for one, other in combinations(range(len(ids)), 2):
        swapped = list(ids)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        orders.append(tuple(swapped))
    yield from ((f"layers in the order {_show(order)}", order_fix, order) for order in dict.fromkeys(orders))
    for place, layer in enumerate(ids):
        yield f"layer {layer} missing (zeros)", "the engine hands over one layer too few", (*ids[:place], NO_LAYER, *ids[place + 1 :])


def _windows(how: Conventions, change: object) -> Iterator[Change]:
    assert callable(change)
    fix = "sliding_window and use_sliding_window"
    if any(window is not None for window in how.windows):
        yield change("no sliding window", fix, windows=(None,) * how.num_layers)
        for shift in (-1, 1):
            moved = tuple(window if window is None else max(1, window + shift) for window in how.windows)
            yield change(f"a window wider by {shift:+d}", f"{fix}: it counts the slot itself", windows=moved)


def _of_tensors(plain: PlainDrafter) -> Iterator[Change]:
    tensors = plain.tensors

    def swapped(pairs: Iterable[tuple[str, str]]) -> PlainDrafter:
        exchanged = {one: tensors[other] for pair in pairs for one, other in (pair, pair[::-1])}
        return replace(plain, tensors={**tensors, **exchanged})

    layers = range(plain.conventions.num_layers)
    heads = [(f"layers.{layer}.self_attn.q_norm.weight", f"layers.{layer}.self_attn.k_norm.weight") for layer in layers]
    mlps = [(f"layers.{layer}.mlp.gate_proj.weight", f"layers.{layer}.mlp.up_proj.weight") for layer in layers]
    norms = [(f"layers.{layer}.input_layernorm.weight", f"layers.{layer}.post_attention_layernorm.weight") for layer in layers]
    yield Change("q_norm and k_norm exchanged", "the names of the tensors", swapped(heads))
    yield Change("gate_proj and up_proj exchanged", "the names of the tensors", swapped(mlps))
    yield Change("input_layernorm and post_attention_layernorm exchanged", "the names of the tensors", swapped(norms))
    yield Change("hidden_norm and norm exchanged", "the names of the tensors", swapped([("hidden_norm.weight", "norm.weight")]))


def _is_stored(ids: tuple[int, ...], situation: Situation) -> bool:
    return set(ids) <= {*situation.stored, NO_LAYER}


def _show(value: object) -> str:
    if isinstance(value, (tuple, list)) and len(value) > 1 and len(set(value)) == 1:
        return f"{_show(value[0])} in all layers"
    if isinstance(value, (tuple, list)):
        return ",".join(_show(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
