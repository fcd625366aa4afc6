"""Rollouts as other trainers' code writes them: what is recognised, how it is read, and what is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
from json_files import write_lines
from run_folders import group, rollout, write_run

from cepo.errors import DataError
from cepo.look import reading
from cepo.look.reading import read_rollouts_of
from cepo.report.responses import groups_of


def message(role: str, text: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


def trl_table(step: int, answers: str, rewards: Sequence[float | None]) -> pandas.DataFrame:
    """The columns of TRL's GRPOTrainer.log, with one reward function and a column that a user logs."""
    return pandas.DataFrame(
        {
            "step": step,
            "prompt": [message("user", "What is 2 + 2?") for _ in answers],
            "completion": [message("assistant", f"It is {answer}.") for answer in answers],
            "accuracy_reward": rewards,
            "note": ["seen"] * len(answers),
            "advantage": [0.5] * len(answers),
        }
    )


def write_trl(folder: Path, tables: Sequence[pandas.DataFrame]) -> Path:
    (folder / "completions").mkdir(parents=True)
    for number, table in enumerate(tables, start=1):
        table.to_parquet(folder / "completions" / f"completions_{number:05d}.parquet")
    return folder


def test_trls_completions_are_read_with_their_step_and_verdict(tmp_path: Path) -> None:
    """A reward function that returned None leaves no reward, and such a response is left out."""
    write_trl(tmp_path, [trl_table(1, "4545", [1.0, 0.0, 1.0, None]), trl_table(2, "5454", [0.0, 1.0, 0.0, 1.0])])
    seen = read_rollouts_of(tmp_path)
    assert seen.form == "TRL's completions"
    responses = [(response.step, response.reward, response.right) for response in seen.responses]
    assert responses[:3] == [(1, 1.0, True), (1, 0.0, False), (1, 1.0, True)]
    assert len(seen.responses) == 7
    assert seen.responses[0].prompt == "What is 2 + 2?"
    assert seen.responses[0].parts == {"accuracy_reward": 1.0}
    assert "images" in seen.lacks


def test_the_reward_function_of_answers_tells_the_verdict(tmp_path: Path) -> None:
    """TRL's accuracy_reward and think_format_reward: a wrong answer in the right format has 1 of 2, and is wrong."""
    table = trl_table(1, "4545", [1.0, 0.0, 1.0, 0.0]).assign(think_format_reward=[1.0, 1.0, 0.0, 0.0])
    seen = read_rollouts_of(write_trl(tmp_path, [table]))
    assert [(response.reward, response.right) for response in seen.responses] == [
        (2.0, True),
        (1.0, False),
        (1.0, True),
        (0.0, False),
    ]


def test_a_number_that_a_reward_function_logs_is_no_reward(tmp_path: Path) -> None:
    """TRL's `log_extra` adds columns of a user's own; its history names the reward functions by their means."""
    folder = write_trl(tmp_path, [trl_table(1, "45", [1.0, 0.0]).assign(seconds=[30.0, 20.0])])
    history = [{"step": 1, "entropy": 0.5, "rewards/accuracy_reward/mean": 0.5, "rewards/accuracy_reward/std": 0.7}]
    (folder / "checkpoint-1").mkdir()
    state = folder / "checkpoint-1" / "trainer_state.json"
    state.write_text(json.dumps({"log_history": history}), encoding="utf-8")
    seen = read_rollouts_of(folder)
    assert [response.reward for response in seen.responses] == [1.0, 0.0]
    assert seen.metrics["rollout/entropy"] == {1: 0.5}


def test_a_batch_that_trl_logs_again_is_counted_once(tmp_path: Path) -> None:
    """With steps_per_generation above the accumulated steps, TRL writes the same responses after each optimizer step."""
    write_trl(tmp_path, [trl_table(1, "4545", [1.0, 0.0, 1.0, 0.0]), trl_table(2, "4545", [1.0, 0.0, 1.0, 0.0])])
    seen = read_rollouts_of(tmp_path)
    assert len(seen.responses) == 4
    assert "repeat the responses of the file before" in " ".join(seen.notes)


