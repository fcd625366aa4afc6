"""cepo's methods in verl's own loop of tools: which tokens are a tool's, what teachers read, and who has credit.

verl's `ToolAgentLoop` encodes the prompt with the tools' descriptions, parses the calls, runs the tool, adds its results,
and marks each token. Only the inference engine, which needs a GPU, is replaced by a script of the model's turns. Runs in an
environment with verl: `make verl`.
"""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if find_spec("verl") is None:
    pytest.skip("verl has an environment of its own: make verl", allow_module_level=True)

HERE = Path(__file__).parent / "verl_on_cpu"
sys.path.insert(0, str(HERE))

import transfer_queue as tq  # noqa: E402
from assembly import ROLLOUTS, configuration, started  # noqa: E402
from canned import told  # noqa: E402
from scripted import turns_of  # noqa: E402
from transformers import AutoModelForImageTextToText  # noqa: E402

from cepo.algorithms import build_estimator  # noqa: E402
from cepo.errors import DataError  # noqa: E402
from cepo.integrations.adapter import MethodAdapter  # noqa: E402
from cepo.integrations.verl import CepoSyncTrainer, _rows_of  # noqa: E402
from cepo.models.text_codec import TextCodec  # noqa: E402
from cepo.types import TokenBatch  # noqa: E402

METHODS = ("cepo", "rlsd", "hindsight", "grpo")
WITHOUT_IMAGES = "visual"
_COLUMNS = ["prompts", "responses", "response_mask", "advantages", "rm_scores", "reward_model", "multi_modal_inputs"]


@dataclass
class MethodRun:
    """What a method made of the step's responses, in the order in which it computed them."""

    data: list[dict[str, Any]] = field(default_factory=list)  # the rows that it compared
    sizes: list[int] = field(default_factory=list)  # of their groups
    teachers: Mapping[str, Tensor] = field(default_factory=dict)  # view -> (B, T)
    advantages: Tensor | None = None  # (B, T)


