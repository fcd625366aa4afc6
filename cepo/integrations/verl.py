"""Puts cepo's methods into verl's synchronous trainer: rollouts, rewards, engines, loss stay verl's, credit becomes cepo's.

`verl` loads this module by the entry point group `verl.plugins`, which registers `trainer.v1.trainer_mode=cepo_sync`.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field
from types import SimpleNamespace
from typing import Any

import torch

try:
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    what = "pip install 'verl[verl-core,vllm]==0.9.1', in an environment of its own: docs/trl-and-verl.md"
    raise ModuleNotFoundError(f"{__name__} needs verl: {what}", name=error.name) from error
from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transfer_queue import KVBatchMeta  # pyright: ignore[reportMissingImports]
from verl.experimental.agent_loop import AgentLoopWorker  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.core_algos import AdvantageEstimator  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1 import get_trainer_cls  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1.trainer_base import register_trainer  # pyright: ignore[reportMissingImports]
from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # pyright: ignore[reportMissingImports]
from verl.utils.tokenizer import get_processor_token_id  # pyright: ignore[reportMissingImports]

from cepo.data.answer_column import answer_text, solution_text
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Fields, Tree
from cepo.integrations.adapter import Hint, MethodAdapter, Row, Shown, check_beginning, spliced, supported_estimator
from cepo.metrics import results
from cepo.models.chat_template import ChatTemplate
from cepo.models.response_end import ResponseEnd, declared_ends, response_end, warn_of_undeclared_end
from cepo.models.text_codec import TextCodec
from cepo.sections.fields import section
from cepo.sections.reader import read_section
from cepo.types import TokenSignal

MODE = "cepo_sync"
"""The value of `trainer.v1.trainer_mode`, and the section under `trainer.v1` with the settings."""
_PARTITION = "cepo_teachers"
_FIELDS = [
    "prompts", "responses", "response_mask", "rm_scores", "old_log_probs", "multi_modal_inputs", "raw_prompt",
    "reward_model", "extra_info", "extra_fields",
]  # fmt: skip
"""What a row of verl's queue must have; `extra_fields` holds the reward function's further results."""


@section
class CepoSettings:
    """The section `trainer.v1.cepo_sync` of verl's configuration."""

    method: str = "cepo"
    """A method, as in `algorithm.adv_estimator`."""
    settings: Tree = field(default_factory=Tree)
    solution_key: str = Field(default="solution", description="Key of `extra_info` with the worked solution.")
    correct_key: str | None = Field(
        default=None,
        description="Result of the reward function that is at least 0.5 for right rollouts; null: its score.",
    )
    answer_function: str | None = Field(default=None, description="As in `worker.reward.answer_function`.")


