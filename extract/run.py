"""`dflash extract`: wires dataset, tokenizer, engine and writer. Owns the order of things, nothing else.

Everything that can be wrong with the user's input is found before the engine starts. Rows in = samples + rejects + already
stored, always; the same command again continues where the last one stopped.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from pathlib import Path

from ..common.errors import InputError
from ..common.lock import only_writer
from ..common.progress import ProgressBar
from .account import Account, ExtractSummary
from .config import ExtractConfig
from .dataset import Row
from .document_store import DocumentStore
from .engine import Engine, EngineJob
from .extract_log import ExtractLog, logged
from .fidelity import FidelityMonitor, MakeCheck
from .meter import Meter
from .plan import Plan, make_plan
from .preflight import check_space, preflight
from .prepare import Prepared, make_converter, prepare
from .rejects import count_reasons, load_rejects, save_rejects
from .sources import size_bytes
from .stall import watched_run
from .target_files import write_target_files
from .tokens import eos_token_ids
from .writer import clear_leftovers, open_cache, stored_keys

CLOSE_SECONDS = 60.0
"""How long an engine may take to let go after an error."""


def run(config: ExtractConfig, make_check: MakeCheck | None = None) -> ExtractSummary:
    """Extract. `make_check` builds the teacher-fidelity check from the cache; without it fidelity is not watched.

    Raises InputError for wrong input, RunFailed when the engine dies or fidelity fails, DiskFull. Published parts stay.
    """
    plan = make_plan(config)
    preflight(plan)
    prepared = _prepare(plan)
    documents, cache = prepared.documents, config.cache
    with only_writer(cache):
        existing = open_cache(cache, plan.spec)
        clear_leftovers(cache)
        load_rejects(cache)  # damage there must be known before the work, not after it
        write_target_files(cache, plan.target, plan.tokenizer)
        known = stored_keys(cache, existing)
        todo = [number for number in range(len(documents)) if documents.key(number) not in known]
        random.Random(config.seed).shuffle(todo)
        account = Account(prepared, already_stored=len(documents) - len(todo))
        with logged(cache, {"config": config.model_dump(mode="json"), "documents": len(documents), "to_do": len(todo)}) as log:
            if todo:
                check_space(config, existing, documents, todo)
                stops = tuple(eos_token_ids(plan.target.folder, plan.tokenizer))
                _extract(EngineJob(config, plan.target, cache, existing, stops), documents, todo, make_check, account, log)
            else:
                save_rejects(cache, account.rejects, account.passed)
            summary = account.summary(config, existing)
            log.write("finished", summary=summary.to_dict())
    return summary


def _prepare(plan: Plan) -> Prepared:
    """All rows, tokenized. Raises InputError when too few of them can be used."""
    config = plan.config
    converter = make_converter(config, plan.target, plan.tokenizer, plan.created_at)
    sizes = {source.name: size_bytes(source) for source in plan.sources}
    partly = config.limit or any(source.limit for source in plan.sources) or None in sizes.values()
    rows, read = 0, dict.fromkeys(sizes, 0)
    with ProgressBar("reading rows", None if partly else sum(size or 0 for size in sizes.values())) as bar:

        def on_row(row: Row) -> None:
            nonlocal rows
            rows += 1
            step = (row.end_byte or 0) - read[row.source]
            read[row.source] += step
            bar.update(1 if partly else step, f"{rows:,} rows")

        prepared = prepare(config, plan.sources, plan.target, converter, nearest_folder(config.cache), on_row)
    if not len(prepared.documents):
        raise _nothing_usable(prepared)
    share = len(prepared.rejects) / (prepared.rows + prepared.more_turns)
    if share > config.max_rejects:
        raise InputError(
            f"{len(prepared.rejects):,} of {prepared.rows + prepared.more_turns:,} cannot be used:{_reasons(prepared)}",
            place="--data",
            expected=f"at most {config.max_rejects:.0%} rejects",
            fix="look at a few with --preview 3; if this is what the data is, add --max-rejects 1",
        )
    return prepared


def nearest_folder(path: Path) -> Path | None:
    """The folder on whose disk `path` will lie, for files that wait; None when nothing may be written there."""
    found = next((parent for parent in path.absolute().parents if parent.is_dir()), None)
    return found if found is not None and os.access(found, os.W_OK) else None


def _extract(job: EngineJob, documents: DocumentStore, todo: list[int], make_check: MakeCheck | None, account: Account, log: ExtractLog) -> None:
    engine = start_engine(job)
    try:
        # After the engine: on a GPU it measures the free memory when it starts.
        check = make_check(job.cache) if make_check else None
        monitor = account.monitor = FidelityMonitor(check, job.config.max_disagreement, job.config.min_samples)
        with ProgressBar("extracting", len(todo)) as bar:
            meter = Meter(bar, log, account, job.spec.raw_bytes_per_token)
            for outcomes in watched_run(engine, documents.take(todo), job.config.stall_seconds):
                monitor.add(outcomes)
                for outcome in outcomes:
                    account.add(outcome)
                meter.step(len(outcomes), engine.counts())
            account.seconds = meter.seconds
            monitor.finish()
            account.counts = engine.close(publish=True)
            meter.step(0, account.counts)
    except BaseException:
        _let_go(engine)
        raise
    finally:
        save_rejects(job.cache, account.rejects, account.passed)


def _let_go(engine: Engine) -> None:
    """Drop the pending part; published parts stay. The error that led here is the one to show, even if the engine is stuck."""

    def close() -> None:
        with suppress(Exception):
            engine.close(publish=False)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)


def start_engine(job: EngineJob) -> Engine:
    """The engine that the config names, ready to run."""
    if job.config.engine == "vllm":
        from .engine_vllm import VllmEngine

        return VllmEngine(job)
    from .engine_transformers import TransformersEngine

    return TransformersEngine(job)


def _nothing_usable(prepared: Prepared) -> InputError:
    if not prepared.rows:
        return InputError("the datasets have no rows", place="--data")
    return InputError(
        f"none of the {prepared.rows} rows can be used:{_reasons(prepared)}",
        place="--data",
        expected='rows like {"messages": [{"role": "user", "content": "..."}, ...]}, or of another shape (see docs/data.md)',
    )


def _reasons(prepared: Prepared) -> str:
    return "".join(f"\n  - {count:,} x {reason}" for reason, count in list(count_reasons(prepared.rejects).items())[:10])
