"""Plan: everything that is known before a row is read: the target, its tokenizer, the sources, and what cache.json will say.

Owns finding what is wrong with the user's input before anything is written or started.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import ValidationError

from ..common import layers, spec
from ..common.errors import InputError
from ..common.spec import CacheSpec, EngineSpec, FeatureSpec, GenerationSpec, Limits, Provenance, Settings, TextSpec
from .config import ExtractConfig
from .shapes import check_reading
from .sources import Source, parse_sources
from .target import Target, read_target
from .tokens import chat_template_hash, load_tokenizer, tokenizer_hash


@dataclass(frozen=True)
class Plan:
    """All that is known before anything is written."""

    config: ExtractConfig
    sources: tuple[Source, ...]
    target: Target
    tokenizer: Any
    spec: CacheSpec

    @property
    def created_at(self) -> datetime:
        """When the cache was created; now for a new one."""
        return datetime.fromisoformat(self.spec.provenance.created_at) if self.spec.provenance.created_at else datetime.now(UTC)


def make_plan(config: ExtractConfig) -> Plan:
    """Check everything but the rows, and settle what cache.json will say. Writes nothing. Raises InputError."""
    sources = parse_sources(config.data)
    check_reading(config.data_format, config.columns, config.roles)
    quantization = config.engine_args.get("quantization")
    engine = EngineSpec(name=config.engine, version=_engine_version(config))
    target = read_target(config.model, trust_remote_code=config.trust_remote_code, quantization=None if quantization is None else str(quantization))
    count = target.spec.num_layers
    layer_ids = layers.default_layer_ids(count) if config.layers is None else layers.check_layer_ids(config.layers, count)
    verifier = layers.check_verifier_layer(config.verifier_layer, count, config.force_verifier_layer)
    tokenizer = load_tokenizer(
        target.folder,
        trust_remote_code=config.trust_remote_code,
        place=f"--model {config.model}",
        chat_template=config.chat_template,
        need_template=config.generate,
    )
    generation = GenerationSpec(**{name: getattr(config, name) for name in GenerationSpec.model_fields}) if config.generate else None
    try:
        wanted = CacheSpec(
            settings=Settings(
                target=target.spec,
                features=FeatureSpec(layer_ids=layer_ids, verifier_layer=verifier, mantissa_bits=config.mantissa_bits),
                text=TextSpec(
                    tokenizer_hash=tokenizer_hash(target.folder),
                    chat_template_hash=chat_template_hash(tokenizer),
                    template_args=config.template_args,
                    max_length=config.max_length,
                    overlong=config.overlong,
                    supervise=config.supervise,
                    turns=config.turns,
                ),
                generation=generation,
                engine=engine,
            ),
            limits=Limits(chunk_tokens=config.chunk_tokens, part_tokens=config.part_tokens, part_seconds=config.part_seconds),
            provenance=Provenance(
                model=config.model,
                revision=target.revision,
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
                dflash_version=_own_version(),
            ),
        )
    except ValidationError as error:
        problems = "; ".join(str(problem["ctx"]["error"]) if "error" in problem.get("ctx", {}) else problem["msg"] for problem in error.errors())
        raise InputError(problems, place="dflash extract", fix="choose other settings, or another target") from None
    if (config.cache / "cache.json").exists():
        existing = spec.load(config.cache)
        spec.check_same_settings(config.cache, existing, wanted)
        wanted = wanted.model_copy(update={"provenance": existing.provenance})
    return Plan(config, sources, target, tokenizer, wanted)


def _engine_version(config: ExtractConfig) -> str:
    if config.engine == "vllm":
        from .vllm_setup import check_engine_args, vllm_version

        check_engine_args(config.engine_args)
        return vllm_version()
    from .engine_transformers import transformers_version

    if config.engine_args:
        raise InputError("is for --engine vllm only", place="--engine-arg", found=", ".join(config.engine_args), fix="leave it out")
    return transformers_version()


def _own_version() -> str:
    try:
        return version("dflash-cache")
    except PackageNotFoundError:
        return ""
