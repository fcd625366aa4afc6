"""Rewards that see images: the row's images in their samples, a judge behind a server, a reward model."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy
import pytest
from local_server import local_server
from PIL import Image

from cepo.config import check_config, load_config
from cepo.config.worker_schema import RewardConfig
from cepo.data.prompts import Problem
from cepo.errors import ConfigError, RewardError
from cepo.models.interface import Video
from cepo.rewards.contract import load_reward
from cepo.rewards.judge import compute_score
from cepo.rewards.pool import RewardPool
from cepo.trainer.sampling import reward_input

Answer = Callable[[int], tuple[int, dict[str, str], str]]


@dataclass
class Judge:
    """A server of our own with the form of OpenAI's: `answer` gives status, headers and body of the n-th request."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


def reply(text: str, prompt_tokens: int = 100, completion_tokens: int = 10) -> str:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage})


@contextmanager
def serving(answer: Answer) -> Iterator[Judge]:
    judge = Judge()

    def reply_to(request: BaseHTTPRequestHandler) -> None:
        judge.requests.append(json.loads(request.rfile.read(int(request.headers["Content-Length"]))))
        judge.keys.append(request.headers.get("Authorization"))
        status, headers, text = answer(len(judge.requests))
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(text.encode())

    with local_server(reply_to) as host:
        judge.url = f"http://{host}/v1"
        yield judge


def sample(**changed: Any) -> dict[str, Any]:
    images = [Image.new("RGB", (5, 3), "red")]
    fields = {"prompt": "<image>What colour?", "response": r"\boxed{red}", "ground_truth": "red", "response_length": 3}
    return {**fields, "images": images, "videos": [], **changed}


