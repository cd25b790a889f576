from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from dflash_cache.extract.config import ExtractConfig, ServeConfig


def test_importing_the_config_imports_neither_torch_nor_vllm_nor_transformers():
    code = "import sys, dflash_cache.extract.config; print([m for m in ('torch', 'vllm', 'transformers', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_every_field_has_a_docstring():
    for config in (ExtractConfig, ServeConfig):
        assert [name for name, field in config.model_fields.items() if not field.description] == []


def test_wrong_values_are_refused():
    good = {"model": "m", "data": ("d.jsonl",), "cache": "c"}
    ExtractConfig(**good)
    for wrong in ({"cache": ""}, {"data": ()}, {"mantissa_bits": 5}, {"limit": 0}, {"temperature": -1}, {"engine": "sglang"}, {"layer": (1,)}):
        with pytest.raises(ValidationError):
            ExtractConfig(**(good | wrong))
    with pytest.raises(TypeError):
        ExtractConfig("m")
