"""Proves a cache: every byte against its digest, every chunk against its checksum, every count, and teacher fidelity.

In: a cache folder. Out: a VerifyReport that lists every problem with its place; it stops at none. Reads all of the cache.
Teacher fidelity: from the stored state of each sample's last row, argmax(lm_head(final_norm(h))) must be the token that
the engine itself predicted there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common import layout, manifest, planes, spec, target_folder
from ..common.errors import CacheDamaged, DflashError, InputError
from ..common.fingerprint import digest_file
from ..common.manifest import PartManifest
from ..common.progress import ProgressBar
from ..common.spec import CacheSpec
from .reader import CacheReader, read_small

if TYPE_CHECKING:
    from .fidelity import Agreement, TeacherCheck

MIN_AGREEMENT = 0.98
"""Below this share of samples the stored states are not what the engine computed with."""
DATA_TOKENS = 20_000
"""Supervised tokens, spread over the cache, on which the teacher is compared with the data."""


@dataclass(frozen=True)
class Problem:
    """Something that is not as it must be."""

    place: str
    """Part, array and chunk."""
    what: str


@dataclass
class VerifyReport:
    """The answer of `dflash verify`."""

    path: str
    parts: int = 0
    samples: int = 0
    tokens: int = 0
    chunks: int = 0
    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list)
    fidelity_exact: int = 0
    """Samples whose stored state gives the engine's own token."""
    fidelity_near_ties: int = 0
    """Samples that give a token within rounding of it."""
    fidelity_different: int = 0
    teacher_tokens: int = 0
    """Supervised tokens on which the teacher was compared with the data."""
    teacher_equals_data: int = 0

    @property
    def fidelity(self) -> float | None:
        """Share of samples that agree, near ties included; None when none was compared."""
        total = self.fidelity_exact + self.fidelity_near_ties + self.fidelity_different
        return (total - self.fidelity_different) / total if total else None

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "fidelity": self.fidelity, "ok": self.ok}

    def to_text(self) -> str:
        """For people."""
        lines = [f"{problem.place}: {problem.what}" for problem in self.problems]
        lines.append(
            f"{'OK' if self.ok else f'{len(self.problems)} PROBLEMS'}: {self.parts} parts, {self.samples:,} samples, {self.tokens:,} tokens, "
            f"{self.chunks:,} chunks, {self.bytes_read:,} bytes checked"
        )
        if self.fidelity is not None:
            lines.append(
                f"teacher fidelity: {self.fidelity:.2%} of samples give the engine's own next token "
                f"({self.fidelity_exact} exactly, {self.fidelity_near_ties} near ties, {self.fidelity_different} different)"
            )
        if self.teacher_tokens:
            share = self.teacher_equals_data / self.teacher_tokens
            lines.append(f"teacher equals data: {share:.2%} of {self.teacher_tokens:,} supervised tokens (high when the target wrote the text)")
        return "\n".join(lines)


