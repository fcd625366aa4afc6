"""Regular expressions of real tokenizers are accepted without trust, and those that may take forever are not."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from cepo.models.split_pattern import fault_of, rows

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NO_HAN = r"&&[^\p{Han}]"
KIMI = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lo}}{NO_HAN}]*[\p{{Ll}}\p{{Lo}}{NO_HAN}]+{CONTRACTIONS}?"
GENUINE = {
    "Qwen2, Qwen3, InternVL3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + ENDS,
    "Qwen3.5": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Llama 3, Idefics3, SmolLM3, OLMo 2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + ENDS,
    "tiktoken's cl100k": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "cl100k without options": r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    + ENDS,
    "Mistral's tekken": rf"{CASED}|{CAPITALS}|\p{{N}}{SLASHED}",
    "GPT-4o, Phi-4": rf"{CASED}{CONTRACTIONS}?|{CAPITALS}{CONTRACTIONS}?|\p{{N}}{{1,3}}{SLASHED}",
    "Kimi K2": rf"[\p{{Han}}]+|{KIMI}|\p{{N}}{{1,3}}" + ENDS,
    "GPT-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "GPT-2's first form": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "DeepSeek's scripts": "[一-龥ࠀ-一가-퟿]+",
    "DeepSeek's line ends": r"[\r\n]",
    "DeepSeek's words": r"\s?\p{L}+",
    "DeepSeek V3": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "BLOOM": r" ?[^(\s|.,!?…。，、।۔،)]+",
    "Falcon's digits": "[0-9][0-9][0-9]",
    "Jais 2": r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
    "Seed": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    "spaces": r"\s+",
    "two spaces": r" {2,}",
    "codes": r"[\u4e00-\u9fa5]+|\x41+",
}
ENDLESS = {
    "a repeated group": "(a+)+$",
    "a repeated alternative": "(a|aa)+$",
    "a group some times": "(?:a?){30}a{30}",
    "a group to a number": "(?:a|b){2,40}c",
    "many optional characters": "a?" * 20 + "a" * 20,
    "many alternatives in a row": "(?:a|a)" * 10 + "b",
    "many optional groups": "(?:ab|ab|ab)?" * 5 + "c",
    "many repeated characters": "a*a*a*a*b",
    "a repetition of a repetition": "a{1,9}+b",
    "two signs of repetition": "a+*b",
    "a reference back": r"(a*)\1b",
    "a call of a group": r"(?<x>a|b\g<x>c)",
    "options within": "(?x)(a + ) +",
    "a comment": "(?#)a",
    "a condition": "(?(1)a|b)",
    "an absent text": "(?~ab)",
    "a quoted text": r"\Qa\E+",
    "a class that begins with its end": "[]a]+",
    "a class without an end": "[a",
    "a group without an end": "(?:a",
    "an end without a group": "a)b",
    "a long pattern": "a" * 2_001,
    "a bound of many": "a{0,999}b",
    "a lookahead that repeats a group": "(?=(?:a+)+b)",
}


@pytest.mark.parametrize("name", GENUINE)
def test_a_real_tokenizers_expression_needs_no_trust(name: str) -> None:
    pattern = GENUINE[name]
    assert fault_of(pattern) is None
    split = Split(Regex(pattern), "isolated")
    assert all(split.pre_tokenize_str(row) for row in rows(pattern))


@pytest.mark.parametrize("name", ENDLESS)
def test_an_expression_that_may_take_forever_is_refused(name: str) -> None:
    assert fault_of(ENDLESS[name])


def test_rows_have_the_characters_of_the_pattern() -> None:
    """`q` and `z` are ends of a range, and `x` a code."""
    characters = {row[0] for row in rows(r"[q-z]*\x78*é")}
    assert characters >= {"q", "z", "x", "é", "a", " ", "\n"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "pattern", ["a*a*b", "a*a*a*b", r"[q-s]*[r-t]*[r-s]*\S\x01", r"\w*\d*\w*!", r"z*z*z*[^z\x01\n 1aA.中]"]
)
def test_overlapping_repetitions_are_slow_on_the_rows(pattern: str) -> None:
    """Two of them take n^3 / 6 steps for n equal characters: 4.5 * 10^9 for a row of 3,000.

    A limit ends them: that of time, or the engine's own.
    """
    assert fault_of(pattern) is None
    program = f"""
import resource
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from cepo.models.split_pattern import rows
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
split = Split(Regex({pattern!r}), "isolated")
for row in rows({pattern!r}):
    split.pre_tokenize_str(row)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    out_of_time = ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    assert out_of_time or b"retry-limit-in-match over" in ended.stderr, ended.stderr.decode()