def test_problems_with_equal_texts_stay_two_groups(tmp_path: Path) -> None:
    """TRL strips images; of eight equal prompts in a row, four and four are groups if another prompt has four."""
    another_prompt = trl_table(1, "7878", [0.0] * 4).assign(prompt=[message("user", "Another?") for _ in range(4)])
    write_trl(tmp_path, [pandas.concat([trl_table(1, "45454545", [1.0, 0.0] * 4), another_prompt])])
    sizes = [len(prompt_group.responses) for prompt_group in groups_of(read_rollouts_of(tmp_path).responses)]
    assert sizes == [4, 4, 4]


def test_verls_balanced_rollouts_are_grouped_by_prompt(tmp_path: Path) -> None:
    """verl's _dump_generations: input, output, gts, score, step and the reward's extras, in the order of balanced batches."""
    prompts = ["system\nBe brief.\nuser\nOne?\nassistant\n", "system\nBe brief.\nuser\nTwo?\nassistant\n"]
    rows: list[dict[str, Any]] = []
    for number in range(6):
        row = {"input": prompts[number % 2], "output": f"r{number}", "gts": "1", "score": -1.0 + number % 3}
        rows.append(row | {"step": 10, "acc": number % 3 == 2})
    write_lines(tmp_path / "10.jsonl", rows)
    write_lines(tmp_path / "9.jsonl", [row | {"step": 9} for row in reversed(rows)])
    seen = read_rollouts_of(tmp_path)
    assert seen.form == "verl's rollout_data_dir"
    assert [response.step for response in seen.responses] == [9] * 6 + [10] * 6
    groups = groups_of(seen.responses)
    assert [len(prompt_group.responses) for prompt_group in groups] == [3] * 4
    assert {prompt_group.responses[0].prompt for prompt_group in groups} == {"One?", "Two?"}
    assert sum(prompt_group.num_right for prompt_group in groups) == 4
    assert seen.responses[0].ground_truth == "1"


def test_verls_own_keys_tell_prompts_of_equal_texts_apart(tmp_path: Path) -> None:
    """The `uid` of verl 0.9's synchronous trainer is prompt, rollout and output; rows of `pad` only fill the batch."""
    prompts = ["0f0e4a2b-5d1c-4f3e-9a77-1b2c3d4e5f60", "7c9e6679-7425-40de-944b-e07fc1f90ae7"]
    rows: list[dict[str, Any]] = []
    for prompt in prompts:
        for number in range(3):
            row = {"input": "user\nHow long is it?\nassistant\n", "output": f"It is {number}.", "gts": "1"}
            rows.append(row | {"score": number % 2, "step": 4, "uid": f"{prompt}_{number}_0"})
    rows.append({"input": "", "output": "", "gts": "1", "score": 0.0, "step": 4, "uid": f"pad{'0a' * 16}_0_0"})
    write_lines(tmp_path / "4.jsonl", rows)
    groups = groups_of(read_rollouts_of(tmp_path).responses)
    assert [len(prompt_group.responses) for prompt_group in groups] == [3, 3]
    assert not any(prompt_group.is_dead for prompt_group in groups)


def nemo_row(reward: float, gap: float, *, question: object = "One?", window: int = 8) -> dict[str, Any]:
    """A row by the rules of NeMo-RL's grpo_train: padded lists, and a last turn that its environment wrote.

    From github.com/NVIDIA-NeMo/RL, Apache-2.0, commit 7ea279ab of 2026-08-22: `log_data` in nemo_rl/algorithms/grpo.py, and
    `log_batched_dict_as_jsonl` in nemo_rl/utils/logger.py. A full `window` leaves no token for the environment.
    """
    mask = [0, 0, 1, 1, 1, 0, 0, 0][:window]
    if isinstance(question, str):
        question = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return {
        "content": [question, "It is 1.", "Environment: correct"],
        "rewards": reward,
        "input_lengths": min(7, window),
        "token_ids": [5, 6, 7, 8, 9, 3, 4, 0][:window],
        "token_loss_mask": mask,
        "sample_loss_mask": 1.0,
        "advantages": [0.5] * window,
        "generation_logprobs": [-1.0 * mark for mark in mask],
        "prev_logprobs": [(gap - 1.0) * mark for mark in mask],
        "idx": 0,
    }


