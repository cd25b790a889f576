from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract import sources as sources_module
from dflash_cache.extract.dataset import read_rows
from dflash_cache.extract.sources import Source, parse_sources, read_lines, scan_lines, size_bytes


def one(text: str) -> Source:
    (source,) = parse_sources([text])
    return source


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("d.jsonl", "lines", ""),
        ("d.ndjson", "lines", ""),
        ("d.jsonl.gz", "lines", ".gz"),
        ("d.ndjson.zst", "lines", ".zst"),
        ("d.jsonl.bz2", "lines", ".bz2"),
        ("d.jsonl.xz", "lines", ".xz"),
        ("d.json", "json", ""),
        ("d.csv", "csv", ""),
        ("d.parquet", "parquet", ""),
        ("d.arrow", "arrow", ""),
    ],
)
def test_the_end_of_a_file_name_says_how_it_is_read(tmp_path: Path, name: str, kind: str, compression: str):
    path = tmp_path / name
    path.touch()
    assert one(str(path)) == Source(str(path), kind, path, compression)  # type: ignore[arg-type]


@pytest.mark.parametrize(("suffix", "limit", "share"), [("", None, None), (":20000", 20000, None), (":25%", None, 0.25), (":12.5%", None, 0.125)])
def test_an_amount_is_taken_off_and_stands_in_no_name(tmp_path: Path, suffix: str, limit: int | None, share: float | None):
    path = tmp_path / "d.jsonl"
    path.touch()
    source = one(f"{path}{suffix}")
    assert (source.name, source.path, source.limit, source.share) == (str(path), path, limit, share)


