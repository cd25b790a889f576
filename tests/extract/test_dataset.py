from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract import dataset as dataset_module
from dflash_cache.extract import sources as sources_module
from dflash_cache.extract.dataset import UNCOUNTED, Row, check_sources, count_rows, read_rows, sample_rows
from dflash_cache.extract.sources import parse_sources, size_bytes


def read(path: Path, **options: Any) -> list[Row]:
    return list(read_rows([str(path)], **options))


def read_until_error(path: Path) -> tuple[list[Row], str]:
    """(the rows before it, what it says)."""
    rows: list[Row] = []
    try:
        for row in read_rows([str(path)]):
            rows.append(row)
    except InputError as error:
        return rows, str(error)
    return rows, ""


def values(path: Path) -> list[object]:
    rows = read(path)
    assert [row.number for row in rows] == list(range(len(rows)))
    assert [row.reject for row in rows] == [None] * len(rows)
    return [row.value for row in rows]


def zstd(data: bytes) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


# Lines


def test_a_broken_or_empty_line_is_one_reject_and_the_others_are_read(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n{"a": "\xff\xfe"}\n{"a": 2}')
    rows = read(path)
    assert [row.number for row in rows] == [0, 1, 2, 3, 4]
    assert [row.value for row in rows if row.reject is None] == [{"a": 1}, {"a": 2}]
    assert rows[1].reject == "the line is empty"
    assert str(rows[2].reject).startswith("the line is not valid JSON: ")
    assert rows[3].reject == "the line is not valid UTF-8: invalid start byte at byte 7"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the line is not valid JSON: an object has the key 'c' twice"),
        (b'{"a": "\\ud83d"}', "the row holds bytes or halves of surrogate pairs that are no text"),
        (b"[" * 100_000, "the line is not valid JSON: maximum recursion depth"),
        (b'{"a": 1}\x00', "the line is not valid JSON: Extra data"),
    ],
)
def test_a_line_with_no_single_meaning_is_a_reject(tmp_path: Path, line: bytes, reason: str):
    path = tmp_path / "d.jsonl"
    path.write_bytes(line + b'\n{"a": "\\ud83d\\ude00"}')
    broken, whole = read(path)
    assert str(broken.reject).startswith(reason)
    assert whole.value == {"a": "😀"}


def test_nulls_and_not_a_number_of_a_json_line_are_kept(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"a": null, "b": [{"c": null}], "score": NaN}')
    (row,) = read(path)
    assert isinstance(row.value, dict)
    assert (row.value["a"], row.value["b"]) == (None, [{"c": None}])
    assert row.value["score"] != row.value["score"]


