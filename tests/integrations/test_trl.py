"""cepo's methods inside TRL's GRPOTrainer, against cepo's own trainer on the same rollouts; images on a CPU."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from case_files import cases
from isolation import own_caches
from reward_functions import of_completions
from rounding import ORDERS, moved_by_one_unit
from scripted_models import declare_end, say
from tiny_checkpoints import write_checkpoint
from torch import Tensor
from verl_on_cpu.own_rollouts import CASES, GROUP, own_advantages, own_trainer

from cepo.algorithms import available_estimators
from cepo.errors import ConfigError, DataError
from cepo.microgeo.world import ASSETS, split_problems, write_problems
from cepo.models.processing import Processing
from cepo.trainer.loop import Trainer
from cepo.trainer.rollouts import Rollouts
from cepo.types import ImageReference, PromptReference
from cepo.workers.worker import Worker

trl = pytest.importorskip("trl", reason="the extra `trl` is not installed")
pytestmark = pytest.mark.heavy

REFUSED = cases(__file__, "methods_trl_lacks.yaml")
BEST_ALONE = "grpo_passk"  # teaches only groups with one right rollout, which the rollouts below need not have
SMALLEST_ERROR = {"pgpo": 1e-2}
"""Of an advantage, where it is not 1e-4: the gate divides by the spread of a response's dependences on its image."""
A_PROCESS = pytest.mark.nightly("a training run or a process of 15 to 25 seconds more")


def row_of(text: str, images: list[Any], answer: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text.removeprefix("<image>")}], "images": images, "answer": answer}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Trainer, Rollouts]]:
    """cepo's own trainer with the embedded model, and the rollouts of its first step: 4 problems x 4 responses."""
    folder = tmp_path_factory.mktemp("own")
    train, _ = split_problems(0, 8, 1)
    write_problems(folder / "train.parquet", train)
    with own_caches(folder / "caches"), ExitStack() as stack:
        trainer = own_trainer(folder, stack)
        yield trainer, trainer.sample(0)


def rounding_of_advantages(trainer: Trainer, rollouts: Rollouts, method: str, settings: dict[str, Any]) -> float:
    """How far the advantages move with the weights' last bit.

    The two trainers batch and pad the same rows differently, so each sum of a pass is rounded in another order; log-probs
    of -14 differ by some 1e-5. A weight `exp(delta)` multiplies this by `lambda |A| exp(delta)`, up to 2.8 here.
    """
    assert isinstance(trainer.backend, Worker)
    local = [parameter.detach().to_local() for parameter in trainer.backend.actor.module.parameters()]
    return moved_by_one_unit(lambda: [own_advantages(trainer, rollouts, method, settings)], local, seeds=1)


def trl_trainer(rows: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    from datasets import Dataset

    from cepo.integrations.trl import CepoTrainer

    arguments: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"},
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "max_steps": 3,
        "learning_rate": 1e-4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
        "num_generations": GROUP, "max_completion_length": 64, "shuffle_dataset": False,
    } | options.pop("arguments", {})  # fmt: skip
    return CepoTrainer(
        model=str(options.pop("model", ASSETS)),
        reward_funcs=options.pop("reward_funcs", of_completions),
        args=trl.GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(rows),
        **options,
    )


def with_canned(trainer: Any, responses: list[list[int]]) -> Any:
    """The trainer, whose engine answers with these responses."""
    trainer._generate_single_turn = lambda *_: ([list(token_ids) for token_ids in responses], None)
    trainer.model.train()
    return trainer


def advantages_of(trainer: Any, rows: list[dict[str, Any]]) -> Tensor:
    inputs = [row for row in rows for _ in range(GROUP)]
    return trainer._generate_and_score_completions(inputs)["advantages"]


