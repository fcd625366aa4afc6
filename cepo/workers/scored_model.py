"""Scores rows with one model: it cuts them into passes, collates these, and offloads the weights while it is not used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cepo.config.worker_schema import ActorConfig, CriticConfig
from cepo.data.batch import ScoringRow
from cepo.models.cpu.matrix_products import row_multiple
from cepo.models.processing import Processing
from cepo.models.segments import BLOCK_SIZE
from cepo.terminal.progress import shown
from cepo.workers.batching import Batcher, RankPass
from cepo.workers.distributed import reshard, this_device
from cepo.workers.pass_sizes import PassSizes, sizes_of
from cepo.workers.scoring_model import CollatedRows, ScoringModel, ValueModel, collate

Config = TypeVar("Config", ActorConfig, CriticConfig)
Model = TypeVar("Model", ScoringModel, ValueModel)


class ScoredModel(Generic[Config, Model]):
    """A model under FSDP2, also with one process, that rows are scored with.

    Each rank has one. All ranks call the same methods in the same order, each with its own rows or none.

    Attributes:
        tokens_computed: tokens of all passes so far, including padding.
        tokens_asked: tokens of all rows in these passes, with shared tokens counted for each row.
        pass_sizes: how passes are made.
    """

    def __init__(self, config: Config, processing: Processing, module: Model, *, longest_row: int | None) -> None:
        self._config = config
        self._processing = processing
        self.module: Model = module
        self.device = this_device()
        self.pass_sizes: PassSizes = sizes_of(config)
        self.passes = Batcher(
            config,
            processing,
            whole_tower=module.encoder.keeps,
            why_padded=module.why_padded,
            device=self.device,
            longest_row=longest_row,
        )
        # Whole blocks of the attention's kernels on a GPU, and of oneDNN's products on a CPU.
        self._multiple_of = row_multiple(module) if self.device.type == "cpu" else BLOCK_SIZE
        self.tokens_computed = 0
        self.tokens_asked = 0
        by_blocks = config.fsdp.enable_cpu_offload  # FSDP itself moves the weights then
        self._moves_weights = config.offload.offload_params and self.device.type != "cpu" and not by_blocks
        self._weights_offloaded = False

    def begin_scoring(self) -> None:
        self.to_device()
        self.module.eval()

    def results(self, rows: Sequence[ScoringRow], compute: Callable[[RankPass], Tensor]) -> list[Tensor]:
        """Returns what `compute` finds for each row's response tokens, (response length,) float32 on the CPU."""
        results: dict[int, Tensor] = {}
        passes = self.passes.cut(rows, self.pass_sizes.scoring_rows)
        for part in shown(passes, "scoring"):
            values = compute(part).float().cpu()  # (N,)
            lengths = [len(row.response_ids) for row in part.rows]
            values_of_rows = values.split(lengths)
            # Entries beyond the indices belong to the filler.
            results.update(zip(part.indices, values_of_rows, strict=False))
        reshard(self.module)
        return [results[index] for index in range(len(rows))]

    def collate(self, part: RankPass) -> CollatedRows:
        """Collates the rows of a pass, and counts its tokens."""
        batch = collate(
            part.rows,
            part.forest,
            processing=self._processing,
            device=self.device,
            multiple_of=self._multiple_of,
        )
        self.tokens_computed += batch.input_ids.numel()
        self.tokens_asked += sum(row.num_tokens for row in part.rows)
        return batch

    def to_device(self) -> None:
        """Loads the weights if they were offloaded. Call it before each use."""
        if self._weights_offloaded:
            self.module.to(self.device)
            self._weights_offloaded = False

    def rest(self) -> None:
        """Moves the shards to host memory if `offload` is set, and frees gathered copies and gradients."""
        if not self._moves_weights or self._weights_offloaded:
            return
        reshard(self.module)
        self.module.zero_grad(set_to_none=True)
        self.module.to("cpu")
        self._weights_offloaded = True
        torch.cuda.empty_cache()