def verify(cache: Path, *, teacher: bool = True) -> VerifyReport:
    """Check all of `cache`; `teacher` False leaves out fidelity (the only step that needs torch).

    Raises InputError when it is no cache, CacheDamaged when cache.json itself cannot be read; all else is reported.
    """
    found = spec.load(cache)
    report = VerifyReport(str(cache))

    def problem(error: DflashError) -> None:
        report.problems.append(Problem(error.place, str(error).removeprefix(f"{error.place}: ")))

    check = None
    try:
        target_folder.check(cache)
        if teacher:
            from .fidelity import TeacherCheck

            check = TeacherCheck(cache)
    except (CacheDamaged, InputError) as error:
        problem(error)
    try:
        parts = manifest.list_parts(cache)
    except CacheDamaged as error:
        problem(error)
        parts = [p for p in sorted((cache / layout.PARTS).iterdir()) if layout.parse_part_name(p.name) and not p.is_symlink() and p.is_dir()]
    if not parts:
        report.problems.append(Problem(str(cache), "holds no samples yet"))
    keys: dict[bytes, str] = {}
    with ProgressBar("verify", total=len(parts)) as bar:
        for part in parts:
            try:
                part_manifest = manifest.load(part, found)
            except CacheDamaged as error:
                problem(error)
                bar.update(1)
                continue
            before = len(report.problems)
            for damage in _check_part(part, part_manifest, found, report, keys):
                problem(damage)
            if check is not None and len(report.problems) == before:
                _check_teacher(part, part_manifest, check, report)
            bar.update(1, f"{report.bytes_read / 1e9:.2f} GB")
    if report.tokens and check is not None and report.ok:
        _compare_with_data(cache, check, report)
    if report.fidelity is not None and report.fidelity < MIN_AGREEMENT:
        report.problems.append(
            Problem(
                str(cache),
                f"the stored states do not give the tokens that the engine predicted ({report.fidelity:.1%} agree, expected {MIN_AGREEMENT:.0%} or more): "
                "wrong layer, norm applied twice, or another target's head",
            )
        )
    return report


def _check_part(part: Path, found: PartManifest, cache: CacheSpec, report: VerifyReport, keys: dict[bytes, str]) -> Iterator[CacheDamaged]:
    report.parts += 1
    report.samples += found.samples
    report.tokens += found.tokens
    for name, entry in found.files.items():
        size, digest = digest_file(part / name)
        report.bytes_read += size
        if digest != entry.xxh3_128:
            yield CacheDamaged("the file's digest does not match", place=str(part / name))
    yield from _check_metadata(part, found, cache)
    yield from _check_chunks(part, found, cache, report)
    columns: dict[str, np.ndarray] = {}
    for name in manifest.small_arrays(found):
        try:
            columns[name] = read_small(part, found, name)
        except CacheDamaged as error:
            yield error
    if len(columns) == len(manifest.small_arrays(found)):
        yield from _check_columns(part, found, cache, columns, keys)


def _check_metadata(part: Path, found: PartManifest, cache: CacheSpec) -> Iterator[CacheDamaged]:
    layers, width = len(cache.layer_ids), cache.hidden_size
    packed = width // 2 if cache.mantissa_bits == planes.PACKED_BITS else width
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        f"{layout.HIDDEN_STATES}/{layout.EXPONENT}": ((found.tokens, layers, width), "uint8"),
        f"{layout.HIDDEN_STATES}/{layout.SIGN_MANTISSA}": ((found.tokens, layers, packed), "uint8"),
        f"{layout.VERIFIER}/{layout.EXPONENT}": ((found.tokens, width), "uint8"),
        f"{layout.VERIFIER}/{layout.SIGN_MANTISSA}": ((found.tokens, width), "uint8"),
        **manifest.small_arrays(found),
    }
    for name, (shape, dtype) in shapes.items():
        path = part / name / layout.ZARR_JSON
        try:
            document = spec.read_json(path)
        except CacheDamaged as error:
            yield error
            continue
        if tuple(document.get("shape", ())) != shape or document.get("data_type") != dtype:
            yield CacheDamaged(
                "the array's metadata disagrees with the manifest", place=str(path), found=document.get("shape"), expected=f"{shape} {dtype}"
            )


def _check_chunks(part: Path, found: PartManifest, cache: CacheSpec, report: VerifyReport) -> Iterator[CacheDamaged]:
    reader = CacheReader.of_part(part, found, cache, offsets=np.array([0, found.tokens]))
    chunk = found.chunk_tokens
    slots = [(layout.HIDDEN_STATES, slot) for slot in range(len(cache.layer_ids))] + [(layout.VERIFIER, 0)]
    for array, slot in slots:
        for number in range(found.num_chunks):
            start, stop = number * chunk, min((number + 1) * chunk, found.tokens)
            try:
                rows = reader.read_rows(0, start, stop, array, (slot,))
            except CacheDamaged as error:
                yield error
                continue
            report.chunks += len(layout.PLANES)
            if (rows.exponent == 0xFF).any():
                layer = cache.layer_ids[slot] if array == layout.HIDDEN_STATES else cache.settings.features.verifier_layer
                row = start + int(np.argwhere(rows.exponent[0] == 0xFF)[0, 0])
                yield CacheDamaged(f"row {row} of layer {layer} holds values that are not finite", place=f"{part / array} chunk {number}")


