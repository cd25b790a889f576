"""The process of a server: vLLM with a drafter or without, the prompts served once and timed, and what vLLM counted meanwhile.

In: prompts as tokens, target, drafter. Out: Served. The process is gone, its memory with it, before the next one starts. Every
counter is summed over the engines of a server; the warm-up request is not in it.
"""

from __future__ import annotations

import io
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from ..common.errors import DflashError, RunFailed
from ..common.progress import ProgressBar
from .config import ServeConfig
from .ties import Difference, differences, margin
from .vllm_setup import EngineLog, cpu_arguments, quiet_environment

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
PER_REQUEST = "per_request_spec_decode_metrics"
"""vLLM's argument for counts of each request; versions before 0.32 may lack it."""
MOST_LOG_PROBABILITIES = 20
"""vLLM gives no more unless told to."""


@dataclass(frozen=True)
class Served:
    """What one server gave."""

    outputs: list[list[int]]
    seconds: float
    counters: dict[str, int] = field(default_factory=dict)
    accepted_per_position: list[int] = field(default_factory=list)
    steps_by_accepted: list[list[int]] | None = None
    """Of each prompt: in how many of its drafts 0, 1, 2, ... tokens were accepted; None when vLLM does not say."""
    differences: list[Difference] = field(default_factory=list)
    """From the answers that it was given to compare with."""

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.outputs))


@dataclass(frozen=True)
class ServerJob:
    """What a server is started for."""

    config: ServeConfig
    model: str
    """The target's folder."""
    prompts: list[list[int]]
    stops: list[int]
    speculative: int | None = None
    """Tokens drafted at once; None: no drafter."""
    compare_with: list[list[int]] | None = None
    """Answers whose first differences are explained by this server's own log-probabilities, after the timing."""


def serve(job: ServerJob) -> Served:
    """Serve in a process of its own. Raises RunFailed when it dies."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_body, args=(theirs, job), name="dflash-serve")
    process.start()
    theirs.close()
    title = "serving without a drafter" if job.speculative is None else "serving with the drafter"
    try:
        with ProgressBar(title, len(job.prompts)) as bar:
            while isinstance(answer := ours.recv(), int):
                bar.update(answer)
    except EOFError:
        answer = RunFailed("the server's process ended without an answer", place="vLLM")
    finally:
        process.join(timeout=60)
        if process.is_alive():
            process.kill()
            process.join()
    if isinstance(answer, str):
        place = "vLLM with the drafter" if job.speculative else "vLLM without a drafter"
        raise RunFailed(answer, place=place, fix="set VLLM_LOGGING_LEVEL=INFO to see its own log")
    if isinstance(answer, Exception):
        raise answer
    served: Served = answer
    return served


def _body(connection: Connection, job: ServerJob) -> None:
    """The body of a server's process: answers Served, or the reason of a failure."""
    log = EngineLog()
    try:
        connection.send(_run(job, log, connection))
    except DflashError as error:
        connection.send(str(error))
    except Exception as error:
        connection.send(log.reason(error))
    finally:
        connection.close()


def _run(job: ServerJob, log: EngineLog, connection: Connection) -> Served:
    config = job.config
    with quiet_environment(), log.capture():
        from vllm import LLM

        arguments: dict[str, Any] = {
            "model": job.model,
            "trust_remote_code": config.trust_remote_code,
            "dtype": "bfloat16",
            "seed": config.seed,
            "max_model_len": config.max_length,
            "max_num_seqs": config.concurrency,
            "enable_prefix_caching": False,  # the second server must not win by it
            "disable_log_stats": False,
            "skip_tokenizer_init": True,
        }
        if job.speculative is not None:
            arguments["speculative_config"] = {"method": "dflash", "model": str(config.drafter), "num_speculative_tokens": job.speculative}
            arguments |= _per_request_argument()
        llm = LLM(**{**arguments, **cpu_arguments(), **config.engine_args})
        try:
            served = _measure(llm, job, connection)
            if job.compare_with is None:
                return served
            return replace(served, differences=_explain(llm, job, differences(served.outputs, job.compare_with), served.outputs))
        finally:
            llm.llm_engine.engine_core.shutdown()  # this process ends without its exit handlers, and the engine would live on


def _per_request_argument() -> dict[str, str]:
    from vllm import EngineArgs

    return {PER_REQUEST: "summary"} if PER_REQUEST in EngineArgs.__dataclass_fields__ else {}


def _measure(llm: Any, job: ServerJob, connection: Connection) -> Served:
    from tqdm import tqdm
    from vllm import SamplingParams

    class Reporter(tqdm):
        """vLLM reports finished prompts to a tqdm; this one sends their number to the parent and shows nothing."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            connection.send(int(n or 0))
            return super().update(n)

    config = job.config
    sampling = [
        SamplingParams(
            max_tokens=min(config.max_new_tokens, config.max_length - len(prompt)),
            temperature=config.temperature,
            seed=config.seed,
            stop_token_ids=job.stops,
            detokenize=False,
        )
        for prompt in job.prompts
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in job.prompts]
    llm.generate(inputs[:1], sampling[:1], use_tqdm=False)  # warm up
    before = read_counters(llm.get_metrics())
    started = time.monotonic()
    outputs = llm.generate(inputs, sampling, use_tqdm=Reporter)
    seconds = time.monotonic() - started
    after = read_counters(llm.get_metrics())
    counters = {name: after[0].get(name, 0) - before[0].get(name, 0) for name in after[0]}
    per_position = [now - then for now, then in zip(after[1], before[1] or [0] * len(after[1]), strict=True)]
    found = [getattr(output.outputs[0], "spec_decode_metrics", None) for output in outputs]
    steps = None if None in found else [list(metrics.histogram) for metrics in found if metrics is not None]
    return Served([list(output.outputs[0].token_ids) for output in outputs], seconds, counters, per_position, steps)


def read_counters(metrics: Sequence[Any]) -> tuple[dict[str, int], list[int]]:
    """vLLM's counters of speculation, summed over its engines: totals by our names, and accepted tokens by place in the block."""
    totals: dict[str, int] = {}
    per_position: list[int] = []
    for metric in metrics:
        if metric.name in COUNTERS:
            totals[COUNTERS[metric.name]] = totals.get(COUNTERS[metric.name], 0) + int(metric.value)
        elif metric.name == PER_POSITION:
            values = [int(value) for value in metric.values]
            per_position = [a + b for a, b in zip(per_position, values, strict=True)] if per_position else values
    return totals, per_position


def _explain(llm: Any, job: ServerJob, found: Sequence[Difference], answers: Sequence[Sequence[int]]) -> list[Difference]:
    """The differences with their margins: the target is given each prompt and the answer up to the difference, and asked for one token."""
    from vllm import SamplingParams

    if not found:
        return []
    asked = [{"prompt_token_ids": [*job.prompts[each.prompt], *answers[each.prompt][: each.place]]} for each in found]
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=MOST_LOG_PROBABILITIES, detokenize=False)
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    explained = []
    for each, output in zip(found, outputs, strict=True):
        likely = (output.outputs[0].logprobs or [{}])[0]
        explained.append(replace(each, margin_nats=margin(each, {token: float(entry.logprob) for token, entry in likely.items()})))
    return explained
