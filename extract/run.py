"""`dflash extract`: wires dataset, tokenizer, engine and writer. Owns the order of things, nothing else.

Everything that can be wrong with the user's input is found before the engine starts. Rows in = samples + rejects + already
stored, always; the same command again continues where the last one stopped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..common import layout
from ..common.errors import InputError
from ..common.lock import one_of_several_writers, only_writer, turn
from ..common.progress import ProgressBar
from .account import Account, ExtractSummary
from .config import ExtractConfig
from .dataset import Row
from .devices import divide_devices, visible_devices
from .engine import Document, Engine, EngineJob, Outcome
from .extract_log import ExtractLog, logged
from .fidelity import FidelityMonitor, MakeCheck
from .meter import Meter
from .plan import Plan, make_plan
from .preflight import check_space, group_size, preflight
from .prepare import Prepared, make_converter, prepare
from .rejects import count_reasons, load_rejects, save_rejects
from .share import OwnRows, share_of
from .sources import size_bytes
from .stall import watched_run
from .target_files import write_target_files
from .tokens import eos_token_ids
from .workers import WorkerPool
from .writer import clear_leftovers, open_cache, stored_keys

CLOSE_SECONDS = 60.0
"""How long an engine may take to let go after an error."""


def run(config: ExtractConfig, make_check: MakeCheck | None = None) -> ExtractSummary:
    """Extract. `make_check` builds the teacher-fidelity check from the cache; without it fidelity is not watched.

    Raises InputError for wrong input, RunFailed when the engine dies or stalls or fidelity fails, DiskFull. Published parts stay.
    """
    plan = make_plan(config)
    preflight(plan)
    prepared = _prepare(plan)
    documents, cache = prepared.documents, config.cache
    share = share_of(documents, config.seed, config.rank, config.world_size)
    with _writing(plan):
        existing = open_cache(cache, plan.spec)
        known = stored_keys(cache, existing)
        todo = [number for number in share.numbers if not known.issuperset(documents.keys(number))]
        stored = [key in known for number in share.numbers for key in documents.keys(number)]
        account = Account(prepared, sum(stored), share)
        with logged(cache, _started(config, prepared, todo), rank=config.rank) as log:
            if todo:
                check_space(config, existing, documents, todo)
                stops = tuple(eos_token_ids(plan.target.folder, plan.tokenizer))
                job = EngineJob(config, plan.target, cache, existing, stops, writer_id=config.rank)
                _extract(job, documents.take(todo, known), stored.count(False), make_check, account, log)
            else:
                _save_rejects(cache, account)
            summary = account.summary(config, existing)
            log.write("finished", summary=summary.to_dict())
    return summary


@contextmanager
def _writing(plan: Plan) -> Iterator[None]:
    """Hold the cache, alone or with the other ranks, with all in it that must be there before the first part."""
    config, cache = plan.config, plan.config.cache

    def make_ready() -> None:
        open_cache(cache, plan.spec)
        clear_leftovers(cache)
        load_rejects(cache)  # damage there must be known before the work, not after it
        write_target_files(cache, plan.target, plan.tokenizer)

    if config.world_size > 1:
        with one_of_several_writers(cache, make_ready):
            yield
        return
    with only_writer(cache):
        make_ready()
        yield


def _started(config: ExtractConfig, prepared: Prepared, todo: list[int]) -> dict[str, Any]:
    return {"config": config.model_dump(mode="json"), "rows": prepared.rows, "documents": len(prepared.documents), "to_do": len(todo)}


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


def _extract(job: EngineJob, documents: Iterator[Document], count: int, make_check: MakeCheck | None, account: Account, log: ExtractLog) -> None:
    config = job.config
    engine = _start(job, log)
    try:
        # After the engine: on a GPU it measures the free memory when it starts.
        check = make_check(job.cache) if make_check else None
        monitor = account.monitor = FidelityMonitor(check, config.max_disagreement, config.min_samples)
        with ProgressBar("extracting", count) as bar:
            meter = Meter(bar, log, account, job.spec.raw_bytes_per_token)

            def lost(outcomes: Sequence[Outcome]) -> None:
                account.take_back(outcomes)
                meter.step(-len(outcomes), engine.counts())

            if isinstance(engine, WorkerPool):
                answers = engine.run(documents, lost, monitor.finish)
            else:
                answers = watched_run(engine, documents, config.stall_seconds)
            for outcomes in answers:
                monitor.add(outcomes)
                account.add(outcomes)
                meter.step(len(outcomes), engine.counts())
            account.seconds = meter.seconds
            monitor.finish()
            account.counts = engine.close(publish=True)
            meter.step(0, account.counts)
    except BaseException:
        _let_go(engine)
        raise
    finally:
        _save_rejects(job.cache, account)


def _start(job: EngineJob, log: ExtractLog) -> Engine | WorkerPool:
    config = job.config
    if config.workers == 1:
        return start_engine(job)
    devices = divide_devices(visible_devices(config.workers), config.workers, group_size(config))
    return WorkerPool(job, start_engine, devices, log.write)


def _save_rejects(cache: Path, account: Account) -> None:
    with turn(cache / layout.TARGET):  # one rank at a time
        save_rejects(cache, account.rejects, OwnRows(account.passed, account.share))


def _let_go(engine: Engine | WorkerPool) -> None:
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
