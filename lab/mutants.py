"""Plants small errors (mutants) in the code, one at a time, and reports those that no test notices.

    python3 lab/branches.py --folder build/branches
    python3 lab/mutants.py --branches build/branches --number 300 --seed 14

The first command records which test runs which line. The second draws mutants by the seed, the same number from each
group of `ROOMS`. It plants each in a copy of the repository and runs the tests that run its line, those of the quickest
files first, in forked processes that have already imported torch, transformers and the other libraries. Verdicts:

- `killed`: a test failed. With `--record` it must also pass without the mutant.
- `SURVIVED`: `--budget` seconds of tests, or all of them, passed.
- `unreached`: no test runs the line.
- `overdue`: the tests took five times as long as they should, so they hang.

Mutants known to be equivalent, which have no visible effect, are in `equivalent_mutants.json` with their reasons.
`--list` shows the mutants and runs nothing. `--known FILE` plants the mutants that a JSON file names, or describes as
`lab/tests/planted_mutants.json` does, runs for each the test that it names, and needs no record. The exit code is 1 if
another mutant survives or is unreached.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lab.support.machine import machine_record  # noqa: E402
from lab.support.mutations import Mutant, lines_that_run_it, mutants_of  # noqa: E402
from lab.support.warm_tests import OVERDUE, Copy, import_libraries  # noqa: E402

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
STAGES = (8.0, 40.0)
"""Limits in seconds of the stages of tests that run together; the last stage is the budget."""
ROOMS: Mapping[str, tuple[str, ...]] = {
    "teacher": (
        "algorithms/references.py", "data/prompts.py", "trainer/planning.py", "trainer/rollout_groups.py",
        "workers/actor.py",
    ),
    "algorithms": ("algorithms/",),
    "losses": ("losses/",),
    "trainer": ("trainer/",),
    "workers": ("workers/",),
    "models": ("models/",),
}  # fmt: skip
"""The mutated files by group; a file belongs to the first that names it. `teacher` is a teacher's input and weights."""
LEFT_OUT = ("models/head_kernel.py",)
"""Code that runs only on a GPU."""


def room_of(file: str) -> str | None:
    """Returns the group of a module; None if it is not mutated."""
    if file.startswith(LEFT_OUT):
        return None
    return next((room for room, prefixes in ROOMS.items() if file.startswith(prefixes)), None)


def all_mutants() -> dict[str, list[Mutant]]:
    """Returns all mutants by group, in the order of files and positions."""
    found: dict[str, list[Mutant]] = {room: [] for room in ROOMS}
    for path in sorted((ROOT / "cepo").rglob("*.py")):
        file = str(path.relative_to(ROOT / "cepo"))
        if room := room_of(file):
            found[room] += mutants_of(file, path.read_text(encoding="utf-8"))
    return found


def sampled(number: int, seed: int, rooms: Sequence[str]) -> list[Mutant]:
    """Draws `number` mutants, equally from all groups, as a function of the seed."""
    everything = all_mutants()
    chosen: list[Mutant] = []
    for place, room in enumerate(rooms):
        share = number // len(rooms) + (place < number % len(rooms))
        chosen += random.Random(f"{seed}/{room}").sample(everything[room], min(share, len(everything[room])))
    return chosen


Verdict = tuple[str, str]
"""`killed`, `SURVIVED`, `unreached`, `overdue` or `equivalent`, and the reason."""


class Judge:
    """Finds the verdict on each mutant by running tests."""

    def __init__(self, place: Copy, reach: Reach, budget: float) -> None:
        self._place, self._reach, self._budget = place, reach, budget
        self._unsound: set[str] = set()

    def __call__(self, mutant: Mutant) -> Verdict:
        count = 0
        for stage in self._reach.stages(mutant, self._budget, without=self._unsound):
            reason = self._place.failure_with(mutant, stage, 60 + 5 * self._reach.seconds(stage))
            if reason is not None:
                return "overdue" if reason.startswith(OVERDUE) else "killed", reason
            count += len(stage)
        return ("SURVIVED", f"{count} tests pass") if count else ("unreached", "no test runs its line")

    def unsound(self, reasons: Collection[str]) -> set[str]:
        """Returns the reasons for a kill whose test fails without a mutant too; such tests are not used any more."""
        killers = {self._reach.test_in(reason): reason for reason in reasons}
        killers.pop(None, None)
        found: set[str] = set()
        while reason := self._place.failure(sorted(killers), 60 + 5 * self._reach.seconds(killers)):
            test = self._reach.test_in(reason)
            found.add(killers.pop(test))
            self._unsound.add(test)
        return found


