"""TrainConfig: every setting of a training run and of an offline evaluation. Each field is the only home of its default.

Owns values and what can be checked without a cache. Imports nothing heavy, so that `--dry-run` needs no torch.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from ..common.config import Config

LayerType = Literal["full_attention", "sliding_attention"]
Term = Literal["ce", "kl", "reverse-kl", "tv", "lk", "lk-hybrid"]
TOKEN_TERMS = frozenset({"ce", "tv"})
"""Terms that say something of their own when the label is one token: kl and lk then equal ce, reverse-kl is infinite."""
Device = str
ComputeType = Literal["auto", "bfloat16", "float32"]
ParameterGroup = Literal["layers", "inputs", "norms"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
MAX_WEIGHT = 100
"""Of a cache: a larger one is a slip of the pen, and an epoch is planned in memory."""


class DataConfig(Config):
    """How samples become rows."""

    row_tokens: int = Field(default=8192, ge=2, le=1 << 22)
    """Tokens in a packed row (T). A longer document is cut to it."""
    seed: int = Field(default=0, ge=0)
    """Of the order of samples."""
    weights: tuple[float, ...] | None = None
    """How often each cache's samples are read in an epoch, in the order of --cache; of 0.5, another half each epoch. None: once."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the samples that is held out for evaluation, chosen by each sample's own key. Not with --eval-cache."""
    lanes: int | None = Field(default=None, ge=1, le=1024)
    """Runs of rows packed apart, of which processes decode each their own. None: as many as rows in a step, where these are left out; else 1."""

    @model_validator(mode="after")
    def _weights_fit(self) -> DataConfig:
        if self.weights is not None and not (all(0 <= weight <= MAX_WEIGHT for weight in self.weights) and any(self.weights)):
            raise ValueError(f"weights must lie in 0..{MAX_WEIGHT} and not all be 0, not {list(self.weights)}")
        return self


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
    draft_vocab_size: int | None = Field(default=None, ge=1)
    """Tokens that the drafter can propose: the most frequent supervised ones. None: the whole vocabulary."""
    sample_from_anchor: bool = False
    """Slot 0 drafts too: slot k proposes the token at a+1+k, B of them a block. No engine serves this form of DFlash yet."""

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
    """teacher: the target's most likely token; data: the text's own token; soft: the target's whole distribution."""
    terms: dict[Term, float] | None = None
    """What is added up, with factors: ce, tv; with label soft also kl, reverse-kl, lk, lk-hybrid. None: {ce: 1}, for label soft {kl: 1}."""
    lk_eta: float = Field(default=3.0, ge=0)
    """lk-hybrid: how soon it turns from kl to tv as acceptance grows; arXiv 2602.23881."""
    position_weights: Literal["exp", "dpace", "none"] = "exp"
    """exp: slot k weighs exp(-(k-1)/gamma); dpace: by what the slot adds to the expected accepted length; none: all the same."""
    gamma: float = Field(default=4.0, gt=0)
    """Decay of the slot weights, in slots. The paper: 7, 5, 4 for blocks of 16, 10, 8; arXiv 2602.06036."""
    dpace_alpha: float = Field(default=0.5, gt=0, le=1)
    """Smoothing of the drafter's confidence in dpace: (1-alpha) * confidence + alpha; arXiv 2605.18810."""
    anchors_per_document: int = Field(default=512, ge=1)
    """Blocks drawn from a document at most."""
    anchors_per_row: int = Field(default=1024, ge=1)
    """Blocks drawn from a packed row at most (memory); more are thinned evenly over the row."""
    chunk_slots: int | None = Field(default=None, ge=1)
    """Slots whose logits exist at the same time. None: 2048 on a GPU, 128 on a CPU (caches)."""
    feature_noise: float = Field(default=0.0, ge=0)
    """Noise on the input of `fc`: half-width of uniform, standard deviation of gaussian; verifier states are never touched."""
    feature_noise_kind: Literal["uniform", "gaussian"] = "uniform"
    """Distribution of that noise."""

    @model_validator(mode="after")
    def _terms_fit_the_label(self) -> LossConfig:
        if self.terms is None:
            return self
        if not self.terms or not all(0 < factor < math.inf for factor in self.terms.values()):
            raise ValueError(f"terms needs at least one term and factors above 0, not {self.terms}")
        vain = sorted(set(self.terms) - TOKEN_TERMS)
        if self.label != "soft" and vain:
            raise ValueError(
                f"terms {', '.join(vain)} compare distributions, but label {self.label} is one token, for which kl and lk equal ce and "
                f"reverse-kl is infinite; use label soft, or terms out of {', '.join(sorted(TOKEN_TERMS))}"
            )
        return self

    @property
    def factors(self) -> dict[str, float]:
        """`terms`, resolved."""
        return {str(name): factor for name, factor in self.terms.items()} if self.terms is not None else {"kl" if self.label == "soft" else "ce": 1.0}

    @property
    def weights_text(self) -> str:
        """The weights of slots, for people."""
        return {
            "exp": f"exp(-(k-1)/gamma), gamma {self.gamma}",
            "dpace": f"dpace, alpha {self.dpace_alpha} (gamma {self.gamma} is not used)",
            "none": f"all 1 (gamma {self.gamma} is not used)",
        }[self.position_weights]


class InitConfig(Config):
    """What the drafter starts from."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, populate_by_name=True, serialize_by_alias=True)

    source: str | None = Field(default=None, alias="from")
    """A drafter's folder (run, checkpoint, z-lab or speculators export), or `target:FOLDER` for the target's own layers. None: random."""
    target_blocks: tuple[int, ...] | None = None
    """With `target:`, the target's block for each drafter layer, 0-based. None: evenly spread from first to last."""

    @model_validator(mode="after")
    def _fits(self) -> InitConfig:
        if self.target_blocks is not None and not (self.source or "").startswith("target:"):
            raise ValueError("target_blocks needs from=target:FOLDER")
        return self


