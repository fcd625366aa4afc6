"""cepo's methods inside verl's trainer, with verl's own configuration, queue, agent loop and FSDP2 engine on a CPU.

Runs in an environment with verl, where neither cepo's own trainer nor the tests' conftest does: `make verl`.
"""

from __future__ import annotations

import copy
import itertools
import math
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import torch

if find_spec("verl") is None:
    pytest.skip("verl has an environment of its own: make verl", allow_module_level=True)

HERE = Path(__file__).parent / "verl_on_cpu"
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

import transfer_queue as tq  # noqa: E402
from assembly import ROLLOUTS, configuration, started  # noqa: E402
from canned import told  # noqa: E402
from scripted_models import declare_end  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from transformers import AutoProcessor  # noqa: E402
from verl.trainer.ppo.core_algos import FixedKLController  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.trainer.ppo.v1 import get_trainer_cls  # noqa: E402

from cepo.algorithms import build_estimator  # noqa: E402
from cepo.errors import ConfigError  # noqa: E402
from cepo.integrations.adapter import MethodAdapter  # noqa: E402
from cepo.integrations.verl import CepoSyncTrainer  # noqa: E402
from cepo.look.reading import read_rollouts_of  # noqa: E402
from cepo.microgeo.world import ASSETS  # noqa: E402
from cepo.models.text_codec import TextCodec  # noqa: E402
from cepo.report.responses import groups_of  # noqa: E402