def test_nemo_rls_rows_have_the_policys_turn_and_log_probs(tmp_path: Path) -> None:
    write_lines(tmp_path / "exp_001" / "train_data_step3.jsonl", [nemo_row(1.0, 0.25), nemo_row(0.0, -0.25)])
    seen = read_rollouts_of(tmp_path)
    assert seen.form == "NeMo-RL's training data"
    first = seen.responses[0]
    assert first.step == 3
    assert first.prompt == "One?"
    assert first.response == "It is 1."
    assert first.length == 3
    assert first.gap == 0.25
    assert first.surprise == 1.0
    assert len(groups_of(seen.responses)) == 1
    assert "log-probs" not in seen.lacks


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(nemo_row(1.0, 0.0, window=5), ("One?", "It is 1.", 1.0), id="a response that fills the window"),
        pytest.param(
            nemo_row(1.0, 0.0, question=[{"type": "image", "image": "<PIL.Image>"}, {"type": "text", "text": "One?"}]),
            ("One?", "It is 1.", 1.0),
            id="a prompt with an image",
        ),
        pytest.param(
            nemo_row(1.0, 0.0) | {"filtered_rewards": 0.0},
            ("One?", "It is 1.", 0.0),
            id="dynamic sampling, whose rewards are of other rows",
        ),
        pytest.param(
            {name: value for name, value in nemo_row(1.0, 0.0).items() if name != "token_loss_mask"},
            ("One?", "It is 1.", 1.0),
            id="an early release, which writes no mask",
        ),
    ],
)
def test_nemo_rls_special_rows(tmp_path: Path, row: Mapping[str, Any], expected: tuple[str, str, float]) -> None:
    write_lines(tmp_path / "train_data_step3.jsonl", [row])
    (response,) = read_rollouts_of(tmp_path).responses
    assert (response.prompt, response.response, response.reward) == expected


@pytest.mark.parametrize(
    "changes",
    [{"rewards": None}, {"content": ["", ""]}],
    ids=["distillation, which has no rewards", "NeMo Gym, whose rows have no texts"],
)
def test_rows_of_nemo_rl_without_rewards_or_texts_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_lines(tmp_path / "train_data_step3.jsonl", [nemo_row(1.0, 0.0) | changes])
    with pytest.raises(DataError, match="NeMo-RL's training data, but no response in it has a text and a reward"):
        read_rollouts_of(tmp_path)


def test_prime_rls_traces_are_read_along_their_last_branch(tmp_path: Path) -> None:
    """A trace is a tree of messages, of which the sampled ones are the policy's; one with errors is left out."""
    nodes = [
        {"parent": None, "sampled": False, "message": {"role": "user", "content": "One?"}},
        {"parent": 0, "sampled": True, "message": {"role": "assistant", "content": "dropped"}},
        {"parent": 0, "sampled": True, "message": {"role": "assistant", "content": "It is 1."}},
    ]
    traces = [
        {"nodes": nodes, "rewards": {"correct": 1.0, "style": 0.25}, "errors": None},
        {"nodes": nodes, "rewards": {"correct": 0.0}, "errors": ["timeout"]},
    ]
    write_lines(tmp_path / "rollouts" / "step_7" / "train_rollouts.jsonl", traces)
    seen = read_rollouts_of(tmp_path)
    (response,) = seen.responses
    assert seen.form == "prime-rl's rollouts"
    assert response.step == 7
    assert response.prompt == "One?"
    assert response.response == "It is 1."
    assert response.reward == 1.25
    assert response.right is True


def prime_episode(step: int, score: float, *, group: str, failed: bool = False) -> dict[str, Any]:
    """An episode by the rules of prime-rl's `FileMonitor.log_episodes`, which leaves out what is None.

    From github.com/PrimeIntellect-ai/prime-rl, Apache-2.0, commit 559b4477 of 2026-08-21, src/prime_rl/monitors/file.py, and
    `Episode` and `Trace` in verifiers/v1 of github.com/PrimeIntellect-ai/verifiers, MIT, commit a60a606e.
    """
    nodes = [
        {"message": {"role": "system", "content": "Be brief."}, "sampled": False, "token_ids": [1], "mask": [False]},
        {
            "parent": 0,
            "message": {"role": "user", "content": "One?"},
            "sampled": False,
            "token_ids": [2],
            "mask": [False],
        },
        {
            "parent": 1,
            "message": {"role": "assistant", "content": "It is 1.", "reasoning_content": "One is 1."},
            "sampled": True,
            "token_ids": [3, 4, 5],
            "mask": [False, True, True],
            "logprobs": [-0.5, -1.5],
        },
    ]
    trace = {
        "task": {"type": "Sums", "data": {"answer": "1"}},
        "agent": {"name": "solver", "trainable": True},
        "nodes": nodes,
        "calls": [{"node": 2, "finish_reason": "length"}],
        "rewards": {"correct_answer": {"score": score, "weight": 2.0}, "style": {"score": 1.0, "weight": 0.25}},
        "ok": True,
        "errors": [],
    }
    judge = trace | {"agent": {"name": "judge", "trainable": False}, "rewards": {}}
    run = {"type": "train", "id": "r", "work": {"type": "train", "step": step}}
    return {
        "group": {"id": group},
        "run": run,
        "ok": not failed,
        "errors": [],
        "traces": [] if failed else [trace, judge],
    }