class OptimConfig(Config):
    """The optimizer, its schedule, and how long."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw: everywhere; muon: Muon on the matrices of the decoder layers, AdamW on `fc` and the norms."""
    lr: float = Field(default=6e-4, gt=0)
    """Peak learning rate. Muon's steps are scaled to the size of AdamW's, so that one rate serves both."""
    lr_factors: dict[ParameterGroup, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Factor of the learning rate for a group: layers (matrices of the decoder layers), inputs (`fc`), norms. Missing: 1."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Of Muon (Nesterov's form)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """On matrices; never on norms. Decoupled: each step takes away lr * weight_decay of a weight."""
    warmup_ratio: float = Field(default=0.04, ge=0, lt=1)
    """Share of the steps in which the learning rate rises linearly."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """What follows the warm-up. wsd: constant, then a fall over the last `decay_ratio` of the steps."""
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps in which wsd falls."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where cosine, linear and wsd end, as a share of the peak."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient, over all processes."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Decay of the running mean of the weights, which evaluation and export then take. None: no such mean."""
    epochs: float = Field(default=6.0, gt=0)
    """Passes over the data; fractions allowed. Not used when `steps` is given."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps. None: as many as `epochs` gives."""
    accumulate_rows: int | None = Field(default=None, ge=1)
    """Rows in an optimizer step, of all processes together. None: one for each process of the run's first start."""
    accumulate_tokens: int | None = Field(default=None, ge=1)
    """Instead: rows are added to a step until they hold so many tokens, padding aside."""

    @model_validator(mode="after")
    def _fits(self) -> OptimConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        if self.accumulate_rows is not None and self.accumulate_tokens is not None:
            raise ValueError("accumulate_rows and accumulate_tokens exclude each other")
        if self.schedule == "wsd" and self.warmup_ratio + self.decay_ratio > 1:
            raise ValueError(f"warmup_ratio {self.warmup_ratio} and decay_ratio {self.decay_ratio} of wsd exceed 1 together")
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
    compile: bool | None = None
    """Compile the drafter's layers with torch.compile; the first step then takes longer. None: on CUDA."""
    float8: bool = False
    """Products with the drafter's matrices in 8-bit floating point, forward and backward, and the head's backward; logits stay as they are."""
    teacher_cache_bytes: int = Field(default=1 << 30, ge=0)
    """Memory for the teacher's tokens, kept per sample so that later epochs skip the teacher head; emptied when full."""
    store_targets: bool | None = None
    """Compute the teacher's tokens before the first step and keep them in the caches. None: with label teacher, if all data is read once."""
    activation_checkpointing: bool = False
    """Compute each decoder layer again in the backward pass instead of keeping what it needs: less memory, for long rows."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl. wandb, trackio and mlflow may use the network; each is a package of its own."""
    log_samples: bool = False
    """Also write samples.jsonl: the samples of every step, in order, as [cache, sample]."""


class DistributedConfig(Config):
    """Several processes, started by torchrun. None of it changes what is learned."""

    mode: Literal["auto", "none", "ddp", "fsdp2"] = "auto"
    """ddp: every process holds all weights; fsdp2: each holds its share of them. auto: ddp when there are several processes."""
    timeout_seconds: float = Field(default=600.0, gt=0)
    """How long a process waits for the others before it gives up."""


class HeldOutConfig(Config):
    """Evaluation during training, on samples that are not trained on."""

    every: int = Field(default=500, ge=1)
    """Optimizer steps between evaluations; the last step is always evaluated."""
    samples: int = Field(default=256, ge=1)
    """Documents evaluated at most."""
    patience: int | None = Field(default=None, ge=1)
    """The run stops after so many evaluations in a row without a better tau. None: never."""
    chunk_blocks: int = Field(default=256, ge=1)
    """Blocks drafted at the same time; bounds memory, changes no result."""


class TrainConfig(Config):
    """The whole of a training run."""

    data: DataConfig = DataConfig()
    """Rows."""
    model: ModelConfig = ModelConfig()
    """Drafter."""
    init: InitConfig = InitConfig()
    """First weights."""
    loss: LossConfig = LossConfig()
    """Objective."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    run: RunConfig = RunConfig()
    """Everything else."""
    distributed: DistributedConfig = DistributedConfig()
    """Several processes."""
    eval: HeldOutConfig = HeldOutConfig()
    """Held-out evaluation."""

    @model_validator(mode="after")
    def _targets_fit_the_label(self) -> TrainConfig:
        if self.run.store_targets and self.loss.label != "teacher":
            raise ValueError(
                f"run.store_targets=true keeps the teacher's tokens, and label {self.loss.label} does not ask for them; use label teacher"
            )
        return self


def _no_overflow(temperature: float) -> float:
    if 0 < temperature < 0.001:
        raise ValueError("is 0, which is greedy, or at least 0.001, for logits are divided by it")
    return temperature


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
    temperatures: tuple[Annotated[float, Field(ge=0, le=100), AfterValidator(_no_overflow)], ...] = ()
    """Also expect the acceptance under sampling at these; 0, which is greedy, is always counted."""
    position_bounds: tuple[Annotated[int, Field(gt=0)], ...] = (32, 128, 512)
    """Where the buckets of positions in the answer begin, tokens; the first begins at 0."""
    resamples: int = Field(default=1000, ge=0)
    """Of the bootstrap for the confidence intervals; 0 makes none."""
    seed: int = Field(default=0, ge=0)
    """Of the bootstrap."""
