"""Plants small errors in the code, one at a time, and says which of them no test notices.

`python3 benchmarks/mutants.py --number 300 --seed 1` draws places in `algorithms`, `losses`, `trainer`, `workers` and
`models`, changes each in a copy of the repository, and runs the tests that ought to notice, from the fast ones to the slow. A
mutant is killed where a test fails; one whose tests take too long is overdue, which is a hang or a busy machine. Known
equivalents, which change nothing that can be seen, stand with their reason in `equivalent_mutants.json`. `--list` shows what
would be planted and runs nothing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
PACKAGES = ("algorithms", "losses", "trainer", "workers", "models")
LEFT_OUT = ("models/head_kernel.py",)
"""Code for a GPU."""

RUNS = "tests/runs/"
SELECTION: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("algorithms/references", ("tests/algorithms/", f"{RUNS}test_contexts.py")),
    ("algorithms/", ("tests/algorithms/", "tests/contracts/test_estimators.py", "tests/config/")),
    ("losses/", ("tests/losses/", "tests/algorithms/test_distillation_methods.py")),
    ("trainer/checkpoints", (f"{RUNS}test_resume.py", f"{RUNS}test_best_checkpoint.py")),
    ("trainer/validation", (f"{RUNS}test_validation.py", f"{RUNS}test_methods.py")),
    ("trainer/leak", (f"{RUNS}test_leak.py",)),
    ("trainer/", (
        "tests/trainer/", f"{RUNS}test_evidence_pass.py", f"{RUNS}test_honest_metrics.py", f"{RUNS}test_methods.py",
        f"{RUNS}test_equivalences.py", f"{RUNS}test_contexts.py", f"{RUNS}test_validation.py", f"{RUNS}test_resume.py",
    )),
    ("workers/forest", ("tests/workers/test_forest.py", f"{RUNS}test_packed_passes.py")),
    ("workers/compensated", ("tests/workers/test_compensated_adamw.py",)),
    ("workers/merged_model", (f"{RUNS}test_merge.py",)),
    ("workers/checkpoint", (f"{RUNS}test_resume.py", f"{RUNS}test_critic.py")),
    ("workers/teacher", (f"{RUNS}test_teacher_weights.py",)),
    ("workers/offload", (f"{RUNS}test_offload.py",)),
    ("workers/critic", (f"{RUNS}test_critic.py",)),
    ("workers/reduction", (f"{RUNS}test_reduction.py",)),
    ("workers/", (
        "tests/losses/test_objective.py", f"{RUNS}test_actor.py", f"{RUNS}test_packed_passes.py",
        f"{RUNS}test_methods.py", "tests/distributed/test_ranks.py",
    )),
    ("models/segments", ("tests/models/test_segment_attention.py", f"{RUNS}test_packed_passes.py")),
    ("models/head", ("tests/models/test_head.py",)),
    ("models/fused_adapter", ("tests/models/test_fused_adapter.py",)),
    ("models/fused_decoding", ("tests/models/test_fused_decoding.py", "tests/rollout/test_generators.py")),
    ("models/", (
        f"{RUNS}test_actor.py", f"{RUNS}test_contexts.py", "tests/models/test_text_models.py",
        f"{RUNS}test_data_forms.py", f"{RUNS}test_videos.py", "tests/rollout/test_generators.py",
    )),
)  # fmt: skip
LAST = (f"{RUNS}test_reference_trainer.py",)
"""Whole training steps against the equations: what no other test has noticed."""

OVERDUE = "takes longer than"

_COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
             ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
_COMBINED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
             ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Mod: ast.Mult}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum",
          "any": "all", "all": "any", "exp": "log", "sum": "mean", "mean": "sum"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one expression: character offsets in the file, what stands there, and what takes its place.

    `text` is the line that it begins in.
    """

    file: str
    line: int
    text: str
    start: int
    end: int
    before: str
    after: str

    @property
    def key(self) -> str:
        """Names it wherever the line has moved to."""
        return f"{self.file}: {self.text}: {self.before} -> {self.after}"


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All changes of a module, in the order of their places."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found: list[Mutant] = []
    for node in _changeable(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        for changed in _changes(node):
            text = ast.unparse(ast.fix_missing_locations(changed))
            if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp):
                text = f"({text})"
            found.append(Mutant(file, node.lineno, lines[node.lineno - 1].strip(), start, end, source[start:end], text))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _changeable(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that compute something: no annotations, decorators, messages, assertions, imports or `strict=` of zip."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("logger.", "require", "ConfigError")):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.AnnAssign):
            stack += [node.value] if node.value is not None else []
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack += [*node.body, *(default for default in node.args.defaults + node.args.kw_defaults if default)]
            continue
        if isinstance(node, ast.ClassDef):
            stack += node.body
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.expr):
            yield node
        stack += ast.iter_child_nodes(node)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        yield _with(node, ops=[_COMPARED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMBINED:
        yield _with(node, op=_COMBINED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield ast.Constant(node.value * 2 if node.value else 1.0)
    elif isinstance(node, ast.Attribute) and node.attr in _NAMES and isinstance(node.ctx, ast.Load):
        yield _with(node, attr=_NAMES[node.attr])
    elif isinstance(node, ast.Name) and node.id in _NAMES and isinstance(node.ctx, ast.Load):
        yield _with(node, id=_NAMES[node.id])


def _with(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def sampled(number: int, seed: int, packages: Sequence[str]) -> list[Mutant]:
    """`number` mutants, the same share of each package's, as a function of the seed."""
    chosen: list[Mutant] = []
    for place, package in enumerate(packages):
        everything: list[Mutant] = []
        for path in sorted((REPOSITORY / "cepo" / package).rglob("*.py")):
            name = str(path.relative_to(REPOSITORY / "cepo"))
            if not name.startswith(LEFT_OUT):
                everything += mutants_of(name, path.read_text(encoding="utf-8"))
        share = number // len(packages) + (place < number % len(packages))
        chosen += random.Random(f"{seed}/{package}").sample(everything, min(share, len(everything)))
    return chosen


def tests_for(file: str) -> list[list[str]]:
    """The tests of the module itself, then those of its package, then whole training steps; each once."""
    stages: list[list[str]] = []
    seen: set[str] = set()
    for names in [tests for prefix, tests in SELECTION if file.startswith(prefix)] + [LAST]:
        stages.append([name for name in names if name not in seen])
        seen |= set(names)
    return [stage for stage in stages if stage]


class Copy:
    """A copy of the working tree that is mutated and tested."""

    def __init__(self, folder: Path, *, seconds: float) -> None:
        self.folder, self._seconds = folder, seconds
        listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
        for name in files:
            if (REPOSITORY / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(REPOSITORY / name, folder / name)

    def killed_by(self, mutant: Mutant) -> str | None:
        """The first test that fails, or how the tests ended; None where all of them pass."""
        path = self.folder / "cepo" / mutant.file
        source = path.read_text(encoding="utf-8")
        assert source[mutant.start : mutant.end] == mutant.before
        path.write_text(source[: mutant.start] + mutant.after + source[mutant.end :], encoding="utf-8")
        try:
            for stage in tests_for(mutant.file):
                if reason := self.failure(stage):
                    return reason
            return None
        finally:
            path.write_text(source, encoding="utf-8")

    def failure(self, tests: Sequence[str]) -> str | None:
        """What makes these tests fail; None where they pass."""
        settings = {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--show-capture=no", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"{OVERDUE} {self._seconds:.0f} s"
        if process.returncode == 0:
            return None
        failed = [line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0] if failed else f"pytest ended with {process.returncode}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each mutant and the counts; 1 where one that is not known to be equivalent survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--packages", nargs="+", choices=PACKAGES, default=PACKAGES)
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for each set of tests")
    parser.add_argument("--output", type=Path, help="JSON file for the verdicts")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    options = parser.parse_args(arguments)
    mutants = sampled(options.number, options.seed, options.packages)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}")
        return 0
    known: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    verdicts: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Copy(Path(folder), seconds=options.seconds)
        for number, mutant in enumerate(mutants, start=1):
            begun = time.monotonic()
            reason = known.get(mutant.key) or place.killed_by(mutant)
            verdict = "equivalent" if mutant.key in known else "killed" if reason else "SURVIVED"
            verdict = "overdue" if verdict == "killed" and str(reason).startswith(OVERDUE) else verdict
            verdicts.append({**asdict(mutant), "verdict": verdict, "reason": reason})
            took = f"{time.monotonic() - begun:.0f} s"
            print(f"{number}/{len(mutants)} {verdict} ({took}) {mutant.file}:{mutant.line}: "
                  f"{mutant.before} -> {mutant.after}; {reason}", flush=True)  # fmt: skip
            if options.output is not None:
                options.output.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    for package in options.packages:
        counts = Counter(str(each["verdict"]) for each in verdicts if str(each["file"]).startswith(f"{package}/"))
        print(f"{package}: {', '.join(f'{count} {verdict}' for verdict, count in sorted(counts.items()))}")
    return int(any(each["verdict"] == "SURVIVED" for each in verdicts))


if __name__ == "__main__":
    sys.exit(main())
