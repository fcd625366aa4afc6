"""The measured processes behind benchmarks and stages do what they say, and their arithmetic is torch's and that by hand."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cepo.models.processing import Processing
from lab import entropy, stages
from lab.support.collectives import (
    SCORING,
    SYNCHRONISATION,
    UPDATE,
    Calls,
    Sharding,
    WeightBytes,
    expected_bytes,
    padded_size,
)
from lab.support.machine import ROOT
from lab.support.model_flops import PATCH_VALUES, ModelFlops, causal_pairs
from lab.support.paired import Record, Side, paired_ratio, side_by_side, summary, take_turns
from lab.support.problems import Script
from lab.support.profiling import LISTED_OPERATIONS, profile_tables
from testing.rows import HINT_TOKENS
from testing.shapes import MICRO, QWEN3_VL_2B, prompt_text, random_image, response_lengths, write_checkpoint


def test_a_paired_ratio_is_the_median_of_ratios() -> None:
    """It is not the ratio of medians."""
    # A slow minute hits both sides of the second pair alike.
    found = paired_ratio([2.0, 30.0, 2.2], [1.0, 10.0, 1.0])
    assert (found.median, found.count) == (2.2, 3)
    assert (found.lower_quartile, found.upper_quartile) == (pytest.approx(2.1), pytest.approx(2.6))
    assert summary([4.0]).record == {"median": 4.0, "lower_quartile": 4.0, "upper_quartile": 4.0, "count": 1}


def test_a_script_gives_the_same_lengths_for_the_same_step() -> None:
    """It makes 2 of 5 prompts dead."""
    script = Script(shape=MICRO, prompts=5, dead_share=0.4)
    assert script.lengths(3) == script.lengths(3) != script.lengths(4)
    right = [sum(script.is_right(prompt, sample) for sample in range(8)) for prompt in range(5)]
    assert right == [0, 0, 4, 4, 4]


def turns(folder: Path, sides: dict[str, dict[str, Any]], modules: dict[str, str]) -> dict[str, list[Record]]:
    shared = {"folder": str(folder), "shape": "micro", "prompts": 2, "steps": 2, "dead_share": 0.5}
    told = {name: Side(modules[name], shared | own) for name, own in sides.items()}
    with side_by_side(told, threads=1, folder=folder) as processes:
        return take_turns(processes, steps=2)


@pytest.mark.heavy
def test_measured_steps_have_the_scripts_lengths_and_rewards(tmp_path: Path) -> None:
    module = "lab.support.training"
    sides = {
        "with": {"method": "cepo", "overrides": ["algorithm.weight.lambda_decay_steps=1"]},
        "without": {"method": "grpo"},
    }
    records = turns(tmp_path, sides, dict.fromkeys(sides, module))
    script = Script(shape=MICRO, prompts=2, dead_share=0.5)
    for step in (0, 1):
        lengths = script.lengths(step)
        for side in sides:
            record = records[side][step]
            assert record["tokens"]["generate"] == sum(map(sum, lengths))
            # The second prompt alone has differing rewards: its 8 rows are updated, each with its prompt of 64 tokens.
            assert record["counts"]["live_rows"] == 8
            assert record["tokens"]["update"] == sum(lengths[1]) + 8 * 64
    assert [record["active"] for record in records["with"]] == [True, False]
    assert [record["counts"]["teacher_rows"] for record in records["with"]] == [16, 0]
    assert [record["active"] for record in records["without"]] == [False, False]


@pytest.mark.heavy
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed (extra `trl`)")
def test_trl_generates_and_updates_as_many_tokens_as_cepo(tmp_path: Path) -> None:
    sides: dict[str, dict[str, Any]] = {"ours": {"method": "grpo"}, "trl": {}}
    modules = {"ours": "lab.support.training", "trl": "lab.support.trl_training"}
    records = turns(tmp_path, {name: own | {"dead_share": 0.0} for name, own in sides.items()}, modules)
    for ours, theirs in zip(records["ours"], records["trl"], strict=True):
        assert ours["tokens"]["generate"] == theirs["tokens"]["generate"] > 0
        assert ours["tokens"]["update"] == theirs["tokens"]["update"] > 0
        assert theirs["tokens"]["update, padding included"] > theirs["tokens"]["update"]
        assert math.isfinite(theirs["seconds"])


def test_a_measured_process_that_dies_says_why(tmp_path: Path) -> None:
    with (
        side_by_side({"broken": Side("lab.support.training", {"no": "option"})}, threads=1, folder=tmp_path) as found,
        pytest.raises(RuntimeError, match="unexpected keyword argument 'no'"),
    ):
        found["broken"].step()


@pytest.mark.parametrize(("folder", "number"), [("lab", 10), ("lab/studies", 3)])
def test_a_readme_lists_every_program_of_its_folder(folder: str, number: int) -> None:
    readme = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    programs = [
        file.parent.name if file.stem == "__main__" else file.stem
        for file in (ROOT / folder).rglob("*.py")
        if file.parent.name not in ("support", "tests")
        and (folder == "lab/studies" or "studies" not in file.parts)
        and (file.parent.name != "gpu_dry" or file.stem == "__main__")
        and "if __name__ ==" in file.read_text(encoding="utf-8")
    ]
    assert len(programs) >= number
    assert [
        name
        for name in programs
        if f"{folder.replace('/', '.')}.{name}" not in readme and f"{folder}/{name}.py" not in readme
    ] == []


on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the trainer takes the GPU; figures are of a CPU")
ROWS, PICTURE_PATCHES = 8, 4 * MICRO.image_tokens
PATCH_FLOPS = 2 * PICTURE_PATCHES * PATCH_VALUES * MICRO.vision_hidden
"""The tower's patch embedding is a convolution."""


