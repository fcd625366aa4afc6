from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Mapping

import pytest
import torch
from factories import group, log_probs_like, rollout, same_bits, token_batch
from torch import Tensor

from cepo.algorithms import available_estimators, build_config, build_estimator, estimator_class
from cepo.algorithms.registry import path_of
from cepo.algorithms.teacher_contexts import possible_rows
from cepo.errors import ConfigError
from cepo.integrations.adapter import supported_estimator
from cepo.types import ImageReference, PromptReference, TokenBatch, TokenSignal

NAMES = available_estimators()
REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.1, 0.0, 0.1, 0.9, 0.9, 0.9, 0.9]
LENGTHS = [6, 4, 1, 5, 6, 6, 2, 3, 4, 5, 6, 1]
GROUP_IDS = [row // 4 for row in range(12)]
every_method = pytest.mark.parametrize("name", NAMES)


class OnlyDeclared(UserDict[str, Tensor]):
    """Teacher log-probs of the declared views; asking for any other fails, and what was read is remembered."""

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        super().__init__(views)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        self.read.add(key)
        return super().__getitem__(key)


def make_batch(name: str, *, scale: float = 3.0, seed: int = 4) -> TokenBatch:
    """Two groups with differing and one with equal rewards; log-probs on padding are as large as elsewhere."""
    names = build_estimator(name).views
    old, *views = log_probs_like((1 + len(names), 12, 6), seed, scale)
    view_log_probs = dict(zip(names, views, strict=True))
    batch = token_batch(REWARDS, GROUP_IDS, lengths=LENGTHS, old=old, views=view_log_probs)
    return dataclasses.replace(batch, teacher_log_probs=OnlyDeclared(batch.teacher_log_probs))


def signal_of(name: str, batch: TokenBatch, step: int = 0) -> TokenSignal:
    return build_estimator(name).signal(batch, step=step)


def tensors_of(batch: TokenBatch) -> dict[str, Tensor]:
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    flat = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    flat |= {f"reference {name}": rows for name, rows in batch.has_reference.items()}
    return flat | {f"view {name}": batch.teacher_log_probs[name] for name in batch.teacher_log_probs}


@every_method
def test_only_declared_views_are_read_and_all_of_them_at_step_0(name: str) -> None:
    batch = make_batch(name)
    signal_of(name, batch)
    assert isinstance(batch.teacher_log_probs, OnlyDeclared)
    assert batch.teacher_log_probs.read <= set(build_estimator(name).views)
    if build_estimator(name).needs_teacher(step=0):
        assert batch.teacher_log_probs.read == set(build_estimator(name).views)


@every_method
@pytest.mark.parametrize("step", [0, 7, 1000])
def test_two_calls_give_the_same_bits_and_change_no_input(name: str, step: int) -> None:
    batch = make_batch(name)
    copies = {key: tensor.clone() for key, tensor in tensors_of(batch).items()}
    first = signal_of(name, batch, step)
    second = signal_of(name, batch, step)
    assert same_bits(first.advantages, second.advantages)
    assert first.metrics == second.metrics
    for key, tensor in tensors_of(batch).items():
        assert torch.equal(tensor, copies[key]), key
        assert first.advantages.data_ptr() != tensor.data_ptr(), f"advantages are the same memory as {key}"


@every_method
def test_weights_and_targets_are_0_on_padding(name: str) -> None:
    """As are advantages and diagnostics; all have the batch's shape, and no gradient."""
    batch = make_batch(name)
    signal = signal_of(name, batch)
    actual = {"advantages": signal.advantages, **signal.diagnostics}
    assert (signal.returns is not None) == ("values" in build_estimator(name).reads)
    if signal.returns is not None:
        actual["returns"] = signal.returns
    if signal.distillation is not None:
        assert signal.distillation.view in build_estimator(name).views
        assert signal.distillation.token_weight.min() >= 0
        actual["token_weight"] = signal.distillation.token_weight
    for key, tensor in actual.items():
        assert tensor.shape == batch.old_log_probs.shape, key
        assert tensor.dtype == torch.float32, key
        assert not tensor.requires_grad, key
        assert tensor.isfinite().all(), key
        assert torch.count_nonzero(tensor[~batch.response_mask]) == 0, key


@every_method
def test_what_stands_on_padding_changes_nothing(name: str) -> None:
    batch = make_batch(name)
    padding = ~batch.response_mask
    moved = dataclasses.replace(
        batch,
        old_log_probs=batch.old_log_probs.masked_fill(padding, -1e4),
        values=None if batch.values is None else batch.values.masked_fill(padding, 1e4),
        teacher_log_probs={
            key: batch.teacher_log_probs[key].masked_fill(padding, 0.0) for key in batch.teacher_log_probs
        },
    )
    signal = signal_of(name, batch)
    signal_of_moved = signal_of(name, moved)
    assert same_bits(signal.advantages, signal_of_moved.advantages)
    assert signal.metrics == signal_of_moved.metrics
    if signal.returns is not None:
        assert signal_of_moved.returns is not None
        assert same_bits(signal.returns, signal_of_moved.returns)


@every_method
def test_old_log_probs_change_the_signal_where_declared(name: str) -> None:
    batch = make_batch(name)
    moved = dataclasses.replace(batch, old_log_probs=0.5 * batch.old_log_probs)
    signal = signal_of(name, batch)
    signal_of_moved = signal_of(name, moved)
    is_same = same_bits(signal.advantages, signal_of_moved.advantages) and signal.metrics == signal_of_moved.metrics
    assert is_same == ("old_log_probs" not in build_estimator(name).reads)


@every_method
def test_log_probs_of_minus_10000_give_finite_signals(name: str) -> None:
    for scale in (1e-30, 1e4):
        signal = signal_of(name, make_batch(name, scale=scale))
        assert signal.advantages.isfinite().all()
        numbers = [metric.result for metric in signal.metrics.values()]
        assert torch.tensor([number for number in numbers if number is not None]).isfinite().all()


def with_references(name: str, batch: TokenBatch, shown: Mapping[str, Tensor]) -> TokenBatch:
    """The batch after the method has settled which of the references that can be shown are kept."""
    settled = build_estimator(name).settled(shown)
    assert settled.keys() == shown.keys()
    teachers: dict[str, Tensor] = {}
    for view, rows in settled.items():
        assert not (rows & ~shown[view]).any(), f"{view}: what cannot be shown is kept"
        teachers[view] = batch.teacher_log_probs[view].where(rows.unsqueeze(1), batch.old_log_probs)
    return dataclasses.replace(batch, teacher_log_probs=teachers, has_reference=dict(settled))


@every_method
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.7, 1.0])
def test_rows_that_are_not_live_have_no_signal(name: str, chance: float) -> None:
    """Whichever references can be shown."""
    estimator = build_estimator(name)
    generator = torch.Generator().manual_seed(6)
    can_be_shown = {view: torch.rand(12, generator=generator) < chance for view in estimator.views}
    batch = with_references(name, make_batch(name), can_be_shown)
    live = estimator.live_rows(batch.rewards, batch.group_ids, batch.has_reference)
    assert live.shape == (12,)
    assert live.dtype == torch.bool
    signal = estimator.signal(batch, step=0)
    assert torch.count_nonzero(signal.advantages[~live]) == 0
    if signal.distillation is not None:
        assert torch.count_nonzero(signal.distillation.token_weight[~live]) == 0
        taught = batch.has_reference[signal.distillation.view]
        assert torch.count_nonzero(signal.distillation.token_weight[~taught]) == 0


