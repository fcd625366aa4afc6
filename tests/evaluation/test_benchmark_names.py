"""Benchmarks named before a source: spellings, paths that contain a colon, and near names."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_files import cases

from cepo.errors import ConfigError
from cepo.evaluation.benchmark_names import TITLES, NamedSource, is_name, named_source
from cepo.evaluation.benchmarks import BENCHMARKS


@pytest.mark.parametrize(
    ("written", "name", "source"),
    cases(__file__, "named_sources.yaml"),
)
def test_a_name_before_a_colon_is_a_benchmark(written: str, name: str | None, source: str) -> None:
    assert named_source(written) == NamedSource(name=name, source=source)


@pytest.mark.parametrize("name", ["mathvista:rows.jsonl", "12:30.jsonl"])
def test_a_path_with_a_colon_that_exists_is_a_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    assert named_source(name) == NamedSource(name=None, source=name)
    assert named_source(f"{name}@train[:2]") == NamedSource(name=None, source=f"{name}@train[:2]")
    assert named_source(f"mmmu:{name}") == NamedSource(name="mmmu", source=name)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("MathVist:rows.parquet", "Did you mean 'mathvista'"),
        ("mmstar:rows.parquet", "'mmstar' is no benchmark"),
        ("https://example.org/rows.parquet", "'https' is no benchmark"),
        (":rows.parquet", "'' is no benchmark"),
        ("mathvista:", "no data; give mathvista:SOURCE"),
        ("MathVista", "no data; give mathvista:SOURCE"),
        ("MathVista@testmini", "no data; give mathvista:SOURCE"),
    ],
)
def test_a_wrong_name_is_refused_with_those_there_are(written: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named_source(written)
    assert words in str(caught.value)
    assert "SOURCE" in str(caught.value) or all(name in str(caught.value) for name in TITLES)


def test_each_benchmark_has_a_title_and_each_title_a_format() -> None:
    assert [benchmark.name for benchmark in BENCHMARKS] == sorted(TITLES)
    assert is_name("Math-Vision")
    assert not is_name("mmmu_val")
