"""Rules of `dflash export --check` on what decides acceptance without any error: layer ids, depth, block, mask token, the target.

In: DrafterFiles. Out: findings. An id is the 0-based number of a block whose output is read; vLLM's and the speculators library's
ids count block inputs and are one higher. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .drafter_folder import CONFIG
from .lint_config import REFUSES, aux_ids
from .lint_finding import AS_IT_STANDS, Finding
from .lint_folder import DrafterFiles, numbers, shown, whole


def layer_ids(it: DrafterFiles) -> Iterator[Finding]:
    """Which blocks are read, and by which convention the ids count."""
    speculators, depth, ids = it.format == "speculators", it.depth, it.layer_ids
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    place = f"{CONFIG} {name}"
    if ids is None:
        yield it.finding(
            "layer-ids-missing", "error", place, "the layers that were trained on are not named", shown(it.nested.get(name, it.config.get(name))),
            "a list of block numbers", vllm=REFUSES if speculators else "guesses, or refuses", sglang="guesses by a formula",
            reference="guesses by a formula",
        )  # fmt: skip
        return
    step = 1 if speculators else 0
    given, least = [number + step for number in ids], step
    other = numbers(it.config.get(name)) if name in it.nested else None
    if other is not None and list(other) != given:
        yield it.finding(
            "layer-ids-differ", "error", place, "stand in two places and differ", f"{list(other)} and dflash_config {given}", "the same",
            vllm=f"reads {given}", sglang=f"reads {given}", reference=f"reads {given}",
        )  # fmt: skip
    if given != sorted(set(given)) or given[0] < least:
        yield it.finding(
            "layer-ids-order", "error", place, "are no ascending choice of blocks", given, f"ascending, distinct, from {least} on",
            vllm="reads them sorted, each once, and feeds fc with too few or in another order", sglang="reads them sorted, or refuses",
            reference="reads them as they stand, negative ones from the end",
        )  # fmt: skip
    if depth is not None and max(ids) >= depth:
        shifted = " (they look like ids that count block inputs)" if not speculators and max(ids) == depth else ""
        yield it.finding(
            "layer-ids-range", "error", place, f"name a block that the target lacks{shifted}", given, f"at most {depth - 1 + step}",
            vllm="gets fewer states than fc has columns for, and fails", sglang=REFUSES, reference="fails at the first block",
        )  # fmt: skip
    elif depth is not None and len(ids) > 1:
        usual = [round(1 + number * (depth - 4) / (len(ids) - 1)) for number in range(len(ids))]
        if given == [number + 1 - step for number in usual]:
            convention = "one higher than the usual 0-based outputs" if not speculators else "the usual 0-based outputs, where block inputs are meant"
            yield it.finding(
                "layer-ids-shifted", "warning", place, f"look shifted: they are {convention}", given, [number + step for number in usual],
                vllm="reads the neighbouring blocks if so", sglang="the same", reference="the same",
            )  # fmt: skip
    aux, inner = aux_ids(it), numbers(it.nested.get("target_layer_ids"))
    if aux is not None and not speculators and list(aux) != [number + 1 for number in ids]:
        yield it.finding(
            "aux-ids", "error", f"{CONFIG} eagle_aux_hidden_state_layer_ids", "are not target_layer_ids, each one higher", list(aux),
            [number + 1 for number in ids], vllm="reads these alone: the outputs of the blocks before them", sglang="does not look at them",
            reference="does not look at them",
        )  # fmt: skip
    if speculators and inner is not None and list(inner) != list(ids):
        yield it.finding(
            "aux-ids", "error", f"{CONFIG} dflash_config.target_layer_ids", "are not aux_hidden_state_layer_ids, each one lower", list(inner), list(ids),
            vllm="does not look at them: it derives them", sglang="", reference="",
        )  # fmt: skip


def depth(it: DrafterFiles) -> Iterator[Finding]:
    """num_target_layers: the target's depth."""
    if it.format == "speculators":
        return
    value, ids = whole(it.config.get("num_target_layers"), 1), it.layer_ids
    if value is None:
        yield it.finding(
            "depth-missing", "error", f"{CONFIG} num_target_layers", "the target's depth is left out", shown(it.config.get("num_target_layers")),
            "the number of the target's blocks", vllm="does not need it", sglang="takes the drafter's own depth and refuses higher layer ids",
            reference=REFUSES,
        )  # fmt: skip
    elif ids is not None and value == len(ids) and max(ids) >= value:
        yield it.finding(
            "depth-is-count", "error", f"{CONFIG} num_target_layers", "looks like the number of layers read, not the target's depth", value,
            f"more than {max(ids)}", vllm="does not need it", sglang=REFUSES, reference="does not use it where ids are given",
        )  # fmt: skip


