"""What `dflash extract` and served evaluation can be told: every flag, its default and its unit.

Owns the defaults. Imports neither torch nor vllm nor transformers, so that `--help` and `--dry-run` stay quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from ..common.agreement import MAX_DISAGREEMENT
from ..common.config import Config
from ..common.spec import Limits


class ExtractConfig(Config):
    """One extraction: a chat dataset in, a feature cache out."""

    model: str = Field(min_length=1)
    """The target: a local folder, or a model's name on the Hugging Face hub."""
    layers: tuple[int, ...] | None = None
    """Blocks whose output is stored, 0-based; None is the DFlash choice round(linspace(1, n - 3, 5))."""
    verifier_layer: int | None = None
    """The block whose raw output is the verifier state; None is the last block."""
    force_verifier_layer: bool = False
    """Accept a verifier layer that is not the last block."""
    data: tuple[str, ...] = Field(min_length=1)
    """Datasets: paths of .jsonl, .json, .parquet or .arrow files, or Hugging Face dataset names (NAME or NAME:SPLIT)."""
    cache: Path
    """The folder of the feature cache."""
    max_length: int = Field(4096, gt=1)
    """Longest document, tokens; with `generate` the prompt and the answer together."""
    limit: int | None = Field(None, gt=0)
    """Take only the first so many rows; None takes all."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What runs the target; transformers is the slow reference."""
    generate: bool = False
    """Let the target write the last assistant turn instead of taking the data's."""
    max_new_tokens: int = Field(512, gt=0)
    """Longest generated answer, tokens."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of generated answers; 0 is greedy."""
    mantissa_bits: Literal[7, 3] = 7
    """Mantissa bits kept in the features; 7 is lossless."""
    seed: int = Field(0, ge=0)
    """Of the order of the samples and of sampling."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    engine_args: dict[str, object] = Field(default_factory=dict)
    """Passed to vLLM's engine as they are."""
    chunk_tokens: int = Field(Limits.model_fields["chunk_tokens"].default, gt=0)
    """Tokens in a chunk of one layer."""
    part_tokens: int = Field(Limits.model_fields["part_tokens"].default, gt=0)
    """A part is published once it holds this many tokens."""
    part_seconds: float = Field(Limits.model_fields["part_seconds"].default, gt=0)
    """A part is published once it is this old, seconds."""
    batch_size: int = Field(4, gt=0)
    """Documents in one forward pass of the transformers engine."""
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


class ServeConfig(Config):
    """Served evaluation: the same prompts with and without a drafter in vLLM."""

    model: str = Field(min_length=1)
    """The target: a local folder, or a model's name on the Hugging Face hub."""
    drafter: Path
    """An exported drafter's folder (`dflash export`, format zlab)."""
    data: tuple[str, ...] = Field(min_length=1)
    """Prompts, in the same forms as for extraction."""
    max_new_tokens: int = Field(256, gt=0)
    """Longest answer, tokens."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    limit: int | None = Field(None, gt=0)
    """Take only the first so many rows; None takes all."""
    concurrency: int = Field(8, gt=0)
    """Requests served at once (vLLM's max_num_seqs)."""
    max_length: int = Field(4096, gt=1)
    """Longest prompt and answer together, tokens."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    engine_args: dict[str, object] = Field(default_factory=dict)
    """Passed to vLLM's engine as they are."""
    num_speculative_tokens: int | None = Field(None, gt=0)
    """Tokens drafted at once; None is block_size - 1 of the drafter's config."""
    seed: int = Field(0, ge=0)
    """Of sampling."""