def known_mutants(file: Path) -> dict[Mutant, str]:
    """Returns the mutants that a file names, each with its test.

    The file is a mapping `{key: test}` of generated mutants, or a list of changes made by hand, `{"file": ..., "before":
    ..., "after": ..., "test": ...}`, of which each `before` is once in its file. Ends if the code lacks one of them.
    """
    content: Any = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, list):
        return {_planted(change, file): change["test"] for change in content}
    generated = {mutant.key: mutant for room in all_mutants().values() for mutant in room}
    if gone := [key for key in content if key not in generated]:
        raise SystemExit(f"{file} names mutants that the code no longer has, put others in their place: {gone}")
    return {generated[key]: test for key, test in content.items()}


def _planted(change: Mapping[str, str], file: Path) -> Mutant:
    source = (ROOT / "cepo" / change["file"]).read_text(encoding="utf-8")
    start = source.find(change["before"])
    if source.count(change["before"]) != 1:
        raise SystemExit(f"{file} changes a text that is not once in {change['file']}: {change['before']}")
    line = source.count("\n", 0, start) + 1
    text = source.splitlines()[line - 1].strip()
    end = start + len(change["before"])
    return Mutant(change["file"], line, text, start, end, change["before"], change["after"])


def known_judge(file: Path, place: Copy) -> tuple[list[Mutant], Callable[[Mutant], Verdict]]:
    """Returns the mutants that a file names as in `known_mutants`, and a judge that runs the test of each."""
    tests = known_mutants(file)

    def judged(mutant: Mutant) -> Verdict:
        reason = place.failure_with(mutant, [tests[mutant]], 120)
        return ("killed", reason) if reason else ("SURVIVED", f"{tests[mutant]} passes")

    return list(tests), judged


def judged_all(
    mutants: Sequence[Mutant], judge: Callable[[Mutant], Verdict], stored: dict[str, Verdict], output: Path | None
) -> dict[Mutant, Verdict]:
    """Judges all mutants and prints a line for each; those that are stored as killed are not run again."""
    known: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    verdicts: dict[Mutant, Verdict] = {}
    for number, mutant in enumerate(mutants, start=1):
        begun = time.monotonic()
        place = f"{mutant.key} @{mutant.start}"
        if mutant.key in known:
            verdicts[mutant] = "equivalent", known[mutant.key]
        elif place in stored and stored[place][0] == "killed":
            verdicts[mutant] = stored[place]
        else:
            stored[place] = verdicts[mutant] = judge(mutant)
        verdict, reason = verdicts[mutant]
        print(f"{number}/{len(mutants)} {verdict} ({time.monotonic() - begun:.0f} s) {mutant.file}:{mutant.line}: "
              f"{mutant.before} -> {mutant.after}; {reason}", flush=True)  # fmt: skip
        if output is not None:
            output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return verdicts


