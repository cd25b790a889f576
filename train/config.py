"""TrainConfig: every setting of a training run and of an offline evaluation. Each field is the only home of its default.

Owns values and what can be checked without a cache. Imports nothing heavy, so that `--dry-run` needs no torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ..common.config import Config

LayerType = Literal["full_attention", "sliding_attention"]
Device = str
ComputeType = Literal["auto", "bfloat16", "float32"]


class DataConfig(Config):
    """How samples become rows."""

    row_tokens: int = Field(default=8192, ge=2, le=1 << 22)
    """Tokens in a packed row (T). A longer document is cut to it."""
    seed: int = Field(default=0, ge=0)
    """Of the order of samples."""


class ModelConfig(Config):
    """The drafter. None means: as the target has it, or as the cache holds it."""

    block_size: int = Field(default=16, ge=2, le=1024)
    """Slots in a block, the anchor included (B). Served with B - 1 speculative tokens."""
    num_layers: int = Field(default=5, ge=1, le=1024)
    """Decoder layers of the drafter."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target blocks whose outputs feed `fc`, 0-based. None: all that the cache stores."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Query heads. None: the target's."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Key and value heads. None: the target's."""
    head_dim: int | None = Field(default=None, ge=2)
    """Size of a head; even. None: the target's."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the feed-forward layer. None: the target's."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Base of the rotary positions. None: that of the target's full-attention layers."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of the drafter's own norms."""
    mask_token_id: int | None = Field(default=None, ge=0)
    """Token that stands in slots 1..B-1. None: chosen from the target's token table."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Positions, its own included, that a slot of a sliding layer may see."""
    layer_types: tuple[LayerType, ...] | None = None
    """Attention of each layer. None: all full."""
    max_position_embeddings: int | None = Field(default=None, ge=1)
    """Longest context that the export declares, tokens. None: the target's."""

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, not {self.head_dim}")
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, num_layers is {self.num_layers}")
        slides = self.layer_types is not None and "sliding_attention" in self.layer_types
        if slides != (self.sliding_window is not None):
            raise ValueError("sliding_window and a sliding_attention in layer_types need each other")
        return self


class LossConfig(Config):
    """What is learned, and from which positions."""

    label: Literal["teacher", "data", "soft"] = "teacher"
    """teacher: the target's most likely token; data: the text's own token; soft: the target's whole distribution (KL)."""
    position_weights: Literal["exp", "none"] = "exp"
    """exp: slot k weighs exp(-(k-1)/gamma); none: all slots weigh the same."""
    gamma: float = Field(default=4.0, gt=0)
    """Decay of the slot weights, in slots. The paper: 7, 5, 4 for blocks of 16, 10, 8; arXiv 2602.06036."""
    anchors_per_document: int = Field(default=512, ge=1)
    """Blocks drawn from a document at most."""
    anchors_per_row: int = Field(default=1024, ge=1)
    """Blocks drawn from a packed row at most (memory); more are thinned evenly over the row."""
    chunk_slots: int | None = Field(default=None, ge=1)
    """Slots whose logits exist at the same time. None: 2048 on a GPU, 128 on a CPU (caches)."""
    feature_noise: float = Field(default=0.0, ge=0)
    """Half-width of uniform noise on the input of `fc`; verifier states are never touched."""


class OptimConfig(Config):
    """AdamW, its schedule, and how long."""

    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """On matrices; never on norms."""
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    """Share of the steps in which the learning rate rises linearly."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of the peak."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient."""
    epochs: float = Field(default=6.0, gt=0)
    """Passes over the data; fractions allowed. Not used when `steps` is given."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps. None: as many as `epochs` gives."""
    accumulate_rows: int = Field(default=1, ge=1)
    """Rows in an optimizer step."""

    @model_validator(mode="after")
    def _betas_fit(self) -> OptimConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        return self


class RunConfig(Config):
    """How the run runs."""

    seed: int = Field(default=0, ge=0)
    """Of the initial weights, the anchors and the noise."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Optimizer steps between checkpoints; the last step is always kept."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""
    log_every: int = Field(default=10, ge=1)
    """Optimizer steps that a line of metrics.jsonl sums up."""
    max_nonfinite_steps: int = Field(default=10, ge=1)
    """The run stops after so many steps in a row whose loss or gradient was not finite; such steps change no weight."""
    device: Device = "auto"
    """auto, cpu, cuda or cuda:N. auto: the first CUDA device if there is one."""
    dtype: ComputeType = "auto"
    """Type of the products; weights and AdamW's state stay float32. auto: bfloat16 where the device multiplies it natively."""
    attention: Literal["auto", "dense", "flex"] = "auto"
    """dense: SDPA with mask matrices, piece by piece; flex: block-sparse, needs CUDA. auto: flex on CUDA, dense elsewhere."""
    compile: bool = False
    """Compile the drafter with torch.compile."""
    teacher_cache_bytes: int = Field(default=1 << 30, ge=0)
    """Memory for the teacher's tokens, kept per sample so that later epochs skip the teacher head; emptied when full."""
    tensorboard: bool = True
    """Also write TensorBoard events."""


class TrainConfig(Config):
    """The whole of a training run."""

    data: DataConfig = DataConfig()
    """Rows."""
    model: ModelConfig = ModelConfig()
    """Drafter."""
    loss: LossConfig = LossConfig()
    """Objective."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    run: RunConfig = RunConfig()
    """Everything else."""


class EvalConfig(Config):
    """An offline evaluation."""

    chunk_blocks: int = Field(default=256, ge=1)
    """Blocks drafted at the same time; bounds memory, changes no result."""
    device: Device = "auto"
    """As in training."""
    dtype: ComputeType = "auto"
    """As in training."""
    attention: Literal["auto", "dense", "flex"] = "auto"
    """As in training."""
