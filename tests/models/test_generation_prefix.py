"""What a chat template writes of a response itself is judged with the rest of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from cepo.algorithms.settings import TeacherConfig
from cepo.config import load_config
from cepo.config.worker_schema import RewardConfig
from cepo.data.prompts import ContextBuilder, Problem
from cepo.microgeo.world import ASSETS
from cepo.models.chat_template import prefilled_text
from cepo.models.processing import Processing
from cepo.rewards.pool import RewardPool
from cepo.runtime.preflight import check_before_loading
from cepo.trainer.sampling import RolloutSampler, reward_input

CHATML = "<|im_end|>\n<|im_start|>assistant\n"
CONTROLS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]


@pytest.mark.parametrize(
    ("earlier", "last", "expected"),
    [
        (CHATML, CHATML, ""),
        (CHATML, f"{CHATML}<think>\n", "<think>\n"),
        (CHATML, f"{CHATML}<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        (f"{CHATML}<think>\n\n</think>\n\n", f"{CHATML}<think>\n", "<think>\n"),
        (f"{CHATML}<think>\n\n</think>\n\n", CHATML, ""),
        (CHATML, f"{CHATML}<seed:think>", "<seed:think>"),
        (CHATML, f"{CHATML}[THINK]", "[THINK]"),
        (CHATML, f"{CHATML}<reasoning>\nStep 1:", "<reasoning>\nStep 1:"),
        ("<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>\n<start_of_turn>model\n", ""),
        ("\nAssistant: ", "\nAssistant:", ""),
        ("</user><assistant>", "</user><assistant>", ""),
        ("</user><assistant>", "</user><assistant><think>", "<think>"),
        ("<|im_end|>\n<b>", f"{CHATML}<x>", ""),
        (CHATML, f"{CHATML}Sure, ", ""),
        ("", "", ""),
    ],
)
def test_the_text_after_the_assistants_header_is_found(earlier: str, last: str, expected: str) -> None:
    """Only with a tag, and never with a control token."""
    assert prefilled_text(earlier, last, CONTROLS) == expected


def opening(written: str) -> str:
    """A template in the form of Qwen's, which writes `written` after the last header alone."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        f"{{{{ '<|im_start|>assistant\\n' }}}}{{{{ {written!r} }}}}"
    )


PROBLEM = Problem(prompt_id="0", text="What is 3 + 4?", images=(), ground_truth="7", solution=None, columns={})


@pytest.fixture(scope="module")
def r1v_pool() -> Iterator[RewardPool]:
    """The example whose format wants `<think>...</think><answer>...</answer>`, which is judged right from 0.5 on."""
    with RewardPool(RewardConfig(reward_function="examples/reward_function/r1v.py:compute_score")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("written", "response", "form"),
    [
        ("<think>\n", "3 + 4 is 7</think><answer>7</answer>", 1.0),
        ("<think>\n\n</think>\n\n", "<answer>7</answer>", 1.0),
        ("<think>\n\n</think>\n\n", "<think>3 + 4</think><answer>7</answer>", 1.0),
        ("", "<think>3 + 4 is 7</think><answer>7</answer>", 1.0),
        ("", "3 + 4 is 7</think><answer>7</answer>", 0.0),
        ("<think>\n", "3 + 4 is 7 <answer>7</answer>", 0.0),
    ],
)
def test_the_format_counts_the_tag_that_the_template_wrote(
    r1v_pool: RewardPool, written: str, response: str, form: float, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(["config=microgeo/grpo", "algorithm.correct_key=format"])
    processing = Processing(str(ASSETS), chat_template=opening(written))
    assert processing.prefilled == written
    contexts = ContextBuilder(processing, TeacherConfig(), max_context_length=100)
    sampler = RolloutSampler(config.worker, config.algorithm, contexts, processing, r1v_pool)
    verdicts = sampler.verdicts([(PROBLEM, processing.encode_text(response))])
    with caplog.at_level(logging.INFO, "cepo.train"):
        check_before_loading(config.worker.actor, config.estimator, r1v_pool, [PROBLEM], processing)  # type: ignore[arg-type]
    assert verdicts.tolist() == [form == 1.0]
    assert ("begins each response" in caplog.text) == bool(written)


def test_a_template_without_such_a_text_leaves_responses_alone() -> None:
    """The embedded model's own, and one that refuses an earlier answer."""
    assert Processing(str(ASSETS)).prefilled == ""
    strict = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}" + opening("<think>\n")
    assert Processing(str(ASSETS), chat_template=strict).prefilled == ""
    assert reward_input(PROBLEM, "7", 1)["response"] == "7"
