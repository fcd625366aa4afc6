"""What a pass makes the host wait for on a card: reads of the device, and masks as indices, counted on the processor.

The processor's own work, such as planning rows, reads tensors of its own. Only what a card would compute is counted.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from actors import build_actor, parameters_of
from PIL import Image
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cepo import metrics
from cepo.data.batch import ScoringRow, token_array
from cepo.losses.aggregation import token_weights
from cepo.models.processing import Processing
from cepo.models.without_waiting import to_device, use_masks_without_counting
from cepo.workers.actor import Actor
from testing.rows import build_rows, optimizer_batch
from testing.shapes import MICRO, write_checkpoint

pytestmark = pytest.mark.heavy

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount"}
ON_THE_HOST = {"collate", "token_weights", "at"}
"""Functions whose tensors are the processor's on a machine with a card too."""


class Waits(TorchDispatchMode):
    """Counts operations, and those that a card's host waits for by where they are called from."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        name = func.__name__.partition(".")[0]
        by_mask = name.startswith("index") and any(
            index is not None and index.dtype == torch.bool for index in (args[1] if isinstance(args[1], list) else ())
        )
        if name in WAITING or by_mask or func is torch.ops.aten.repeat_interleave.Tensor:
            self._note(name)
        return func(*args, **(kwargs or {}))

    def _note(self, operation: str) -> None:
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "/cepo/" in frame.filename or "/transformers/" in frame.filename
        ]
        if not ON_THE_HOST & {frame.name for frame in frames}:
            self.found[f"{operation} in {frames[-1].name}"] += 1


def pass_of(actor: Actor, folder: Path) -> Waits:
    rows, _ = build_rows(MICRO, Processing(str(folder)), groups=2, group_size=2, contexts=2, prompt=MICRO.prompt_tokens)
    batch = optimizer_batch(rows)
    actor.update([batch], step=0)  # image features are kept from here on
    weights = token_weights(batch.response_mask, "token", batch.denominators)
    (part,) = actor.passes.cut(rows, 99)
    with Waits() as waits:
        actor._accumulate_gradient(batch, weights, part)
    return waits


@pytest.mark.parametrize("recomputes", ["true", "false"])
def test_a_pass_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recomputes: str) -> None:
    """Of 23 reads and masks, one is left, of the host's mask of response tokens, and it is no wait on a card."""
    folder = write_checkpoint(MICRO, tmp_path / "model", dtype="float32")
    actor = build_actor(
        folder,
        model__lora__rank=4,
        model__freeze_vision_tower="true",
        model__enable_gradient_checkpointing=recomputes,
    )
    use_masks_without_counting(actor.module.base)  # as on a card
    monkeypatch.setattr(metrics, "_number", lambda value: value)  # as for tensors on a card
    assert pass_of(actor, folder).found == {"nonzero in _accumulate_gradient": 1}


class Copies(TorchFunctionMode):
    """The functions of cepo that ask for a tensor on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.asking: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names_device = any(isinstance(argument, torch.device) for argument in (*args, *kwargs.values()))
        caller = traceback.extract_stack(limit=2)[0]
        if func is Tensor.to and names_device and "/cepo/" in caller.filename:
            self.asking[caller.name] += 1
        return func(*args, **kwargs)


def test_a_pass_copies_only_by_the_function_that_does_not_wait(tmp_path: Path) -> None:
    folder = write_checkpoint(MICRO, tmp_path / "model", dtype="float32")
    actor = build_actor(folder, model__lora__rank=4, model__freeze_vision_tower="true")
    rows, _ = build_rows(MICRO, Processing(str(folder)), groups=2, group_size=2, contexts=2, prompt=MICRO.prompt_tokens)
    batch = optimizer_batch(rows)
    actor.update([batch], step=0)
    weights = token_weights(batch.response_mask, "token", batch.denominators)
    (part,) = actor.passes.cut(rows, 99)
    with Copies() as copies:
        actor._accumulate_gradient(batch, weights, part)
    assert copies.asking == {"to_device": 9}, "of the collated rows four, of what the loss reads five"


def test_a_copy_to_a_gpu_is_page_locked_and_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has no page-locked memory without a GPU, so the moves are noted and made nowhere."""
    moves: list[tuple[str, dict[str, Any]]] = []

    def noted(name: str) -> Callable[..., Tensor]:
        def move(tensor: Tensor, *_: Any, **options: Any) -> Tensor:
            moves.append((name, options))
            return tensor

        return move

    # vLLM's worker for processors replaces `Tensor.pin_memory` too, in each process that has imported it
    monkeypatch.setattr(Tensor, "pin_memory", noted("pin_memory"))
    monkeypatch.setattr(Tensor, "to", noted("to"))
    to_device(torch.zeros(3), torch.device("cuda"))
    assert moves == [("pin_memory", {}), ("to", {"non_blocking": True})]