def test_responses_end_where_the_template_ends_a_turn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The files of this base model declare another token, and each response would have the full length."""
    folder = write_checkpoint("qwen2", tmp_path / "model")
    declare_end(folder, "<|endoftext|>")
    script: list[int] = Processing(str(folder)).tokenizer("\n2<|im_end|>+", add_special_tokens=False)["input_ids"]
    say(folder, script)
    rows = [row_of("1 + 1?", [], "2") for _ in range(2)]
    trainer = trl_trainer(rows, tmp_path, model=folder, arguments={"max_steps": 1, "max_completion_length": 8})
    assert "ends an assistant's turn with the token '<|im_end|>'" in caplog.text
    prompt: list[int] = trainer._tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True)[
        "input_ids"
    ]
    completions, _ = trainer._generate_single_turn([prompt, prompt], None, {}, GROUP)
    assert completions == [script[1:-1]] * 2
    trainer.use_vllm = True
    trainer.vllm_generation = SimpleNamespace(generation_kwargs={"stop_token_ids": [7]})
    ends = trainer._end_responses_as_the_template().token_ids
    assert trainer.vllm_generation.generation_kwargs == {"stop_token_ids": sorted([7, *ends])}
    assert trainer._tokenizer.convert_ids_to_tokens(list(ends)) == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize(("method", "settings"), CASES)
def test_the_same_rollouts_have_cepos_own_advantages(
    method: str, settings: dict[str, Any], own: tuple[Trainer, Rollouts], tmp_path: Path
) -> None:
    trainer, rollouts = own
    expected = own_advantages(trainer, rollouts, method, settings)
    assert expected.any(), "the rollouts must teach something"
    rows = [row_of(problem.text, list(problem.images), problem.ground_truth) for problem in rollouts.problems]
    responses = [list(generation.response_ids) for generation in rollouts.generations]
    trls_trainer = trl_trainer(rows, tmp_path, method=method, settings=settings)
    advantages = advantages_of(with_canned(trls_trainer, responses), rows)
    rounding = rounding_of_advantages(trainer, rollouts, method, settings)
    tolerance = max(1e-5, ORDERS * rounding)
    assert tolerance < SMALLEST_ERROR.get(method, 1e-4), "a small error must be seen"
    torch.testing.assert_close(advantages, expected, rtol=0, atol=tolerance)
    if trls_trainer.estimator.views:
        logged = list(trls_trainer._metrics["train"])
        assert any(name.startswith("references/") for name in logged)
        assert any(name.startswith(("evidence/", "perception/")) for name in logged)


def test_every_method_is_compared_or_refused() -> None:
    assert {*REFUSED, BEST_ALONE, *(name for name, _ in CASES)} == set(available_estimators())


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_that_needs_what_trl_lacks_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"method {method} needs {REFUSED[method]}, which TRL lacks"):
        trl_trainer([], tmp_path, method=method)


def test_three_steps_with_images_learn_and_log_metrics(tmp_path: Path) -> None:
    """Each step has one rollout batch, so that lambda falls from step to step."""
    trainer = trl_trainer(rows_of_the_world(8), tmp_path, method="cepo", arguments={"num_generations": 8})
    initial_weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    trained_weights = dict(trainer.model.named_parameters())
    assert any(not torch.equal(weight, trained_weights[name]) for name, weight in initial_weights.items())
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(math.isfinite(entry["grad_norm"]) for entry in steps)
    assert [entry["evidence/lambda"] for entry in steps] == pytest.approx([0.5, 0.48, 0.46])


def rows_of_the_world(number: int) -> list[dict[str, Any]]:
    from cepo.microgeo.world import SHAPES

    rows: list[dict[str, Any]] = []
    for index in range(number):
        problem = SHAPES.generate(0, index, stream="train")
        question = f"{problem.question} Answer in \\boxed{{}}."
        rows.append(row_of(question, [SHAPES.draw(problem)], problem.answer))
    return rows


def responses_to(trainer: Any, rows: list[dict[str, Any]], texts: list[str]) -> list[list[int]]:
    """The same four responses to each row; `{}` in a text becomes the row's right answer."""
    said = [text.replace("{}", f"{{{row['answer']}}}") for row in rows for text in texts]
    return [[*trainer._tokenizer(text)["input_ids"], trainer._tokenizer.eos_token_id] for text in said]