class Watched:
    """Computes the advantages of every method before the trainer's own, and keeps what went into them."""

    def __init__(self, trainer: CepoSyncTrainer) -> None:
        self.runs: dict[str, MethodRun] = {}
        self.rows: list[dict[str, Any]] = []  # of the queue, with the advantages of `cepo`
        self.teacher_rows: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of `rlsd`: the row, and its teacher's
        self.error = ""  # of the method without images
        self._trainer = trainer
        self._compute = trainer._compute_advantage
        trainer._compute_advantage = self

    def __call__(self, batch: Any, metrics: dict[str, Any]) -> Any:
        trainer = self._trainer
        cepos_method = trainer.estimator, trainer._credit
        for method in METHODS:
            self._use(method)
            self.runs[method] = self._computed(batch, notes_rows=method == "rlsd")
        self._use(WITHOUT_IMAGES)
        try:
            self._compute(batch, {})
        except DataError as error:
            self.error = str(error)
        trainer.estimator, trainer._credit = cepos_method
        written = self._compute(batch, metrics)
        self.rows = _rows_of(tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=_COLUMNS))
        for row, key in zip(self.rows, batch.keys, strict=True):
            row["session"] = int(key.rsplit("_", 2)[1])
        return written

    def _use(self, method: str) -> None:
        trainer = self._trainer
        trainer.estimator = build_estimator(method)
        texts = TextCodec(trainer.tokenizer, [trainer.tokenizer.eos_token_id])
        trainer._credit = MethodAdapter(trainer.estimator, texts, 0, None)

    def _computed(self, batch: Any, *, notes_rows: bool) -> MethodRun:
        trainer = self._trainer
        run = MethodRun()
        signal = trainer._signal
        teachers = trainer._teachers
        teacher_row = trainer._teacher_row

        def noted_signal(data: Any, sizes: Any) -> Any:
            computed = signal(data, sizes)
            run.data = list(data)
            run.sizes = list(sizes)
            run.advantages = computed.advantages
            return computed

        def noted_teachers(*arguments: Any) -> Any:
            run.teachers = teachers(*arguments)
            return run.teachers

        def noted_row(data: Any, hint: Any) -> Any:
            row = teacher_row(data, hint)
            if notes_rows:
                self.teacher_rows.append((data, row))
            return row

        trainer._signal = noted_signal
        trainer._teachers = noted_teachers
        trainer._teacher_row = noted_row
        self._compute(batch, {})
        trainer._signal = signal
        trainer._teachers = teachers
        trainer._teacher_row = teacher_row
        return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One step of `cepo` with four responses to each problem; see `turns_of`."""
    model = tmp_path_factory.mktemp("model")
    shutil.copytree(told()["model"], model, dirs_exist_ok=True)
    shutil.copy(HERE / "with_tools.jinja", model / "chat_template.jinja")
    loops = "- name: scripted\n  _target_: scripted.ScriptedToolLoop\n"
    (ROLLOUTS / "agent_loops.yaml").write_text(loops, encoding="utf-8")
    config = configuration(
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=scripted",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.multi_turn.format=hermes",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE / 'tools.py'}",
    )
    with started(config) as trainer:
        watched = Watched(trainer)
        initial_weights = trainer.actor_rollout_wg.weights()
        trainer.global_steps = 1
        metrics: dict[str, Any] = {}
        batch = trainer.step(metrics, {})
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        yield SimpleNamespace(
            watched=watched,
            metrics=metrics,
            tokenizer=trainer.tokenizer,
            model=model,
            before=initial_weights,
            after=trainer.actor_rollout_wg.weights(),
        )


def stretches(row: Mapping[str, Any], tokenizer: Any) -> list[tuple[int, str]]:
    """The parts of a response with one mask each: the mask, and the text."""
    ids = row["responses"].tolist()
    masks = row["response_mask"].tolist()
    parts: list[tuple[int, str]] = []
    for mask, places in itertools.groupby(range(len(ids)), key=lambda place: masks[place]):
        parts.append((mask, tokenizer.decode([ids[place] for place in places])))
    return parts


def expected_stretches(session: int, truth: str) -> list[tuple[int, str]]:
    """The turns of the script, with the results of the tool between them."""
    unknown = "Unknown function 'divide'. Available tools: ['multiply']"
    results = (["18"], [unknown], [], ["6", "42"])[session]
    parts: list[tuple[int, str]] = []
    for turn, text in enumerate(turns_of(session, truth)):
        parts.append((1, text + "<|im_end|>"))
        if turn < len(results):
            result = f"<tool_response>\n{results[turn]}\n</tool_response>"
            parts.append((0, f"\n<|im_start|>user\n{result}<|im_end|>\n<|im_start|>assistant\n"))
    return parts


def test_verls_loop_marks_the_tools_tokens(run: SimpleNamespace) -> None:
    rows = run.watched.rows
    assert len(rows) == 16
    for row in rows:
        truth = str(row["reward_model"]["ground_truth"])
        assert stretches(row, run.tokenizer) == expected_stretches(row["session"], truth)
        assert '"name": "multiply"' in run.tokenizer.decode(row["prompts"].tolist()), "the prompt describes the tool"


def test_only_the_models_tokens_have_credit(run: SimpleNamespace) -> None:
    """Of two right and two wrong responses A is 0.866 and -0.866, and cepo's weights keep its sign."""
    assert run.watched.rows
    for row in run.watched.rows:
        is_own = row["response_mask"].bool()
        advantages = row["advantages"]
        assert not advantages[~is_own].any()
        sign = 1.0 if row["session"] in (0, 3) else -1.0
        assert bool((sign * advantages[is_own] > 0.4).all())
    plain = run.watched.runs["grpo"]
    for row, advantages in zip(plain.data, plain.advantages, strict=True):
        is_own = row["response_mask"].bool()
        outcome = 0.8660254 if float(row["rm_scores"].sum()) == 1 else -0.8660254
        torch.testing.assert_close(
            advantages[: len(is_own)], outcome * is_own.float(), rtol=0, atol=1e-4, check_dtype=False
        )