def test_a_copy_to_the_processor_is_the_tensor() -> None:
    tensor = torch.zeros(3)
    assert to_device(tensor, torch.device("cpu")) is tensor


class Operations(TorchDispatchMode):
    """The names of operations on plain tensors, those of a sharded tensor's part among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        self.names[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_adamw_steps_all_weights_at_once_to_the_same_bits(tmp_path: Path) -> None:
    """9 operations for 28 weights; torch's own choice for sharded weights takes 8 for each. Reads are of the host's counts."""
    folder = write_checkpoint(MICRO, tmp_path / "model", dtype="float32")
    weights: list[dict[str, Tensor]] = []
    counts: list[int] = []
    for foreach in (True, False):
        actor = build_actor(folder, model__lora__rank=4, optim__lr=1e-3)
        (group,) = actor.optimizer.param_groups
        assert group["foreach"] is True
        group["foreach"] = foreach
        draw = torch.Generator().manual_seed(2)
        for _ in range(3):
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight)
                weight.grad._local_tensor.copy_(torch.randn(weight._local_tensor.shape, generator=draw))
            with Operations() as operations:
                actor.optimizer.step()
        del operations.names["_local_scalar_dense"]
        counts.append(operations.names.total())
        weights.append(parameters_of(actor))
    assert counts[0] < 15
    assert counts[1] > 8 * len(weights[0])
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_metrics_are_read_at_once_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.linspace(-3, 5, 24).view(4, 6)
    chosen = values > 1

    def found() -> metrics.Metrics:
        return {
            "mean": metrics.mean_of(values, chosen),
            "largest": metrics.max_of(values, chosen),
            "none": metrics.max_of(values, values > 9),
            "share": metrics.share_of_mean(values.sum()),
            "plain": metrics.sum_value(3),
        }

    expected = found()
    monkeypatch.setattr(metrics, "_number", lambda value: value)
    pending = found()
    with Waits() as waits:
        (numbers,) = metrics.as_numbers([pending])
    assert numbers == expected
    assert waits.found.total() <= 8, "one copy, from which numbers are taken"
    assert "none" not in metrics.results(numbers)


def test_features_are_added_without_counting_to_the_same_bits(tmp_path: Path) -> None:
    folder = write_checkpoint(MICRO, tmp_path / "model", dtype="float32")
    plain = build_actor(folder, model__lora__rank=4, model__freeze_vision_tower="true")
    without = build_actor(folder, model__lora__rank=4, model__freeze_vision_tower="true")
    use_masks_without_counting(without.module.base)
    rows, _ = build_rows(MICRO, Processing(str(folder)), groups=2, group_size=2, contexts=2, prompt=MICRO.prompt_tokens)
    for log_probs, expected in zip(without.score(rows), plain.score(rows), strict=True):
        assert torch.equal(log_probs, expected)


PLACEHOLDERS = {"_local_scalar_dense in get_placeholder_mask": 1, "_local_scalar_dense in torch_compilable_check": 1}
"""Two reads of transformers' check that features and placeholders are as many."""
OF_FAMILIES = {
    "qwen3_vl": {},
    "qwen2_5_vl": PLACEHOLDERS,
    "internvl": PLACEHOLDERS,
    "gemma3": PLACEHOLDERS | {"_local_scalar_dense in find_packed_sequence_indices": 3},
}


@pytest.mark.heavy
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_what_a_pass_of_each_family_waits_for(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most five reads a pass, in update and scoring alike, whatever the number of layers; lab/notes/gpus.md has them."""
    monkeypatch.setattr(metrics, "_number", lambda value: value)  # as for tensors on a card
    folder = tiny_checkpoints.write_checkpoint(family, tmp_path / "model")
    actor = build_actor(folder, model__lora__rank=4, model__freeze_vision_tower="true")
    use_masks_without_counting(actor.module.base)
    rows = rows_with_images(folder)
    batch = optimizer_batch(rows)
    actor.update([batch], step=0)
    (part,) = actor.passes.cut(rows, 99)
    with Waits() as updating:
        actor._accumulate_gradient(batch, token_weights(batch.response_mask, "token", batch.denominators), part)
    actor.module.eval()
    with torch.no_grad(), Waits() as scoring:
        actor._forward(actor, part)
    assert scoring.found == OF_FAMILIES[family]
    assert updating.found == OF_FAMILIES[family] | {"nonzero in _accumulate_gradient": 1}  # of the host's mask


def rows_with_images(folder: Path) -> list[ScoringRow]:
    processing = Processing(str(folder))
    rows: list[ScoringRow] = []
    for colour in ("grey", "white"):
        context = processing.encode("<image>Count.", processing.load_images([Image.new("RGB", (112, 56), colour)]))
        rows += [ScoringRow(context=context, response_ids=token_array(range(40, 40 + size))) for size in (9, 30)]
    return rows