FOUR = [r"so \boxed{}", r"\boxed{1}", "it is nothing", r"then \boxed{}"]


def test_a_row_without_an_image_has_grpos_advantages_from_visual(tmp_path: Path) -> None:
    from cepo.integrations.adapter import Hint, Row

    rows = rows_of_the_world(1)
    visual = trl_trainer(rows, tmp_path, method="visual")
    responses = responses_to(visual, rows, FOUR)
    advantages = advantages_of(with_canned(visual, responses), rows)
    for row, response in zip(advantages, responses, strict=True):
        assert len(row[: len(response)].unique()) > 1, "with an image, tokens differ"

    rows[0]["images"] = []
    visual_of_text = trl_trainer(rows, tmp_path, method="visual")
    grpo = trl_trainer(rows, tmp_path, method="grpo")
    without_image = advantages_of(with_canned(visual_of_text, responses), rows)
    assert torch.equal(without_image, advantages_of(with_canned(grpo, responses), rows))

    # Each row of a mixed batch decides for itself.
    with_images = Row((), [], "1", None, True)
    without_images = Row((), [], "1", None, False)
    placed = visual._credit._placed
    assert placed(ImageReference(), with_images) == Hint()
    assert placed(ImageReference(), without_images) is None
    with pytest.raises(ConfigError, match=r"masks_images = True, and train it with cepo train"):
        placed(ImageReference(masked=0.5), with_images)
    with pytest.raises(ConfigError, match=r"reads_other_prompts = True, and train it with cepo train"):
        placed(PromptReference(), with_images)


def test_grpo_passk_teaches_the_single_right_rollout(tmp_path: Path) -> None:
    rows = rows_of_the_world(1)
    trainer = trl_trainer(rows, tmp_path, method=BEST_ALONE)
    responses = responses_to(trainer, rows, [r"\boxed{1}", r"so \boxed{}", "it is nothing", r"\boxed{0}"])
    advantages = advantages_of(with_canned(trainer, responses), rows)
    expected = torch.zeros_like(advantages)
    expected[1, : len(responses[1])] = 1 / (0.5 + 1e-6)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)


@A_PROCESS
def test_two_processes_compute_the_advantages_of_one(tmp_path: Path) -> None:
    rows = rows_of_the_world(1)
    alone = trl_trainer(rows, tmp_path, method="cepo", arguments={"per_device_train_batch_size": 4})
    responses = responses_to(alone, rows, FOUR)
    expected = advantages_of(with_canned(alone, responses), rows)
    script = tmp_path / "rank.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]\n"
        "from test_trl import share_of_a_group\n"
        f"share_of_a_group({responses!r}, {str(tmp_path)!r})\n",
        encoding="utf-8",
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        part = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(part, expected[2 * rank : 2 * rank + 2, : part.shape[1]], rtol=0, atol=1e-5)
        assert not expected[2 * rank : 2 * rank + 2, part.shape[1] :].any()


def share_of_a_group(responses: list[list[int]], folder: str) -> None:
    """What each of two processes does."""
    rows = rows_of_the_world(1)
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    trainer = trl_trainer(rows, Path(folder), method="cepo", arguments=arguments)
    first = 2 * trainer.accelerator.process_index
    with_canned(trainer, responses[first : first + 2])
    output = trainer._generate_and_score_completions(rows * 2)
    torch.save(output["advantages"], f"{folder}/rank{trainer.accelerator.process_index}.pt")


def test_columns_and_rewards_that_are_missing_are_named(tmp_path: Path) -> None:
    rows = rows_of_the_world(1)
    trainer = trl_trainer(rows, tmp_path, ground_truth="gold")
    with_canned(trainer, responses_to(trainer, rows, FOUR))
    with pytest.raises(DataError, match="no column 'gold'"):
        advantages_of(trainer, rows)
    with pytest.raises(ConfigError, match="correct_by 'right' is not among of_completions"):
        trl_trainer(rows, tmp_path, correct_by="right")
    rows[0]["answer"] = ""
    with pytest.raises(DataError, match="column 'answer' of a row is empty"):
        advantages_of(with_canned(trl_trainer(rows, tmp_path), responses_to(trainer, rows, FOUR)), rows)