def told(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr("sys.argv", ["stages", "--shape", "micro", *arguments])
    return stages.arguments()


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        scoring = ("score student", "teachers", "score all")
        found = stages.measure(told(patch, "--repeats", "1", "--profile", "--stages", *scoring))
    return json.loads(json.dumps(found))


@on_a_cpu
@pytest.mark.heavy
def test_teachers_alone_share_their_prompt_when_packed(record: dict[str, Any]) -> None:
    """Padded they are 16 rows of 148 tokens."""
    student, teachers, both = (record["stages"][name] for name in ("score student", "teachers", "score all"))
    longest = MICRO.prompt_tokens + HINT_TOKENS + MICRO.longest
    assert teachers["padded"]["tokens"] == 2 * ROWS * longest == 16 * 148
    assert both["padded"]["tokens"] == teachers["padded"]["tokens"] + student["padded"]["tokens"]
    # The prompt up to the hint is passed once, however many teachers read it: alone they pay for it again.
    shared = MICRO.prompt_tokens - 5 - 2
    alone = student["packed"]["tokens"] + teachers["packed"]["tokens"] - both["packed"]["tokens"]
    assert alone == pytest.approx(shared, abs=3)
    difference = record["stages"]["teachers (difference)"]["packed"]["seconds"]
    assert difference == pytest.approx(both["packed"]["seconds"] - student["packed"]["seconds"])


@on_a_cpu
@pytest.mark.heavy
def test_the_profile_lists_12_operations_and_counts_products(record: dict[str, Any]) -> None:
    """The products are counted for each stage, as torch counts them."""
    assert list(record["profile"]) == ["score student", "teachers", "score all"] == list(record["matrix_products"])
    for name, operations in record["profile"].items():
        seconds = [operation["seconds"] for operation in operations]
        assert len(seconds) == LISTED_OPERATIONS
        assert seconds == sorted(seconds, reverse=True)
        assert 0.5 < sum(operation["share"] for operation in operations) <= 1
        products = record["matrix_products"][name]
        assert products["flops"] == record["stages"][name]["packed"]["matrix_product_flops"] - PATCH_FLOPS
        assert products["gflops_per_second"] == pytest.approx(products["flops"] / products["seconds"] / 1e9)
        large = products["large_product"]
        assert large["sizes"] == [record["stages"][name]["packed"]["tokens"], MICRO.hidden, MICRO.intermediate]
        assert large["gflops_per_second"] > 0
    tables = profile_tables(record)
    assert [text.partition(":")[0] for text in tables[:3]] == ["| score student", "| teachers", "| score all"]
    assert tables[3].count("128 x 384, float32") == 3


@on_a_cpu
def test_teachers_of_the_students_context_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are left out of what is measured by itself."""
    assert told(monkeypatch, "--contexts", "1").stages == ["generate", "score student", "score all", "update"]
    assert "teachers" in told(monkeypatch).stages
    with pytest.raises(SystemExit):
        told(monkeypatch, "--contexts", "1", "--stages", "teachers")
    assert "give --contexts 2 or more" in capsys.readouterr().err


def test_a_rank_of_4_sends_three_quarters() -> None:
    """They are three quarters of what its passes gather and reduce."""
    sharding = Sharding(
        blocks=WeightBytes(gathered=400, reduced=40), outside=WeightBytes(gathered=80, reduced=0), synchronised=48
    )
    calls = Calls(scoring_calls=1, scoring_passes=3, update_passes=2, synchronisations=1)
    sent = expected_bytes(sharding, calls, 4)
    assert sent == {SCORING: 3 * 1280 // 4, UPDATE: 3 * 2 * (800 + 80 + 40) // 4, SYNCHRONISATION: 36}
    assert set(expected_bytes(sharding, calls, 1).values()) == {0}


def test_a_weight_of_5_rows_is_padded_to_8_for_4_ranks() -> None:
    assert [padded_size(torch.zeros(5, 3), ranks) for ranks in (1, 2, 4)] == [15, 18, 24]


RESPONSE = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(MICRO, tmp_path_factory.mktemp("micro"))


def measured(folder: Path, *, lora_rank: int = 0, backward: bool = False) -> int:
    """Of one prompt with its image and a response, logits of all tokens, by torch's counter."""
    import peft
    from transformers import Qwen3VLForConditionalGeneration

    processing = Processing(str(folder))
    model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    if lora_rank:
        settings = peft.LoraConfig(r=lora_rank, target_modules="all-linear", exclude_modules=".*visual.*")
        model = peft.get_peft_model(model, settings)
    images = processing.load_images([random_image(MICRO, 0)])
    assert images is not None
    prompt = processing.encode(prompt_text(MICRO, processing, 0), images)
    assert len(prompt.token_ids) == MICRO.prompt_tokens
    ids = torch.tensor([[*prompt.token_ids, *processing.encode_text("7" * RESPONSE)]])
    kinds = (ids == processing.image_token_id).int()
    # torch does not count its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=kinds,
            **images.tensors,
        ).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_a_forward_pass_costs_what_torch_counts(folder: Path, lora_rank: int) -> None:
    costs, length = ModelFlops(MICRO, lora_rank), MICRO.prompt_tokens + RESPONSE
    # torch counts every query-key pair of causal attention, also those that are masked.
    expected = costs.image + length * (costs.token + costs.adapter_token + costs.head) + costs.pair * length**2
    assert measured(folder, lora_rank=lora_rank) == expected


