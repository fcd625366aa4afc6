"""Each example and notebook under examples/ runs, from a folder that is not the repository's."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_files import cases
from factories import group, rollout, same_bits, token_batch
from isolation import restored_process
from PIL import Image
from torch import Tensor

from cepo.algorithms import build_estimator, load_plugin
from cepo.config import check_config, load_config
from cepo.errors import ConfigError
from cepo.losses import PolicyTokens, build_loss
from cepo.metrics import results
from cepo.microgeo.figures import draw_figure
from cepo.microgeo.problems import generate_problem
from cepo.microgeo.world import ASSETS, split_problems, write_problems
from cepo.rewards.contract import load_reward_function
from cepo.run_folder.trace import read_rollouts
from cepo.train import train

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
METHOD_FILE = EXAMPLES / "custom_method" / "my_method.py"
LOSS_FILE = EXAMPLES / "custom_loss" / "my_loss.py"
METHOD_FILES = {
    "my_method": METHOD_FILE,
    "visible": EXAMPLES / "visible_method" / "visible.py",
    "low_probability_control": EXAMPLES / "low_probability_control" / "control.py",
}
TRAINED = (
    "custom_loss/my_loss.yaml",
    "custom_method/my_method.yaml",
    "visible_method/visible.yaml",
    "low_probability_control/control.yaml",
    "reward_function/dapo.yaml",
    "custom_dataset/custom_dataset.yaml",
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def trained(example: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a step of 4 prompts x 4 responses with the embedded model."""
    arguments = [
        f"config=examples/{example}",
        f"worker.actor.model.model_path={ASSETS}",
        "worker.actor.global_batch_size=4",
        "worker.rollout.name=transformers",
        "worker.rollout.n=4",
        "data.rollout_batch_size=4",
        "trainer.max_steps=1",
        "trainer.val_before_train=false",
        "trainer.logger=[file]",
        f"trainer.save_checkpoint_path={folder / 'run'}",
    ]
    if "custom_dataset" not in example:
        problems, _ = split_problems(0, 8, 1)
        write_problems(folder / "train.parquet", problems)
        arguments += [f"data.train_files={folder / 'train.parquet'}", "data.val_files=null"]
    config = load_config([*arguments, *overrides])
    check_config(config)
    train(config)
    assert (folder / "run" / "global_step_1").is_dir()
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("example", TRAINED)
def test_an_examples_file_passes_the_checks_from_any_folder(example: str, elsewhere: Path) -> None:
    config = load_config([f"config=examples/{example}"])
    plan = check_config(config)
    assert any(line.startswith("samples per step: ") for line in plan)
    assert str(elsewhere) not in f"{config.trainer.plugins} {config.data} {config.worker.reward}"


@pytest.mark.usefixtures("elsewhere")
def test_a_local_dataset_keeps_its_split_and_a_hub_name_stays() -> None:
    base_file = "config=configs/microgeo/base.yaml"
    shipped = load_config([base_file, "data.train_files=examples/custom_dataset/train.jsonl@train"]).data.train_files
    assert shipped == f"{EXAMPLES / 'custom_dataset' / 'train.jsonl'}@train"
    for name in ("hiyouga/geometry3k@train", "examples/nothing@train", "microgeo:train"):
        assert load_config([base_file, f"data.train_files={name}"]).data.train_files == name