def test_a_line_that_is_too_long_is_one_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources_module, "MAX_ROW_BYTES", 64)
    path = tiny.write_jsonl(tmp_path / "d.jsonl", [{"a": 1}, {"a": "x" * 100}, {"a": 2}])
    assert [row.reject for row in read(path)] == [None, "the line is longer than 64 MB", None]


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_lines_are_the_lines_and_their_progress_is_in_compressed_bytes(tmp_path: Path, ending: str):
    plain = "".join(json.dumps({"n": n, "text": str(n**9)}) + "\n" for n in range(500)).encode()
    path = tmp_path / f"d.jsonl.{ending}"
    path.write_bytes(COMPRESS[ending](plain))
    assert values(path) == [{"n": n, "text": str(n**9)} for n in range(500)]
    ends = [row.end_byte or 0 for row in read(path)]
    assert ends == sorted(ends)
    assert ends[-1] == path.stat().st_size < len(plain)
    assert count_rows(parse_sources([str(path)])[0]) is None


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_compressed_file_that_is_cut_off_ends_with_the_row_that_was_reached(tmp_path: Path, ending: str):
    noise = random.Random(0)
    plain = "".join(json.dumps({"text": noise.randbytes(400).hex()}) + "\n" for _ in range(5000)).encode()
    data = COMPRESS[ending](plain)
    path = tmp_path / f"d.jsonl.{ending}"
    path.write_bytes(data[: len(data) * 2 // 3])
    rows, message = read_until_error(path)
    assert f"cannot be read after row {len(rows) - 1}: " in message
    assert f"take only the rows before that: {path}:{len(rows)}" in message
    assert 0 < len(rows) < 5000
    assert rows_within(path, len(rows)) == len(rows)


def rows_within(path: Path, limit: int) -> int:
    return len(list(read_rows([f"{path}:{limit}"])))


def test_what_is_not_compressed_as_its_name_says_is_refused(tmp_path: Path):
    for ending in COMPRESS:
        path = tmp_path / f"d.jsonl.{ending}"
        path.write_bytes(b'{"a": 1}\n' * 9)
        with pytest.raises(InputError, match="cannot be read: "):
            read(path)


def test_progress_of_plain_lines_ends_at_the_size(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": 22}')
    assert [row.end_byte for row in read(path)] == [9, 10, 19]
    assert size_bytes(parse_sources([str(path)])[0]) == 19


# Several sources


def test_the_limit_counts_rows_over_all_sources_in_the_order_given(tmp_path: Path):
    one, two = (tiny.write_jsonl(tmp_path / name, [{"n": n} for n in range(3)]) for name in ("z.jsonl", "a.jsonl"))
    rows = list(read_rows([str(one), str(two)], limit=4))
    assert [(Path(row.source).name, row.number) for row in rows] == [("z.jsonl", 0), ("z.jsonl", 1), ("z.jsonl", 2), ("a.jsonl", 0)]


def test_each_source_has_a_limit_of_its_own(tmp_path: Path):
    one, two = (tiny.write_jsonl(tmp_path / name, [{"n": n} for n in range(3)]) for name in ("one.jsonl", "two.jsonl"))
    rows = list(read_rows([f"{one}:2", f"{two}:1"]))
    assert [(row.source, row.number) for row in rows] == [(str(one), 0), (str(one), 1), (str(two), 0)]


def test_a_missing_file_is_refused_before_a_row_is_read():
    with pytest.raises(InputError, match="no such file"):
        read_rows(["missing.jsonl"])
    with pytest.raises(InputError, match="no such file"):
        check_sources(["missing.jsonl"])


def test_a_file_that_may_not_be_read_is_an_error_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tiny.write_jsonl(tmp_path / "d.jsonl", [{"a": 1}])

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(dataset_module, "read_lines", refuse)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        read(path)


# JSON


ROWS = [{"a": 1, "text": "ä😀\\]"}, {"b": ["]", {"c": None}]}, "text", 1234, None, {"d": "x" * 50}]


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_is_read_row_by_row_wherever_its_blocks_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, indent: int | None):
    monkeypatch.setattr(dataset_module, "BLOCK_BYTES", block)
    path = tmp_path / "d.json"
    path.write_text(json.dumps(ROWS, indent=indent, ensure_ascii=False) + "\n")
    rows = read(path)
    assert [row.value for row in rows] == ROWS
    assert [row.number for row in rows] == list(range(len(ROWS)))


@pytest.mark.parametrize("text", ["[]", " [ ]\n", "\ufeff[]"])
def test_an_empty_list_has_no_rows(tmp_path: Path, text: str):
    (tmp_path / "d.json").write_text(text)
    assert read(tmp_path / "d.json") == []


def test_a_list_that_is_cut_off_gives_its_whole_rows_and_names_the_last(tmp_path: Path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"a": "x" * 9}] * 3)[:-10])
    rows, message = read_until_error(path)
    assert [row.value for row in rows] == [{"a": "x" * 9}] * 2
    assert "cannot be read after row 1: row 2 is cut off or not valid JSON: Unterminated string" in message
    assert f"{path}:2" in message
    assert rows_within(path, 2) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1}', "must be a list of rows"),
        ('{\n  "a": 1\n}\n', "must be a list of rows"),
        ("", "must be a list of rows"),
        ('[{"a": 1}', "after row 0: it ends before its list does"),
        ('[{"a": 1}]\n[{"a": 2}]', "after row 0: the list has ended there, and the file goes on"),
        ('[{"a": 1}, oh]', "after row 0: row 1 is cut off or not valid JSON"),
    ],
)
def test_json_that_is_no_list_of_rows_is_refused(tmp_path: Path, text: str, problem: str):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(InputError, match=problem):
        read(tmp_path / "d.json")


def test_a_json_file_with_one_object_a_line_is_read_as_lines(tmp_path: Path):
    (tmp_path / "d.json").write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    assert [(row.number, row.value, row.reject is None) for row in read(tmp_path / "d.json")] == [
        (0, {"a": 1}, True),
        (1, None, False),
        (2, {"a": 3}, True),
    ]


def test_bytes_that_are_no_text_reject_their_row_of_a_list_only(tmp_path: Path):
    (tmp_path / "d.json").write_bytes(b'[{"a": "\xff"}, {"a": "\\udc00"}, {"a": "x"}]')
    rows = read(tmp_path / "d.json")
    assert [row.reject for row in rows] == ["the row holds bytes or halves of surrogate pairs that are no text"] * 2 + [None]
    assert rows[2].value == {"a": "x"}


# CSV


def test_csv_gives_an_object_a_record_without_its_empty_cells(tmp_path: Path):
    (tmp_path / "d.csv").write_bytes(b'\xef\xbb\xbfprompt,response\r\n"a\nb","say ""hi"", then"\r\nc,\r\n')
    assert values(tmp_path / "d.csv") == [{"prompt": "a\nb", "response": 'say "hi", then'}, {"prompt": "c"}]