def block(it: DrafterFiles) -> Iterator[Finding]:
    """block_size, in one place or two."""
    top, inner = it.config.get("block_size"), it.nested.get("block_size")
    place = f"{CONFIG} block_size"
    if top is None and inner is None:
        yield it.finding(
            "block-missing", "error", place, "is left out", "nothing", "the block size of the training", vllm="does not need it: it is told the drafts",
            sglang="takes 16", reference="takes 16",
        )  # fmt: skip
        return
    if top is not None and inner is not None and top != inner:
        yield it.finding(
            "block-differs", "error", place, "stands in two places and differs", f"{shown(top)} and dflash_config {shown(inner)}", "the same",
            vllm="looks at neither", sglang=f"takes {shown(inner)}", reference=f"takes {shown(inner)}",
        )  # fmt: skip
    elif whole(inner if inner is not None else top, 2) is None:
        yield it.finding(
            "block-wrong", "error", place, "is no block that drafts anything", shown(inner if inner is not None else top), "2 or more",
            vllm="does not look at it", sglang=REFUSES, reference="drafts nothing",
        )  # fmt: skip


def mask_token(it: DrafterFiles) -> Iterator[Finding]:
    """mask_token_id: the row of the target's embedding that stands in the slots to be drafted."""
    top, inner = it.config.get("mask_token_id"), it.nested.get("mask_token_id")
    place, rows = f"{CONFIG} mask_token_id", (it.target.vocab_size if it.target else None) or it.size("vocab_size")
    if top is None and inner is None:
        yield it.finding(
            "mask-missing", "error", place, "is left out", "nothing", "the token of the training", vllm=REFUSES,
            sglang="takes the tokenizer's <|MASK|>, or refuses", reference="fails at the first block",
        )  # fmt: skip
        return
    if top is not None and inner is not None and top != inner:
        yield it.finding(
            "mask-differs", "error", place, "stands in two places and differs", f"{shown(top)} and dflash_config {shown(inner)}", "the same",
            vllm=f"takes {shown(inner)}" if it.format == "zlab" else f"takes {shown(top)}", sglang=f"takes {shown(inner)}", reference=f"takes {shown(inner)}",
        )  # fmt: skip
    value = whole(inner if inner is not None else top, 0)
    if value is None or (rows is not None and value >= rows):
        yield it.finding(
            "mask-range", "error", place, "is no row of the target's embedding", shown(inner if inner is not None else top), f"0 to {rows - 1 if rows else '...'}",
            vllm="reads past the embedding", sglang=REFUSES, reference="fails at the first block",
        )  # fmt: skip
        return
    special = _special(it)
    if value in special:
        yield it.finding(
            "mask-special", "warning", place, f"is the {special[value]}, which means something else to the target", value,
            "an unused row, unless the training used this one", vllm=AS_IT_STANDS, sglang=AS_IT_STANDS, reference=AS_IT_STANDS,
        )  # fmt: skip


def target(it: DrafterFiles) -> Iterator[Finding]:
    """The drafter's idea of its target against the target."""
    if it.target is None:
        return
    pairs = (
        ("target-hidden-size", "hidden_size", it.size("hidden_size"), it.target.hidden_size, "fails when the first states arrive", it.layer_place),
        ("target-vocabulary", "vocab_size", it.size("vocab_size"), it.target.vocab_size, "gives the drafter a head of its own without weights", it.layer_place),
        ("target-depth", "num_target_layers", whole(it.config.get("num_target_layers"), 1), it.target.num_layers, "does not need it", CONFIG),
    )  # fmt: skip
    for code, name, ours, theirs, vllm, place in pairs:
        if ours is not None and theirs is not None and ours != theirs:
            other = "does not look at it" if name != "hidden_size" else "fails when the first states arrive"
            yield it.finding(
                code,
                "error",
                f"{place} {name}",
                "is not the target's",
                ours,
                f"{theirs} in {it.target.place}",
                vllm=vllm,
                sglang=other,
                reference=other,
            )


def _special(it: DrafterFiles) -> Mapping[int, str]:
    """Tokens of a meaning: the target's, or those that the drafter's config took over from it."""
    found: dict[int, str] = {}
    holders = ((it.own.get("eos_token_id"), "end-of-text token"), (it.own.get("pad_token_id"), "padding token"))
    for value, what in holders:
        found |= {number: what for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)}
    if it.target is not None:
        found |= {**dict.fromkeys(it.target.eos, "end-of-text token"), **({it.target.pad: "padding token"} if it.target.pad is not None else {})}
    return found
