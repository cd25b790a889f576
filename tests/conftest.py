"""What most tests share: the builders as fixtures, and a cache written by the real writer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from builders import make_sample, make_spec, to_bf16_bits, write_target_files
from hypothesis import HealthCheck, settings

from dflash_cache.common.sample import NO_TOKEN, Sample
from dflash_cache.common.spec import CacheSpec
from dflash_cache.extract.writer import CacheWriter, open_cache

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")  # the same examples in every run, on machines of any speed; `--hypothesis-profile default` draws new ones

WriteCache = Callable[..., tuple[Path, CacheSpec, list[Sample]]]


@pytest.fixture
def write_cache(tmp_path: Path) -> WriteCache:
    """write_cache(lengths=[...], name="cache", **make_spec arguments) -> (cache, spec, samples), with target files."""

    def write(
        lengths: Sequence[int] = (10, 20, 30, 25, 18, 7), name: str = "cache", next_token: int = NO_TOKEN, seed: int = 0, **settings: int
    ) -> tuple[Path, CacheSpec, list[Sample]]:
        spec = make_spec(**settings)
        cache = tmp_path / name
        open_cache(cache, spec)
        write_target_files(cache, spec)
        samples = [make_sample(i, length, spec, next_token=next_token, seed=seed) for i, length in enumerate(lengths)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda handle: None)  # a hundred a part; on a busy disk they would be most of the suite's time
            writer = CacheWriter(cache, spec)
            for sample in samples:
                writer.add(sample)
            writer.close()
        return cache, spec, samples

    return write


class Make:
    """The builders above, for tests that need them without a cache."""

    spec = staticmethod(make_spec)
    sample = staticmethod(make_sample)
    bits = staticmethod(to_bf16_bits)
    target_files = staticmethod(write_target_files)


@pytest.fixture
def make() -> type[Make]:
    """make.spec(...), make.sample(number, length, spec), make.bits(floats), make.target_files(cache, spec)."""
    return Make


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread():
    """Tiny tensors on shared cores: more threads only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