def test_a_broken_record_of_a_csv_file_is_one_reject(tmp_path: Path):
    (tmp_path / "d.csv").write_bytes(b'a,b\n1,2\n1\n\n"x"y,2\n\xff,2\n3,4\n')
    rows = read(tmp_path / "d.csv")
    assert [row.reject for row in rows] == [
        None,
        "the row has 1 cells, the header 2",
        "the line is empty",
        "the row is not valid CSV: ',' expected after '\"'",
        "the row holds bytes or halves of surrogate pairs that are no text",
        None,
    ]
    assert [row.value for row in rows if row.reject is None] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert rows[-1].end_byte == (tmp_path / "d.csv").stat().st_size


def test_a_cell_longer_than_the_usual_limit_of_csv_is_read(tmp_path: Path):
    (tmp_path / "d.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert values(tmp_path / "d.csv") == [{"text": "x" * 200_000}]


def test_a_csv_file_with_two_columns_of_one_name_is_refused(tmp_path: Path):
    (tmp_path / "d.csv").write_text("a,a\n1,2\n")
    with pytest.raises(InputError, match="two columns of one name"):
        read(tmp_path / "d.csv")


# Columns


def write_columns(path: Path, rows: list[dict[str, Any]], chunk: int = 2) -> Path:
    """Parquet, either form of Arrow, or a saved folder, by the name's end."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=chunk)
    elif path.suffix == ".arrow":
        new = pyarrow.ipc.new_file if path.stem == "file" else pyarrow.ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=chunk)
    else:
        import datasets

        datasets.disable_progress_bars()
        datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(str(path), num_shards={"test": 2})
    return path


COLUMNAR = ["d.parquet", "file.arrow", "stream.arrow", "saved"]


@pytest.mark.parametrize("name", COLUMNAR)
def test_every_columnar_kind_gives_the_rows_in_order_counted_and_without_its_nulls(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset_module, "SLICE_ROWS", 2)
    rows: list[dict[str, Any]] = [tiny.chat("a", "b", system="s"), tiny.chat("c", "d")] * 3
    rows[1] = {"messages": [{"role": "user", "content": "e", "name": "x"}, {"role": "assistant", "content": "f", "name": None}], "tags": ["t", None]}
    rows[0] |= {"tags": None}
    rows.append({"messages": None})
    path = write_columns(tmp_path / name, rows, chunk=3)
    expected = [{"messages": [{k: v for k, v in m.items() if v is not None} for m in row["messages"]]} if row["messages"] else {} for row in rows]
    expected[1]["tags"] = ["t", None]  # type: ignore[assignment]
    assert values(path) == expected
    (source,) = parse_sources([str(path)])
    assert count_rows(source) == 7
    assert read(path)[-1].end_byte == size_bytes(source)
    assert [row.number for row in read_rows([f"{path}:5"])] == [0, 1, 2, 3, 4]


def test_nulls_inside_what_a_column_stores_as_json_are_kept(tmp_path: Path):
    import datasets

    datasets.disable_progress_bars()
    path = tmp_path / "d.parquet"
    rows = [
        {"messages": [{"role": "user", "content": "hi", "extra": 1}]},
        {"messages": [{"role": "user", "content": [{"text": "x", "n": None}], "extra": None}]},
    ]
    tiny.write_jsonl(tmp_path / "d.jsonl", rows)
    datasets.Dataset.from_json(str(tmp_path / "d.jsonl"), cache_dir=str(tmp_path / "cached")).to_parquet(str(path))
    del rows[1]["messages"][0]["extra"]
    assert values(path) == rows


def test_a_broken_text_in_a_column_rejects_its_row_only(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.StringArray.from_buffers(
        3, pyarrow.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])), pyarrow.py_buffer(b"a\xffc")
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "d.parquet")
    rows = read(tmp_path / "d.parquet")
    assert [row.value for row in rows] == [{"text": "a"}, None, {"text": "c"}]
    assert str(rows[1].reject).startswith("the row cannot be read: ")


@pytest.mark.parametrize("name", COLUMNAR[:3])
def test_a_columnar_file_that_is_cut_off_is_an_error_of_the_user(tmp_path: Path, name: str):
    path = write_columns(tmp_path / name, [{"text": "x" * 1000}] * 10)
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(InputError, match="cannot be read"):
        read(path)
    with pytest.raises(InputError, match="cannot be read"):
        count_rows(parse_sources([str(path)])[0])


def test_a_saved_folder_that_lost_a_file_is_an_error_of_the_user(tmp_path: Path):
    path = write_columns(tmp_path / "saved", [{"n": n} for n in range(4)])
    next((path / "test").glob("*.arrow")).unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read(path)


# The hub


def test_a_dataset_that_cannot_be_reached_is_an_error_of_the_user(monkeypatch: pytest.MonkeyPatch):
    import datasets

    asked: list[object] = []

    def unreachable(*arguments: object, **options: object) -> None:
        asked.append((arguments, options))
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match="no dataset of that name could be loaded: Couldn't reach 'a/b' on the Hub\n"):
        list(read_rows(["a/b@c:d:9"]))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError):
        list(read_rows(["a/b"]))
    assert asked == [(("a/b", "c"), {"split": "d", "streaming": True}), (("a/b", None), {"split": "train", "streaming": False})]


def test_a_dataset_of_the_hub_streams_its_rows_without_nulls(monkeypatch: pytest.MonkeyPatch):
    import datasets

    rows = [{"n": n, "odd": n if n % 2 else None} for n in range(5)]
    whole = datasets.Dataset.from_list(rows)
    for loaded in (whole, whole.to_iterable_dataset()):
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, loaded=loaded, **__: loaded)
        found = list(read_rows(["a/b:4"]))
        assert [(row.source, row.number, row.value) for row in found] == [("a/b", n, {"n": n, "odd": n} if n % 2 else {"n": n}) for n in range(4)]


# Counts and samples


@pytest.mark.parametrize(("suffix", "rows"), [("", 40), (":7", 7), (":100", 40), (":25%", 10)])
def test_rows_are_counted_within_their_amount(tmp_path: Path, suffix: str, rows: int):
    path = tiny.write_jsonl(tmp_path / "d.jsonl", [{"n": n} for n in range(40)])
    assert count_rows(parse_sources([f"{path}{suffix}"])[0]) == rows


@pytest.mark.parametrize("name", ["d.jsonl", *COLUMNAR])
def test_a_sample_is_of_different_rows_in_order_within_the_limit_and_set_by_the_seed(tmp_path: Path, name: str):
    rows: list[dict[str, Any]] = [{"n": n} for n in range(60)]
    path = tiny.write_jsonl(tmp_path / name, rows) if name == "d.jsonl" else write_columns(tmp_path / name, rows, chunk=7)
    (source,) = parse_sources([f"{path}:50"])
    sample = sample_rows(source, 10, seed=1)
    numbers = [row.number for row in sample]
    assert len(set(numbers)) == 10
    assert numbers == sorted(numbers)
    assert max(numbers) < 50
    assert [row.value for row in sample] == [{"n": number} for number in numbers]
    assert sample_rows(source, 10, seed=1) == sample
    assert [row.number for row in sample_rows(source, 10, seed=2)] != numbers
    assert len(sample_rows(source, 1000)) == 50


def test_a_sample_of_a_large_file_has_whole_rows_of_the_wanted_part_without_reading_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dataset_module, "SAMPLED_WHOLE_BYTES", 0)
    lengths = [random.Random(n).randrange(500) for n in range(3000)]
    path = tiny.write_jsonl(tmp_path / "d.jsonl", [{"n": n, "pad": "x" * lengths[n]} for n in range(3000)])
    (source,) = parse_sources([f"{path}:2000"])
    sample = sample_rows(source, 300, seed=1)
    found = [row.value["n"] for row in sample]  # type: ignore[index]
    assert len(found) == len(set(found)) == 300
    assert found == sorted(found)
    assert max(found) < 2000
    assert {row.number for row in sample} <= {0, UNCOUNTED}
    assert abs(sum(found) / 300 - 1000) < 150  # 4.5 standard deviations
    assert abs(sum(lengths[n] for n in found) / 300 - 250) < 35  # the lines that random bytes hit would have 320
    assert sample_rows(source, 300, seed=1) == sample


def test_a_sample_of_what_cannot_be_entered_in_the_middle_is_its_first_rows(tmp_path: Path):
    (tmp_path / "d.json").write_text(json.dumps([{"n": n} for n in range(20)]))
    assert [row.number for row in sample_rows(parse_sources([str(tmp_path / "d.json")])[0], 3)] == [0, 1, 2]


def test_an_empty_file_has_no_rows_to_count_or_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "d.jsonl").touch()
    (source,) = parse_sources([str(tmp_path / "d.jsonl")])
    assert (count_rows(source), sample_rows(source, 3), list(read_rows([source]))) == (0, [], [])
    write_columns(tmp_path / "d.parquet", [{"n": 1}][:0] or [])
    (source,) = parse_sources([str(tmp_path / "d.parquet")])
    assert (count_rows(source), sample_rows(source, 3), list(read_rows([source]))) == (0, [], [])
