"""CEPO in one file: rollouts, teachers, evidence and loss, with torch and transformers alone.

It follows the paper's section "Contrastive Evidence Policy Optimization" and its Algorithm 1, with the paper's symbols:
x is a problem (an image and a question), y a response, t one of its tokens, r+ the right answer, r- a wrong one.

    python3 examples/cepo_in_one_file.py --steps 40

trains the built-in toy task's small vision-language model on a CPU. The package `cepo` gives the model and the problems,
as data; nothing of the method is imported. Given the same rollouts, advantages and gradients equal the package's, which
adds engines, sharding, packing, resuming, records, and the many cases that these lines leave out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, AutoProcessor

Responses = Sequence[Sequence[int]]
ACCEPTED = 0.5
"""The reward from which a response belongs to G+; all others belong to G-."""


@dataclass(frozen=True)
class Settings:
    """The paper's settings of the method; batch, length and learning rate are those of the built-in toy task."""

    prompts: int = 32  # problems in each iteration
    group_size: int = 8  # G, responses to each problem
    temperature: float = 1.0
    max_tokens: int = 64
    lambda_0: float = 0.5  # weight of the evidence at the first iteration
    warm_steps: int = 25  # T_warm, iterations until it is 0
    evidence_clip: float = 0.5  # epsilon_w
    clip_low: float = 0.20  # epsilon of PPO, below and above 1
    clip_high: float = 0.28
    learning_rate: float = 1e-4

    def lambda_at(self, step: int) -> float:
        """Returns lambda, which decays linearly from lambda_0 to 0 over T_warm iterations, counted from 0."""
        return self.lambda_0 * max(0.0, 1.0 - step / self.warm_steps)


@dataclass(frozen=True)
class Problem:
    """A problem x with its verifiable answer r+."""

    image: Any
    question: str
    answer: str


@dataclass(frozen=True)
class Credit:
    """What the update needs to know about B responses of at most T tokens; all but `rewards` (B,) are (B, T)."""

    rewards: Tensor
    mask: Tensor  # True on tokens of the response, its end included
    old_log_probs: Tensor  # log P_S(y_t) of the weights that sampled
    delta: Tensor  # contrastive evidence
    advantages: Tensor  # A_hat


# --- Rollouts: y ~ pi(. | x), and their reward ---------------------------------------------------------------------


def contexts(processor: Any, problems: Sequence[Problem], hints: Sequence[str | None]) -> Any:
    """Returns the model's inputs for the prompts, padded on the left: the student's, or with a hint a teacher's.

    A teacher sees the student's own user turn, image included, with one line after its text. The wording is the same
    for both answers, so that what it does to the model by itself cancels in their contrast.
    """
    texts: list[str] = []
    for problem, hint in zip(problems, hints, strict=True):
        text = f"{problem.question} Answer in \\boxed{{}}."
        if hint is not None:
            text += f"\nHere is a sample answer: {hint}"
        turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        texts.append(processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False))
    images = [[problem.image] for problem in problems]
    return processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")


@torch.no_grad()
def sample(model: Any, processor: Any, problems: Sequence[Problem], settings: Settings) -> list[list[int]]:
    """Samples G responses to each problem, and returns the tokens of each up to its end token, which it includes."""
    ends = model.generation_config.eos_token_id
    never = sorted(set(processor.tokenizer.all_special_ids) - set(ends))  # an image token without an image, for example
    rows = [problem for problem in problems for _ in range(settings.group_size)]
    inputs = contexts(processor, rows, [None] * len(rows)).to(model.device)
    tokens = model.eval().generate(
        **inputs,
        do_sample=True,
        temperature=settings.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=settings.max_tokens,
        suppress_tokens=never,
    )
    responses: list[list[int]] = []
    for row in tokens[:, inputs["input_ids"].shape[1] :].tolist():
        stop = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        responses.append(row[: stop + 1])
    return responses


