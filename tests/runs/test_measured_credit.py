"""`cepo credit` on a model whose every response is enumerated: 2 tokens to choose from, responses of at most 4."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from generator_cases import reference_model
from isolation import restored_process
from training_runs import Train, json_lines, reference_logits

from cepo.cli import main
from cepo.credit import stored
from cepo.credit.agreement import QUARTERS
from cepo.data.batch import ScoringRow
from cepo.models.inputs import EncodedPrompt
from cepo.models.processing import Processing

pytestmark = pytest.mark.heavy

NUMBER = 48
METHODS = "methods=grpo, rlsd(scale=std), cepo(lambda_init=1), my_method"
SETTINGS = ["data.max_response_length=4", "worker.rollout.top_k=2", "worker.rollout.n=6"]


@pytest.fixture(scope="module", autouse=True)
def _without_the_plugin_afterwards() -> Iterator[None]:
    with restored_process():
        yield


@pytest.fixture(scope="module")
def credit_command(tiny_run: list[str]) -> list[str]:
    own = ["responses=9", f"continuations={NUMBER}", METHODS]
    return ["credit", *tiny_run, *SETTINGS, "trainer.plugins=[examples/custom_method/my_method.py]", *own]


@pytest.fixture(scope="module")
def measured(credit_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credit") / "measured"
    assert main([*credit_command, f"out={folder}"]) == 0
    return folder


class Enumeration:
    """The chance that a response after some tokens is right, over all of its ends."""

    def __init__(self, model: Any, processing: Processing, prompt: EncodedPrompt) -> None:
        self._model, self._processing, self._prompt = model, processing, prompt
        self._known: dict[tuple[int, ...], float] = {}

    def value(self, tokens: tuple[int, ...]) -> float:
        if len(tokens) == 4 or (tokens and tokens[-1] in self._processing.eos_token_ids):
            text = self._processing.decode(tokens)
            return float(sum(map(ord, text)) % 2 == 0)
        if tokens not in self._known:
            row = ScoringRow(context=self._prompt, response_ids=(*tokens, 0))
            assert self._processing.image_token_id is not None
            logits = reference_logits(self._model, row, self._processing.image_token_id)[-1]
            logits[list(self._processing.banned_token_ids)] = float("-inf")
            best = logits.double().topk(2)
            chances = best.values.softmax(dim=0).tolist()
            values = [self.value((*tokens, token)) for token in best.indices.tolist()]
            self._known[tokens] = sum(chance * value for chance, value in zip(chances, values, strict=True))
        return self._known[tokens]


@pytest.fixture(scope="module")
def enumerated(credit_command: list[str], tiny_model_folder: Path) -> Callable[[str], Enumeration]:
    from cepo.cli import cli
    from cepo.commands.measure_credit import make_credit_plan
    from cepo.credit.session import opened
    from cepo.data.dataset import read_training_sets

    options = cli.commands["credit"].make_context("credit", credit_command[1:]).params
    del options["dry_run"]
    config = make_credit_plan(**options).config
    model = reference_model(tiny_model_folder)
    with opened(config, None) as session:
        problems = read_training_sets(config.data, session.processing)
        by_name = {problem.prompt_id: session.contexts.student(problem) for problem in problems}
        processing = session.processing
    return lambda prompt_id: Enumeration(model, processing, by_name[prompt_id])


def test_values_are_the_enumerated_chances(measured: Path, enumerated: Callable[[str], Enumeration]) -> None:
    """A mean of 48 verdicts lies within 4.5 standard errors of the chance that enumeration gives, for every prefix."""
    traces = json_lines(measured / "traces.jsonl")
    assert len(traces) == 9
    errors: list[float] = []
    for trace in traces:
        exact = enumerated(trace["prompt_id"])
        for length, value in enumerate(trace["values"]):
            chance = exact.value(tuple(trace["token_ids"][:length]))
            error = math.sqrt(max(chance * (1 - chance), 0.0) / NUMBER)
            assert abs(value - chance) <= 4.5 * error + 1e-9, (trace["prompt_id"], length, value, chance)
            if 0.1 < chance < 0.9:
                errors.append((value - chance) / error)
    assert len(errors) > 10
    assert numpy.std(errors) > 0.5, "values that are exact are not sampled"


def test_credit_adds_up_to_the_verdict(measured: Path) -> None:
    for trace in json_lines(measured / "traces.jsonl"):
        assert trace["values"][0] + sum(trace["credit"]) == pytest.approx(float(trace["correct"]), abs=1e-12)
        assert set(trace["advantages"]) == {"uniform", "grpo", "rlsd(scale=std)", "cepo(lambda_init=1)", "my_method"}
        lengths = {len(trace["tokens"]), len(trace["credit"]), len(trace["values"]) - 1}
        assert lengths | {len(given) for given in trace["advantages"].values()} == {len(trace["token_ids"])}
        assert (measured / trace["image"]).read_bytes().startswith(b"\x89PNG")


def test_advantages_are_those_that_training_computes(measured: Path, train: Train) -> None:
    settings = ["algorithm.adv_estimator=rlsd", "trainer.max_steps=1", "worker.actor.global_batch_size=4"]
    trained = train(*SETTINGS, *settings)
    learnt = {
        (group["prompt_id"], rollout["response"]): rollout["token_advantages"]
        for group in trained.rollouts
        for rollout in group["rollouts"]
    }
    compared = [
        numpy.abs(numpy.subtract(learnt[name], trace["advantages"]["rlsd(scale=std)"])).max()
        for trace in json_lines(measured / "traces.jsonl")
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
    monkeypatch.setattr(stored, "_PREFIXES_AT_ONCE", 4)
    rows = (measured / "continuations.jsonl").read_bytes().splitlines(keepends=True)
    for name in ("measurement.json", "responses.jsonl"):
        shutil.copy(measured / name, tmp_path / name)
    (tmp_path / "continuations.jsonl").write_bytes(b"".join(rows[:5]) + rows[5][:30])
    capsys.readouterr()
    assert main([*credit_command, f"out={tmp_path}", "dry_run=true"]) == 0
    said = capsys.readouterr().out
    assert f"{len(rows) * NUMBER:,} continuations ({len(rows)} prefixes, {NUMBER} each)" in said
    left = int(re.search(r"([\d,]+) of them are left", said)[1].replace(",", ""))  # type: ignore[index]
    assert left == (len(rows) - 5) * NUMBER
    assert main([*credit_command, f"out={tmp_path}"]) == 0
    assert len(json_lines(tmp_path / "continuations.jsonl")) == len(rows)
    for name in ("credit.json", "credit.md", "traces.jsonl"):
        assert (tmp_path / name).read_bytes() == (measured / name).read_bytes(), name


def test_the_table_has_controls_and_the_page_its_bars(measured: Path) -> None:
    results = json.loads((measured / "credit.json").read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in results["credit"]}
    assert rows["grpo"]["pearson"]["value"] == pytest.approx(rows["uniform"]["pearson"]["value"])
    assert rows["oracle"]["pearson_corrected"]["value"] is not None
    assert {"cepo(lambda_init=1), permuted", "cepo(lambda_init=1), inverted"} <= set(rows)
    assert "grpo, permuted" not in rows
    page = (measured / "credit.html").read_text(encoding="utf-8")
    assert page.count('class="bar"') > 50
    assert "cepo(lambda_init=1), permuted (baseline)" in page


def test_knowledge_is_measured_with_and_without_continuations(
    measured: Path, credit_command: list[str], tmp_path: Path
) -> None:
    """The quarters add up, a teacher's figures are listed once, and 0 continuations leave the other tables out."""
    found = json.loads((measured / "credit.json").read_text())["knowledge"]
    assert [row["name"] for row in found] == ["rlsd(scale=std): correct"], (
        "no response has an answer that cepo could show"
    )
    for row in found:
        parts = [row[quarter]["value"] for quarter in QUARTERS]
        assert sum(parts) == pytest.approx(row["nats"]["value"])
        assert row["limit"]["value"] > 0
    assert main([*credit_command, "continuations=0", f"out={tmp_path / 'only'}"]) == 0
    alone = json.loads((tmp_path / "only" / "credit.json").read_text())
    assert (alone["knowledge"], "credit" in alone) == (found, False)
    assert "limit, -log p" in (tmp_path / "only" / "credit.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("continuations=47", "holds a measurement with other settings: num_continuations"),
        ("worker.rollout.top_k=3", "holds a measurement with other settings: worker.rollout.top_k"),
        ("worker.reward.reward_function={reward}", "have equal rewards"),
        ("out={tmp_path}", "does not hold a measurement"),
        ("responses=0", "'--responses': 0 is not in the range x>=1"),
        ("worker.rollout.n=1", "groups of at least 2"),
        ("data.rollout_batch_size=9", "train.parquet has 8 usable problems"),
        ("continuation=4", "continuations"),
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
    reward = tmp_path / "one.py"
    reward.write_text("def one(samples):\n    return [{'overall': 1.0} for sample in samples]\n", encoding="utf-8")
    change = change.format(reward=f"{reward}:one", tmp_path=tmp_path)
    out = tmp_path / "new" if "reward" in change or "size" in change else measured
    assert main([*credit_command, f"out={out}", change]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
