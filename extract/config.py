"""What `dflash extract` and served evaluation can be told: every flag, its default and its unit.

Owns the defaults. Imports neither torch nor vllm nor transformers, so that `--help` and `--dry-run` stay quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ..common.agreement import MAX_DISAGREEMENT
from ..common.config import Config
from ..common.spec import Limits


class RowsConfig(Config):
    """What is read from the datasets and how a row is understood."""

    model: str = Field(min_length=1)
    """The target: a local folder, or a model's name on the Hugging Face hub."""
    data: tuple[str, ...] = Field(min_length=1)
    """Datasets, each perhaps with an amount: PATH, PATTERN, FOLDER or hub NAME[@CONFIG][:SPLIT], then :20000 rows or :25%."""
    limit: int | None = Field(None, gt=0)
    """Take only the first so many rows of all datasets together; None takes all."""
    data_format: Literal["messages", "sharegpt", "alpaca", "prompt-response", "text", "tokens"] | None = None
    """The shape of the rows; None finds it out row by row."""
    columns: dict[str, str] = Field(default_factory=dict)
    """The dataset's name of a column, by ours: {"prompt": "question"}."""
    roles: dict[str, str] = Field(default_factory=dict)
    """What a role of the dataset stands for: {"bot": "assistant"}."""
    chat_template: Path | None = None
    """A Jinja file instead of the target's own chat template."""
    template_args: dict[str, object] = Field(default_factory=dict)
    """Arguments for the chat template, for example {"enable_thinking": False}; a row's own `chat_template_kwargs` win."""
    max_length: int = Field(4096, gt=1)
    """Longest document, tokens; with an answer to be written the prompt and the answer together."""
    max_new_tokens: int = Field(512, gt=0)
    """Longest answer that the target writes, tokens."""
    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature of its answers; 0 is greedy, 2 the most that vLLM takes."""
    seed: int = Field(0, ge=0)
    """Of the rows of a share, the order of the samples and of sampling."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    engine_args: dict[str, object] = Field(default_factory=dict)
    """Passed to vLLM's engine as they are."""


class ExtractConfig(RowsConfig):
    """One extraction: a chat dataset in, a feature cache out."""

    layers: tuple[int, ...] | None = None
    """Blocks whose output is stored, 0-based; None is the DFlash choice round(linspace(1, n - 3, 5))."""
    verifier_layer: int | None = None
    """The block whose raw output is the verifier state; None is the last block."""
    force_verifier_layer: bool = False
    """Accept a verifier layer that is not the last block."""
    cache: Path
    """The folder of the feature cache."""
    supervise: Literal["all", "assistant", "last"] = "assistant"
    """Which tokens of a conversation are learned from: all, the assistant's, or those of its last turn."""
    turns: Literal["all", "each"] = "all"
    """all: a conversation is one sample; each: every assistant turn ends a sample of its own."""
    overlong: Literal["reject", "truncate"] = "reject"
    """What is done with documents over `max_length`."""
    min_supervised: int = Field(1, ge=1)
    """Documents with fewer supervised tokens, after the cut, are rejected."""
    max_rejects: float = Field(0.5, ge=0, le=1)
    """The run stops before the engine starts when a larger share of the rows is rejected."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What runs the target; transformers is the slow reference."""
    generate: bool = False
    """Let the target write the assistant turns instead of taking the data's."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Its tokens are sampled from the likeliest ones that have this much probability together; 1 is all."""
    top_k: int = Field(0, ge=0)
    """Its tokens are sampled from so many likeliest ones; 0 is all."""
    mantissa_bits: Literal[7, 3] = 7
    """Mantissa bits kept in the features; 7 is lossless."""
    chunk_tokens: int = Field(Limits.model_fields["chunk_tokens"].default, gt=0)
    """Tokens in a chunk of one layer."""
    part_tokens: int = Field(Limits.model_fields["part_tokens"].default, gt=0)
    """A part is published once it holds this many tokens."""
    part_seconds: float = Field(Limits.model_fields["part_seconds"].default, gt=0)
    """A part is published once it is this old, seconds."""
    batch_size: int = Field(4, gt=0)
    """Documents in one forward pass of the transformers engine."""
    workers: int = Field(1, ge=1, le=1000)
    """Processes of this extraction, each with an engine of its own on its own GPUs."""
    rank: int = Field(0, ge=0)
    """Which of `world_size` extractions into one cache this is, each of which takes its share of the documents."""
    world_size: int = Field(1, ge=1, le=1000)
    """How many extractions share the work; each is started with the same settings and data and a rank of its own."""
    stall_seconds: float = Field(600.0, gt=0)
    """The run fails, naming the documents, when some are being computed and none has finished for so long, seconds."""
    max_disagreement: float = Field(MAX_DISAGREEMENT, ge=0, le=1)
    """Stop when the stored state's own prediction differs from the engine's in more than this share of the samples."""
    min_samples: int = Field(50, gt=0)
    """Samples to see before that may stop the run."""

    @field_validator("cache", mode="before")
    @classmethod
    def _cache_is_given(cls, value: object) -> object:
        if str(value).strip() in ("", "."):
            raise ValueError("must name a folder")
        return value

    @model_validator(mode="after")
    def _fits(self) -> ExtractConfig:
        changed = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        unused = [name for name in ("overlong", "min_supervised") if name in changed]
        if self.generate and unused:
            raise ValueError(f"{', '.join(unused)} concern answers that the data has; with generate the target's own are learned from, whole")
        sampling = [name for name in ("top_p", "top_k") if name in changed]
        if sampling and not (self.generate and self.temperature):
            raise ValueError(f"{', '.join(sampling)} concern answers that are sampled: they need generate and a temperature above 0, which is greedy")
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}: ranks count from 0 to world_size - 1")
        if self.workers * self.world_size > 10_000:
            raise ValueError("workers times world_size may be 10,000 at most, because a part's name has four digits for its writer")
        if self.turns == "each" and self.supervise != "assistant":
            raise ValueError(f"turns each learns from one assistant turn a sample, which supervise {self.supervise} contradicts")
        return self


class ServeConfig(RowsConfig):
    """Served evaluation: the same prompts with and without a drafter in vLLM."""

    drafter: Path
    """An exported drafter's folder (`dflash export`)."""
    max_new_tokens: int = Field(256, gt=0)
    """Longest answer, tokens."""
    concurrency: int = Field(8, gt=0)
    """Requests served at once (vLLM's max_num_seqs)."""
    num_speculative_tokens: int | None = Field(None, gt=0)
    """Tokens drafted at once; None is block_size - 1 of the drafter's config."""
    baseline: bool = True
    """Serve the prompts without the drafter too, for the speed-up and to compare the answers."""
    near_tie_nats: float = Field(0.125, ge=0)
    """Two tokens whose log-probabilities lie at most so far apart may change places by rounding: a bfloat16 logit between 16 and
    32 is a multiple of 0.125, and rounding two of them moves their difference by up to one such step."""
    resamples: int = Field(1000, ge=0)
    """Of the bootstrap over prompts; 0 makes no confidence interval."""