@register_trainer(MODE)
class CepoSyncTrainer(get_trainer_cls("sync")):
    """verl's synchronous trainer whose tokens have the advantages (B, T) of a method of cepo.

    A teacher reads the row's own prompt tokens with the reference's tokens spliced in, the row's pixel tensors, and
    positions computed anew. verl's actor workers score it as they score the student. `docs/trl-and-verl.md` lists what verl's
    settings mean here. Raises `ConfigError`: the method or a setting is unknown, or needs what verl lacks.
    """

    def __init__(self, config: DictConfig) -> None:
        written_section = config.trainer.v1.get(MODE)
        written: Any = {}
        if written_section is not None:
            written = OmegaConf.to_container(written_section, resolve=True)
        self._settings = read_section(CepoSettings, written, path=f"trainer.v1.{MODE}")
        self.estimator = supported_estimator(self._settings.method, self._settings.settings, MODE)
        # verl compares the mode with "sync", and its default estimator would start a critic.
        config.trainer.v1.trainer_mode = "sync"
        config.algorithm.adv_estimator = AdvantageEstimator.GRPO.value
        super().__init__(config)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        texts = TextCodec(self.tokenizer, self._response_end())
        seed = self.config.data.get("seed") or 0
        self._credit = MethodAdapter(self.estimator, texts, seed, self._settings.answer_function)
        self._placeholders = {get_processor_token_id(self.processor, kind) for kind in ("image", "video")}

    def _response_end(self) -> ResponseEnd:
        """Returns what ends a response; warns if verl's engines do not, which end it by the model's files alone."""
        renderer = self.processor if self.processor is not None else self.tokenizer
        template = ChatTemplate(
            renderer.chat_template,
            "the chat template",
            special_tokens=self.tokenizer.special_tokens_map,
            settings=self._template_settings(),
        )
        declared = declared_ends(self.tokenizer.name_or_path, None, self.tokenizer)
        end = response_end(template, self.tokenizer, declared, as_parts=self.processor is not None)
        advice = "verl stops at these alone: add the other to eos_token_id in the model's generation_config.json"
        warn_of_undeclared_end(end, declared, template.name, self.tokenizer, advice)
        return end

    def _template_settings(self) -> Tree:
        return dict(self.config.data.get("apply_chat_template_kwargs") or {})

    def _compute_advantage(self, batch: KVBatchMeta, metrics: Tree) -> KVBatchMeta:
        """Lets verl apply its KL penalty and rollout correction, then replaces the advantages by the method's."""
        place = {"keys": batch.keys, "partition_id": batch.partition_id}
        data = _rows_of(tq.kv_batch_get(**place, select_fields=_FIELDS))
        written = super()._compute_advantage(batch, metrics)
        groups = _groups(batch, at_least=2 if "group_ids" in self.estimator.reads else 1)
        compared_rows: list[int] = []
        for group in groups:
            compared_rows += group
        if self.config.algorithm.use_kl_in_reward:
            penalised = _rows_of(tq.kv_batch_get(**place, select_fields=["token_level_rewards"]))
            for row, rewards_of_row in zip(data, penalised, strict=True):
                row |= rewards_of_row
        advantages = [torch.zeros(len(row["responses"])) for row in data]  # other rows teach nothing
        if compared_rows:
            signal = self._signal([data[row] for row in compared_rows], [len(group) for group in groups])
            metrics |= results(signal.metrics)
            for row, row_advantages in zip(compared_rows, signal.advantages, strict=True):
                advantages[row] = row_advantages[: len(advantages[row])].float()
        nested = torch.nested.as_nested_tensor(advantages, layout=torch.jagged)
        fields = {"advantages": nested, "returns": nested}
        tq.kv_batch_put(**place, fields=TensorDict(fields, batch_size=len(data)))
        return written

    def _signal(self, data: Sequence[Fields], sizes: Sequence[int]) -> TokenSignal:
        """Computes the advantages (B, T) of rows whose groups have these sizes in ascending order, and metrics."""
        rewards = torch.stack([row["rm_scores"].sum() for row in data])  # (B,)
        old = pad_sequence([row["old_log_probs"].float() for row in data], batch_first=True)  # (B, T)
        penalties = None
        if self.config.algorithm.use_kl_in_reward:
            penalties_of_rows = [(row["rm_scores"] - row["token_level_rewards"]).float() for row in data]
            penalties = pad_sequence(penalties_of_rows, batch_first=True)  # (B, T)

        def score(live: Tensor, shown: Shown) -> tuple[Tensor, dict[str, Tensor]]:
            return old, self._teachers(data, shown, live, old)

        return self._credit.signal(
            [self._row(row) for row in data],
            rewards,
            self._correct(data, rewards),  # by the reward without the KL: a penalty makes no answer wrong
            sizes,
            score,
            step=self.global_steps - 1,
            penalties=penalties,
        )

    def _row(self, data: Fields) -> Row:
        try:
            written_truth = data["reward_model"]["ground_truth"]
        except (KeyError, TypeError):
            raise DataError("a row's column `reward_model` has no `ground_truth`, as verl's data sets have") from None
        key = self._settings.solution_key
        extra_info = data.get("extra_info") or {}
        return Row(
            response_ids=tuple(data["responses"].tolist()),
            own=data["response_mask"].bool().tolist(),
            ground_truth=answer_text(written_truth, "`reward_model.ground_truth` of a row"),
            solution=solution_text(extra_info.get(key), f"`extra_info.{key}` of a row"),
            has_images=bool(_visuals(data)),
        )

    def _correct(self, data: Sequence[Fields], rewards: Tensor) -> Tensor:
        key = self._settings.correct_key
        if key is None:
            return rewards >= 0.5
        scores: list[float] = []
        for row in data:
            extra_fields = row.get("extra_fields") or {}
            reward_results = extra_fields.get("reward_extra_info") or {}
            if key not in reward_results:
                known = ", ".join(reward_results) or "none"
                raise ConfigError(f"trainer.v1.{MODE}.correct_key: the reward function returns no '{key}', but {known}")
            scores.append(float(reward_results[key]))
        return torch.tensor(scores) >= 0.5

    def _teachers(self, data: Sequence[Fields], shown: Shown, live: Tensor, old: Tensor) -> dict[str, Tensor]:
        """Scores the live rows that have a reference with the actor's workers: view -> (B, T), `old` elsewhere."""
        teachers = {view: old.clone() for view in shown}
        keys: list[str] = []
        names: list[tuple[str, int]] = []  # of the rows to score: view, and row of the batch
        fields: list[Tree] = []
        for view, hints in shown.items():
            for row, hint in enumerate(hints):
                if hint is not None and live[row]:
                    keys.append(f"{view}_{row}_0")
                    names.append((view, row))
                    fields.append(self._teacher_row(data[row], hint))
        if not keys:
            return teachers
        tags = [{"status": "success", "seq_len": len(row_fields["input_ids"])} for row_fields in fields]
        tq.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=list_of_dict_to_tensordict(fields), tags=tags)
        meta = KVBatchMeta(partition_id=_PARTITION, keys=keys, tags=tags)
        meta = self._balance_batch(meta, {})  # also appends the rows that make the batch divisible
        temperature = self.config.actor_rollout_ref.rollout.temperature
        meta.extra_info |= {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        try:
            self.actor_rollout_wg.compute_log_prob(meta)
            scored = tq.kv_batch_get(keys=keys, partition_id=_PARTITION, select_fields=["log_probs"])
        finally:
            tq.kv_clear(keys=meta.keys, partition_id=_PARTITION)
        for (view, row), log_probs in zip(names, scored["log_probs"].unbind(), strict=True):
            length = len(data[row]["responses"])
            teachers[view][row, :length] = log_probs[-length - 1 : -1].float()  # each position predicts the next token
        return teachers

    def _teacher_row(self, data: Fields, hint: Hint) -> Tree:
        messages = list(data["raw_prompt"])
        responses = data["responses"]
        hinted, prefix = self._credit.teacher_messages(messages, hint)
        target = [*self._prompt_ids(hinted), *self._credit.texts.encode_text(prefix)]
        prompt = data["prompts"].tolist()
        student = self._prompt_ids(messages)
        visuals: Tree = {}
        if self._credit.shows_images(hint):
            visuals = _visuals(data)
            target = spliced(prompt, student, target, self._placeholders)
        else:
            check_beginning(prompt, student, self._placeholders)
        prompts = torch.tensor(target)
        input_ids = torch.cat([prompts, responses])
        return {
            "prompts": prompts,
            "responses": responses,
            "input_ids": input_ids,
            "position_ids": self._positions(input_ids, visuals),
            "response_mask": torch.ones_like(responses),
            "loss_mask": torch.ones_like(responses),
            "multi_modal_inputs": visuals,
        }

    def _prompt_ids(self, messages: Sequence[Fields]) -> list[int]:
        """Returns the tokens of the conversation and the assistant header, with one placeholder for each image."""
        return self.tokenizer(self._rendered(messages), add_special_tokens=False)["input_ids"]

    def _rendered(self, messages: Sequence[Fields]) -> str:
        options = self._template_settings()
        renderer = self.processor if self.processor is not None else self.tokenizer
        return renderer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **options)

    def _positions(self, input_ids: Tensor, visuals: Fields) -> Tensor:
        """Returns the positions that verl gives to a row: (L,), or (4, L) with M-RoPE."""
        indexer = getattr(self.processor, "get_rope_index", None)
        inputs = dict(visuals)
        if indexer is not None and "mm_token_type_ids" in inspect.signature(indexer).parameters:
            inputs["mm_token_type_ids"] = True  # verl then computes them
        batch_of_one = input_ids.unsqueeze(0)
        worker = SimpleNamespace(processor=self.processor)  # the method reads nothing else of its worker
        positions = AgentLoopWorker._compute_position_ids(worker, batch_of_one, torch.ones_like(batch_of_one), inputs)
        return positions.squeeze(0)


