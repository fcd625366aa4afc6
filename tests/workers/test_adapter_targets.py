"""Names of adapter targets are looked up in the model before PEFT, which trains without those that fit nothing."""

from __future__ import annotations

import pytest
from torch import nn

from cepo.errors import ConfigError
from cepo.workers.adapters import require_targets, target_names


class _Model(nn.Module):
    """Two layers of a language model beside a vision tower."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.ModuleDict({"qkv": nn.Linear(2, 2), "q_proj": nn.Linear(2, 2)})
        self.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})])


def test_names_are_separated_by_commas_and_all_linear_is_none() -> None:
    assert target_names("q_proj, v_proj") == ["q_proj", "v_proj"]
    assert target_names("q_proj") == ["q_proj"]
    assert target_names("all-linear") == []


@pytest.mark.parametrize("names", [["q_proj"], ["layers.0.q_proj"], ["q_proj", "norm"], []])
def test_names_and_ends_of_paths_fit(names: list[str]) -> None:
    require_targets(_Model(), names, excluded=".*visual.*")


@pytest.mark.parametrize(
    ("name", "excluded", "words"),
    [
        ("q_prj", None, r"'q_prj' fits no layer.*Did you mean 'q_proj'\?.* linear layers: q_proj, qkv"),
        (
            "qkv",
            ".*visual.*",
            r"'qkv' fits no layer of this model outside of exclude_modules '\.\*vis.*layers: q_proj;",
        ),
    ],
)
def test_a_name_that_fits_nothing_is_refused_with_the_layers(name: str, excluded: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        require_targets(_Model(), ["q_proj", name], excluded=excluded)
