"""Served evaluation: the same prompts in vLLM without a drafter and with it, and what the server itself counted.

Each server lives in a process of its own and is gone before the next one starts. In: prompts, target, exported drafter.
Out: ServedResult. tau is 1 + accepted / drafts, from vLLM's own counters.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..common.errors import DflashError, InputError, RunFailed
from ..common.progress import ProgressBar
from .config import ServeConfig
from .conversation import Conversation
from .dataset import read_rows
from .prepare import parse
from .rejects import Reject, RowRejected, count_reasons
from .shapes import check_reading
from .sources import parse_sources
from .target import read_target
from .tokens import ConversationTokenizer, eos_token_ids, load_tokenizer
from .vllm_setup import EngineLog, check_engine_args, cpu_arguments, model_length, quiet_environment, vllm_version

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class ServedResult:
    """What serving with the drafter gave."""

    prompts: int
    rejects: dict[str, int]
    """Rows that are no prompts, by reason."""
    num_speculative_tokens: int
    drafts: int
    """Times that a block was proposed."""
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    """Of the drafts, those in which the token at this place was accepted."""
    tau: float | None
    """Mean tokens won per verification: 1 + accepted_tokens / drafts; None when nothing was drafted."""
    output_tokens_without: int
    output_tokens_with: int
    tokens_per_second_without: float
    tokens_per_second_with: float
    speed_up: float
    differing_outputs: int
    """Prompts whose answers differ; at temperature 0 only near ties should do that."""
    first_differences: list[tuple[int, int]]
    """(prompt, first differing token) of each."""

    def to_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        rates = "  ".join(f"{accepted / self.drafts:.3f}" for accepted in self.accepted_per_position) if self.drafts else "nothing was drafted"
        lines = [
            f"acceptance length  {self.tau:.3f}  ({self.accepted_tokens:,} accepted of {self.draft_tokens:,} in {self.drafts:,} drafts; bonus included)"
            if self.tau is not None
            else "acceptance length  nothing was drafted",
            f"accepted by place  {rates}",
            f"tokens/s           {self.tokens_per_second_without:.1f} without, {self.tokens_per_second_with:.1f} with the drafter: {self.speed_up:.2f} times",
            f"prompts            {self.prompts:,}; {self.differing_outputs:,} answers differ from those without the drafter",
        ]
        return "\n".join(lines + [f"  not served: {count:,} x {reason}" for reason, count in self.rejects.items()])


@dataclass(frozen=True)
class _Served:
    """What one server gave."""

    outputs: list[list[int]]
    seconds: float
    counters: dict[str, int]
    accepted_per_position: list[int]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


def evaluate_served(config: ServeConfig) -> ServedResult:
    """Serve the prompts twice. Raises InputError for wrong input, RunFailed when a server dies."""
    vllm_version()
    check_engine_args(config.engine_args)
    parse_sources(config.data)
    check_reading(config.data_format, config.columns, config.roles)
    speculative = config.num_speculative_tokens or _block_size(config.drafter) - 1
    target = read_target(config.model, trust_remote_code=config.trust_remote_code)
    config = config.model_copy(update={"max_length": model_length(target, config.max_length, config.trust_remote_code)})
    tokenizer = load_tokenizer(
        target.folder, trust_remote_code=config.trust_remote_code, place=f"--model {config.model}", chat_template=config.chat_template
    )
    prompts, rejects = _prompts(config, tokenizer)
    if not prompts:
        lines = "".join(f"\n  - {count} x {reason}" for reason, count in rejects.items())
        raise InputError(f"none of the rows is a prompt:{lines}", place="--data")
    stops = eos_token_ids(target.folder, tokenizer)
    plain = _in_own_process(config, str(target.folder), prompts, stops, None)
    drafted = _in_own_process(config, str(target.folder), prompts, stops, speculative)
    return compare(plain, drafted, speculative, rejects)


def compare(plain: _Served, drafted: _Served, speculative: int, rejects: dict[str, int]) -> ServedResult:
    """Put the two servers' numbers side by side."""
    differences = [
        (prompt, place)
        for prompt, pair in enumerate(zip(plain.outputs, drafted.outputs, strict=True))
        if (place := first_difference(*pair)) is not None
    ]
    drafts, accepted = drafted.counters.get("drafts", 0), drafted.counters.get("accepted_tokens", 0)
    rates = [served.tokens / served.seconds for served in (plain, drafted)]
    return ServedResult(
        prompts=len(plain.outputs),
        rejects=rejects,
        num_speculative_tokens=speculative,
        drafts=drafts,
        draft_tokens=drafted.counters.get("draft_tokens", 0),
        accepted_tokens=accepted,
        accepted_per_position=drafted.accepted_per_position,
        tau=1 + accepted / drafts if drafts else None,
        output_tokens_without=plain.tokens,
        output_tokens_with=drafted.tokens,
        tokens_per_second_without=rates[0],
        tokens_per_second_with=rates[1],
        speed_up=rates[1] / rates[0],
        differing_outputs=len(differences),
        first_differences=differences,
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ; the shorter one's length when it is a beginning of the other."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _block_size(drafter: Path) -> int:
    place = f"--drafter {drafter}"
    path = drafter / "config.json"
    if not path.is_file():
        raise InputError(
            "is no exported drafter: it has no config.json", place=place, expected="a folder written by `dflash export`", fix="export the run first"
        )
    raw = json.loads(path.read_bytes())
    size = raw.get("block_size") or (raw.get("dflash_config") or {}).get("block_size")
    if not isinstance(size, int) or size < 2:
        raise InputError("its config.json has no usable block_size", place=place, found=size, fix="export again")
    return size


def _prompts(config: ServeConfig, tokenizer: Any) -> tuple[list[list[int]], dict[str, int]]:
    converter = ConversationTokenizer(tokenizer, (), config.max_length, template_args=config.template_args)
    prompts, rejects = [], []
    for row in read_rows(config.data, config.limit, config.seed):
        try:
            found = parse(row, config)
            if not isinstance(found.value, Conversation):
                raise RowRejected(f"a row of shape {found.shape} holds no question to answer")
            prompts.append(converter.prompt(found.value).tolist())
        except RowRejected as rejected:
            rejects.append(Reject(row.source, row.number, str(rejected)))
    return prompts, count_reasons(rejects)


def _in_own_process(config: ServeConfig, model: str, prompts: list[list[int]], stops: list[int], speculative: int | None) -> _Served:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, config, model, prompts, stops, speculative), name="dflash-serve")
    process.start()
    theirs.close()
    title = "serving without a drafter" if speculative is None else "serving with the drafter"
    try:
        with ProgressBar(title, len(prompts)) as bar:
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
        raise RunFailed(
            answer, place="vLLM with the drafter" if speculative else "vLLM without a drafter", fix="set VLLM_LOGGING_LEVEL=INFO to see its own log"
        )
    if isinstance(answer, Exception):
        raise answer
    served: _Served = answer
    return served