def test_prime_rls_episodes_are_read_of_what_was_trained(tmp_path: Path) -> None:
    """Since July 2026 it writes train and eval, all and effective rollouts; in each the rewards have their weights."""
    for kind in ("train/all", "train/effective", "eval/effective"):
        for step in (2, 10):
            episodes = [prime_episode(step, score, group=group) for group in "ab" for score in (1.0, 0.0)]
            write_lines(tmp_path / "rollouts" / f"step_{step}" / kind / "traces.jsonl", episodes)
    with (tmp_path / "rollouts" / "step_2" / "train" / "effective" / "traces.jsonl").open("a") as file:
        file.write(json.dumps(prime_episode(2, 0.0, group="b", failed=True)) + "\n")
    seen = read_rollouts_of(tmp_path)
    assert seen.form == "prime-rl's rollouts"
    assert [response.step for response in seen.responses] == [2] * 4 + [10] * 4
    assert [response.reward for response in seen.responses[:4]] == [2.25, 0.25, 2.25, 0.25]
    assert [response.right for response in seen.responses[:2]] == [True, False]
    first = seen.responses[0]
    assert (first.prompt, first.response, first.ground_truth) == ("One?", "One is 1.\nIt is 1.", "1")
    assert (first.length, first.surprise, first.finished) == (2, 1.0, False)
    assert [len(of_prompt.responses) for of_prompt in groups_of(seen.responses)] == [2, 2, 2, 2]
    assert seen.notes == ["1 rows are left out: they have no response or no reward, failed, or fill a batch."]
    alone = read_rollouts_of(tmp_path / "rollouts" / "step_10" / "eval" / "effective" / "traces.jsonl")
    assert [response.step for response in alone.responses] == [10] * 4


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        pytest.param(
            [*message("system", "Be brief."), *message("user", "One?")], "One?", id="a system's and a user's turn"
        ),
        pytest.param(
            [*message("user", "One?"), *message("assistant", "1"), *message("user", "Two?")],
            "user\nOne?\nassistant\n1\nuser\nTwo?",
            id="turns of a conversation",
        ),
    ],
)
def test_the_question_of_a_conversation_is_the_users_turn(tmp_path: Path, prompt: object, shown: str) -> None:
    """The contrast's model would read the system's text, and both roles, as the user's own words."""
    write_lines(tmp_path / "1.jsonl", [{"prompt": prompt, "completion": message("assistant", "1"), "reward": 1.0}])
    (response,) = read_rollouts_of(tmp_path).responses
    assert response.prompt == shown


def test_easyr1s_log_of_generations_is_read_by_validation(tmp_path: Path) -> None:
    entry = "[prompt] user\nOne?\nassistant\n\n[output] It is\n[1].\n[ground_truth] 1\n[score] {}\n\n"
    (tmp_path / "generations.log").write_text(entry.format(0.0) + entry.format("1.0"), encoding="utf-8")
    seen = read_rollouts_of(tmp_path)
    assert seen.form == "EasyR1's generations"
    assert [(response.step, response.response, response.reward) for response in seen.responses] == [
        (1, "It is\n[1].", 0.0),
        (2, "It is\n[1].", 1.0),
    ]


def test_easyr1s_problems_with_equal_texts_are_of_one_validation(tmp_path: Path) -> None:
    """Two validations log the same three problems in one order; two of them have the same text and other images."""
    entry = "[prompt] {}\n[output] It is 1.\n[ground_truth] {}\n[score] 0.0\n\n"
    validation = entry.format("Find x.", 1) + entry.format("Find x.", 2) + entry.format("Find y.", 1)
    (tmp_path / "generations.log").write_text(2 * validation, encoding="utf-8")
    assert [response.step for response in read_rollouts_of(tmp_path).responses] == [1, 1, 1, 2, 2, 2]