class Watched:
    """Computes the advantages of every method on the first batch, before the trainer's own method computes them."""

    def __init__(self, trainer: CepoSyncTrainer) -> None:
        self.found: list[dict[tuple[int, int], list[float]]] = []
        self.penalised: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.with_a_tool: dict[tuple[int, int], list[float]] = {}
        self.nested = True
        self._trainer = trainer
        self._compute = trainer._compute_advantage
        trainer._compute_advantage = self

    def __call__(self, batch: Any, metrics: dict[str, Any]) -> Any:
        trainer = self._trainer
        cepos_method = trainer.estimator, trainer._credit
        texts = TextCodec(trainer.tokenizer, [trainer.tokenizer.eos_token_id])
        for method, settings in told()["cases"] if not self.found else []:
            trainer.estimator = build_estimator(method, settings)
            trainer._credit = MethodAdapter(trainer.estimator, texts, 0, None)
            self._compute(batch, {})
            self.found.append(self._advantages(batch))
        trainer.estimator, trainer._credit = cepos_method
        if not self.penalised:
            self._with_a_kl_in_the_reward(batch)
        if not self.with_a_tool:
            self._with_a_tools_mask(batch)
        return self._compute(batch, metrics)

    def _with_a_kl_in_the_reward(self, batch: Any) -> None:
        """Computes advantages with verl's penalty of 1 x (log P - log P_reference), which is 2 nats per token here."""
        trainer = self._trainer
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        scored = tq.kv_batch_get(**where, select_fields=["old_log_probs"])["old_log_probs"]
        reference = torch.nested.as_nested_tensor([row - 2.0 for row in scored.unbind()], layout=torch.jagged)
        tq.kv_batch_put(**where, fields=TensorDict({"ref_log_prob": reference}, batch_size=len(batch.keys)))
        trainer.config.algorithm.use_kl_in_reward = True
        trainer.kl_ctrl_in_reward = FixedKLController(kl_coef=1.0)
        compute = trainer._credit.signal

        def noted(rows: Any, rewards: Any, correct: Any, *others: Any, penalties: Any, **further: Any) -> Any:
            self.penalised.append((rewards, correct, penalties))
            return compute(rows, rewards, correct, *others, penalties=penalties, **further)

        trainer._credit.signal = noted
        self._compute(batch, {})
        trainer._credit.signal = compute
        trainer.config.algorithm.use_kl_in_reward = False

    def _with_a_tools_mask(self, batch: Any) -> None:
        """Notes the advantages of responses of which a tool wrote the second and third token, as an agent loop marks it."""
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        whole = tq.kv_batch_get(**where, select_fields=["response_mask"])["response_mask"]
        marked: list[torch.Tensor] = []
        for mask in whole.unbind():
            mask = mask.clone()
            mask[1:3] = 0
            marked.append(mask)
        masks = torch.nested.as_nested_tensor(marked, layout=torch.jagged)
        tq.kv_batch_put(**where, fields=TensorDict({"response_mask": masks}, batch_size=len(batch.keys)))
        self._compute(batch, {})
        self.with_a_tool = self._advantages(batch)
        tq.kv_batch_put(**where, fields=TensorDict({"response_mask": whole}, batch_size=len(batch.keys)))

    def _advantages(self, batch: Any) -> dict[tuple[int, int], list[float]]:
        fields = ["advantages", "extra_info"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        self.nested = self.nested and data["advantages"].is_nested
        by_row_and_session: dict[tuple[int, int], list[float]] = {}
        of_rows = data["advantages"].unbind()
        for key, extra_info, advantages in zip(batch.keys, data["extra_info"], of_rows, strict=True):
            session = int(key.rsplit("_", 2)[1])
            by_row_and_session[extra_info["index"], session] = advantages.tolist()
        return by_row_and_session


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """Two steps with `cepo`, and on the first one the advantages of every case."""
    dumped = tmp_path_factory.mktemp("dumped")
    (ROLLOUTS / "agent_loops.yaml").write_text("- name: canned\n  _target_: canned.CannedAgentLoop\n", encoding="utf-8")
    with started(configuration()) as trainer:
        watched = Watched(trainer)
        trainer._init_dump_executor()
        steps: list[dict[str, Any]] = []
        weights = [trainer.actor_rollout_wg.weights()]
        for step in (1, 2):
            trainer.global_steps = step
            metrics: dict[str, Any] = {}
            batch = trainer.step(metrics, {})
            trainer._log_rollout_data(batch, {}, str(dumped))
            tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
            weights.append(trainer.actor_rollout_wg.weights())
            steps.append(metrics)
        trainer._shutdown_dump_executor()
        keys_in_queue = tq.kv_list()
        yield SimpleNamespace(watched=watched, steps=steps, weights=weights, left=keys_in_queue, dumped=dumped)


def test_verl_finds_the_trainer_by_its_entry_point() -> None:
    targets = [entry_point.value for entry_point in entry_points(group="verl.plugins") if entry_point.name == "cepo"]
    assert targets == ["cepo.integrations.verl"]
    assert get_trainer_cls("cepo_sync") is CepoSyncTrainer


@pytest.mark.parametrize("number", range(len(told()["cases"])), ids=lambda number: str(told()["cases"][number]))
def test_the_same_rollouts_have_cepos_own_advantages(number: int, run: SimpleNamespace) -> None:
    expected = torch.load(ROLLOUTS / "expected.pt")[number]
    assert expected.any(), "the rollouts must teach something"
    advantages = run.watched.found[number]
    group = told()["group"]
    method, _ = told()["cases"][number]
    tolerance = 1e-2 if method == "pgpo" else 1e-5  # its gate divides by the spread of a response's dependences
    assert len(advantages) == len(expected)
    for (row, session), values in advantages.items():
        of_response = expected[row * group + session]
        torch.testing.assert_close(torch.tensor(values), of_response[: len(values)], rtol=0, atol=tolerance)
        assert not of_response[len(values) :].any()
    assert run.watched.nested


def test_tokens_of_a_tool_have_no_advantage(run: SimpleNamespace) -> None:
    advantages = run.watched.with_a_tool.values()
    assert len(advantages) == len(run.watched.found[0])
    assert not any(any(values[1:3]) for values in advantages)
    taught = [values for values in advantages if any(values)]
    assert taught
    assert all(values[0] and all(values[3:]) for values in taught)


def test_look_reads_what_verl_dumped(run: SimpleNamespace) -> None:
    """verl's own `_log_rollout_data` wrote two steps: groups, prompts, verdicts and steps are those of the rollouts."""
    seen = read_rollouts_of(run.dumped)
    assert seen.form == "verl's rollout_data_dir"
    groups = groups_of(seen.responses)
    assert [len(group.responses) for group in groups] == [told()["group"]] * 8
    assert sorted(group.step for group in groups) == [1] * 4 + [2] * 4
    assert sum(group.num_right for group in groups) == sum(told()["correct"])
    rows = pyarrow.parquet.read_table(ROLLOUTS / "verl.parquet").to_pylist()
    questions = {row["prompt"][0]["content"].replace("<image>", "").strip() for row in rows}
    assert {response.prompt for response in seen.responses} == questions
    assert {response.ground_truth for response in seen.responses} == {
        row["reward_model"]["ground_truth"] for row in rows
    }


def test_look_reads_what_verls_older_trainer_dumps(tmp_path: Path) -> None:
    """`RayPPOTrainer` writes rows as they were balanced, with what the reward function returned and a request's name."""
    older = RayPPOTrainer.__new__(RayPPOTrainer)  # its __init__ wants a cluster
    older.global_steps = 3
    older._init_dump_executor()
    older._dump_generations(
        inputs=["user\nOne?\nassistant\n", "user\nTwo?\nassistant\n"] * 2,
        outputs=["1", "1", "2", "2"],
        gts=["1", "2", "1", "2"],
        scores=[1.0, -1.0, -1.0, 1.0],
        reward_extra_infos_dict={"acc": [True, False, False, True], "request_id": list("abcd")},
        dump_path=str(tmp_path),
    )
    older._shutdown_dump_executor()
    groups = groups_of(read_rollouts_of(tmp_path).responses)
    first, second = groups
    assert [response.right for response in first.responses] == [True, False]
    assert [response.right for response in second.responses] == [False, True]
    assert [(group.step, group.responses[0].prompt) for group in groups] == [(3, "One?"), (3, "Two?")]


def test_a_kl_in_the_reward_makes_no_right_rollout_wrong(run: SimpleNamespace) -> None:
    """verl subtracts 2 from the reward of each token, so that every sum is negative: right is what earned 1 before."""
    ((rewards, correct, penalties),) = run.watched.penalised
    assert sorted(set(rewards.tolist())) == [0.0, 1.0]
    assert torch.equal(correct, rewards == 1.0)
    assert bool((rewards - penalties.sum(dim=1) < 0.5).all())
    torch.testing.assert_close(penalties[penalties != 0], torch.full_like(penalties[penalties != 0], 2.0))


def test_two_steps_train_and_log_the_methods_metrics(run: SimpleNamespace) -> None:
    for weights, weights_after_step in itertools.pairwise(run.weights):
        is_moved = [not torch.equal(*pair) for pair in zip(weights, weights_after_step, strict=True)]
        assert any(is_moved)
    assert [round(metrics["evidence/lambda"], 6) for metrics in run.steps] == [0.5, 0.48]
    for metrics in run.steps:
        assert math.isfinite(metrics["actor/grad_norm"])
        assert metrics["actor/grad_norm"] > 0
        assert 0 < metrics["references/correct_used"] <= 1
        assert {"actor/entropy", "actor/pg_loss"} <= set(metrics), "verl's own metrics"
    assert not any(run.left.values()), "teacher rows must not stay in the queue"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method: sdpo", "a loss over the whole vocabulary and teacher.source ema, which cepo_sync lacks"),
        ("method: cpeo", "did you mean|Known"),
        ("clip: 1", "clip"),
    ],
)
def test_what_verl_lacks_or_nobody_knows_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CepoSyncTrainer(configuration(f"+trainer.v1.cepo_sync={{{override}}}"))


def test_the_mode_is_all_that_a_user_sets() -> None:
    config = configuration()
    assert config.algorithm.adv_estimator == "gae", "verl's default"
    trainer = CepoSyncTrainer(copy.deepcopy(config))
    assert trainer.estimator.name == "cepo"
    assert not trainer.use_critic
    assert trainer.trainer_mode == "sync"


def test_an_end_that_verl_does_not_stop_at_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The files declare another token, by which alone verl's engines stop; references have neither in them."""
    folder = shutil.copytree(ASSETS, tmp_path / "model")
    declare_end(folder, "<|endoftext|>")
    processor = AutoProcessor.from_pretrained(folder)
    trainer: Any = SimpleNamespace(processor=processor, tokenizer=processor.tokenizer, _template_settings=dict)
    end = CepoSyncTrainer._response_end(trainer)
    assert processor.tokenizer.convert_ids_to_tokens(list(end.token_ids)) == ["<|im_end|>", "<|endoftext|>"]
    assert "ends an assistant's turn with the token '<|im_end|>'" in caplog.text
    assert "add the other to eos_token_id in the model's generation_config.json" in caplog.text
