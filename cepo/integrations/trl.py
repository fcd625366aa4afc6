"""Puts cepo's methods into TRL's GRPOTrainer: rollouts, rewards, loss and engines stay TRL's, credit becomes cepo's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad
from transformers.image_utils import load_image
from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]
from trl.data_utils import prepare_multimodal_messages  # pyright: ignore[reportMissingImports]

from cepo.data.answers_text import answer_text, solution_text
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Fields, Tree
from cepo.integrations.gathered import Credit, Hint, Row, Shown, images_of, supported_estimator
from cepo.models.patch_mask import patch_size_of
from cepo.models.text_codec import TextCodec
from cepo.types import TokenSignal

_PADDED = {"padding": True, "padding_side": "left", "add_special_tokens": False, "return_tensors": "pt"}


class CepoTrainer(GRPOTrainer):  # pyright: ignore[reportGeneralTypeIssues]
    """TRL's GRPOTrainer whose tokens have the advantages (B, T) of a method of cepo.

    Every process gathers the rollouts and log-probs of all, so that groups may be spread over processes, and computes
    the same signal. Tokens that a tool wrote have no advantage and no evidence. `docs/trl.md` lists what TRL's settings
    mean here.

    Args:
        method: a name as in `algorithm.adv_estimator`.
        settings: of the method, as in the section `algorithm` of a configuration.
        ground_truth: column of the right answer.
        solution: column of the worked solution, for `positive.source` solution.
        correct_by: name of the reward function that decides whether a rollout is right; None: the weighted sum decides.
        answer_function: `file.py:function` that finds the final answer of a response, as in `worker.reward`.

    Raises `ConfigError`: the method or a setting is unknown, or needs what TRL lacks.
    """

    # TRL sets them in its own __init__; transformers declares them wider than they are there.
    model: Any
    args: Any
    accelerator: Any
    processing_class: Any
    num_generations: int

    def __init__(
        self,
        *args: Any,
        method: str = "cepo",
        settings: Fields | None = None,
        ground_truth: str = "answer",
        solution: str = "solution",
        correct_by: str | None = None,
        answer_function: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.estimator = supported_estimator(method, settings, "TRL")
        super().__init__(*args, **kwargs)
        if correct_by not in (None, *self.reward_func_names):
            raise ConfigError(f"correct_by '{correct_by}' is not among {', '.join(self.reward_func_names)}")
        self._truth, self._solution, self._correct_by = ground_truth, solution, correct_by
        texts = TextCodec(self._tokenizer, self.eos_token_ids)
        self._credit = Credit(self.estimator, texts, self.args.seed, answer_function)
        self._prompts: list[Any] = []
        self._sampled: list[list[int]] = []
        self._scores = torch.zeros(0, 0)

    def _generate(self, prompts: list[Any]) -> Any:
        self._prompts = prompts  # with images, and with what an environment has added
        generated = super()._generate(prompts)
        if self.estimator.views and any(generated[-1]):
            raise DataError("a tool returned an image: teachers cannot score responses with images in them")
        return generated

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self._sampled = completion_ids_list
        self._scores = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._scores

    def _generate_and_score_completions(self, inputs: list[Tree]) -> Tree:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            signal, ids = self._signal(inputs, output), output["completion_ids"]
            output["advantages"] = _as_wide(signal.advantages, ids.shape[1]).to(ids.device)
            for name, metric in signal.metrics.items():
                if metric.result is not None:
                    self._metrics["train"][name].append(metric.result)
        return output

    def _signal(self, inputs: list[Tree], output: Tree) -> TokenSignal:
        """Computes this process's advantages (B, T) from all processes' rollouts, and metrics."""
        rows: list[Row] = gather_object(self._own_rows(inputs, output))
        width, first = max(len(row.response_ids) for row in rows), self.accelerator.process_index * len(inputs)
        mine = slice(first, first + len(inputs))

        def score(live: Tensor, shown: Shown) -> tuple[Tensor, dict[str, Tensor]]:
            learns = live[mine] & output["completion_mask"].any(dim=1).cpu()
            old = output.get("old_per_token_logps")
            if old is None:
                is_read = bool(shown) or "old_log_probs" in self.estimator.reads
                old = self._log_probs(output, [None] * len(inputs), learns & is_read)
            teachers: dict[str, Tensor] = {}
            for view, of in shown.items():
                reads = learns & torch.tensor([each is not None for each in of[mine]])
                found = self._log_probs(output, of[mine], reads)
                teachers[view] = self._of_all(found.where(reads.to(found.device).unsqueeze(1), old), width)
            return self._of_all(old, width), teachers

        rewards, correct = self._rewards()
        sizes = [self.num_generations] * (len(rows) // self.num_generations)
        micro_steps = self.state.global_step * self.args.gradient_accumulation_steps
        step = micro_steps // (self.args.steps_per_generation * self.num_iterations)  # of the rollouts, for schedules
        signal = self._credit.signal(rows, rewards, correct, sizes, score, step=step)
        return replace(signal, advantages=signal.advantages[mine])

    def _own_rows(self, inputs: list[Tree], output: Tree) -> list[Row]:
        if self._truth not in inputs[0]:
            raise DataError(f"the data set has no column '{self._truth}' of right answers; name it in ground_truth")
        if any(isinstance(prompt, str) for prompt in self._prompts):
            raise DataError("prompts must be lists of messages, because teachers read the reference in a user turn")
        rows: list[Row] = []
        for row, (example, ids) in enumerate(zip(inputs, self._sampled, strict=True)):
            own = [True] * len(ids)  # also of a response that mask_truncated_completions hides: its reward counts
            if "tool_mask" in output and bool(output["completion_mask"][row].any()):
                own = output["tool_mask"][row, : len(ids)].bool().tolist()
            truth = answer_text(example[self._truth], f"column '{self._truth}' of a row")
            solution = solution_text(example.get(self._solution), f"column '{self._solution}' of a row")
            rows.append(Row(tuple(ids), own, truth, solution, bool(images_of(self._prompts[row]))))
        return rows

    def _rewards(self) -> tuple[Tensor, Tensor]:
        """Returns the reward of each rollout of all processes, and whether it is right.

        The reward is NaN if every reward function returned None: TRL warns of it, and the rollout teaches nothing.
        """
        scores = self._scores.double().cpu()
        totals = (scores * self.reward_weights.double().cpu()).nansum(dim=1)
        totals[scores.isnan().all(dim=1)] = torch.nan
        decides = totals if self._correct_by is None else scores[:, self.reward_func_names.index(self._correct_by)]
        return totals, decides >= 0.5

    @torch.no_grad()
    def _log_probs(self, output: Tree, hints: Sequence[Hint | None], needed: Tensor) -> Tensor:
        """Scores this process's needed rows after the prompts with these hints: (B, T), 0 for all other rows."""
        ids, mask, was_training = output["completion_ids"], output["completion_mask"], self.model.training
        contexts = {row: self._context(row, hints[row]) for row in needed.nonzero().flatten().tolist()}
        kinds = [[row for row in contexts if bool(contexts[row][1]) is seen] for seen in (True, False)]
        size = self.args.per_device_train_batch_size  # rows without an image get passes of their own
        chunks = [kind[start : start + size] for kind in kinds for start in range(0, len(kind), size)]
        result = torch.zeros(ids.shape, device=ids.device)
        most = int(self.accelerator.gather(torch.tensor([len(chunks)], device=ids.device)).max())
        self.model.eval()
        for number in range(most):  # as many on each process, because a sharded model's passes are common ones
            chunk = chunks[number] if number < len(chunks) else [0]
            texts, images = zip(*(contexts.get(row) or self._context(row, None) for row in chunk), strict=True)
            visual = {"images": list(images)} if any(images) else {}
            fields = self.processing_class(text=list(texts), **visual, **_PADDED).to(ids.device)
            tokens = torch.cat([fields.pop("input_ids"), ids[chunk]], dim=1)
            seen = torch.cat([fields.pop("attention_mask"), mask[chunk]], dim=1)
            for name in {"token_type_ids", "mm_token_type_ids"} & set(fields):
                fields[name] = pad(fields[name], (0, ids.shape[1]))
            if visual:
                tiles = fields.get("spatial_shapes", fields["pixel_values"])  # of models that cut images into tiles
                fields["num_tiles"] = [len(tiles)] + [0] * (len(chunk) - 1)
                fields["num_images"] = [len(own) for own in images]
            scored = self._get_per_token_logps_and_entropies(self.model, tokens, seen, ids.shape[1], **fields)[0]
            if number < len(chunks):
                result[chunk] = scored.float()
        self.model.train(was_training)
        return result

    def _context(self, row: int, hint: Hint | None) -> tuple[str, list[object]]:
        """Returns the rendered prompt with its assistant header, and its images: TRL's own, but for the hint."""
        prompt = self._prompts[row]
        messages = prepare_multimodal_messages(prompt) if self._is_vlm else prompt
        messages, prefix = self._credit.teacher_messages(messages, hint)
        tools = self.tools if self.environment_factories is None else self._env_tools[self._batch_environments[row]]
        options = {"tools": tools or None, "chat_template": self.chat_template, "tokenize": False}
        options |= {"add_generation_prompt": True, **cast("Tree", self.chat_template_kwargs)}
        text = self.processing_class.apply_chat_template(messages, **options)
        images = images_of(messages)
        if hint is not None and hint.mask is not None:
            config = self.accelerator.unwrap_model(self.model).config
            decoded = [load_image(cast("Any", image)) for image in images]
            images, _ = hint.mask.masked(decoded, [], patch_size=patch_size_of(config))
        return text + prefix, list(images)

    def _of_all(self, values: Tensor, width: int) -> Tensor:
        return self.accelerator.gather(_as_wide(values, width).contiguous()).float().cpu()


def _as_wide(values: Tensor, width: int) -> Tensor:
    return pad(values[:, :width], (0, max(0, width - values.shape[1])))