def test_the_judge_sees_images_and_its_last_score_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's 100 tokens and the reply's 10 are counted."""
    monkeypatch.setenv("JUDGE_KEY", "secret")
    video = numpy.zeros((20, 4, 6, 3), dtype=numpy.uint8)
    graded = sample(videos=[video], response=r"\boxed{red} RESPONSE>>> {prompt}")
    with serving(lambda _: (200, {}, reply("I see <score>3</score>, no: <score>7.5</score>"))) as judge:
        (score,) = compute_score([graded], base_url=judge.url, model="m", api_key_variable="JUDGE_KEY")
    assert score == {"overall": 0.75, "judge_attempts": 1.0, "judge_tokens": 110.0}
    assert judge.keys == ["Bearer secret"]
    (request,) = judge.requests
    assert request["model"] == "m"
    text_part, *image_parts = request["messages"][0]["content"]
    question = text_part["text"]
    assert r"\boxed{red}" in question
    assert "Reference answer: red" in question
    assert question.count("RESPONSE>>>") == 1, "it ends no quotation"
    assert question.count("What colour?") == 1
    pictures: list[Image.Image] = []
    for part in image_parts:
        content = part["image_url"]["url"].partition(",")[2]
        pictures.append(Image.open(io.BytesIO(base64.b64decode(content))))
    assert [picture.size for picture in pictures] == [(5, 3)] + 8 * [(6, 4)]
    assert pictures[0].getpixel((0, 0)) == (255, 0, 0)


def test_a_judge_that_reads_text_alone_gets_no_image() -> None:
    with serving(lambda _: (200, {}, reply("<score>5</score>"))) as judge:
        compute_score([sample()], base_url=judge.url, model="m", with_images=False)
    (request,) = judge.requests
    (part,) = request["messages"][0]["content"]
    assert part["type"] == "text"


def test_faults_that_may_pass_are_tried_again() -> None:
    """Twice busy, then a verdict: three attempts. The time limit is final."""

    verdict = (200, {}, reply("<score>10</score>"))
    busy = (503, {"Retry-After": "0"}, "busy")
    with serving(lambda number: busy if number < 3 else verdict) as judge:
        (score,) = compute_score([sample()], base_url=judge.url, model="m")
    assert score["overall"] == 1.0
    assert score["judge_attempts"] == 3.0
    done = threading.Event()
    with serving(lambda _: (200, {}, str(done.wait(20)))) as judge:
        with pytest.raises(RewardError, match="gave no verdict in 1 attempts"):
            compute_score([sample()], base_url=judge.url, model="m", time_limit=0.3)
        done.set()


@pytest.mark.parametrize(
    ("status", "headers", "text", "fault"),
    [
        (200, {}, reply("fine"), "has no <score>"),
        (200, {}, "[]", "has no choices"),
        (200, {}, "<html>", "did not reply with JSON"),
        (200, {}, "{}", "has no choices"),
        (302, {"Location": "http://127.0.0.1:9/"}, "", "status 302"),
        (400, {}, "no such model", "status 400: no such model"),
    ],
)
def test_a_reply_without_a_verdict_is_a_final_error(
    status: int, headers: dict[str, str], text: str, fault: str
) -> None:
    with serving(lambda _: (status, headers, text)) as judge, pytest.raises(RewardError, match=fault):
        compute_score([sample()], base_url=judge.url, model="m")
    assert len(judge.requests) == 1


@pytest.mark.parametrize(
    "usage",
    [
        "missing", None, "many", [], [1], 7, True, {"prompt_tokens": "many"}, {"prompt_tokens": float("nan")},
        {"prompt_tokens": float("inf"), "completion_tokens": -1e400}, {"prompt_tokens": -3}, {"prompt_tokens": {"a": 1}},
        {"prompt_tokens": None, "completion_tokens": True}, {"prompt_tokens": 10**400},
    ],
)  # fmt: skip
def test_a_verdict_does_not_depend_on_the_usage(usage: Any) -> None:
    """Servers say in many ways what they have used; what is no number of tokens counts as 0."""
    content: dict[str, Any] = {"choices": [{"message": {"content": "<score>5</score>"}}], "usage": usage}
    if usage == "missing":
        del content["usage"]
    with serving(lambda _: (200, {}, json.dumps(content))) as judge:
        (score,) = compute_score([sample()], base_url=judge.url, model="m")
    assert score == {"overall": 0.5, "judge_attempts": 1.0, "judge_tokens": 0.0}


def test_a_wrong_setting_of_the_judge_is_refused() -> None:
    for words, settings in (("http:// or https://", {"base_url": "file:///etc"}), ("retires", {"retires": 1})):
        with pytest.raises(ConfigError, match=words):
            compute_score([], **({"base_url": "http://localhost", "model": "m"} | settings))


def test_the_example_mixes_a_judge_and_a_verifier() -> None:
    """1 for the right answer and half of 0.8: 1.4. The verifier alone decides what is correct."""
    config = load_config(["config=examples/reward_function/judged.yaml"])
    check_config(config)
    reward = config.worker.reward
    with serving(lambda _: (200, {}, reply("<score>8</score>"))) as judge:
        keywords = {"judge": {**reward.reward_function_kwargs["judge"], "base_url": judge.url}}
        mixed = load_reward(reward.reward_function, keywords, reward.reward_weights)
        right, wrong = mixed.score([sample(), sample(response=r"\boxed{blue}")])
    assert mixed.needs_images
    assert right["overall"] == pytest.approx(1.4)
    assert right["accuracy"] == 1.0
    assert right["judge"] == 0.8
    assert wrong["overall"] == pytest.approx(0.4)
    assert wrong["accuracy"] == 0.0


@pytest.mark.heavy
def test_a_function_gets_images_and_frames_if_it_asks(tmp_path: Path) -> None:
    """In a process of its own; a function that does not ask gets none."""
    source = "def size(samples):\n    seen = [s.get('images') for s in samples]\n"
    source += "    return [{'overall': float(images[0].size[0] if images else 0)} for images in seen]\n"
    (tmp_path / "blind.py").write_text(source, encoding="utf-8")
    (tmp_path / "seeing.py").write_text(f"NEEDS_IMAGES = True\n{source}", encoding="utf-8")
    frames = numpy.zeros((4, 2, 2, 3), dtype=numpy.uint8)
    video = Video(frames=frames, frame_numbers=(0, 1, 2, 3), source_fps=1.0, num_source_frames=4)
    problem = Problem(
        prompt_id="0", text="<image>?", images=(Image.new("RGB", (7, 5)),), videos=(video,), ground_truth="1",
        solution=None, columns={"id": 3},
    )  # fmt: skip
    for name, width in (("blind", 0.0), ("seeing", 7.0)):
        with RewardPool(RewardConfig(reward_function=f"{tmp_path / name}.py:size")) as pool:
            columns = reward_input(problem, "1", 1, pool.needs_images)
            assert ("videos" in columns) == (name == "seeing")
            assert [score["overall"] for score in pool.score([columns]).scores] == [width]


@pytest.mark.heavy
def test_a_reward_model_scores_by_its_classification_head(tmp_path: Path) -> None:
    """A random BERT of one layer: the reward is the sigmoid of its one logit, whatever else is in the batch."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "what", "?"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer = BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(words), num_labels=1, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    reward = load_reward("examples/reward_function/reward_model.py:compute_score", {"model": str(tmp_path / "model")})
    responses = ("red", "blue red red")
    samples = [{"prompt": "what ?", "response": text} for text in responses]
    scores = [score["overall"] for score in reward.score(samples)]
    expected: list[float] = []
    for text in responses:
        pair = tokenizer("what ?", text, return_tensors="pt")
        with torch.no_grad():
            expected.append(float(model(**pair).logits.sigmoid()))
    assert scores == pytest.approx(expected, abs=1e-6)
    assert scores[0] != scores[1]