def test_a_file_whose_name_ends_like_an_amount_is_that_file(tmp_path: Path):
    for name in ("d.jsonl", "d:3.jsonl", "d[1].jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "d:3.jsonl:5").mkdir()
    assert one(f"{tmp_path}/d:3.jsonl").limit is None
    assert one(f"{tmp_path}/d[1].jsonl:2").name == f"{tmp_path}/d[1].jsonl"
    with pytest.raises(InputError, match="is a folder that save_to_disk did not write"):
        one(f"{tmp_path}/d:3.jsonl:5")


@pytest.mark.parametrize(
    ("text", "name", "config", "split", "limit", "share"),
    [
        ("gsm8k", "gsm8k", None, "train", None, None),
        ("openai/gsm8k:test", "openai/gsm8k", None, "test", None, None),
        ("openai/gsm8k@main:test", "openai/gsm8k", "main", "test", None, None),
        ("openai/gsm8k@main", "openai/gsm8k", "main", "train", None, None),
        ("openai/gsm8k@main:test:20000", "openai/gsm8k", "main", "test", 20000, None),
        ("openai/gsm8k:25%", "openai/gsm8k", None, "train", None, 0.25),
    ],
)
def test_a_name_on_the_hub_may_have_a_configuration_a_split_and_an_amount(
    text: str, name: str, config: str | None, split: str, limit: int | None, share: float | None
):
    source = one(text)
    assert (source.kind, source.dataset, source.config, source.split, source.limit, source.share) == ("hub", name, config, split, limit, share)
    assert text in (source.name, f"{source.name}:20000", f"{source.name}:25%")


def test_a_pattern_gives_its_files_in_the_order_of_their_names_numbers_by_value(tmp_path: Path):
    for name in ("s-10.jsonl", "s-9.jsonl", "a.jsonl", "s-9.txt"):
        (tmp_path / name).touch()
    found = parse_sources([f"{tmp_path}/*.jsonl:7"])
    assert [source.name for source in found] == [f"{tmp_path}/{name}" for name in ("a.jsonl", "s-9.jsonl", "s-10.jsonl")]
    assert {source.limit for source in found} == {7}


def test_a_home_folder_is_found_and_named_as_it_was_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d.jsonl").touch()
    assert (one("~/d.jsonl").name, one("~/d.jsonl").path) == ("~/d.jsonl", tmp_path / "d.jsonl")
    assert one("~/*.jsonl").name == f"{tmp_path}/d.jsonl"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What save_to_disk leaves of two splits, without rows."""
    for split in ("train", "test"):
        (tmp_path / "saved" / split).mkdir(parents=True)
        (tmp_path / "saved" / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        (tmp_path / "saved" / split / "data.arrow").write_bytes(b"x" * (5 if split == "test" else 7))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return tmp_path / "saved"


def test_a_saved_folder_gives_the_split_that_is_named_and_else_train(saved: Path):
    assert one(str(saved)).path == saved / "train"
    assert one(f"{saved}:test") == Source(f"{saved}:test", "saved", saved / "test")
    assert one(f"{saved}:test:20") == Source(f"{saved}:test", "saved", saved / "test", limit=20)
    assert one(f"{saved}:20") == Source(str(saved), "saved", saved / "train", limit=20)
    assert (size_bytes(one(str(saved))), size_bytes(one(f"{saved}:test"))) == (7, 5)
    with pytest.raises(InputError, match="has no split dev") as refused:
        one(f"{saved}:dev")
    assert "train, test" in str(refused.value)
    with pytest.raises(InputError, match="has no splits"):
        one(f"{saved}/train:test")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("missing.jsonl", "no such file"),
        ("missing.jsonl:20", "no such file"),
        ("missing.jsonl.gz", "no such file"),
        ("./missing", "no such file"),
        ("/nowhere/data.parquet", "no such file"),
        ("missing/*.jsonl", "no file matches"),
        ("gsm8k:train[:10%]", "no file matches"),
        ("gsm8k:0", "is no amount of rows"),
        ("gsm8k:0%", "is no amount of rows"),
        ("gsm8k:101%", "is no amount of rows"),
        ("gsm8k:10%:20", "has two amounts of rows"),
        ("a/b/c", "is no file here and no dataset's name"),
        ("", "is empty"),
        ("~nobody-has-this-home/d.jsonl", "no such file"),
        ("a" * 300 + ".jsonl", "no such file"),
    ],
)
def test_what_cannot_be_a_source_is_refused_before_anything_is_read(text: str, problem: str):
    with pytest.raises(InputError, match=problem) as refused:
        parse_sources([text])
    assert f"--data {text.removesuffix(':20')}".strip() in str(refused.value)


@pytest.mark.parametrize("name", ["d.txt", "d.csv.gz", "d.gz"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(InputError, match="is no dataset file"):
        one(str(tmp_path / name))


def test_a_folder_that_is_no_dataset_is_refused_with_the_pattern_to_use_instead(tmp_path: Path):
    with pytest.raises(InputError, match="save_to_disk did not write") as refused:
        one(str(tmp_path))
    assert f"'{tmp_path}/*.jsonl'" in str(refused.value)


def test_a_name_that_comes_twice_is_refused_because_its_rows_could_not_be_told_apart(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.touch()
    with pytest.raises(InputError, match="is named twice"):
        parse_sources([str(path), f"{path}:10"])
    with pytest.raises(InputError, match="is named twice"):
        parse_sources([str(path), f"{tmp_path}/*.jsonl"])


def test_a_share_takes_its_part_of_the_rows_the_same_ones_in_every_run_and_a_larger_share_keeps_them():
    quarter, half = Source("d", "lines", share=0.25), Source("d", "lines", share=0.5)
    taken = [number for number in range(10_000) if quarter.takes(number, seed=1)]
    assert abs(len(taken) - 2500) < 200  # 4.6 standard deviations
    assert taken[:5] == [3, 4, 7, 9, 11]
    assert all(half.takes(number, seed=1) for number in taken)
    assert taken != [number for number in range(10_000) if quarter.takes(number, seed=2)]
    assert taken != [number for number in range(10_000) if Source("e", "lines", share=0.25).takes(number, seed=1)]
    assert all(Source("d", "lines", share=1.0).takes(number, seed=1) for number in range(1000))


def test_shares_and_limits_keep_the_numbers_and_the_name_of_the_whole_source(tmp_path: Path):
    path = tiny.write_jsonl(tmp_path / "d.jsonl", [{"n": n} for n in range(200)])
    first = list(read_rows([f"{path}:3"]))
    assert [(row.source, row.number, row.value) for row in first] == [(str(path), n, {"n": n}) for n in range(3)]
    share = list(read_rows([f"{path}:25%"], seed=1))
    assert [row.number for row in share] == [n for n in range(200) if Source(str(path), "lines", share=0.25).takes(n, 1)]
    assert all(row.value == {"n": row.number} and row.source == str(path) for row in share)
    assert [row.number for row in read_rows([f"{path}:25%"], limit=4, seed=1)] == [row.number for row in share[:4]]


def test_lines_and_bytes_are_counted_with_and_without_a_last_line_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "d.jsonl"
    for block in (1, 2, 3, 1 << 20):
        monkeypatch.setattr(sources_module, "BLOCK_BYTES", block)
        for data, lines in ((b"", 0), (b"\n", 1), (b"ab", 1), (b"ab\n", 1), (b"ab\ncd", 2), (b"ab\n\ncd\n", 3)):
            path.write_bytes(data)
            assert scan_lines(path) == (lines, len(data))
        path.write_bytes(b"ab\n\ncde\nf")
        assert [scan_lines(path, limit) for limit in (1, 2, 3, 4, 9)] == [(1, 3), (2, 4), (3, 8), (4, 9), (4, 9)]


def test_a_line_that_is_too_long_is_passed_over_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "d.jsonl"
    for block in (1, 3, 1 << 20):
        monkeypatch.setattr(sources_module, "BLOCK_BYTES", block)
        monkeypatch.setattr(sources_module, "MAX_ROW_BYTES", 4)
        path.write_bytes(b"abc\nabcd\nabcdefghi\nab\nabcde")
        assert list(read_lines(one(str(path)))) == [(b"abc\n", 4), (None, 9), (None, 19), (b"ab\n", 22), (None, 27)]
        path.write_bytes(b"abcde\nab")
        assert list(read_lines(one(str(path)))) == [(None, 6), (b"ab", 8)]
