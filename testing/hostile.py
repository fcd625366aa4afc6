"""Generates harmful texts and answers, as a function of a seed."""

from __future__ import annotations

import random

MARKS = (
    "<|im_start|>", "<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<|image_pad|>", "<|vision_start|>",
    "<|vision_end|>", "<|video_pad|>", "<image>", "<video>", "</s>", "<s>", "[INST]", "<bos>", "<|eot_id|>", "<think>",
    "<tool_call>", "CEPO-TEXT-SLOT-000",
)  # fmt: skip
CODE = (
    "{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ prompt.__class__.__mro__ }}", "{#", "%}", "${7*7}",
    "${oc.env:HOME}", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</pre><b>", "&lt;", "'\"><svg/onload=1>",
    "__import__('os').system('true')", "%s%n%x", "\\input{/etc/passwd}", "\x1b[2J",
)  # fmt: skip
CHARACTERS = (
    "\x00", "\ud800", "\udfff\ud800", "\ufeff", "\u202e", "\u2066", "\u200b", "\U000e0041", "\u2028", "\r", "\x0b", "\x85",
    "\U0001f600", "a\u0301" * 5, "\ufffd", "\u0000\u0008",
)  # fmt: skip
LATEX = (
    r"\boxed{", "}", "{", r"\frac{", r"\sqrt{", r"\sqrt[", "^", "^{", "_{", r"\left(", r"\right)", r"\begin{matrix}",
    r"\end{matrix}", r"\text{", r"\mathrm{", r"\approx ", r"\pm ", r"\cup ", r"\infty", r"\sum_{i=1}^{9}", r"\int_{0}^{1}",
    r"\lim_{x \to 0}", r"\log ", r"\sin ", r"\pi ", r"\cdot ", r"\%", "!", "|", "=", "<", ",", ";", "[", "]", "(", ")", ":",
    "&", r"\\", r"\def\x{\x}\x", r"\newcommand{\a}{\a\a}\a", "$", "$$", "°", "√", "½", " or ", " and ", r"\{", r"\}",
)  # fmt: skip
BOMBS = (
    r"10^{10^9}", r"9^{9^{9^9}}", "99999!", "9!!!!", r"2^{10^{6}\cdot 10}", r"(x+1)^{9999}", r"\frac{1}{7^{7^{77}}}",
    r"\sqrt{" * 60 + "2" + "}" * 60, r"\frac{1}{" * 60 + "2" + "}" * 60, "(" * 200 + "1" + ")" * 200, "1+" * 250 + "1",
    "x" * 500, "9" * 500, "9." + "9" * 400, "-" * 500 + "1", r"\binom{9999}{5000}", r"\sum_{i=1}^{99999999} i^{i}",
    r"\int_{0}^{1} x^{x^{x}} dx", r"\prod_{n=1}^{10^6} n", r"\lim_{x \to 0} \frac{\sin x}{x}", "1e400", "1e-400", "0x7f",
    "|".join("x" * 60), r"\{" + ",".join(map(str, range(120))) + r"\}", r"\begin{pmatrix}" + "1 & 2 \\\\ " * 40,
    r"\sin(" * 40 + "1" + ")" * 40, "x^2-1=0", r"x^{5}-x-1=0", r"\gcd(10^{300},7)", "1/0", "0/0", r"\sqrt{-1}", r"(-8)^{1/3}",
)  # fmt: skip
GOLDS = (
    "60", "0.6", r"5 \sqrt { 3 }", r"\frac { 40 } { 3 }", "2:3", r"60\%", "x < 60", "x^2 + 1", r"\angle 1 \cong \angle 2", "B",
    r"\{1, 2\}", "(3, 4)", "a + b = 90", "not enough information", "-7", r"4 \pi",
)  # fmt: skip


def hostile_text(draw: random.Random, *, pieces: int = 12) -> str:
    """Returns special tokens, code, odd characters and words in random order; parts may be cut, nested or repeated."""
    parts: list[str] = []
    for _ in range(draw.randint(1, pieces)):
        part = draw.choice(draw.choice((MARKS, CODE, CHARACTERS, LATEX, ("70", "cm", " ", "\n", "Find x."))))
        kind = draw.random()
        if kind < 0.1:
            part = part[: len(part) // 2]
        elif kind < 0.2:
            part = part[: len(part) // 2] + draw.choice(MARKS) + part[len(part) // 2 :]
        elif kind < 0.25:
            part *= draw.randint(2, 40)
        parts.append(part)
    return "".join(parts)


def hostile_answer(draw: random.Random) -> str:
    """Returns a response whose answer is a bomb, random LaTeX, hostile text, digits, or nearly an ordinary answer."""
    kind = draw.randrange(6)
    if kind == 0:
        answer = draw.choice(BOMBS)
    elif kind == 1:
        answer = draw.choice(BOMBS) + draw.choice(LATEX) + draw.choice(BOMBS)
    elif kind == 2:
        answer = "".join(
            draw.choice(draw.choice((LATEX, "0123456789x+-*/^.", BOMBS[:8]))) for _ in range(draw.randint(1, 60))
        )
    elif kind == 3:
        answer = hostile_text(draw)
    elif kind == 4:
        gold = draw.choice(GOLDS)
        place = draw.randint(0, len(gold))
        answer = gold[:place] + draw.choice((*LATEX, *CHARACTERS, "0", "x", " ")) + gold[place:]
    else:
        answer = "".join(draw.choices("0123456789^{}()!+-*/.", k=draw.choice((5, 20, 80, 300, 511, 513, 5000))))
    wrapped = draw.randrange(5)
    if wrapped == 0:
        return answer
    if wrapped == 1:
        return f"so <answer>{answer}</answer>"
    return draw.choice((r"\boxed{", "<answer>", "{")) * draw.choice((0, 0, 0, 50, 3000)) + rf"so \boxed{{{answer}}}"
