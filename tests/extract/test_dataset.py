from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract.dataset import check_sources, read_rows


def test_a_broken_or_empty_line_is_one_reject_and_the_others_are_read(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n\xff\xfe\n{"a": 2}')
    rows = list(read_rows([str(path)]))
    assert [row.number for row in rows] == [0, 1, 2, 3, 4]
    assert [row.value for row in rows if row.reject is None] == [{"a": 1}, {"a": 2}]
    assert rows[1].reject == "the line is empty"
    assert rows[2].reject is not None
    assert rows[2].reject.startswith("the line is not valid JSON")
    assert rows[3].reject is not None


def test_the_limit_counts_rows_over_all_sources(tmp_path: Path):
    one, two = (tiny.write_jsonl(tmp_path / name, [{"n": n} for n in range(3)]) for name in ("one.jsonl", "two.jsonl"))
    rows = list(read_rows([str(one), str(two)], limit=4))
    assert [(Path(row.source).name, row.number) for row in rows] == [("one.jsonl", 0), ("one.jsonl", 1), ("one.jsonl", 2), ("two.jsonl", 0)]


@pytest.mark.parametrize("kind", ["json", "parquet", "arrow"])
def test_every_kind_of_file_gives_the_same_messages(tmp_path: Path, kind: str):
    import datasets

    expected = [tiny.chat("a", "b"), tiny.chat("c", "d", system="s")]
    path = tmp_path / f"d.{kind}"
    if kind == "json":
        path.write_text(json.dumps(expected))
    elif kind == "parquet":
        datasets.Dataset.from_list(expected).to_parquet(str(path))
    else:
        datasets.Dataset.from_list(expected).save_to_disk(str(tmp_path / "saved"))
        path = next((tmp_path / "saved").glob("*.arrow"))
    assert [row.value for row in read_rows([str(path)])] == expected


def test_absent_fields_of_a_columnar_file_do_not_reach_the_template(tmp_path: Path):
    import datasets

    path = tmp_path / "d.parquet"
    rows = [{"messages": [{"role": "user", "content": "a", "name": "x"}, {"role": "assistant", "content": "b", "name": None}]}]
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    (row,) = read_rows([str(path)])
    assert row.value == {"messages": [{"role": "user", "content": "a", "name": "x"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/nowhere/data.parquet"])
def test_a_missing_file_is_refused(name: str):
    with pytest.raises(InputError, match="no such file"):
        check_sources([name])


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "d.csv").write_text("a,b")
    with pytest.raises(InputError, match="is no dataset file"):
        check_sources([str(tmp_path / "d.csv")])


def test_json_that_is_no_list_is_refused(tmp_path: Path):
    (tmp_path / "d.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="must be a list of rows"):
        list(read_rows([str(tmp_path / "d.json")]))