def final_answer(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`, or None. The built-in toy task's answers are whole numbers."""
    _, found, rest = text.rpartition("\\boxed{")
    return rest.partition("}")[0].strip() or None if found and "}" in rest else None


# --- Teachers: one model, three contexts ---------------------------------------------------------------------------


def log_probs(
    model: Any,
    processor: Any,
    problems: Sequence[Problem],
    hints: Sequence[str | None],
    responses: Responses,
    temperature: float,
) -> Tensor:
    """Computes log pi(y_t | x, hint, y_<t), (B, T): P_S without a hint, P_T+ with r+ and P_T- with r-."""
    inputs = contexts(processor, problems, hints).to(model.device)
    tokens = padded(responses).to(model.device)
    whole = {
        "input_ids": torch.cat([inputs.pop("input_ids"), tokens], dim=1),
        "attention_mask": torch.cat([inputs.pop("attention_mask"), response_mask(responses).to(tokens)], dim=1),
        "mm_token_type_ids": torch.cat([inputs.pop("mm_token_type_ids"), torch.zeros_like(tokens)], dim=1),
    }
    logits = model(**whole, **inputs, logits_to_keep=tokens.shape[1] + 1).logits[:, :-1].float() / temperature
    return logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def padded(responses: Responses) -> Tensor:
    """Returns the responses' tokens, (B, T), with 0 after each end."""
    return pad_sequence([torch.tensor(response) for response in responses], batch_first=True)


def response_mask(responses: Responses) -> Tensor:
    """Returns which entries of `padded` are tokens, (B, T)."""
    return pad_sequence([torch.ones(len(response), dtype=torch.bool) for response in responses], batch_first=True)


def wrong_answer(answers: Sequence[str | None], rewards: Sequence[float]) -> str | None:
    """Returns r-: the final answer of the group's wrong rollout with the lowest reward, of equal ones the first."""
    wrong = [
        (reward, place) for place, reward in enumerate(rewards) if reward < ACCEPTED and answers[place] is not None
    ]
    return answers[min(wrong)[1]] if wrong else None


# --- Evidence: from the group's advantage to each token's ----------------------------------------------------------


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Computes A = (R - mean) / std over each group, (B,); exactly 0 where all rewards of a group are equal."""
    groups = rewards.double().view(-1, group_size)
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + 1e-6)
    flat = groups.amax(dim=1, keepdim=True) - groups.amin(dim=1, keepdim=True) < 1e-6
    return advantages.masked_fill(flat, 0.0).flatten().float()


def token_advantages(advantages: Tensor, delta: Tensor, *, mixing: float, clip: float) -> Tensor:
    """Computes A_hat_t = A ((1 - lambda) + lambda clip(w_t, 1 - epsilon_w, 1 + epsilon_w)), (B, T).

    w_t = exp(sign(A) Delta_t) = (P_T+(y_t) / P_T-(y_t))^sign(A). It is positive, so no token's direction changes.
    """
    advantages = advantages.unsqueeze(1)
    weight = (advantages.sign() * delta).exp().clamp(1.0 - clip, 1.0 + clip)
    return advantages * ((1.0 - mixing) + mixing * weight)


@torch.no_grad()  # sg(.): evidence and advantages are constants of the loss
def credit_of(
    model: Any, processor: Any, problems: Sequence[Problem], responses: Responses, settings: Settings, *, step: int
) -> Credit:
    """Rewards the responses, lets both teachers read them, and returns the credit of each token.

    A group without a wrong answer has r- = None. Its wrong teacher then reads the student's prompt, P_T- = P_S, which
    is RLSD, and needs no case of its own.
    """
    model.eval()
    rows = [problem for problem in problems for _ in range(settings.group_size)]
    answers = [final_answer(processor.tokenizer.decode(list(y), skip_special_tokens=True)) for y in responses]
    rewards = [float(answer == problem.answer) for answer, problem in zip(answers, rows, strict=True)]
    refuted: list[str | None] = []
    for first in range(0, len(rows), settings.group_size):
        group = slice(first, first + settings.group_size)
        refuted += [wrong_answer(answers[group], rewards[group])] * settings.group_size
    right = [problem.answer for problem in rows]

    def scored(hints: Sequence[str | None]) -> Tensor:
        return log_probs(model, processor, rows, hints, responses, settings.temperature)

    mask = response_mask(responses).to(model.device)
    advantages = group_advantages(torch.tensor(rewards, device=model.device), settings.group_size)
    delta = (scored(right) - scored(refuted)).masked_fill(~mask, 0.0)
    token_level = token_advantages(advantages, delta, mixing=settings.lambda_at(step), clip=settings.evidence_clip)
    return Credit(
        rewards=torch.tensor(rewards),
        mask=mask,
        old_log_probs=scored([None] * len(rows)),
        delta=delta,
        advantages=token_level.where(mask, 0.0),
    )


# --- Loss: PPO's clipped surrogate, with A_hat in place of A -------------------------------------------------------


def surrogate(new: Tensor, credit: Credit, settings: Settings) -> Tensor:
    """Computes the loss, the mean over responses of the mean over their tokens of -min(rho A_hat, clip(rho) A_hat).

    Its gradient touches the sampled tokens only: no sum over the vocabulary has weights that know r+ or r-, so that
    the answer cannot leak into the weights (the paper's theorem, part ii).
    """
    ratio = (new - credit.old_log_probs).exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    losses = -torch.minimum(ratio * credit.advantages, clipped * credit.advantages)
    return (losses.where(credit.mask, 0.0).sum(dim=1) / credit.mask.sum(dim=1)).mean()


def accumulate_gradient(
    model: Any, processor: Any, problems: Sequence[Problem], responses: Responses, credit: Credit, settings: Settings
) -> float:
    """Adds the gradient of the loss to the weights', group by group to save memory, and returns the loss."""
    total, size = 0.0, settings.group_size
    for number, problem in enumerate(problems):
        rows = slice(number * size, (number + 1) * size)
        part = Credit(*(value[rows] for value in vars(credit).values()))
        if not bool(part.advantages.any()):
            continue  # all rewards are equal: no gradient
        new = log_probs(model, processor, [problem] * size, [None] * size, responses[rows], settings.temperature)
        new = torch.nn.functional.pad(new, (0, part.mask.shape[1] - new.shape[1]))  # to the batch's longest response
        loss = surrogate(new, part, settings) / len(problems)
        loss.backward()
        total += float(loss.detach())
    return total


# --- Algorithm 1 ---------------------------------------------------------------------------------------------------


def train(model: Any, processor: Any, problems: Sequence[Problem], settings: Settings, *, steps: int) -> list[float]:
    """Trains the model in place, and returns the mean reward of each iteration's rollouts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    order, curve = random.Random(0), list[float]()
    for step in range(steps):
        batch = order.sample(list(problems), settings.prompts)
        responses = sample(model, processor, batch, settings)
        credit = credit_of(model, processor, batch, responses, settings, step=step)
        accumulate_gradient(model, processor, batch, responses, credit, settings)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(credit.rewards.mean()))
        evidence = float(credit.delta[credit.mask].abs().mean())
        print(f"step {step:3}  reward {curve[-1]:.3f}  lambda {settings.lambda_at(step):.2f}  |Delta| {evidence:.3f}")
    return curve


def embedded_world(number: int) -> tuple[str, list[Problem]]:
    """Returns the folder of the embedded model and `number` training problems: the only use of the package `cepo`."""
    from cepo.microgeo import SHAPES

    drawn = [SHAPES.generate(0, index, stream="train") for index in range(number)]
    return str(SHAPES.assets), [Problem(SHAPES.draw(each), each.question, each.answer) for each in drawn]


def load(folder: str) -> tuple[Any, Any]:
    """Loads the model, in float32, and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), AutoProcessor.from_pretrained(folder)


def main() -> None:
    """Trains the built-in toy task's model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grpo", action="store_true", help="lambda = 0: the same without evidence")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    folder, problems = embedded_world(1024)
    model, processor = load(folder)
    settings = replace(Settings(), lambda_0=0.0) if options.grpo else Settings()
    train(model, processor, problems, settings, steps=options.steps)


if __name__ == "__main__":
    main()
