"""DrafterSpec: everything that the drafter's weights mean: sizes, layers, block, mask token, positions.

In: a ModelConfig, a cache's spec and the target's shape. Out: a record with nothing left open. It is stored with each
checkpoint, and the export writes it in the words of the serving engines. No torch.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError, model_validator

from ..common.config import Config
from ..common.errors import InputError
from ..common.layers import layer_slots
from ..common.spec import CacheSpec
from .config import LayerType, ModelConfig
from .target_shape import TargetShape

FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"
MOST_LAYERS, MOST_SLOTS, MOST_ROWS, MOST_HEADS = 1024, 4096, 2**24, 2**14
"""Of a drafter, of its block, of a matrix, of an attention. A larger number in a config.json is a slip, and memory is not asked for it."""


class DrafterSpec(Config):
    """A drafter, resolved."""

    hidden_size: int = Field(gt=0, le=MOST_ROWS)
    """H, the target's."""
    num_layers: int = Field(gt=0, le=MOST_LAYERS)
    """Decoder layers."""
    num_attention_heads: int = Field(gt=0, le=MOST_HEADS)
    """N."""
    num_key_value_heads: int = Field(gt=0, le=MOST_HEADS)
    """G."""
    head_dim: int = Field(gt=0, le=MOST_HEADS)
    """E."""
    intermediate_size: int = Field(gt=0, le=MOST_ROWS)
    """Width of the feed-forward layer."""
    rms_norm_eps: float = Field(gt=0, allow_inf_nan=False)
    """Epsilon of the drafter's norms."""
    rope_theta: float = Field(gt=0, allow_inf_nan=False)
    """Rotary base; all of a head is rotated."""
    max_position_embeddings: int = Field(gt=0, lt=2**31)
    """Longest context, tokens."""
    layer_types: tuple[LayerType, ...]
    """Attention of each layer; full layers see their whole block, sliding layers the slots up to their own."""
    sliding_window: int | None = Field(default=None, gt=0, lt=2**31)
    """Positions, its own included, that a slot of a sliding layer may see."""
    block_size: int = Field(ge=2, le=MOST_SLOTS)
    """B, anchor included."""
    mask_token_id: int = Field(ge=0)
    """Token in slots 1..B-1."""
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    """Target blocks that feed `fc`, 0-based, ascending."""
    num_target_layers: int = Field(gt=0, lt=2**31)
    """The target's depth."""
    vocab_size: int = Field(gt=0, le=MOST_ROWS)
    """Rows of the target's embedding."""
    logit_scale: float = 1.0
    """The target's head multiplies logits by this."""
    logit_softcap: float | None = None
    """The target's head bounds logits by this."""
    draft_vocab_size: int | None = Field(default=None, gt=0)
    """Rows of the head that the drafter uses; which, stands in its tensor `d2t`. None: all."""
    sample_from_anchor: bool = False
    """Slot 0 drafts too."""

    @model_validator(mode="after")
    def _fits(self) -> DrafterSpec:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if len(self.layer_types) != self.num_layers or (SLIDING in self.layer_types and self.sliding_window is None):
            raise ValueError("layer_types and sliding_window do not fit num_layers")
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= self.num_target_layers:
            raise ValueError(f"target_layer_ids {list(ids)} is no ascending choice of {self.num_target_layers} blocks")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is no row of an embedding of {self.vocab_size}")
        if self.draft_vocab_size is not None and self.draft_vocab_size >= self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} prunes nothing of a vocabulary of {self.vocab_size}")
        return self

    @property
    def num_drafted(self) -> int:
        """Tokens that a block drafts, S: B - 1, or B when slot 0 drafts too."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_slot(self) -> int:
        """The first slot that drafts."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        hidden, heads, groups, size = self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        layer = hidden * size * (2 * heads + 2 * groups) + 2 * size + 3 * hidden * self.intermediate_size + 2 * hidden
        return self.num_layers * layer + len(self.target_layer_ids) * hidden * hidden + 2 * hidden


def resolve_layer_ids(wanted: tuple[int, ...] | None, spec: CacheSpec, place: str = "model.target_layer_ids") -> tuple[int, ...]:
    """The drafter's layers, ascending: `wanted`, or all that the cache stores. Raises InputError for a layer it lacks."""
    return tuple(spec.layer_ids[slot] for slot in layer_slots(wanted, spec.layer_ids, place))


def resolve(model: ModelConfig, spec: CacheSpec, shape: TargetShape, mask_token_id: int) -> DrafterSpec:
    """Fill what `model` leaves open from the target.

    Raises InputError that names every size which neither the configuration nor the target's config.json gives.
    """
    target = spec.settings.target
    inherited = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rope_theta", "max_position_embeddings")
    sizes: dict[str, Any] = {}
    for name in inherited:
        own = getattr(model, name)
        sizes[name] = own if own is not None else getattr(shape, name)
    missing = [name for name in inherited if sizes[name] is None]
    if missing:
        raise InputError(
            "these sizes cannot be read from the target's config.json",
            place=f"target {target.architecture}",
            found=", ".join(missing),
            fix="give them: " + " ".join(f"--set model.{name}=..." for name in missing),
        )
    try:
        return DrafterSpec(
            hidden_size=target.hidden_size,
            num_layers=model.num_layers,
            rms_norm_eps=model.rms_norm_eps,
            layer_types=model.layer_types or (FULL,) * model.num_layers,
            sliding_window=model.sliding_window,
            block_size=model.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=resolve_layer_ids(model.target_layer_ids, spec),
            num_target_layers=target.num_layers,
            vocab_size=target.vocab_size,
            logit_scale=target.logit_scale,
            logit_softcap=target.logit_softcap,
            draft_vocab_size=model.draft_vocab_size,
            sample_from_anchor=model.sample_from_anchor,
            **sizes,
        )
    except ValueError as error:
        problem = f"the drafter's sizes do not fit: {problems_of(error)}"
        raise InputError(problem, place="model", fix="correct them with --set model.FIELD=...") from None


def problems_of(error: Exception) -> str:
    """A validation error in one line: each field and what is wrong with it."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(": ".join(filter(None, (".".join(map(str, item["loc"])), item["msg"]))) for item in error.errors())
