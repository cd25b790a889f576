"""What is in a cache: counts, lengths, bytes, and each stored layer's size of values. Reads; changes nothing.

In: a cache folder. Out: a CacheReport, printable as text and as JSON. The norms come from a sample of chunks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..common import layout, planes
from ..common.errors import InputError
from .reader import CacheReader, Part
from .targets_report import KeptTargets, kept_targets

NORM_CHUNKS = 8
"""Chunks, spread over the parts, from which rms and absolute maximum are taken."""
OUTLIERS = 100.0
"""An absolute maximum of so many times the rms is remarked on: a few channels dominate the layer."""
BAR_WIDTH = 40
"""Characters of the longest bar of the histogram."""


@dataclass(frozen=True)
class LayerNorms:
    """Size of the values of one stored layer over the sampled rows."""

    layer: str
    """Layer id, or `verifier N`."""
    rms: float
    absolute_maximum: float
    not_finite: int
    remark: str
    """`dead`: nothing but zeros. `outliers`: the absolute maximum is over 100 times the rms. Else empty."""


@dataclass(frozen=True)
class LengthBin:
    """How many samples have from `shortest` to `longest` tokens: powers of two, 64-127 for example."""

    shortest: int
    longest: int
    samples: int


@dataclass(frozen=True)
class ArraySize:
    """What one array takes, its metadata included."""

    array: str
    bytes: int
    bytes_per_token: float
    ratio_to_raw: float
    """Of the same values uncompressed."""


@dataclass(frozen=True)
class PartLine:
    """One published part."""

    name: str
    samples: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class CacheReport:
    """The answer of `dflash inspect`."""

    path: str
    model: str
    architecture: str
    layer_ids: tuple[int, ...]
    verifier_layer: int
    hidden_size: int
    vocab_size: int
    mantissa_bits: int
    engine: str
    generation: dict[str, Any] | None
    fingerprint: str
    created_at: str
    parts: int
    samples: int
    tokens: int
    supervised_tokens: int
    supervised_share: float
    stored_bytes: int
    bytes_per_token: float
    raw_bytes_per_token: int
    ratio: float
    arrays: tuple[ArraySize, ...]
    """Largest first."""
    length_quantiles: dict[str, int]
    length_histogram: tuple[LengthBin, ...]
    """Without gaps, from the shortest sample's bin to the longest's."""
    sources: dict[str, int]
    norms: tuple[LayerNorms, ...]
    part_list: tuple[PartLine, ...]
    targets: tuple[KeptTargets, ...]
    """Teacher tokens kept beside the parts, head by head; not counted in `stored_bytes`."""

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        most = max(found.samples for found in self.length_histogram)
        lines = [
            f"cache        {self.path}",
            f"target       {self.model or '?'} ({self.architecture}, hidden size {self.hidden_size}, vocabulary {self.vocab_size})",
            f"layers       {', '.join(map(str, self.layer_ids))}; verifier state: raw output of block {self.verifier_layer}",
            f"written by   {self.engine}{f', answers generated ({self.generation})' if self.generation else ''}, {self.created_at or 'time unknown'}",
            f"content      {self.samples:,} samples, {self.tokens:,} tokens ({self.supervised_share:.1%} supervised) in {self.parts} parts",
            f"size         {self.stored_bytes:,} bytes; {self.bytes_per_token:,.0f} a token, {self.ratio:.3f} of raw bfloat16 ({self.raw_bytes_per_token:,})",
            "lengths      " + ", ".join(f"{name} {value:,}" for name, value in self.length_quantiles.items()),
            "sources      " + ", ".join(f"{name} ({count:,})" for name, count in self.sources.items()),
            *(f"targets      {line}" for line in self.targets),
            f"fingerprint  {self.fingerprint}",
            "",
            f"{'tokens':>15} {'samples':>9}",
            *(
                f"{f'{found.shortest}-{found.longest}':>15} {found.samples:>9,} {'#' * round(BAR_WIDTH * found.samples / most)}".rstrip()
                for found in self.length_histogram
            ),
            "",
            f"{'array':45} {'bytes':>15} {'a token':>10} {'of raw':>7}",
            *(f"{size.array:45} {size.bytes:>15,} {size.bytes_per_token:>10.1f} {size.ratio_to_raw:>7.3f}" for size in self.arrays),
            "",
            f"{'layer':12} {'rms':>10} {'abs. max.':>12} {'not finite':>12}",
            *(
                f"{norm.layer:12} {norm.rms:>10.4g} {norm.absolute_maximum:>12.5g} {norm.not_finite:>12}  {norm.remark}".rstrip()
                for norm in self.norms
            ),
        ]
        return "\n".join(lines)


def inspect(cache: Path) -> CacheReport:
    """Describe a cache. Raises InputError when it is none, CacheDamaged when what is read is not as written."""
    reader = CacheReader(cache)
    settings = reader.spec.settings
    stored = sum(_bytes(part) for part in reader.parts)
    tokens = reader.num_tokens
    sources: dict[str, int] = {}
    for number, part in enumerate(reader.parts):
        for index, count in zip(*np.unique(reader.column(number, "source_index"), return_counts=True)):
            source = part.manifest.sources[index]
            sources[source] = sources.get(source, 0) + int(count)
    supervised = sum(part.manifest.supervised_tokens for part in reader.parts)
    quantiles = np.quantile(reader.lengths, [0, 0.1, 0.5, 0.9, 1], method="nearest").astype(int)
    return CacheReport(
        path=str(cache),
        model=reader.spec.provenance.model,
        architecture=settings.target.architecture,
        layer_ids=reader.spec.layer_ids,
        verifier_layer=settings.features.verifier_layer,
        hidden_size=reader.spec.hidden_size,
        vocab_size=settings.target.vocab_size,
        mantissa_bits=reader.spec.mantissa_bits,
        engine=f"{settings.engine.name} {settings.engine.version}",
        generation=settings.generation.model_dump() if settings.generation else None,
        fingerprint=reader.spec.fingerprint,
        created_at=reader.spec.provenance.created_at,
        parts=len(reader.parts),
        samples=reader.num_samples,
        tokens=tokens,
        supervised_tokens=supervised,
        supervised_share=supervised / tokens,
        stored_bytes=stored,
        bytes_per_token=stored / tokens,
        raw_bytes_per_token=reader.spec.raw_bytes_per_token,
        ratio=stored / tokens / reader.spec.raw_bytes_per_token,
        arrays=tuple(_arrays(reader)),
        length_quantiles=dict(zip(("min", "10%", "median", "90%", "max"), quantiles.tolist())),
        length_histogram=tuple(length_histogram(reader.lengths)),
        sources=sources,
        norms=tuple(_norms(reader)),
        part_list=tuple(PartLine(part.path.name, part.manifest.samples, part.manifest.tokens, _bytes(part)) for part in reader.parts),
        targets=tuple(kept_targets(reader)),
    )


def length_histogram(lengths: np.ndarray) -> list[LengthBin]:
    """Samples per power of two: a length n falls into the bin from 2^k to 2^(k+1) - 1 that holds it."""
    powers = np.array([int(length).bit_length() - 1 for length in np.unique(lengths)])
    counts = np.histogram(lengths, bins=[2**power for power in range(powers.min(), powers.max() + 2)])[0]
    return [LengthBin(2**power, 2 ** (power + 1) - 1, int(count)) for power, count in enumerate(counts, powers.min())]


def remark(rms: float, absolute_maximum: float) -> str:
    """What is to be said of a layer whose finite values have this size."""
    return "dead" if rms == 0 else "outliers" if absolute_maximum > OUTLIERS * rms else ""


def _bytes(part: Part) -> int:
    return part.manifest.stored_bytes + (part.path / layout.ZARR_JSON).stat().st_size


def _arrays(reader: CacheReader) -> list[ArraySize]:
    sizes: dict[str, int] = {}
    for part in reader.parts:
        for name, entry in part.manifest.files.items():
            array = name.split("/c/")[0].removesuffix(f"/{layout.ZARR_JSON}")
            sizes[array] = sizes.get(array, 0) + entry.size
    tokens, width, layers = reader.num_tokens, reader.spec.hidden_size, len(reader.spec.layer_ids)
    packed = width // 2 if reader.spec.mantissa_bits == planes.PACKED_BITS else width
    raw = {
        f"{layout.HIDDEN_STATES}/{layout.EXPONENT}": tokens * layers * width,
        f"{layout.HIDDEN_STATES}/{layout.SIGN_MANTISSA}": tokens * layers * packed,
        f"{layout.VERIFIER}/{layout.EXPONENT}": tokens * width,
        f"{layout.VERIFIER}/{layout.SIGN_MANTISSA}": tokens * width,
    }
    for part in reader.parts:
        for name, (shape, dtype) in part.manifest.small_arrays(reader.spec).items():
            raw[name] = raw.get(name, 0) + math.prod(shape) * np.dtype(dtype).itemsize
    lines = [ArraySize(name, size, size / tokens, size / raw[name]) for name, size in sizes.items() if name in raw]
    return sorted(lines, key=lambda line: -line.bytes)


def _norms(reader: CacheReader) -> list[LayerNorms]:
    wanted = [(layout.HIDDEN_STATES, slot, str(layer)) for slot, layer in enumerate(reader.spec.layer_ids)]
    wanted.append((layout.VERIFIER, 0, f"verifier {reader.spec.settings.features.verifier_layer}"))
    places = [(part, chunk) for part, found in enumerate(reader.parts) for chunk in range(found.manifest.num_chunks)]
    chosen = [places[i] for i in np.linspace(0, len(places) - 1, min(NORM_CHUNKS, len(places))).astype(int)]
    norms = []
    for array, slot, name in wanted:
        squares = largest = 0.0
        count = not_finite = 0
        for part, chunk in chosen:
            found = reader.parts[part].manifest
            start = chunk * found.chunk_tokens
            bits = reader.read_states(part, start, min(start + found.chunk_tokens, found.tokens), array, (slot,))
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            finite = np.isfinite(values)
            kept = np.where(finite, values, 0).astype(np.float64)
            squares += float((kept**2).sum())
            largest = max(largest, float(np.abs(kept).max()))
            count += int(finite.sum())
            not_finite += int((~finite).sum())
        rms = float(np.sqrt(squares / max(count, 1)))
        norms.append(LayerNorms(name, rms, largest, not_finite, remark(rms, largest)))
    return norms


def sample_tokens(cache: Path, number: int) -> tuple[str, int, np.ndarray, np.ndarray, int]:
    """(source, row, input_ids [T], loss_mask [T], next token or -1) of sample `number`. Raises InputError when there is no such."""
    reader = CacheReader(cache)
    if number >= reader.num_samples:
        raise InputError("no such sample", place=f"--sample {number}", expected=f"0..{reader.num_samples - 1}")
    part = int(reader.part_of[number])
    row = int(reader.column(part, "source_row")[number - int(np.searchsorted(reader.part_of, part))])
    return reader.source(number), row, reader.tokens(number, "input_ids"), reader.tokens(number, "loss_mask"), reader.next_token(number)