def _check_columns(
    part: Path, found: PartManifest, cache: CacheSpec, columns: dict[str, np.ndarray], keys: dict[bytes, str]
) -> Iterator[CacheDamaged]:
    vocab = cache.settings.target.vocab_size

    def outside(name: str, low: int, high: int) -> Iterator[CacheDamaged]:
        values = columns[name]
        if values.min() < low or values.max() >= high:
            yield CacheDamaged(
                "a value lies out of range", place=str(part / name), found=f"{values.min()}..{values.max()}", expected=f"{low}..{high - 1}"
            )

    yield from outside("input_ids", 0, vocab)
    yield from outside("loss_mask", 0, 2)
    yield from outside("engine_top1", 0, vocab)
    yield from outside("next_token", -1, vocab)
    yield from outside("source_index", 0, len(found.sources))
    offsets = columns["sample_offsets"]
    if offsets[0] != 0 or offsets[-1] != found.tokens or (np.diff(offsets) <= 0).any():
        yield CacheDamaged("the samples do not fill the part, each after the other", place=str(part / "sample_offsets"))
    if int(columns["loss_mask"].sum()) != found.supervised_tokens:
        yield CacheDamaged(
            "the manifest counts other supervised tokens",
            place=str(part / "loss_mask"),
            found=int(columns["loss_mask"].sum()),
            expected=str(found.supervised_tokens),
        )
    for number, raw in enumerate(columns["sample_key"]):
        key = raw.tobytes()
        if key in keys:
            yield CacheDamaged(f"sample {number} is stored twice; the other is {keys[key]}", place=str(part / "sample_key"))
        keys[key] = f"{part.name} sample {number}"


def _check_teacher(part: Path, found: PartManifest, check: TeacherCheck, report: VerifyReport) -> None:
    reader = CacheReader.of_part(part, found, check.spec)
    last_rows = reader.parts[0].offsets[1:] - 1
    top1 = reader.column(0, "engine_top1")
    chunk = found.chunk_tokens
    for number in range(found.num_chunks):
        start, stop = number * chunk, min((number + 1) * chunk, found.tokens)
        here = np.flatnonzero((last_rows >= start) & (last_rows < stop))
        if len(here):
            rows = reader.read_rows(0, start, stop, layout.VERIFIER, (0,))
            bits = planes.merge(rows.exponent[0], rows.sign_mantissa[0])[last_rows[here] - start]
            agreement: Agreement = check.compare(bits, top1[here])
            report.fidelity_exact += agreement.exact
            report.fidelity_near_ties += agreement.near_ties
            report.fidelity_different += agreement.different


def _compare_with_data(cache: Path, check: TeacherCheck, report: VerifyReport) -> None:
    reader = CacheReader(cache)
    left = DATA_TOKENS
    for sample in np.random.default_rng(0).permutation(reader.num_samples):
        mask, ids = reader.tokens(sample, "loss_mask"), reader.tokens(sample, "input_ids")
        rows = np.flatnonzero(mask[1:])  # row r predicts token r + 1
        if not len(rows):
            continue
        start = int(reader.starts[sample])
        states = reader.read_rows(int(reader.part_of[sample]), start, start + len(ids), layout.VERIFIER, (0,))
        bits = planes.merge(states.exponent[0], states.sign_mantissa[0])[rows]
        report.teacher_equals_data += int((check.top1(bits) == ids[1:][rows]).sum())
        report.teacher_tokens += len(rows)
        left -= len(rows)
        if left <= 0:
            return