def verified(verdicts: dict[Mutant, Verdict], judge: Judge) -> dict[Mutant, Verdict]:
    """Checks that every test that killed passes without a mutant; if one fails, its mutants are judged again."""
    while unsound := judge.unsound({reason for verdict, reason in verdicts.values() if verdict == "killed"}):
        verdicts |= judged_all([each for each in verdicts if verdicts[each][1] in unsound], judge, {}, None)
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Judges mutants and prints the counts; returns 1 if one survives or is unreached."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--branches", type=Path, default=ROOT / "build" / "branches", help="record of branches.py")
    parser.add_argument("--known", type=Path, help="JSON file of mutants and the test that notices each")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests for a mutant")
    parser.add_argument("--output", type=Path, help="JSON file for the verdicts; its killed mutants are not run again")
    parser.add_argument("--record", type=Path, help="JSON file for the counts and the mutants that were not killed")
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    options = parser.parse_args(arguments)
    mutants = sampled(options.number, options.seed, options.rooms)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}: {mutant.before} -> {mutant.after}")
        return 0
    stored: dict[str, Verdict] = {}
    if options.output is not None and options.output.exists():
        stored = {place: (each[0], each[1]) for place, each in json.loads(options.output.read_text("utf-8")).items()}
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Copy(Path(folder))
        if options.known is not None:
            mutants, judge = known_judge(options.known, place)
            verdicts = judged_all(mutants, judge, {}, None)
        else:
            judge = Judge(place, Reach(options.branches), options.budget)
            verdicts = judged_all(mutants, judge, stored, options.output)
            if options.record is not None:
                verdicts = verified(verdicts, judge)
    rooms = {
        room: {each: verdict for each, verdict in verdicts.items() if room_of(each.file) == room} for room in ROOMS
    }
    counts = {room: Counter(verdict for verdict, _ in each.values()) for room, each in rooms.items() if each}
    for room, found in counts.items():
        print(f"{room}: {', '.join(f'{count} {verdict}' for verdict, count in sorted(found.items()))}")
    if options.record is not None:
        left = [{**asdict(each), "verdict": verdict, "reason": reason}
                for each, (verdict, reason) in verdicts.items() if verdict != "killed"]  # fmt: skip
        record = {
            **machine_record(1),
            "seed": options.seed,
            "budget": options.budget,
            "counts": counts,
            "not_killed": left,
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(verdict in ("SURVIVED", "unreached") for verdict, _ in verdicts.values()))


class Reach:
    """The tests that run each line and their times, from the record of `lab/branches.py`."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(folder / "data"))
        self._data.read()
        self._paths = {path.rpartition("/cepo/")[2]: path for path in self._data.measured_files()}
        self._seconds: dict[str, float] = {}
        for file in sorted(folder.glob("seconds-*.json")):
            self._seconds |= json.loads(file.read_text(encoding="utf-8"))
        self._tests: dict[str, list[str]] = defaultdict(list)
        for test in self._seconds:
            self._tests[test.partition("::")[0]].append(test)

    def stages(self, mutant: Mutant, budget: float, *, without: Collection[str]) -> list[list[str]]:
        """Returns the tests that run the mutant's line in growing stages, by file, the quickest file first.

        Lines that ran during a test's setup count for all tests of its file.
        """
        source = (ROOT / "cepo" / mutant.file).read_text(encoding="utf-8")
        contexts = self._contexts(mutant.file)
        lines = lines_that_run_it(mutant, source)
        reached = {context for line in lines or contexts for context in contexts.get(line, ())}
        by_file: dict[str, list[str]] = {}
        for file, tests in self._tests.items():
            if found := [test for test in tests if {file, test} & reached and test not in without]:
                by_file[file] = found
        cost = {file: sum(self._seconds[test] for test in each) for file, each in by_file.items()}
        stages, passed, limits = [[]], 0.0, [*STAGES, budget]
        for file in sorted(by_file, key=lambda file: cost[file]):
            if passed + cost[file] > budget and passed:
                break
            while limits[1:] and passed + cost[file] > limits[0] and stages[-1]:
                stages.append([])
                limits.pop(0)
            stages[-1] += by_file[file]
            passed += cost[file]
        return [stage for stage in stages if stage]

    def _contexts(self, file: str) -> dict[int, set[str]]:
        """Returns tests and test files by line; child processes have their test's name with the phase from pytest."""
        if file not in self._paths:
            return {}
        found: dict[int, set[str]] = {}
        for line, contexts in self._data.contexts_by_lineno(self._paths[file]).items():
            called = {context.removesuffix(" (call)") for context in contexts}
            found[line] = {context.partition("::")[0] if context.endswith(")") else context for context in called}
        return found

    def seconds(self, tests: Iterable[str]) -> float:
        """Returns how long the tests took in total."""
        return sum(self._seconds[test] for test in tests)

    def test_in(self, failure: str) -> str | None:
        """Returns the test that a line of pytest's summary names; names may contain characters that end other names."""
        named = failure.partition(" ")[2]
        return max((test for test in self._seconds if named.startswith(test)), key=len, default=None)


if __name__ == "__main__":
    sys.exit(main())