def _groups(batch: KVBatchMeta, *, at_least: int) -> list[list[int]]:
    """Returns the rows of each prompt in the order of generation, small groups first, without verl's padding rows."""
    rows_of_prompts: dict[str, dict[int, int]] = defaultdict(dict)  # by prompt, then by session
    for row, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        if tag.get("is_padding"):
            continue
        prompt, session, output = key.rsplit("_", 2)
        if int(output) > 0:
            raise DataError(f"an agent loop gave several outputs for one rollout ({key}), whose credit is not defined")
        rows_of_prompts[prompt][int(session)] = row
    groups: list[list[int]] = []
    for rows_of_sessions in rows_of_prompts.values():
        group = [row for _, row in sorted(rows_of_sessions.items())]
        if len(group) >= at_least:
            groups.append(group)
    return sorted(groups, key=len)


def _rows_of(data: TensorDict) -> list[Tree]:
    """Returns the rows of a batch, whose fields may be nested, stacked or no tensors, as mappings."""
    columns: dict[str, Sequence[Any]] = {}
    for name, column in data.items():
        columns[name] = column.unbind() if isinstance(column, Tensor) else column.tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _visuals(data: Fields) -> Tree:
    """Returns the row's inputs to the vision tower; none for a row of text."""
    inputs = data.get("multi_modal_inputs") or {}
    return {name: value for name, value in inputs.items() if value is not None}
