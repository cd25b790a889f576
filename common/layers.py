"""Layer ids: id k is the output of block k, counted from 0. Pure arithmetic and the checks of what a user asked for.

The same number elsewhere: Hugging Face `hidden_states[k + 1]`; vLLM `eagle_aux_hidden_state_layer_ids` k + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import InputError

DEFAULT_COUNT = 5


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """The DFlash choice, round(linspace(1, n - 3, 5)), for a target of `num_layers` blocks.

    Duplicates that a shallow target causes are dropped. Source: z-lab/dflash, `build_target_layer_ids`.
    """
    first, last = 1, num_layers - 3
    if last <= first:
        return tuple(range(max(num_layers - 1, 1)))
    step = (last - first) / (DEFAULT_COUNT - 1)
    return tuple(sorted({round(first + i * step) for i in range(DEFAULT_COUNT)}))


def check_layer_ids(ids: Sequence[int], num_layers: int, place: str = "--layers") -> tuple[int, ...]:
    """`ids` in ascending order. Raises InputError for an id out of range, negative or repeated, or for none at all."""
    problems = []
    if not ids:
        problems.append("no layer is given")
    out_of_range = [i for i in ids if not 0 <= i < num_layers]
    if out_of_range:
        problems.append(f"the target has blocks 0..{num_layers - 1}, not {', '.join(map(str, out_of_range))}")
    repeated = sorted({i for i in ids if list(ids).count(i) > 1})
    if repeated:
        problems.append(f"given more than once: {', '.join(map(str, repeated))}")
    if problems:
        raise InputError(
            "; ".join(problems),
            place=place,
            found=",".join(map(str, ids)),
            expected=f"different block numbers from 0 to {num_layers - 1}",
            fix=f"for example --layers {','.join(map(str, default_layer_ids(num_layers)))}",
        )
    return tuple(sorted(ids))


def check_verifier_layer(layer: int | None, num_layers: int, forced: bool) -> int:
    """The verifier layer: the last block unless `forced` otherwise.

    Raises InputError for any other layer: teacher logits from an inner layer cap the acceptance length in silence.
    """
    last = num_layers - 1
    if layer is None or layer == last:
        return last
    if not 0 <= layer < num_layers:
        raise InputError("no such block", place="--verifier-layer", found=layer, expected=f"{last}, the last block", fix=f"--verifier-layer {last}")
    if not forced:
        raise InputError(
            "the teacher's logits come from the last block; from another they would be wrong in silence",
            place="--verifier-layer",
            found=layer,
            expected=f"{last}, the last of {num_layers} blocks",
            fix="leave the flag out, or say --force-verifier-layer if you mean it",
        )
    return layer


def layer_slots(wanted: Sequence[int] | None, stored: Sequence[int], place: str) -> tuple[int, ...]:
    """Indices into a cache's layer axis of the `wanted` layer ids, ascending; all of them when `wanted` is None.

    Raises InputError naming the layers that the cache does not hold.
    """
    if wanted is None:
        return tuple(range(len(stored)))
    missing = [i for i in wanted if i not in stored]
    if missing or len(set(wanted)) != len(wanted) or not wanted:
        raise InputError(
            "these layers are not all in the cache, or not different",
            place=place,
            found=list(wanted),
            expected=f"different ones of {list(stored)}",
            fix="choose among the stored layers, or extract again with more",
        )
    return tuple(sorted(stored.index(i) for i in wanted))