def test_every_example_with_a_yaml_file_is_trained_here() -> None:
    """The judge's needs a server, which tests/rewards/test_rewards_with_eyes.py starts; the last test here is SFT's.

    That of a model with eyes is trained in test_eyes.py.
    """
    configurations = {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.yaml")}
    assert configurations == {*TRAINED, "reward_function/judged.yaml", "sft_first/after_sft.yaml", "eyes/eyes.yaml"}


@pytest.mark.heavy
def test_the_custom_method_trains(elsewhere: Path) -> None:
    [row] = trained("custom_method/my_method.yaml", elsewhere)
    assert 0 < row["work/teacher_rows"] <= 16 * (1 - row["reward/correct"])
    assert row["actor/grad_norm"] > 0
    assert 0.7 <= row["blame/weight_mean"] <= 1.3


@pytest.mark.heavy
def test_the_custom_loss_trains_and_reports_its_metrics(elsewhere: Path) -> None:
    """Of two updates the first starts at ratio 1, so the mean distance is half that of the second."""
    [row] = trained("custom_loss/my_loss.yaml", elsewhere, "worker.actor.optim.lr=1e-2")
    assert row["actor/grad_norm"] > 0
    assert row["my_loss/distance"] > 0
    assert 0 <= row["my_loss/outside_fraction"] <= 0.5
    assert "actor/pg_clipfrac_higher" not in row


def test_the_custom_loss_pulls_back_a_ratio_beyond_its_radius() -> None:
    """A = 2 and radius 1/4: the loss is -2 rho + 4 (rho - 1)^2, with the derivative rho (-2 + 8 (rho - 1))."""
    load_plugin(LOSS_FILE)
    log_probs = torch.tensor([[1.0, 1.25, 1.5]]).log().requires_grad_()
    tokens = PolicyTokens(
        log_probs=log_probs,
        old_log_probs=torch.zeros(1, 3),
        advantages=torch.full((1, 3), 2.0),
        response_mask=torch.ones(1, 3, dtype=torch.bool),
    )
    losses = build_loss("my_loss", {"radius": 0.25}).token_losses(tokens)
    assert losses[0].tolist() == pytest.approx([-2.0, -2.25, -2.0])
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert gradient[0].tolist() == pytest.approx([-2.0, 0.0, 3.0], abs=1e-6)
    assert len(LOSS_FILE.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.heavy
def test_the_method_of_the_image_asks_about_every_live_row(elsewhere: Path) -> None:
    """A step of the tiny model, which reads every prompt twice: with the image, and without it behind one more line."""
    [row] = trained("visible_method/visible.yaml", elsewhere)
    assert row["work/teacher_rows"] == 16 * row["work/scored_fraction"] > 0
    assert row["actor/grad_norm"] > 0


@pytest.mark.heavy
def test_the_custom_reward_trains_and_charges_for_length(elsewhere: Path) -> None:
    short = "worker.reward.reward_function_kwargs.overlong_buffer_length=64"
    [row] = trained("reward_function/dapo.yaml", elsewhere, short)
    length = row["response_length/mean"]
    assert row["reward/overlong"] == pytest.approx(-length / 64, abs=1e-6)
    assert row["reward/mean"] == pytest.approx(row["reward/accuracy"] - length / 64, abs=1e-6)
    assert row["reward/correct"] == row["reward/accuracy_normalized"] == (row["reward/accuracy"] + 1) / 2
    assert row["reward/num_raised"] == 0
    assert row["actor/grad_norm"] > 0


@pytest.mark.heavy
def test_the_custom_dataset_trains(elsewhere: Path) -> None:
    """Its solutions are the references, and it validates on 4 rows."""
    rows = trained("custom_dataset/custom_dataset.yaml", elsewhere, "trainer.val_freq=1")
    [step] = [row for row in rows if "actor/grad_norm" in row]
    assert step["distillation/demonstrated_rollouts"] == 1
    assert step["distillation/divergence"] > 0
    assert any("val/accuracy" in row for row in rows)
    recorded = read_rollouts(elsewhere / "run")
    references: set[str] = set()
    for prompt_group in recorded:
        for recorded_rollout in prompt_group.rollouts:
            references.update(recorded_rollout.references.values())
    lines = (EXAMPLES / "custom_dataset" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = {json.loads(line)["solution"] for line in lines}
    assert references & solutions


@pytest.mark.parametrize("name", METHOD_FILES)
def test_a_method_of_the_examples_keeps_the_contract(name: str) -> None:
    contract = runpy.run_path(str(REPOSITORY / "tests" / "contracts" / "test_estimators.py"))
    parameters = {
        test: set(inspect.signature(function).parameters)
        for test, function in contract.items()
        if test.startswith("test_")
    }
    tests = [test for test, names in parameters.items() if {"name"} <= names <= {"name", "step"}]
    assert len(tests) >= 10
    load_plugin(METHOD_FILES[name])
    for test in tests:
        contract[test](name, **({"step": 7} if "step" in parameters[test] else {}))


@pytest.mark.parametrize("name", METHOD_FILES)
def test_a_method_of_the_examples_has_at_most_40_lines(name: str) -> None:
    assert len(METHOD_FILES[name].read_text(encoding="utf-8").splitlines()) <= 40


def test_a_token_that_the_image_explains_counts_more() -> None:
    """A = 0.5 / (sqrt(0.5) + 1e-6); delta = log 2 is clipped at 1.3 for A > 0, and exp(-log 2) at 0.7 for A < 0."""
    load_plugin(METHOD_FILES["visible"])
    old = -torch.ones(2, 1)
    views = {"blind": old - math.log(2)}
    batch = token_batch([1.0, 0.0], [0, 0], lengths=[1, 1], old=old, views=views)
    plain = 0.5 / (math.sqrt(0.5) + 1e-6)
    visible = build_estimator("visible").signal(batch, step=0)
    expected = torch.tensor([[1.3 * plain], [-0.7 * plain]])
    torch.testing.assert_close(visible.advantages, expected)
    without_radius = build_estimator("visible", {"weight": {"clip_radius": 0.0}}).signal(batch, step=0)
    grpo = build_estimator("grpo").signal(batch, step=0)
    assert same_bits(without_radius.advantages, grpo.advantages)


def test_the_control_pushes_down_a_fifth_of_a_responses_tokens() -> None:
    """Of 5 tokens the rarest one, of 6 the two rarest; rewards are not read."""
    load_plugin(METHOD_FILES["low_probability_control"])
    old = torch.tensor([[-1.0, -3.0, -2.0, -0.5, -0.1, 0.0], [-4.0, -1.0, -5.0, -0.5, -0.1, -0.2]])
    batch = token_batch([1.0, 1.0], [0, 0], lengths=[5, 6], old=old, views={})
    signal = build_estimator("low_probability_control").signal(batch, step=0)
    assert signal.advantages.tolist() == [[0.0, -0.5, 0.0, 0.0, 0.0, 0.0], [-0.5, 0.0, -0.5, 0.0, 0.0, 0.0]]
    assert results(signal.metrics)["control/log_prob_of_rare_tokens"] == -4.0


def signal_of(blamed: list[float], **settings: Any) -> Tensor:
    """Advantages of a right and a wrong response of 2 tokens each, whose student log-probs are -1."""
    views = {"blamed": torch.tensor([[-1.0, -1.0], blamed])}
    batch = token_batch([1.0, 0.0], [0, 0], lengths=[2, 2], old=-torch.ones(2, 2), views=views)
    return build_estimator("my_method", settings).signal(batch, step=0).advantages


def test_a_token_likelier_under_the_wrong_answer_is_blamed_more() -> None:
    """A token twice as likely is blamed 1.3-fold, and a rarer one 0.7-fold."""
    load_plugin(METHOD_FILE)
    plain = 0.5 / (math.sqrt(0.5) + 1e-6)
    advantages = signal_of([-1.0 + math.log(2), -1.0 - math.log(2)])
    torch.testing.assert_close(advantages, torch.tensor([[plain, plain], [-1.3 * plain, -0.7 * plain]]))
    within = signal_of([-1.0 + math.log(1.1), -1.0])
    torch.testing.assert_close(within[1], torch.tensor([-1.1 * plain, -plain]))


def test_radius_0_or_no_reference_gives_grpo_bit_for_bit() -> None:
    load_plugin(METHOD_FILE)
    batch = token_batch([1.0, 0.0], [0, 0], lengths=[2, 2], old=-torch.ones(2, 2), views={})
    plain = build_estimator("grpo").signal(batch, step=0).advantages
    assert same_bits(signal_of([-5.0, 0.0], clip_radius=0.0), plain)
    assert same_bits(signal_of([-1.0, -1.0]), plain)


def test_only_the_wrong_answer_reads_itself() -> None:
    load_plugin(METHOD_FILE)
    wrong = [rollout(1, 0.0, "40"), rollout(2, 0.0, None), rollout(3, 0.0, "70.0", equal=True)]
    prompt_group = group(rollout(0, 1.0, "70", correct=True), *wrong)
    references = build_estimator("my_method").references(prompt_group)["blamed"]
    texts_and_sources = [reference and (reference.text, reference.source_index) for reference in references]
    assert texts_and_sources == [None, ("40", 1), None, None]


def scorer(name: str, **settings: Any) -> Callable[..., list[dict[str, float]]]:
    return load_reward_function(f"{EXAMPLES}/reward_function/{name}.py:compute_score", settings).score


def sample(response: str, length: int = 10) -> dict[str, Any]:
    return {"response": response, "response_length": length, "ground_truth": "28", "family": "angle"}


@pytest.mark.parametrize(("length", "overlong"), [(48, 0.0), (52, -0.25), (64, -1.0), (70, -1.0)])
def test_the_last_16_of_64_tokens_cost_a_sixteenth_each(length: int, overlong: float) -> None:
    buffer = {"max_response_length": 64, "overlong_buffer_length": 16}
    right, wrong = scorer("dapo", **buffer)([sample(r"\boxed{28}", length), sample(r"\boxed{29}", length)])
    assert right == {"overall": 1 + overlong, "accuracy": 1.0, "overlong": overlong, "accuracy_normalized": 1.0}
    assert wrong == {"overall": -1 + overlong, "accuracy": -1.0, "overlong": overlong, "accuracy_normalized": 0.0}
    doubled = scorer("dapo", **buffer, overlong_penalty_factor=2.0)
    assert doubled([sample(r"\boxed{28}", length)])[0]["overall"] == 1 + 2 * overlong


def test_a_buffer_longer_than_the_limit_is_refused() -> None:
    score = scorer("dapo", max_response_length=64, overlong_buffer_length=65)
    with pytest.raises(ConfigError, match="overlong_buffer_length is 65 with max_response_length 64"):
        score([sample("")])


@pytest.mark.parametrize(
    ("reward", "response", "accuracy", "form"),
    cases(__file__, "answer_and_form.yaml"),
)
def test_the_r1v_and_math_rewards_weigh_answer_and_form(
    reward: str, response: str, accuracy: float, form: float
) -> None:
    """One half each, or 0.9 and 0.1, unless `format_weight` says otherwise."""
    usual_weight = {"r1v": 0.5, "math": 0.1}[reward]
    (score,) = scorer(reward)([sample(response)])
    assert score == {
        "overall": (1 - usual_weight) * accuracy + usual_weight * form,
        "accuracy": accuracy,
        "format": form,
    }
    (score,) = scorer(reward, format_weight=0.25)([sample(response)])
    assert score["overall"] == 0.75 * accuracy + 0.25 * form


@pytest.mark.parametrize(
    ("answer", "prompt", "columns", "accuracy"),
    cases(__file__, "rounded_answers.yaml"),
)
def test_the_rounded_reward_reads_the_prompt_and_a_column(
    answer: str, prompt: str, columns: dict[str, float], accuracy: float
) -> None:
    graded = sample(rf"\boxed{{{answer}}}") | {"ground_truth": "34.6", "prompt": prompt} | columns
    assert scorer("rounded")([graded])[0]["accuracy"] == accuracy
    if "slack" in columns:
        assert scorer("rounded", tolerance_key="slack")([graded])[0]["accuracy"] == 1.0


def test_the_example_datasets_20_rows_are_embedded_problems() -> None:
    folder = EXAMPLES / "custom_dataset"
    for name, count in (("train", 16), ("held_out", 4)):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").open(encoding="utf-8")]
        assert len(rows) == count
        for index, row in enumerate(rows):
            problem = generate_problem(0, index, stream=f"example-{name}")
            assert (row["question"], row["answer"]) == (f"<image>{problem.question}", problem.answer)
            assert row["solution"].endswith(f"\\boxed{{{problem.answer}}}")
            (picture,) = row["figures"]
            assert Image.open(folder / picture).convert("RGB").tobytes() == draw_figure(problem).tobytes()


def cells(notebook: Path) -> list[dict[str, Any]]:
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def executed(notebook: Path) -> dict[str, Any]:
    """The names that the cells define; plain Python, without magic commands, so that no kernel is needed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code_cells = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    with restored_process():
        for number, cell in enumerate(code_cells, start=1):
            code = compile("".join(cell["source"]), f"{notebook.name}, code cell {number}", "exec")
            exec(code, names)
    return names


def test_three_notebooks_have_the_outputs_of_their_code() -> None:
    """Made by scripts/run_notebooks.py: every cell was run in order, none failed, and no path of a machine is in them."""
    assert [notebook.name for notebook in NOTEBOOKS] == ["first_run.ipynb", "look.ipynb", "own_parts.ipynb"]
    for notebook in NOTEBOOKS:
        text = notebook.read_text(encoding="utf-8")
        assert len(text) < 60_000, notebook.name
        assert not re.search(r"/(tmp|home|root|work|var|Users)/", text), notebook.name
        code_cells = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code_cells] == list(range(1, len(code_cells) + 1))
        kinds = {output["output_type"] for cell in code_cells for output in cell["outputs"]}
        assert kinds <= {"execute_result", "display_data"}, notebook.name
        digest = hashlib.sha256()
        for cell in code_cells:
            digest.update("".join(cell["source"]).encode() + b"\0")
        recorded = json.loads(text)["metadata"]["cepo"]["digest_of_code"]
        assert recorded == digest.hexdigest(), f"run python3 scripts/run_notebooks.py {notebook.name}"
    assert "✗ Wrong response" in NOTEBOOKS[0].read_text(encoding="utf-8"), "the view of a run"


@pytest.mark.heavy
def test_the_first_run_shows_the_credit_of_tokens(elsewhere: Path) -> None:
    names = executed(NOTEBOOKS[0])
    assert list(names["correct"].shares) == list(names["run"].metrics["reward/correct"])
    assert len(names["correct"].shares) == 4
    credit = names["credit"]
    assert len(credit) > 0
    assert list(credit) == ["tokens", "delta", "weight", "token_advantages"]
    assert (elsewhere / "first_run" / "report.html").is_file()


@pytest.mark.heavy
def test_rollouts_of_another_trainer_are_looked_at(elsewhere: Path) -> None:
    names = executed(NOTEBOOKS[1])
    assert names["scored"][0].startswith("verl's rollout_data_dir: 24 rollouts in 6 files")
    assert "polyline" in names["Picture"]("pair.svg")._repr_svg_()
    assert (elsewhere / "look.html").is_file()


@pytest.mark.heavy
def test_own_data_reward_and_method_train(elsewhere: Path) -> None:
    """The advantage of each response grows from its first token to its last."""
    names = executed(NOTEBOOKS[2])
    rollouts = names["run"].rollouts
    learning = [
        advantages for advantages in rollouts["token_advantages"] if len(advantages) > 1 and advantages[-1] != 0
    ]
    assert learning, "all groups had equal rewards"
    assert all(abs(advantages[0]) < abs(advantages[-1]) for advantages in learning)
    assert (elsewhere / "own_parts_model" / "config.json").is_file()


@pytest.mark.heavy
def test_a_fine_tuned_model_is_trained_further(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTTrainer's model and the problems beside it are what cepo reads, with a step of each."""
    pytest.importorskip("trl", reason="TRL is not installed: pip install -e '.[trl]'")
    script = EXAMPLES / "sft_first" / "sft.py"
    monkeypatch.setattr("sys.argv", [str(script), "--steps", "1", "--rows", "8"])
    with restored_process():
        runpy.run_path(str(script), run_name="__main__")
    config = load_config(
        [
            "config=examples/sft_first/after_sft.yaml",
            "data.rollout_batch_size=2",
            "worker.rollout.name=transformers",
            "worker.rollout.n=2",
            "trainer.max_steps=1",
            "trainer.val_before_train=false",
            "trainer.val_freq=-1",
            "trainer.logger=[file]",
        ]
    )
    run = train(config)
    assert run.last_step == 1
    assert math.isfinite(run.series("reward/mean")[1][0])
    first_line, *_ = (elsewhere / "sft-first" / "train.jsonl").read_text().splitlines()
    assert json.loads(first_line)["answer"].isdecimal()