@pytest.mark.parametrize("method", ["grpo", "cepo"])
def test_rollouts_without_a_reward_teach_nothing_as_in_trl(method: str, tmp_path: Path) -> None:
    """The second and third of four have none: the others are 1 and 1 by the verifier, and 1 and 0 where it is inverted."""

    def some(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
        scores = of_completions(completions, answer)
        return [scores[0], None, None, 1.0 - scores[3]]

    def none(completions: list[Any], **_: Any) -> list[None]:
        return [None] * len(completions)

    rows = rows_of_the_world(1)
    trainer = trl_trainer(rows, tmp_path, method=method, reward_funcs=some)
    responses = responses_to(trainer, rows, FOUR)
    advantages = advantages_of(with_canned(trainer, responses), rows)
    assert not advantages[[1, 2]].any()
    assert advantages[0, 0] > 0
    assert advantages[3, 0] < 0
    of_trl = super(type(trainer), trainer)._generate_and_score_completions(rows * GROUP)["advantages"]
    assert torch.equal(of_trl.sign(), advantages[:, 0].sign())

    unrewarded = trl_trainer(rows, tmp_path, method=method, reward_funcs=none)
    assert not advantages_of(with_canned(unrewarded, responses), rows).any()


def test_answers_in_lists_reach_teachers_as_text(tmp_path: Path) -> None:
    """A list of one answer is that answer; of several, their JSON text."""
    (row,) = rows_of_the_world(1)
    for answer, text_of_answer in ((["24"], "24"), (["24", "1/2"], '["24", "1/2"]')):
        rows = [row | {"answer": answer}]
        trainer = trl_trainer(rows, tmp_path, method="cepo", reward_funcs=lambda completions, **_: [1.0, 0.0, 0.0, 1.0])
        responses = [[*trainer._tokenizer(text)["input_ids"]] for text in (r"\boxed{1}", "2", "3", "4")]
        with_canned(trainer, responses)
        seen = []
        choose = trainer.estimator.references

        def noted(group: Any, seen: list[Any] = seen, choose: Any = choose) -> Any:
            seen.append(group.ground_truth)
            return choose(group)

        trainer.estimator.references = noted
        advantages_of(trainer, rows)
        assert seen == [text_of_answer]


def test_a_teacher_of_other_weights_scores_in_trl(tmp_path: Path) -> None:
    """The policy's own weights as a model give its bits, halved ones others; wrong responses and the answer are shown."""
    from safetensors.torch import load_file, save_file

    teacher_folder = shutil.copytree(ASSETS, tmp_path / "other")
    weights = load_file(teacher_folder / "model.safetensors")
    (norm,) = [name for name in weights if name.endswith("language_model.norm.weight")]
    weights[norm] = weights[norm] / 2
    save_file(weights, teacher_folder / "model.safetensors", metadata={"format": "pt"})
    rows = rows_of_the_world(1)

    def advantages_under(**teacher: str) -> Tensor:
        trainer = trl_trainer(rows, tmp_path, method="cepo", settings={"teacher": teacher})
        responses = responses_to(trainer, rows, FOUR)
        return advantages_of(with_canned(trainer, responses), rows)

    of_policys_weights = advantages_under()
    of_same_weights = advantages_under(model_path=str(ASSETS))
    of_other_weights = advantages_under(model_path=str(teacher_folder))
    assert torch.equal(of_same_weights, of_policys_weights)
    assert not torch.allclose(of_other_weights, of_policys_weights)
    assert torch.equal(of_other_weights.sign(), of_policys_weights.sign())


EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"


def test_the_example_differs_from_a_script_of_trl_in_two_lines() -> None:
    comments = EXAMPLE.read_text(encoding="utf-8").split("# ")[1:]
    changes = [comment for comment in comments if "was:" in comment]
    assert [change[:2] for change in changes] == ["1.", "2."]


@A_PROCESS
def test_the_example_trains_a_step(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "evidence/lambda" in done.stdout