@every_method
def test_a_row_is_live_while_it_may_get_a_reference(name: str) -> None:
    """Before references are known, as if every row had each: no row becomes live once some cannot be shown."""
    estimator = build_estimator(name)
    batch = make_batch(name)
    possible = possible_rows(estimator, batch.rewards, batch.group_ids, with_teachers=True)
    generator = torch.Generator().manual_seed(7)
    for _ in range(20):
        can_be_shown = {view: torch.rand(12, generator=generator) < 0.5 for view in estimator.views}
        live = estimator.live_rows(batch.rewards, batch.group_ids, estimator.settled(can_be_shown))
        assert not (live & ~possible).any()


@every_method
def test_steps_that_need_no_teacher_run_without_any_view(name: str) -> None:
    estimator = build_estimator(name)
    free = [step for step in (0, 24, 25, 1000) if not estimator.needs_teacher(step=step)]
    if not estimator.views:
        assert free == [0, 24, 25, 1000]
    for step in free:
        bare = dataclasses.replace(make_batch(name), teacher_log_probs={})
        assert estimator.signal(bare, step=step).advantages.isfinite().all()


@every_method
def test_references_have_one_entry_per_rollout_and_view(name: str) -> None:
    prompt_group = group(rollout(0, 1.0, "70", correct=True), rollout(1, 0.0, "40"), rollout(2, 0.0, None))
    references = build_estimator(name).references(prompt_group)
    assert set(references) == set(build_estimator(name).views)
    assert {len(entries) for entries in references.values()} <= {3}


@every_method
def test_a_method_declares_masked_images_and_other_prompts(name: str) -> None:
    """TRL and verl have no teachers for either, and refuse a method by what it says."""
    estimator = build_estimator(name)
    mixed_group = group(rollout(0, 1.0, "70", correct=True), rollout(1, 0.0, "40"), rollout(2, 0.0, None))
    chosen = [reference for entries in estimator.references(mixed_group).values() for reference in entries]
    images = [reference for reference in chosen if isinstance(reference, ImageReference)]
    masks_images = any(reference.masked is not None for reference in images)
    reads_other_prompts = any(isinstance(reference, PromptReference) for reference in chosen)
    assert estimator.masks_images is masks_images
    assert estimator.reads_other_prompts is reads_other_prompts
    if masks_images:
        with pytest.raises(ConfigError, match=f"method {name} needs masked images, which TRL lacks"):
            supported_estimator(name, None, "TRL")
    if reads_other_prompts:
        with pytest.raises(ConfigError, match=f"method {name} needs other problems' prompts, which TRL lacks"):
            supported_estimator(name, None, "TRL")


@every_method
def test_the_default_config_builds_and_is_frozen(name: str) -> None:
    config = build_config(name, None)
    assert config == build_config(name, {})
    sections = [config, *(value for value in vars(config).values() if dataclasses.is_dataclass(value))]
    for section in sections:
        for field in dataclasses.fields(section):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(section, field.name, None)


@every_method
def test_an_unknown_key_is_an_error_that_names_it_in_full(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^unknown key '{path_of(name)}\.no_such_setting'\..* Known under "):
        build_estimator(name, {"no_such_setting": 1})


@every_method
def test_a_method_says_what_it_computes_and_where_it_comes_from(name: str) -> None:
    documentation = estimator_class(name).__doc__ or ""
    assert "Source:" in documentation, f"{name} names no source"
    assert estimator_class(name).name == name