def batch_of_own_tokens(of_method: MethodRun) -> TokenBatch:
    """The responses as if the tool's tokens had never been there, with the log-probs of the model's tokens."""
    old: list[Tensor] = []
    teachers: dict[str, list[Tensor]] = {view: [] for view in of_method.teachers}
    for number, row in enumerate(of_method.data):
        is_own = row["response_mask"].bool()
        old.append(row["old_log_probs"].float()[is_own])
        for view, log_probs in of_method.teachers.items():
            teachers[view].append(log_probs[number, : len(is_own)][is_own])
    lengths = torch.tensor([len(values) for values in old])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    rewards = torch.stack([row["rm_scores"].sum().float() for row in of_method.data])
    token_rewards = torch.zeros(mask.shape).scatter(1, lengths.unsqueeze(1) - 1, rewards.unsqueeze(1))
    all_rows = torch.ones(len(old), dtype=torch.bool)
    return TokenBatch(
        token_level_rewards=token_rewards,
        response_mask=mask,
        old_log_probs=pad_sequence(old, batch_first=True),
        group_ids=torch.arange(len(of_method.sizes)).repeat_interleave(torch.tensor(of_method.sizes)),
        teacher_log_probs={view: pad_sequence(rows, batch_first=True) for view, rows in teachers.items()},
        correct=rewards >= 0.5,
        has_reference=dict.fromkeys(of_method.teachers, all_rows),
    )


@pytest.mark.parametrize("method", METHODS)
def test_credit_is_that_of_the_models_tokens_alone(method: str, run: SimpleNamespace) -> None:
    of_method = run.watched.runs[method]
    batch = batch_of_own_tokens(of_method)
    expected = build_estimator(method).signal(batch, step=0).advantages
    assert expected[batch.response_mask].std() > 0.1
    for number, row in enumerate(of_method.data):
        is_own = row["response_mask"].bool()
        actual = of_method.advantages[number, : len(is_own)][is_own]
        expected_credit = expected[number, : int(is_own.sum())]
        torch.testing.assert_close(actual, expected_credit, rtol=0, atol=1e-5, check_dtype=False)


def log_probs_by_hand(model: Any, row: Mapping[str, Any], length: int) -> Tensor:
    """The log-probs of the last `length` tokens of a row, computed by transformers alone."""
    visuals = {name: value for name, value in row["multi_modal_inputs"].items() if isinstance(value, Tensor)}
    ids = row["input_ids"]
    with torch.no_grad():
        output = model(input_ids=ids.unsqueeze(0), position_ids=row["position_ids"].unsqueeze(1), **visuals)
    log_probs = output.logits[0, -length - 1 : -1].float().log_softmax(dim=-1)
    return log_probs.gather(1, ids[-length:].unsqueeze(1)).squeeze(1)


def test_teachers_read_the_transcript_with_its_results(run: SimpleNamespace) -> None:
    """Their log-probs are the model's own after the reference, the tool's description and its results."""
    of_method = run.watched.runs["rlsd"]
    model = AutoModelForImageTextToText.from_pretrained(run.model, dtype=torch.float32).eval()
    assert len(run.watched.teacher_rows) == 16
    for number, (row, teacher_row) in enumerate(run.watched.teacher_rows):
        length = len(row["responses"])
        assert torch.equal(teacher_row["input_ids"][-length:], row["responses"])
        prompt = run.tokenizer.decode(teacher_row["prompts"].tolist())
        assert '"name": "multiply"' in prompt
        assert str(row["reward_model"]["ground_truth"]) in prompt.rpartition("\\boxed{}")[2]
        by_hand = log_probs_by_hand(model, teacher_row, length)
        torch.testing.assert_close(of_method.teachers["correct"][number, :length], by_hand, rtol=0, atol=1e-4)


def test_a_view_without_images_would_lose_the_tools(run: SimpleNamespace) -> None:
    """It renders the conversation anew, without descriptions, so that its evidence would be of them too."""
    assert "the row's prompt begins otherwise" in run.watched.error


def test_the_step_updates_the_weights(run: SimpleNamespace) -> None:
    is_moved = [not torch.equal(*pair) for pair in zip(run.before, run.after, strict=True)]
    assert any(is_moved)
    assert run.metrics["actor/grad_norm"] > 0