def test_a_run_of_cepo_is_read_with_its_metrics_and_images(tmp_path: Path) -> None:
    groups = [group(1, [rollout(right=True), rollout(right=False)])]
    run = write_run(tmp_path / "run", [(1, {"reward/mean": 0.25})], groups=groups)
    seen = read_rollouts_of(run)
    assert seen.form == "a run of cepo"
    assert [response.right for response in seen.responses] == [True, False]
    assert seen.metrics["reward/mean"] == {1: 0.25}
    assert all(Path(response.images[0]).is_file() for response in seen.responses)
    assert seen.responses[0].length == 3


def test_an_image_outside_the_folder_is_left_out(tmp_path: Path) -> None:
    """A stranger's row must not bring another file of the reader onto a page that is then shown to others."""
    secret_image = tmp_path / "secret.png"
    own_image = tmp_path / "rollouts" / "own.png"
    own_image.parent.mkdir()
    for file in (secret_image, own_image):
        file.write_bytes(b"png")
    names = ["own.png", "../secret.png", str(secret_image), "none.png", "a\0.png", "a" * 5_000]
    row = {"prompt": "One?", "completion": "1", "reward": 1.0, "images": names}
    write_lines(tmp_path / "rollouts" / "rows.jsonl", [row])
    (response,) = read_rollouts_of(tmp_path / "rollouts").responses
    assert response.images == [str(own_image)]


@pytest.mark.parametrize("names", [("prompt", "completion", "reward"), ("problem", "response", "score")])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_plain_rows_are_read_by_either_names(tmp_path: Path, names: tuple[str, str, str], suffix: str) -> None:
    rows = [dict(zip(names, ("One?", f"It is {number}.", float(number)), strict=True)) for number in (0, 1)]
    file = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        write_lines(file, rows)
    else:
        pandas.DataFrame(rows).to_parquet(file)
    for place in (file, tmp_path):
        seen = read_rollouts_of(place)
        assert [response.right for response in seen.responses] == [False, True]


def plain(number: int, **columns: Any) -> dict[str, Any]:
    return {"prompt": "One?", "completion": f"It is {number}.", "reward": number % 2} | columns


def test_what_a_row_states_as_zero_is_not_taken_for_missing(tmp_path: Path) -> None:
    """Step 0 stands although the file's name has a 2; rows of group 0 are one group, though those of group 1 lie between."""
    rows = [plain(number, step=0, group_id=number // 2 % 2) for number in range(8)]
    responses = read_rollouts_of(write_lines(tmp_path / "run_2.jsonl", rows)).responses
    assert {response.step for response in responses} == {0}
    assert [len(prompt_group.responses) for prompt_group in groups_of(responses)] == [4, 4]


def test_rows_that_are_no_rollouts_are_counted(tmp_path: Path) -> None:
    """Of five rows, one has no reward, one a reward of NaN, and one no response; an empty response is one."""
    rows = [
        plain(0),
        plain(1, completion=""),
        plain(2, reward=None),
        plain(3, reward=float("nan")),
        plain(4, completion=None),
    ]
    seen = read_rollouts_of(write_lines(tmp_path / "rows.jsonl", rows))
    assert [response.response for response in seen.responses] == ["It is 0.", ""]
    assert seen.notes == ["3 rows are left out: they have no response or no reward, failed, or fill a batch."]


def test_a_last_line_without_its_line_feed_is_read(tmp_path: Path) -> None:
    """Unless it is incomplete, as that of a file that is being written."""
    lines = [json.dumps(plain(number)) for number in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert len(read_rollouts_of(tmp_path).responses) == 3
    (tmp_path / "rows.jsonl").write_text("\n".join(lines)[:-1], encoding="utf-8")
    assert len(read_rollouts_of(tmp_path).responses) == 2


def test_empty_lines_are_passed_over(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "One?", "completion": "1", "reward": 1.0})
    (tmp_path / "1.jsonl").write_text(f"\n{row}\n\r\n{row}\n\n", encoding="utf-8")
    assert len(read_rollouts_of(tmp_path).responses) == 2


def test_a_response_in_parts_is_read_whole(tmp_path: Path) -> None:
    """The parts of a turn are texts, or objects with a text."""
    rows = [plain(0, completion=["It ", {"type": "text", "text": "is 1."}], finished="yes")]
    (response,) = read_rollouts_of(write_lines(tmp_path / "rows.jsonl", rows)).responses
    assert response.response == "It is 1."
    assert response.finished is None, "a text is no truth value"


def test_a_link_brings_no_other_file_onto_a_page(tmp_path: Path) -> None:
    """A link into the folder is a name of its file; one that leads nowhere is no file; one that leads out is refused."""
    row = {"prompt": "What is 2 + 2?", "completion": "It is 4.", "reward": 1.0}
    secret = write_lines(tmp_path / "secret.jsonl", [row])
    folder = tmp_path / "rollouts"
    folder.mkdir()
    write_lines(folder / "1.jsonl", [row])
    (folder / "2.jsonl").symlink_to(folder / "gone.jsonl")
    assert len(read_rollouts_of(folder).responses) == 1
    (folder / "3.jsonl").symlink_to(secret)
    with pytest.raises(DataError, match="lies outside of"):
        read_rollouts_of(folder)
    assert len(read_rollouts_of(folder / "3.jsonl").responses) == 1  # which the user has named


def test_a_link_brings_no_other_metrics_onto_a_page(tmp_path: Path) -> None:
    folder = write_trl(tmp_path / "run", [trl_table(1, "45", [1.0, 0.0])])
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [{"step": 1, "entropy": 0.5}]}), encoding="utf-8")
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "trainer_state.json").symlink_to(state)
    with pytest.raises(DataError, match="lies outside of"):
        read_rollouts_of(folder)


