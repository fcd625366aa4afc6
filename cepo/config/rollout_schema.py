"""Declares the settings of sampling and of rewards; a part of the schema."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from typing_extensions import TypedDict

from cepo.config.data_schema import Joined, parts_of
from cepo.config.paths import located, split_function
from cepo.sections import DECISIVE, Count, CountOrOff, Natural, NotNegative, Positive, section
from cepo.trees import Fields

FloatType = Literal["bf16", "fp16", "fp32"]


class SamplingOverrides(TypedDict, total=False):
    """`worker.rollout.val_override_config`: the entries that it may have."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # pyright: ignore[reportGeneralTypeIssues]

    n: Count
    temperature: NotNegative
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: CountOrOff
    presence_penalty: Annotated[float, Field(ge=-2, le=2)]


@section
class RolloutConfig:
    """`worker.rollout.*`: how responses are sampled."""

    name: Literal["auto", "vllm", "transformers"] = "auto"
    """Rollout engine; auto: vLLM if it is installed, else transformers."""
    n: Annotated[Count, DECISIVE] = 1
    """Responses per prompt, which form a group."""
    temperature: Annotated[Positive, DECISIVE] = 1.0
    """Sampling temperature; log-probs are computed from logits divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1), DECISIVE] = 1.0
    """Nucleus sampling; 1.0: off. Log-probs are those of the whole distribution."""
    top_k: Annotated[CountOrOff, DECISIVE] = -1
    """Sample among the k most probable tokens; -1: off. Log-probs are those of the whole distribution."""
    seed: Annotated[Natural, DECISIVE] = 1
    """Sampling seed, combined with the step and the prompt; trainer.seed if it is not set."""
    dtype: FloatType = "bf16"
    """Data type in which the rollout engine computes."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of the device's memory that vLLM takes. Raise it if vLLM finds too little memory for its KV cache; lower it
    if the trainer runs out of memory."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs."""
    sleep: bool = True
    """On a GPU, vLLM frees its memory during scoring and updates, at the cost of copying its weights twice per step."""
    limit_images: Natural = 0
    """Most images in a prompt; 0: as many as the data has."""
    max_model_len: Count | None = None
    """Context length of the rollout engine in tokens; null: data.max_prompt_length + data.max_response_length."""
    max_num_batched_tokens: Count = 8192
    """Tokens that the rollout engine processes in one pass, at least its context length."""
    max_num_seqs: Count | None = None
    """Responses that one vLLM engine samples at once; null: as many as it gets in a step, 128 to 1024."""
    merge_lora: bool = False
    """Sample from weights with the adapter merged into them, instead of computing the adapter beside them: each token
    is cheaper and each update loads all weights. The sums are rounded to dtype."""
    ignore_eos: Annotated[bool, DECISIVE] = False
    """Do not stop at the end-of-sequence token: every response has the full length."""
    disable_tqdm: bool = False
    """Hide the progress bar of sampling."""
    tensor_parallel_size: Count = 1
    """Devices of a machine that share one vLLM engine (tensor parallelism), a divisor of trainer.n_gpus_per_node. Raise
    it if the model does not fit on one device."""
    val_override_config: SamplingOverrides = {}
    """Sampling settings for validation only: n, temperature (0: greedy), top_p, top_k, presence_penalty."""


def _located_functions(text: str) -> str:
    functions = [split_function(part) for part in parts_of(text)]
    return ",".join(f"{located(file)}:{function}" for file, function in functions)


@section
class RewardConfig:
    """`worker.reward.*`."""

    reward_function: Annotated[Joined, AfterValidator(_located_functions), DECISIVE] = (
        "cepo/rewards/math.py:compute_score"
    )
    """Reward function as `file.py:function`; without a function name, `main`. The scores of several functions, as a
    list or separated by commas, are added up."""
    reward_weights: Annotated[list[float] | None, DECISIVE] = None
    """Weights of the reward functions, one each; null: 1 each."""
    reward_function_kwargs: Annotated[Fields, DECISIVE] = {}
    """Keyword arguments of the reward function. For several functions: one section each, named after the function's
    file."""
    answer_function: Annotated[Annotated[str, AfterValidator(_located_functions)] | None, DECISIVE] = None
    """Function as `file.py:function` that returns the final answer in a response's text, or None; null: the last
    `\\boxed{}` or `<answer>`. Rewards receive the answer as `extracted_answer`, teachers as a reference."""
    skip_special_tokens: Annotated[bool, DECISIVE] = True
    """Decode responses without special tokens."""
    num_cpus: Count = 1
    """Number of worker processes that score responses. Raise it if a run waits for rewards."""
    timeout_seconds: Positive = 10.0
    """Time limit for scoring one response, in seconds; beyond it the response scores 0."""

    @property
    def reward_functions(self) -> list[str]:
        return parts_of(self.reward_function)
