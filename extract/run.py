"""`dflash extract`: wires dataset, tokenizer, engine and writer. Owns the order of things and the accounts, nothing else.

Everything that can be wrong with the user's input is found before the engine starts. Rows in = samples + rejects + already
stored, always; the same command again continues where the last one stopped.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..common import layers, spec
from ..common.errors import InputError, RunFailed
from ..common.lock import only_writer
from ..common.progress import ProgressBar
from ..common.spec import CacheSpec, EngineSpec, FeatureSpec, GenerationSpec, Limits, Provenance, Settings, TextSpec
from .config import ExtractConfig
from .dataset import check_sources
from .engine import Document, Engine, EngineJob, Outcome, WriterCounts
from .fidelity import FidelityMonitor, MakeCheck
from .prepare import Prepared, prepare
from .rejects import Reject, count_reasons, load_rejects, save_rejects
from .target import Target, read_target
from .target_files import write_target_files
from .tokens import chat_template_hash, eos_token_ids, load_tokenizer, tokenizer_hash
from .writer import clear_leftovers, open_cache, stored_keys


@dataclass(frozen=True)
class ExtractSummary:
    """What a run did."""

    rows: int
    """Rows read."""
    samples: int
    """Stored by this run."""
    already_stored: int
    """Rows that an earlier run had stored."""
    rejects: int
    reject_reasons: dict[str, int]
    tokens: int
    """Rows of states stored by this run."""
    supervised_tokens: int
    """Of them, those that may be learned from; a generated last token counts."""
    stored_bytes: int
    """Size of the parts that this run published."""
    bytes_per_token: float | None
    ratio_to_raw: float | None
    """Stored bytes over plain bfloat16."""
    parts: int
    """Published by this run."""
    seconds: float
    """Of the engine's work, its start not included."""
    tokens_per_second: float | None
    fidelity_samples: int
    fidelity_agreement: float | None
    """Share of the checked samples whose stored state predicts the engine's own next token; None when not checked."""
    cache: str = ""
    layer_ids: tuple[int, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        lines = [f"{self.rows:,} rows = {self.samples:,} samples + {self.rejects:,} rejects + {self.already_stored:,} already stored"]
        lines += [f"  {count:,} x {reason}" for reason, count in self.reject_reasons.items()]
        if self.samples:
            lines.append(
                f"{self.tokens:,} tokens ({self.supervised_tokens:,} supervised) in {self.seconds:.0f} s, {self.tokens_per_second or 0:.0f} tokens/s"
            )
            lines.append(
                f"{self.stored_bytes:,} bytes in {self.parts} parts: {self.bytes_per_token or 0:,.0f} a token, {self.ratio_to_raw or 0:.3f} of raw bfloat16"
            )
        if self.fidelity_agreement is not None:
            lines.append(f"teacher fidelity {self.fidelity_agreement:.2%} of {self.fidelity_samples:,} samples")
        return "\n".join([*lines, f"cache {self.cache}, layers {', '.join(map(str, self.layer_ids))}"])


@dataclass(frozen=True)
class Plan:
    """All that is known before anything is written."""

    config: ExtractConfig
    target: Target
    tokenizer: Any
    spec: CacheSpec

    @property
    def created_at(self) -> datetime:
        """When the cache was created; now for a new one."""
        return datetime.fromisoformat(self.spec.provenance.created_at) if self.spec.provenance.created_at else datetime.now(UTC)


def run(config: ExtractConfig, make_check: MakeCheck | None = None) -> ExtractSummary:
    """Extract. `make_check` builds the teacher-fidelity check from the cache; without it fidelity is not watched.

    Raises InputError for wrong input, RunFailed when the engine dies or fidelity fails, DiskFull. Published parts stay.
    """
    plan = make_plan(config)
    with ProgressBar("reading rows", None) as bar:
        prepared = prepare(config, plan.target, plan.tokenizer, plan.created_at, lambda: bar.update(advance=1))
    if not prepared.documents:
        raise _nothing_usable(prepared)
    cache = config.cache
    with only_writer(cache):
        existing = open_cache(cache, plan.spec)
        clear_leftovers(cache)
        load_rejects(cache)  # damage there must be known before the work, not after it
        write_target_files(cache, plan.target, plan.tokenizer)
        known = stored_keys(cache, existing)
        todo = [document for document in prepared.documents if document.key not in known]
        random.Random(config.seed).shuffle(todo)
        account = _Account(prepared, already_stored=len(prepared.documents) - len(todo))
        if todo:
            stops = tuple(eos_token_ids(plan.target.folder, plan.tokenizer))
            _extract(EngineJob(config, plan.target, cache, existing, stops), todo, make_check, account)
        else:
            save_rejects(cache, account.rejects, prepared.looked_at)
    return account.summary(config, existing)


def make_plan(config: ExtractConfig) -> Plan:
    """Check everything but the rows, and settle what cache.json will say. Writes nothing. Raises InputError."""
    check_sources(config.data)
    quantization = config.engine_args.get("quantization")
    engine = EngineSpec(name=config.engine, version=_engine_version(config))
    target = read_target(config.model, trust_remote_code=config.trust_remote_code, quantization=None if quantization is None else str(quantization))
    count = target.spec.num_layers
    layer_ids = layers.default_layer_ids(count) if config.layers is None else layers.check_layer_ids(config.layers, count)
    verifier = layers.check_verifier_layer(config.verifier_layer, count, config.force_verifier_layer)
    tokenizer = load_tokenizer(target.folder, trust_remote_code=config.trust_remote_code, place=f"--model {config.model}")
    generation = GenerationSpec(max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed) if config.generate else None
    wanted = CacheSpec(
        settings=Settings(
            target=target.spec,
            features=FeatureSpec(layer_ids=layer_ids, verifier_layer=verifier, mantissa_bits=config.mantissa_bits),
            text=TextSpec(
                tokenizer_hash=tokenizer_hash(target.folder), chat_template_hash=chat_template_hash(tokenizer), max_length=config.max_length
            ),
            generation=generation,
            engine=engine,
        ),
        limits=Limits(chunk_tokens=config.chunk_tokens, part_tokens=config.part_tokens, part_seconds=config.part_seconds),
        provenance=Provenance(
            model=config.model, revision=target.revision, created_at=datetime.now(UTC).isoformat(timespec="seconds"), dflash_version=_own_version()
        ),
    )
    if (config.cache / "cache.json").exists():
        existing = spec.load(config.cache)
        spec.check_same_settings(config.cache, existing, wanted)
        wanted = wanted.model_copy(update={"provenance": existing.provenance})
    return Plan(config, target, tokenizer, wanted)


class _Account:
    """Counts what became of every row."""

    def __init__(self, prepared: Prepared, already_stored: int) -> None:
        self.rows, self.already_stored, self.looked_at = prepared.rows, already_stored, prepared.looked_at
        self.rejects: list[Reject] = list(prepared.rejects)
        self.samples = self.tokens = self.supervised_tokens = 0
        self.counts = WriterCounts()
        self.seconds = 0.0
        self.monitor: FidelityMonitor | None = None

    def add(self, outcome: Outcome) -> None:
        document = outcome.document
        if outcome.reject is not None:
            self.rejects.append(Reject(document.source, document.source_row, outcome.reject))
            return
        self.samples += 1
        self.tokens += outcome.tokens
        self.supervised_tokens += outcome.supervised_tokens

    def check(self) -> None:
        """Every row has one fate, and what was accepted is what was published."""
        if self.rows != self.samples + len(self.rejects) + self.already_stored or (self.samples, self.tokens) != (
            self.counts.samples,
            self.counts.tokens,
        ):
            raise RunFailed(
                "the accounts do not add up",
                place="extract",
                found=f"{self.rows} rows; {self.samples} samples ({self.counts.samples} published), "
                f"{len(self.rejects)} rejects, {self.already_stored} already stored",
                expected="rows = samples + rejects + already stored",
                fix="run `dflash verify` on the cache and report this",
            )

    def summary(self, config: ExtractConfig, existing: CacheSpec) -> ExtractSummary:
        self.check()
        monitor, tokens, stored = self.monitor, self.tokens, self.counts.stored_bytes
        return ExtractSummary(
            rows=self.rows,
            samples=self.samples,
            already_stored=self.already_stored,
            rejects=len(self.rejects),
            reject_reasons=count_reasons(self.rejects),
            tokens=tokens,
            supervised_tokens=self.supervised_tokens,
            stored_bytes=stored,
            bytes_per_token=stored / tokens if tokens else None,
            ratio_to_raw=stored / (tokens * existing.raw_bytes_per_token) if tokens else None,
            parts=self.counts.parts,
            seconds=self.seconds,
            tokens_per_second=tokens / self.seconds if tokens and self.seconds else None,
            fidelity_samples=monitor.samples if monitor else 0,
            fidelity_agreement=monitor.agreement if monitor else None,
            cache=str(config.cache),
            layer_ids=existing.layer_ids,
        )


def _extract(job: EngineJob, todo: list[Document], make_check: MakeCheck | None, account: _Account) -> None:
    engine = start_engine(job)
    started = time.monotonic()
    try:
        # After the engine: on a GPU it measures the free memory when it starts.
        check = make_check(job.cache) if make_check else None
        monitor = account.monitor = FidelityMonitor(check, job.config.max_disagreement, job.config.min_samples)
        with ProgressBar("extracting", len(todo)) as bar:
            for outcomes in engine.run(todo):
                monitor.add(outcomes)
                for outcome in outcomes:
                    account.add(outcome)
                bar.update(len(outcomes), _note(account.tokens, time.monotonic() - started, engine.counts()))
        account.seconds = time.monotonic() - started
        monitor.finish()
        account.counts = engine.close(publish=True)
    except BaseException:
        _let_go(engine)
        raise
    finally:
        save_rejects(job.cache, account.rejects, account.looked_at)


def _let_go(engine: Engine) -> None:
    """Drop the pending part; published parts stay. The error that led here is the one to show."""
    try:
        engine.close(publish=False)
    except Exception:
        return


def start_engine(job: EngineJob) -> Engine:
    """The engine that the config names, ready to run."""
    if job.config.engine == "vllm":
        from .engine_vllm import VllmEngine

        return VllmEngine(job)
    from .engine_transformers import TransformersEngine

    return TransformersEngine(job)


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


def _note(tokens: int, seconds: float, counts: WriterCounts) -> str:
    rate = tokens / seconds if seconds else 0.0
    return f"{tokens} tokens, {rate:.0f} tok/s, {counts.stored_bytes / 1e6:.1f} MB in {counts.parts} parts"


def _nothing_usable(prepared: Prepared) -> InputError:
    if not prepared.rows:
        return InputError("the datasets have no rows", place="--data")
    lines = "".join(f"\n  - {count} x {reason}" for reason, count in list(count_reasons(prepared.rejects).items())[:10])
    return InputError(
        f"none of the {prepared.rows} rows can be used:{lines}",
        place="--data",
        expected='rows like {"messages": [{"role": "user", "content": "..."}, ...]}',
    )
