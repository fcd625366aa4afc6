"""Writes the page of a running GRPOTrainer of TRL every few steps, with the contrast of tokens by the model it trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback

from cepo.credit.resources import Scoring
from cepo.data.batch import ScoringRow
from cepo.errors import CepoError, ConfigError, DataError
from cepo.look.contrast import chosen_groups, config_of_model, contrast_sections, scored_by
from cepo.look.look_page import write_look_page
from cepo.look.reading import read_rollouts_of, trl_metrics
from cepo.models.processing import Processing
from cepo.report.diagnosis import Observed, diagnosed
from cepo.report.findings import findings_lines
from cepo.report.html_page import Section
from cepo.report.responses import groups_of
from cepo.rewards.pool import RewardPool

__all__ = ["CreditCallback"]

logger = logging.getLogger(__name__)


class CreditCallback(TrainerCallback):
    """Writes `look.html` into the output folder every few steps, from what `log_completions=True` writes there.

    The training does not change: the model is only read, without gradients and without random numbers. With more than one
    process, or a model that cepo cannot read, the page has no contrast. Images are not in TRL's files, so the model scores
    texts. `docs/look.md` has what it costs.

    With `trainer`, the figures of every page but the last one go to what its `report_to` names, as `look/*`; when
    training ends, trackers may have been closed.

    Args:
        every: steps between pages; the last one is written when training ends.
        responses: number of responses that the model scores for a page; 0 for none.
        trainer: the trainer to which the callback is added with `trainer.add_callback`.

    Raises `ConfigError` when training begins: the trainer does not log its completions.
    """

    def __init__(self, *, every: int = 20, responses: int = 16, trainer: Trainer | None = None) -> None:
        self._every = every
        self._responses = responses
        self._trainer = trainer
        self._pool: RewardPool | None = None
        self.seconds = 0.0
        """Seconds of all pages so far."""
        self._figures: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuses a trainer whose completions are not written."""
        if not getattr(args, "log_completions", False):
            raise ConfigError(
                "CreditCallback reads the completions that TRL writes; set log_completions=True in GRPOConfig"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Writes the page after every so many steps: what a step logs is in its file when the next one begins."""
        if state.global_step > 0 and state.global_step % self._every == 0:
            self._write(args, state, objects)
            if self._trainer is not None and self._figures:
                self._trainer.callback_handler.on_log(args, state, control, logs=dict(self._figures))

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Writes the last page, and logs what keeps the run from learning."""
        for line in self._write(args, state, objects):
            logger.warning("%s", line)
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _write(self, args: Any, state: Any, objects: dict[str, Any]) -> list[str]:
        """Writes the page, and returns the diagnosis; nothing without completions, or on another process than the first."""
        folder = Path(args.output_dir)
        if not state.is_world_process_zero or not any(folder.glob("completions/*.parquet")):
            return []
        start = time.perf_counter()
        seen = read_rollouts_of(folder / "completions")
        observed = Observed(groups_of(seen.responses), trl_metrics(state.log_history))
        findings = diagnosed(observed)
        self._figures = {
            "look/faults": len(findings),
            "look/dead_groups": 1 - len(observed.mixed) / len(observed.groups),
        }
        contrast: list[Section] = []
        if self._responses > 0 and args.world_size == 1:
            try:
                contrast = self._contrast(observed, objects["model"], objects["processing_class"])
            except DataError as error:  # for example, no group has both a right and a wrong response yet
                logger.info("step %d: no contrast on the page: %s", state.global_step, error)
            except CepoError as error:
                logger.warning("the page has no contrast: %s", error)
                self._responses = 0
        write_look_page(folder / "look.html", seen, observed, findings, contrast=contrast)
        self.seconds += time.perf_counter() - start
        self._figures["look/seconds"] = self.seconds
        return [*findings_lines(findings), f"page: {folder / 'look.html'}"]

    def _contrast(self, observed: Observed, model: Any, processing_class: Any) -> list[Section]:
        groups = chosen_groups(observed.groups, responses=self._responses)
        name = str(model.config.name_or_path)
        config = config_of_model(name)
        processing = Processing(name, chat_template=getattr(processing_class, "chat_template", None))
        if self._pool is None:
            self._pool = RewardPool(config.worker.reward)
        session = Scoring(config=config, processing=processing, rewards=self._pool, backend=_LiveModel(model))
        scored = scored_by(session, groups)
        if scored.known is not None:
            self._figures["look/known_nats"] = scored.known
        if scored.noise is not None:
            self._figures |= {"look/noise_nats": scored.noise.nats, "look/standing_out": scored.noise.for_outcome}
        return contrast_sections(scored)


class _LiveModel:
    """Scores texts with a model that is being trained, and leaves it as it was."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def score(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns each row's log-probs at temperature 1, (response length,) float32 on the CPU, one row a pass."""
        was_training = self._model.training
        self._model.eval()
        try:
            return [self._of_row(row) for row in rows]
        finally:
            self._model.train(was_training)

    def score_teacher(self, rows: Sequence[ScoringRow]) -> list[Tensor]:
        """Returns the same: the teacher is the model itself."""
        return self.score(rows)

    def _of_row(self, row: ScoringRow) -> Tensor:
        tokens = torch.tensor([*row.context.token_ids, *row.response_ids.tolist()], device=self._model.device)
        start = len(row.context.token_ids)
        logits = self._model(input_ids=tokens.unsqueeze(0), use_cache=False).logits[0, start - 1 : -1]  # (T, V)
        return -cross_entropy(logits.float(), tokens[start:], reduction="none").cpu()
