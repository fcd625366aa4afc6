"""Puts cepo's methods into TRL's GRPOTrainer: rollouts, rewards, loss and engines stay TRL's, credit becomes cepo's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import pad

from cepo.data.answer_column import answer_text, solution_text
from cepo.errors import ConfigError, DataError
from cepo.files.trees import Fields, Tree
from cepo.integrations.adapter import Hint, MethodAdapter, Row, Shown, images_of, supported_estimator
from cepo.models.chat_template import ChatTemplate
from cepo.models.response_end import SAMPLED_HERE, ResponseEnd, response_end, warn_of_undeclared_end
from cepo.models.text_codec import TextCodec
from cepo.types import TokenSignal
from cepo.workers.teacher_model import require_same_tokens

try:
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]
    from trl.data_utils import prepare_multimodal_messages  # pyright: ignore[reportMissingImports]
    from trl.models import prepare_deepspeed, prepare_fsdp  # pyright: ignore[reportMissingImports]
    from trl.trainer.utils import add_fused_lm_head, create_model_from_path  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise ModuleNotFoundError(f"{__name__} needs TRL: pip install 'trl==1.16.0'", name="trl") from error

_PADDED = {"padding": True, "padding_side": "left", "add_special_tokens": False, "return_tensors": "pt"}


class CepoTrainer(GRPOTrainer):  # pyright: ignore[reportGeneralTypeIssues]
    """TRL's GRPOTrainer whose tokens have the advantages (B, T) of a method of cepo.

    Every process gathers the rollouts and log-probs of all, so that groups may be spread over processes, and computes
    the same signal. Tokens that a tool wrote have no advantage and no evidence. `docs/trl-and-verl.md` lists what TRL's settings
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
        self.estimator = supported_estimator(method, settings, "TRL", loads_teachers=True)
        super().__init__(*args, **kwargs)
        self._teacher: Any = self._frozen_teacher(self.estimator.teacher.model_path)
        if correct_by not in (None, *self.reward_func_names):
            raise ConfigError(f"correct_by '{correct_by}' is not among {', '.join(self.reward_func_names)}")
        self._truth = ground_truth
        self._solution = solution
        self._correct_by = correct_by
        texts = TextCodec(self._tokenizer, self._end_responses_as_the_template())
        self._credit = MethodAdapter(self.estimator, texts, self.args.seed, answer_function)
        self._prompts: list[Any] = []
        self._sampled: list[list[int]] = []
        self._tool_masks: list[list[int]] | None = None  # 0 on the tokens of tools
        self._tools_images: list[list[Any]] = []  # of each response; empty without tools
        self._scores = torch.zeros(0, 0)

    def _frozen_teacher(self, path: str | None) -> Any:
        """Loads a teacher with weights of its own as TRL loads its reference model; None where the policy is its own."""
        if path is None:
            return None
        policy: Any = self.accelerator.unwrap_model(self.model)
        require_same_tokens(path, self._tokenizer, policy.config, distils=False)
        options: Tree = {"device_map": None, **cast("Tree", self.args.model_init_kwargs or {})}
        teacher: Any = create_model_from_path(path, **options).requires_grad_(False).eval()
        add_fused_lm_head(teacher, temperature=self.temperature, cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(teacher, self.accelerator)
        return self.accelerator.prepare_model(teacher, evaluation_mode=True)

    def _end_responses_as_the_template(self) -> ResponseEnd:
        """Lets the engines end a response where the chat template ends an assistant's turn, and returns what ends one."""
        declared = tuple(self.eos_token_ids)
        template = ChatTemplate(
            self.chat_template or self.processing_class.chat_template,
            "the chat template",
            special_tokens=self._tokenizer.special_tokens_map,
            settings=cast("Tree", self.chat_template_kwargs),
        )
        end = response_end(template, self._tokenizer, declared, as_parts=self._is_vlm)
        consequence = SAMPLED_HERE
        self.eos_token_ids = list(end.token_ids)
        if self.use_vllm:
            stopping: Tree = self.vllm_generation.generation_kwargs
            stopping["stop_token_ids"] = sorted({*stopping.get("stop_token_ids", ()), *end.token_ids})
            if end.text:
                stopping["stop"] = [*stopping.get("stop", ()), end.text]
                stopping["include_stop_str_in_output"] = True
        else:
            self.generation_config.eos_token_id = self.eos_token_ids
            self.generation_kwargs["eos_token_id"] = self.eos_token_ids
            if end.text:
                consequence = "TRL's transformers engine stops at tokens alone: give the tokenizer such a token"
        if self.accelerator.is_main_process:
            warn_of_undeclared_end(end, declared, template.name, self._tokenizer, consequence)
        return end

    def _generate(self, prompts: list[Any]) -> Any:
        self._prompts = prompts  # with images, and with what an environment has added
        generated = super()._generate(prompts)
        self._tool_masks = generated[2]
        self._tools_images = generated[-1]
        return generated

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self._sampled = completion_ids_list
        self._scores = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._scores

    def _generate_and_score_completions(self, inputs: list[Tree]) -> Tree:
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        signal = self._signal(inputs, output)
        completion_ids = output["completion_ids"]  # (B, T)
        output["advantages"] = _as_wide(signal.advantages, completion_ids.shape[1]).to(completion_ids.device)
        for name, metric in signal.metrics.items():
            if metric.result is not None:
                self._metrics["train"][name].append(metric.result)
        return output

    def _signal(self, inputs: list[Tree], output: Tree) -> TokenSignal:
        """Computes this process's advantages (B, T) from all processes' rollouts, and metrics."""
        rows: list[Row] = gather_object(self._own_rows(inputs))
        width = max(len(row.response_ids) for row in rows)
        first_row = self.accelerator.process_index * len(inputs)
        own_rows = slice(first_row, first_row + len(inputs))

        def score(live: Tensor, shown: Shown) -> tuple[Tensor, dict[str, Tensor]]:
            own_hints: dict[str, Sequence[Hint | None]] = {}
            for view, hints in shown.items():
                own_hints[view] = hints[own_rows]
            old, own_teachers = self._scored(output, live[own_rows], own_hints)
            teachers: dict[str, Tensor] = {}
            for view, log_probs in own_teachers.items():
                teachers[view] = self._of_all(log_probs, width)
            return self._of_all(old, width), teachers

        rewards, correct = self._rewards()
        num_groups = len(rows) // self.num_generations
        signal = self._credit.signal(
            rows,
            rewards,
            correct,
            [self.num_generations] * num_groups,
            score,
            step=self._rollout_step(),
        )
        return replace(signal, advantages=signal.advantages[own_rows])

    def _rollout_step(self) -> int:
        """Returns the number of rollout batches before this one, by which methods' schedules go."""
        micro_steps = self.state.global_step * self.args.gradient_accumulation_steps
        micro_steps_per_rollouts = self.args.steps_per_generation * self.num_iterations
        return micro_steps // micro_steps_per_rollouts

    def _scored(self, output: Tree, live: Tensor, hints_of_views: Shown) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the log-probs (B, T) of this process's rows by the student, and by the teacher of each view.

        Rows that do not learn, or that a mask hides, have no pass: theirs are 0, and a teacher's are the student's.
        """
        has_token = output["completion_mask"].any(dim=1)
        learns = live & has_token.cpu()
        old = output.get("old_per_token_logps")
        if old is None:
            is_read = bool(hints_of_views) or "old_log_probs" in self.estimator.reads
            no_hints = [None] * len(live)
            old = self._log_probs(output, no_hints, learns & is_read, self.model)
        teacher = self.model if self._teacher is None else self._teacher
        teachers: dict[str, Tensor] = {}
        for view, hints in hints_of_views.items():
            has_hint = torch.tensor([hint is not None for hint in hints])
            is_scored = learns & has_hint
            log_probs = self._log_probs(output, hints, is_scored, teacher)
            on_device = is_scored.to(log_probs.device)
            teachers[view] = log_probs.where(on_device.unsqueeze(1), old)
        return old, teachers

    def _own_rows(self, inputs: list[Tree]) -> list[Row]:
        if self._truth not in inputs[0]:
            raise DataError(f"the data set has no column '{self._truth}' of right answers; name it in ground_truth")
        if any(isinstance(prompt, str) for prompt in self._prompts):
            raise DataError("prompts must be lists of messages, because teachers read the reference in a user turn")
        rows: list[Row] = []
        for number, (example, response_ids) in enumerate(zip(inputs, self._sampled, strict=True)):
            # TRL's output has no mask of a response that mask_truncated_completions hides, whose reward counts.
            is_policys = [True] * len(response_ids)
            if self._tool_masks is not None:
                is_policys = [bool(mark) for mark in self._tool_masks[number]]
            row = Row(
                response_ids=tuple(response_ids),
                own=is_policys,
                ground_truth=answer_text(example[self._truth], f"column '{self._truth}' of a row"),
                solution=solution_text(example.get(self._solution), f"column '{self._solution}' of a row"),
                has_images=bool(images_of(self._prompts[number])),
            )
            rows.append(row)
        return rows

    def _rewards(self) -> tuple[Tensor, Tensor]:
        """Returns the reward of each rollout of all processes, and whether it is right.

        The reward is NaN if every reward function returned None: TRL warns of it, and the rollout teaches nothing.
        """
        scores = self._scores.double().cpu()  # (B of all processes, reward functions)
        weights = self.reward_weights.double().cpu()
        totals = (scores * weights).nansum(dim=1)
        lacks_all = scores.isnan().all(dim=1)
        totals[lacks_all] = torch.nan
        if self._correct_by is None:
            return totals, totals >= 0.5
        column = self.reward_func_names.index(self._correct_by)
        return totals, scores[:, column] >= 0.5

    @torch.no_grad()
    def _log_probs(self, output: Tree, hints: Sequence[Hint | None], needed: Tensor, model: Any) -> Tensor:
        """Scores this process's needed rows by `model` after the prompts with these hints: (B, T), 0 for all other rows.

        Raises `DataError`: a tool returned an image in one of these rows.
        """
        completion_ids = output["completion_ids"]  # (B, T)
        contexts: dict[int, _Context] = {}
        for row in needed.nonzero().flatten().tolist():
            if self._tools_images and self._tools_images[row]:
                raise DataError(
                    f"a tool returned an image, and method {self.estimator.name} reads log-probs of responses, which may "
                    "have no images in them; accepted: tools that return text, or a method that reads no log-probs"
                )
            contexts[row] = self._context(row, hints[row])
        chunks = self._chunks(contexts)
        # A sharded model's passes are collective, so each process runs as many as the one with the most.
        num_chunks = torch.tensor([len(chunks)], device=completion_ids.device)
        num_passes = int(self.accelerator.gather(num_chunks).max())
        result = torch.zeros(completion_ids.shape, device=completion_ids.device)
        was_training = model.training
        model.eval()
        for number in range(num_passes):
            if number < len(chunks):
                rows = chunks[number]
                result[rows] = self._pass(output, rows, [contexts[row] for row in rows], model)
            else:
                self._pass(output, [0], [self._context(0, None)], model)
        model.train(was_training)
        return result

    def _chunks(self, contexts: Mapping[int, _Context]) -> list[list[int]]:
        """Divides rows into passes; those without an image get passes of their own."""
        with_images: list[int] = []
        without_images: list[int] = []
        for row, context in contexts.items():
            if context.images:
                with_images.append(row)
            else:
                without_images.append(row)
        size = self.args.per_device_train_batch_size
        chunks: list[list[int]] = []
        for rows in (with_images, without_images):
            for start in range(0, len(rows), size):
                chunks.append(rows[start : start + size])
        return chunks

    def _pass(self, output: Tree, rows: Sequence[int], contexts: Sequence[_Context], model: Any) -> Tensor:
        """Returns the log-probs (rows, T) of some rows' responses after these contexts, in one pass of `model`."""
        response_ids = output["completion_ids"][rows]
        num_tokens = response_ids.shape[1]
        images = [context.images for context in contexts]
        visuals: Tree = {"images": images} if any(images) else {}
        texts = [context.text for context in contexts]
        fields = self.processing_class(text=texts, **visuals, **_PADDED).to(response_ids.device)
        input_ids = torch.cat([fields.pop("input_ids"), response_ids], dim=1)
        attention_mask = torch.cat([fields.pop("attention_mask"), output["completion_mask"][rows]], dim=1)
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in fields:
                fields[name] = pad(fields[name], (0, num_tokens))  # a response is text
        if visuals:
            tiles = fields.get("spatial_shapes", fields["pixel_values"])  # of models that cut images into tiles
            fields["num_tiles"] = [len(tiles)] + [0] * (len(rows) - 1)
            fields["num_images"] = [len(images_of_row) for images_of_row in images]
        log_probs, *_ = self._get_per_token_logps_and_entropies(model, input_ids, attention_mask, num_tokens, **fields)
        return log_probs.float()

    def _context(self, row: int, hint: Hint | None) -> _Context:
        """Returns what a teacher reads before a row's response: TRL's own prompt, but for the hint."""
        prompt = self._prompts[row]
        messages = prepare_multimodal_messages(prompt) if self._is_vlm else prompt
        messages, prefix = self._credit.teacher_messages(messages, hint)
        tools = self.tools
        if self.environment_factories is not None:
            tools = self._env_tools[self._batch_environments[row]]
        text = self.processing_class.apply_chat_template(
            messages,
            tools=tools or None,
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=True,
            **cast("Tree", self.chat_template_kwargs),
        )
        return _Context(text=text + prefix, images=images_of(messages))

    def _of_all(self, values: Tensor, width: int) -> Tensor:
        """Gathers (B, T) values of all processes, padded or cut to `width` tokens."""
        return self.accelerator.gather(_as_wide(values, width).contiguous()).float().cpu()


class _Context(NamedTuple):
    """What precedes a response."""

    text: str  # the rendered prompt with its assistant header
    images: list[object]


def _as_wide(values: Tensor, width: int) -> Tensor:
    num_missing = max(0, width - values.shape[1])
    return pad(values[:, :width], (0, num_missing))