def test_a_file_that_a_trainer_has_only_opened_is_passed_over(tmp_path: Path) -> None:
    write_lines(tmp_path / "1.jsonl", [])
    write_lines(tmp_path / "2.jsonl", [plain(0), plain(1)])
    assert len(read_rollouts_of(tmp_path).responses) == 2


def test_of_long_responses_fewer_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files of 10 rows of about 100 bytes: for 2,000 bytes, every second one."""
    monkeypatch.setattr(reading, "_MOST_BYTES", 2_000)
    for step in range(1, 5):
        write_lines(
            tmp_path / f"{step}.jsonl", [plain(step, completion="x" * 52 + str(number)) for number in range(10)]
        )
    seen = read_rollouts_of(tmp_path)
    assert "2 of 4 files were read" in seen.notes[0]


def test_a_larger_run_is_read_in_evenly_spread_files(tmp_path: Path) -> None:
    for step in range(1, 11):
        rows = [{"input": "One?", "output": f"{step}.{number}", "score": number % 2} for number in range(10)]
        write_lines(tmp_path / f"{step}.jsonl", rows)
    seen = read_rollouts_of(tmp_path, most=50)
    assert {response.step for response in seen.responses} == {1, 3, 5, 7, 9}
    assert "5 of 10 files were read" in seen.notes[0]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_large_file_is_read_from_its_beginning(tmp_path: Path, suffix: str) -> None:
    """Of 10,000 rows, for most = 2,500, the first 2,500."""
    file = tmp_path / f"rows{suffix}"
    rows = [{"prompt": f"Problem {k // 7}?", "completion": f"{k}", "reward": k % 7 % 2} for k in range(10_000)]
    if suffix == ".jsonl":
        write_lines(file, rows)
    else:
        pandas.DataFrame(rows).to_parquet(file)
    seen = read_rollouts_of(file, most=2_500)
    assert seen.notes == ["The first 2,500 of 10,000 rollouts were read."]
    assert [int(response.response) for response in seen.responses] == list(range(2_500))


@pytest.mark.parametrize("name", ["rollouts.pkl", "debug_rollout_data.pt"])
def test_a_pickle_is_refused_unopened(tmp_path: Path, name: str) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / name).write_bytes(pickle.dumps(Harmful()))
    for place in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=r"may be a pickle, which can run any code when it is opened"):
            read_rollouts_of(place)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a", "completion": "b"}\n', "has no reward or score or overall"),
        ('{"prompt": "a", "completion": "b", "reward": null}\n', "no response in it has a text and a reward"),
        ("", "has no rollouts"),
        ('{"prompt": "a"', "has no rows"),
        ("[1]\n", "damaged in line 1"),
    ],
)
def test_rows_without_what_is_needed_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_rollouts_of(tmp_path)


def test_an_empty_folder_says_how_each_trainer_writes_rollouts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"TRL writes them with log_completions=True"):
        read_rollouts_of(tmp_path)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "completions_00001.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"completions_00001\.parquet"):
        read_rollouts_of(tmp_path)