@pytest.mark.parametrize("lora_rank", [0, 3])
def test_an_update_costs_what_torch_counts_to_4_percent(folder: Path, lora_rank: int) -> None:
    costs, length = ModelFlops(MICRO, lora_rank), MICRO.prompt_tokens + RESPONSE
    expected = costs.update(MICRO.prompt_tokens, [RESPONSE], checkpointing=False)
    # Here the head runs on all tokens, and only once; masked pairs are counted, and scores are not computed again.
    expected += costs.head * (length * (2 if lora_rank else 3) - RESPONSE * (2 if lora_rank else 4))
    expected += round(costs.pair * (3 * length**2 - 3.5 * causal_pairs(length)))
    assert measured(folder, lora_rank=lora_rank, backward=True) == pytest.approx(expected, rel=0.04)


def test_qwen3_vl_2b_costs_what_its_published_sizes_say() -> None:
    costs = ModelFlops(QWEN3_VL_2B, 16)
    # 28 layers of 4 x 2048 x 2048 with halved keys and values (3 x 2048^2) and 3 x 2048 x 6144.
    assert costs.token == 2 * 28 * (3 * 2048**2 + 3 * 2048 * 6144) == 2_818_572_288
    assert costs.head == 2 * 2048 * 151_936
    assert costs.pair == 229_376
    assert costs.image == pytest.approx(0.931e12, rel=1e-3)
    assert costs.adapter_token == pytest.approx(0.0349e9, rel=2e-3)
    # Reading 400 tokens and an image once, and decoding 8 x 400: 0.437 of PFLOP over 32 prompts.
    assert 32 * costs.generate(400, [400] * 8) == pytest.approx(0.437e15, rel=1e-2)


def test_pairs_of_a_continued_text_are_the_whole_less_the_start() -> None:
    assert causal_pairs(4) == 1 + 2 + 3 + 4
    assert causal_pairs(4, 2) == 3 + 4


def test_lengths_of_a_step_are_the_same_wherever_asked() -> None:
    """They are a third of the way up on average."""
    lengths = response_lengths(QWEN3_VL_2B, 10_000, seed=3)
    assert lengths == response_lengths(QWEN3_VL_2B, 10_000, seed=3)
    assert 50 <= min(lengths) < max(lengths) <= 800
    assert sum(lengths) / 10_000 == pytest.approx(300, rel=0.02)


def test_the_cost_of_entropy_is_measured_in_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ratio is the median over the pairs. Chunks are halved, so that memory grows by less than a tenth."""
    out = tmp_path / "entropy.json"
    assert entropy.main(["--shape", "micro", "--pairs", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["work"]["pairs"] == 3
    for trained in ("adapter", "all weights"):
        measured = record["trained"][trained]
        of_pairs = measured["seconds_of_pairs"]
        ratios = sorted(after / before for after, before in zip(of_pairs["with"], of_pairs["without"], strict=True))
        assert measured["seconds_ratio"]["median"] == pytest.approx(ratios[1])
        peaks = measured["peak_bytes"]
        assert 0 < peaks["with"] < 1.1 * peaks["without"]
        assert f"| {trained} |" in printed
