"""`cepo credit` on a model whose every response is enumerated: 2 tokens to choose from, responses of at most 4."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import numpy
import pytest
import torch
from generator_cases import reference_model
from isolation import restored_process
from json_files import read_lines, write_lines
from training_runs import (
    EVERY_WRONG_ROLLOUT_TEACHES,
    ONE_STEP,
    REWARD_FUNCTIONS,
    Train,
    checked_config,
    recorded_groups,
    reference_logits,
)

from cepo.commands.cli import main
from cepo.credit import truth
from cepo.credit.agreement import QUARTERS
from cepo.credit.resources import opened
from cepo.data.batch import ScoringRow, token_array
from cepo.data.training_set import read_training_sets

pytestmark = pytest.mark.heavy

NUMBER = 48
METHODS = "methods=grpo, rlsd(scale=std), cepo(lambda_init=1), my_method"
SETTINGS = ["data.max_response_length=4", "worker.rollout.top_k=2", "worker.rollout.n=6"]


@pytest.fixture(scope="module")
def credit_command(tiny_run: list[str]) -> Iterator[list[str]]:
    """Afterwards no test finds the plugin."""
    arguments = ["responses=9", f"continuations={NUMBER}", METHODS]
    with restored_process():
        yield ["credit", *tiny_run, *SETTINGS, "trainer.plugins=[examples/custom_method/my_method.py]", *arguments]


@pytest.fixture(scope="module")
def measured(credit_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credit") / "measured"
    assert main([*credit_command, f"out={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def chance(tiny_run: list[str], tiny_model_folder: Path) -> Callable[[str, tuple[int, ...]], float]:
    """The chance that a response to a problem is right after some tokens, over all of its ends."""
    config = checked_config([*tiny_run, *SETTINGS])
    with opened(config, None, ()) as session:
        processing = session.processing
        model = reference_model(tiny_model_folder)
        problems = read_training_sets(config.data, processing)
        contexts = {problem.prompt_id: session.contexts.student(problem) for problem in problems}

    @functools.cache
    def chance(problem: str, tokens: tuple[int, ...]) -> float:
        if len(tokens) == 4 or (tokens and tokens[-1] in processing.eos_token_ids):
            return float(sum(map(ord, processing.decode(tokens))) % 2 == 0)
        row = ScoringRow(context=contexts[problem], response_ids=token_array([*tokens, 0]))
        logits = reference_logits(model, row)[-1]
        logits[list(processing.banned_token_ids)] = float("-inf")
        best = logits.double().topk(2)
        values = [chance(problem, (*tokens, token)) for token in best.indices.tolist()]
        return float(best.values.softmax(dim=0) @ torch.tensor(values, dtype=torch.float64))

    return chance


def test_values_are_the_enumerated_chances(measured: Path, chance: Callable[[str, tuple[int, ...]], float]) -> None:
    """A mean of 48 verdicts lies within 4.5 standard errors of the chance that enumeration gives, for every prefix."""
    traces = read_lines(measured / "traces.jsonl")
    assert len(traces) == 9
    errors: list[float] = []
    for trace in traces:
        for length, value in enumerate(trace["values"]):
            exact = chance(trace["prompt_id"], tuple(trace["token_ids"][:length]))
            error = math.sqrt(max(exact * (1 - exact), 0.0) / NUMBER)
            assert abs(value - exact) <= 4.5 * error + 1e-9, (trace["prompt_id"], length, value, exact)
            if 0.1 < exact < 0.9:
                errors.append((value - exact) / error)
    assert len(errors) > 10
    assert numpy.std(errors) > 0.5, "values that are exact are not sampled"


def test_credit_adds_up_to_the_verdict(measured: Path) -> None:
    traces = read_lines(measured / "traces.jsonl")
    assert traces
    for trace in traces:
        assert trace["values"][0] + sum(trace["credit"]) == pytest.approx(float(trace["correct"]), abs=1e-12)
        assert set(trace["advantages"]) == {"uniform", "grpo", "rlsd(scale=std)", "cepo(lambda_init=1)", "my_method"}
        lengths = {len(trace["tokens"]), len(trace["credit"]), len(trace["values"]) - 1}
        assert lengths | {len(advantages) for advantages in trace["advantages"].values()} == {len(trace["token_ids"])}
        assert (measured / trace["image"]).read_bytes().startswith(b"\x89PNG")


def test_advantages_are_those_that_training_computes(measured: Path, once: Train) -> None:
    settings = ["algorithm.adv_estimator=rlsd", ONE_STEP, "worker.actor.global_batch_size=4"]
    trained = once(*SETTINGS, *settings)
    learnt = {
        (group["prompt_id"], rollout["response"]): rollout["token_advantages"]
        for group in trained.rollouts
        for rollout in group["rollouts"]
    }
    compared = [
        numpy.abs(numpy.subtract(learnt[name], trace["advantages"]["rlsd(scale=std)"])).max()
        for trace in read_lines(measured / "traces.jsonl")
        if (name := (trace["prompt_id"], trace["response"])) in learnt
    ]
    assert len(compared) == 9
    assert max(compared) < 1e-4


def test_an_ended_measurement_goes_on_to_the_same_results(
    measured: Path,
    credit_command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the middle of a line. What a dry run counts is what was done, whatever is sampled at once."""
    monkeypatch.setattr(truth, "_PREFIXES_AT_ONCE", 4)
    rows = (measured / "continuations.jsonl").read_bytes().splitlines(keepends=True)
    for name in ("measurement.json", "responses.jsonl"):
        shutil.copy(measured / name, tmp_path / name)
    (tmp_path / "continuations.jsonl").write_bytes(b"".join(rows[:5]) + rows[5][:30])
    capsys.readouterr()
    assert main([*credit_command, f"out={tmp_path}", "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"\ntime: \d+ s\n$", said)
    assert f"{len(rows) * NUMBER:,} continuations ({len(rows)} prefixes, {NUMBER} each)" in said
    num_left = int(re.search(r"([\d,]+) of them are left", said)[1].replace(",", ""))  # type: ignore[index]
    assert num_left == (len(rows) - 5) * NUMBER
    assert main([*credit_command, f"out={tmp_path}"]) == 0
    assert len(read_lines(tmp_path / "continuations.jsonl")) == len(rows)
    for name in ("credit.json", "credit.md", "traces.jsonl"):
        assert (tmp_path / name).read_bytes() == (measured / name).read_bytes(), name


def test_tables_have_controls_the_page_dots_and_quarters_add_up(
    measured: Path, credit_command: list[str], tmp_path: Path
) -> None:
    """A teacher's knowledge is listed once, and 0 continuations leave the other tables out."""
    results = json.loads((measured / "credit.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in results["credit"]}
    assert rows["grpo"]["pearson"]["value"] == pytest.approx(rows["uniform"]["pearson"]["value"])
    assert rows["oracle"]["pearson_corrected"]["value"] is not None
    assert {"cepo(lambda_init=1), permuted", "cepo(lambda_init=1), inverted"} <= set(rows)
    assert "grpo, permuted" not in rows
    page = (measured / "credit.html").read_text(encoding="utf-8")
    assert page.count('class="dot"') >= 6
    assert "true credit A*" in page
    assert results["ceiling"]["value"] == pytest.approx(
        rows["uniform"]["pearson"]["value"] / rows["uniform"]["pearson_corrected"]["value"]
    )
    assert "cepo(lambda_init=1), permuted (control)" in page
    [row] = results["knowledge"]
    assert row["name"] == "rlsd(scale=std): correct", "no response has an answer that cepo could show"
    assert sum(row[quarter]["value"] for quarter in QUARTERS) == pytest.approx(row["nats"]["value"])
    assert row["limit"]["value"] > 0
    assert main([*credit_command, "continuations=0", f"out={tmp_path / 'only'}"]) == 0
    alone = json.loads((tmp_path / "only" / "credit.json").read_text())
    assert alone["knowledge"] == [row]
    assert "credit" not in alone
    assert "limit, -log p" in (tmp_path / "only" / "credit.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("worker.rollout.top_k=3", "holds a measurement with other settings: worker.rollout.top_k"),
        (f"worker.reward.reward_function={REWARD_FUNCTIONS}:never", "have equal rewards"),
        ("out={tmp_path}", "does not hold a measurement"),
        ("worker.rollout.n=1", "groups of at least 2"),
        ("data.rollout_batch_size=9", "train.parquet has 8 usable problems"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused(
    change: str,
    message: str,
    measured: Path,
    credit_command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change = change.format(tmp_path=tmp_path)
    (tmp_path / "notes.txt").touch()
    out = tmp_path / "new" if "reward" in change or "size" in change else measured
    assert main([*credit_command, f"out={out}", change]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_given_text_is_scored_beside_sampled_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two problems the first gets it as its first response; its answer is right, and every response is scored."""
    response = tmp_path / "response.txt"
    out = tmp_path / "out"
    data = write_lines(tmp_path / "data.jsonl", ({"problem": f"{k} + 1?", "answer": str(k + 1)} for k in range(3)))
    response.write_text("It is \\boxed{1}\n", encoding="utf-8")
    arguments = ["microgeo:model", str(data), "config=configs/microgeo/base.yaml"]
    settings = ["algorithm.adv_estimator=cepo", EVERY_WRONG_ROLLOUT_TEACHES, "worker.rollout.name=transformers"]
    settings += ["worker.rollout.n=4", "data.max_response_length=16"]
    options = ["--response", str(response), "--problems", "2", "--out", str(out)]
    assert main(["show", *arguments, *settings, *options]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"page: {out / 'report.html'}\n")
    first, second = recorded_groups(out)
    assert [len(first["rollouts"]), len(second["rollouts"])] == [4, 4]
    of_file = first["rollouts"][0]
    assert of_file["response"].startswith("It is \\boxed{1}")
    assert of_file["accuracy"] == 1
    assert all(rollout["is_scored"] for group in (first, second) for rollout in group["rollouts"])
    assert all(value < 0 for value in of_file["log_probs"]["student"])
    assert len(of_file["log_probs"]["correct"]) == len(of_file["tokens"])
    assert of_file["references"]["correct"] == "1"
    assert not list(out.glob("global_step_*"))


def test_a_checkpoint_is_shown_under_any_method(tmp_path: Path) -> None:
    """One of grpo and the embedded model, under cepo and under a method whose teacher follows the actor."""
    run = tmp_path / "run"
    out = tmp_path / "out"
    small = ["data.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=4"]
    small += ["data.max_response_length=16", "worker.rollout.name=transformers"]
    of_run = [
        "data.val_files=null",
        "trainer.max_steps=1",
        "trainer.val_before_train=false",
        "worker.actor.optim.lr=1e-2",
    ]
    assert main(["train", "config=microgeo/grpo", *small, *of_run, f"trainer.save_checkpoint_path={run}"]) == 0
    models_and_methods = [(run / "global_step_1", "cepo"), (run / "global_step_1", "sdpo"), ("microgeo:model", "sdpo")]
    probabilities: list[list[float]] = []
    for number, (model, method) in enumerate(models_and_methods):
        settings = ["config=microgeo/base", f"algorithm.adv_estimator={method}", *small[2:], "--problems", "2"]
        assert main(["show", str(model), "microgeo:validation", *settings, "--out", f"{out}-{number}"]) == 0
        groups = recorded_groups(Path(f"{out}-{number}"))
        probabilities.append(groups[0]["rollouts"][0]["log_probs"]["student"])
    # Of other methods a response is scored in other passes, which round differently.
    assert probabilities[0] == pytest.approx(probabilities[1], abs=1e-5), "the weights are the checkpoint's"
    assert probabilities[0] != pytest.approx(probabilities[2], abs=1e-5)
    of_run_itself = ["show", str(run / "global_step_1"), "microgeo:validation", f"config={run / 'config.yaml'}"]
    assert main([*of_run_itself, "--problems", "2", "--out", str(tmp_path / "own")]) == 0


def test_show_asks_the_greedy_responses_that_a_method_reads(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", ({"problem": f"{k} + 1?", "answer": str(k + 1)} for k in range(2)))
    arguments = ["show", "microgeo:model", str(data), "config=configs/microgeo/base.yaml", "--problems", "1"]
    settings = ["algorithm.adv_estimator=remax", "worker.rollout.name=transformers", "worker.rollout.n=2"]
    assert main([*arguments, *settings, "data.max_response_length=8", "--out", str(tmp_path / "out")]) == 0
    [group] = recorded_groups(tmp_path / "out")
    assert len(group["rollouts"]) == 2


SPELLINGS = ["1/2"] * 3 + ["0.5"] * 3 + ["7"] * 4


def test_show_counts_wrong_answers_by_value_as_training_does(tmp_path: Path) -> None:
    """`1/2` and `0.5` count as one answer, so that one of them is shown even if `7` is the most frequent spelling."""
    finder = tmp_path / "finder.py"
    finder.write_text(
        f"import zlib\n\n\ndef of(response):\n    return {SPELLINGS}[zlib.crc32(response.encode()) % 10]\n",
        encoding="utf-8",
    )
    data = write_lines(tmp_path / "data.jsonl", ({"problem": f"{k} + 1?", "answer": "9"} for k in range(6)))
    arguments = ["show", "microgeo:model", str(data), "config=configs/microgeo/base.yaml", "--problems", "6"]
    settings = ["algorithm.adv_estimator=cepo", "algorithm.negative.select=most_frequent", "worker.rollout.n=16"]
    settings += ["worker.rollout.temperature=4"]  # varied responses
    settings += [f"worker.reward.answer_function={finder}:of", "worker.rollout.name=transformers"]
    assert main([*arguments, *settings, "data.max_response_length=16", "--out", str(tmp_path / "out")]) == 0
    has_told_apart = False
    for group in recorded_groups(tmp_path / "out"):
        responses = [rollout["response"].encode() for rollout in group["rollouts"]]
        spellings = [SPELLINGS[crc32(response) % 10] for response in responses]
        counts = {spelling: spellings.count(spelling) for spelling in ("1/2", "0.5", "7")}
        tells_apart = max(counts["1/2"], counts["0.5"]) <= counts["7"] < counts["1/2"] + counts["0.5"]
        has_told_apart = has_told_apart or tells_apart
        if tells_apart:
            assert all(rollout["references"]["wrong"] in ("1/2", "0.5") for rollout in group["rollouts"]), counts
    assert has_told_apart, "the responses do not tell counting by value from counting by spelling: change the finder"


def test_show_without_a_config_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "microgeo:model", "microgeo:validation"]) == 2
    assert "give config=FILE" in capsys.readouterr().err