def _serve(connection: Connection, config: ServeConfig, model: str, prompts: list[list[int]], stops: list[int], speculative: int | None) -> None:
    """The body of a server's process: answers _Served, or the reason of a failure."""
    log = EngineLog()
    try:
        connection.send(_serve_all(config, model, prompts, stops, speculative, log, connection))
    except DflashError as error:
        connection.send(str(error))
    except Exception as error:
        connection.send(log.reason(error))
    finally:
        connection.close()


def _serve_all(
    config: ServeConfig, model: str, prompts: list[list[int]], stops: list[int], speculative: int | None, log: EngineLog, connection: Connection
) -> _Served:
    with quiet_environment(), log.capture():
        from vllm import LLM

        arguments: dict[str, Any] = {
            "model": model,
            "trust_remote_code": config.trust_remote_code,
            "dtype": "bfloat16",
            "seed": config.seed,
            "max_model_len": config.max_length,
            "max_num_seqs": config.concurrency,
            "enable_prefix_caching": False,  # the second server must not win by it
            "disable_log_stats": False,
            "skip_tokenizer_init": True,
        }
        if speculative is not None:
            arguments["speculative_config"] = {"method": "dflash", "model": str(config.drafter), "num_speculative_tokens": speculative}
        llm = LLM(**{**arguments, **cpu_arguments(), **config.engine_args})
        try:
            return _measure(llm, config, prompts, stops, connection)
        finally:
            llm.llm_engine.engine_core.shutdown()  # this process ends without its exit handlers, and the engine would live on


def _measure(llm: Any, config: ServeConfig, prompts: list[list[int]], stops: list[int], connection: Connection) -> _Served:
    from tqdm import tqdm
    from vllm import SamplingParams

    class Reporter(tqdm):
        """vLLM reports finished prompts to a tqdm; this one sends their number to the parent and shows nothing."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            connection.send(int(n or 0))
            return super().update(n)

    sampling = [
        SamplingParams(
            max_tokens=min(config.max_new_tokens, config.max_length - len(prompt)),
            temperature=config.temperature,
            seed=config.seed,
            stop_token_ids=stops,
            detokenize=False,
        )
        for prompt in prompts
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(inputs[:1], sampling[:1], use_tqdm=False)  # warm up
    before = _counters(llm)
    started = time.monotonic()
    outputs = llm.generate(inputs, sampling, use_tqdm=Reporter)
    seconds = time.monotonic() - started
    after = _counters(llm)
    counters = {name: after[0].get(name, 0) - before[0].get(name, 0) for name in after[0]}
    per_position = [now - then for now, then in zip(after[1], before[1] or [0] * len(after[1]), strict=True)]
    return _Served([list(output.outputs[0].token_ids) for output in outputs], seconds, counters, per_position)


def _counters(llm: Any) -> tuple[dict[str, int], list[int]]:
    """vLLM's counters of speculation: totals by our names, and accepted tokens by place in the block."""
    totals: dict[str, int] = {}
    per_position: list[int] = []
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            totals[COUNTERS[metric.name]] = totals.get(COUNTERS[metric.name], 0) + int(metric.value)
        elif metric.name == PER_POSITION:
            per_position = [int(value) for value in metric.values]
    return totals, per_position
