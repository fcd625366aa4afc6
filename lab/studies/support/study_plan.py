"""Reads the study's plan from lab/studies/study.yaml: its arms and profiles, and the runs in order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lab.support.machine import ROOT

PLAN: Mapping[str, Any] = yaml.safe_load((ROOT / "lab" / "studies" / "study.yaml").read_text(encoding="utf-8"))
BASELINE: str = PLAN["baseline"]
EQUAL_RATES: Mapping[str, float] = PLAN["equal_rates"]
"""The learning rate of each world at which all arms are compared."""
RATIO_ARM: str = PLAN["paper_ratio"]["arm"]
RATIO_RATES = {world: PLAN["paper_ratio"]["factor"] * rate for world, rate in EQUAL_RATES.items()}
GROUP_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method with settings, under its name in tables; see the plan's comments."""

    name: str
    estimator: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    plugin: str = ""
    rate_of: str = ""
    group_size: int = GROUP_SIZE
    worlds: Sequence[str] = ("shapes", "chain")


def _ablation(name: str, settings: Mapping[str, Any] | None = None, group_size: int = GROUP_SIZE) -> Arm:
    own = PLAN["arms"][PLAN["ablated"]]
    return Arm(
        name=name, estimator=own["estimator"], settings={**own["settings"], **(settings or {})}, group_size=group_size
    )


METHODS = {name: Arm(name=name, **own) for name, own in PLAN["arms"].items()}
ABLATIONS: Mapping[str, Sequence[Arm]] = {
    part: [_ablation(str(name), **own) for name, own in arms.items()] for part, arms in PLAN["ablations"].items()
}
ARMS = METHODS | {arm.name: arm for arm in itertools.chain(*ABLATIONS.values())}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A size of the study; see the plan's comments."""

    name: str
    worlds: Sequence[str]
    arms: Sequence[str] = tuple(METHODS)
    seeds: Sequence[int]
    tuning_seeds: Sequence[int]
    rates: Sequence[float]
    batches: Mapping[str, Sequence[int]]
    rollouts: int
    validations: int
    problems: Mapping[str, Sequence[int]]
    ablations: Sequence[str]
    comparisons: Mapping[str, Sequence[Mapping[str, Any]]]


PROFILES = {name: Profile(name=name, **own) for name, own in PLAN["profiles"].items()}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run; equal runs of several parts of the study are one run."""

    world: str
    arm: str
    rate: float
    batch: int
    rollouts: int
    seed: int
    tuning: bool = False

    @property
    def steps(self) -> int:
        """The number of the run's steps."""
        return self.rollouts // self.batch

    @property
    def folder(self) -> str:
        """The run's folder within the study's."""
        part = "tuning" if self.tuning else "reported"
        return f"{self.world}/{part}/{self.arm.replace(' ', '-')}-lr{self.rate:g}-b{self.batch}-s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of some arms at the equal rate, besides that of all arms; see the plan's comments."""

    title: str
    why: str
    arms: Sequence[str]
    seeds: Sequence[int]
    batch: int
    rollouts: int

    @property
    def steps(self) -> int:
        """The number of steps of its runs."""
        return self.rollouts // self.batch


def comparisons(profile: Profile, world: str) -> list[Comparison]:
    """Returns the plan's further comparisons in a world; what an entry does not name is as in the main one."""
    plain = {"seeds": profile.seeds, "batch": profile.batches[world][0], "rollouts": profile.rollouts}
    return [Comparison(**{**plain, **entry}) for entry in profile.comparisons.get(world, ())]


def first_runs(profile: Profile) -> Iterator[Run]:
    """Yields the runs that do not depend on the sweep's result, the most important first, seed by seed."""
    for world in profile.worlds:
        rate, rollouts = EQUAL_RATES[world], profile.rollouts
        for batch, seed in itertools.product(profile.batches[world], profile.seeds):
            for arm in trained(profile, world):
                yield Run(world=world, arm=arm, rate=rate, batch=batch, rollouts=rollouts, seed=seed)
        for other in comparisons(profile, world):
            for seed, arm in itertools.product(other.seeds, other.arms):
                if arm in profile.arms:
                    yield Run(world=world, arm=arm, rate=rate, batch=other.batch, rollouts=other.rollouts, seed=seed)
        if not profile.rates:
            continue
        main = _main_run(profile, world)
        for seed in profile.seeds:
            yield main(arm=RATIO_ARM, rate=RATIO_RATES[world], seed=seed)
        for seed in profile.seeds if world in profile.ablations else ():
            for arm in itertools.chain(*ABLATIONS.values()):
                yield main(arm=arm.name, rate=rate, seed=seed)
        yield from itertools.chain.from_iterable(sweep(profile, world, arm) for arm in swept(profile))


def _main_run(profile: Profile, world: str) -> functools.partial[Run]:
    """Returns a constructor of runs with the first batch size of a world and the profile's rollouts."""
    return functools.partial(Run, world=world, batch=profile.batches[world][0], rollouts=profile.rollouts)


def trained(profile: Profile, world: str) -> list[str]:
    """Returns the arms that are trained in a world."""
    return [name for name in profile.arms if world in ARMS[name].worlds]


def swept(profile: Profile) -> list[str]:
    """Returns the arms whose learning rate is swept."""
    return [name for name in profile.arms if not ARMS[name].rate_of]


def sweep(profile: Profile, world: str, arm: str) -> list[Run]:
    """Returns the runs that choose an arm's learning rate, all on the tuning world's problems."""
    rates = itertools.product(profile.tuning_seeds, profile.rates)
    return [_main_run(profile, world)(arm=arm, rate=rate, seed=seed, tuning=True) for seed, rate in rates]


def own_rate_runs(profile: Profile, world: str, rates: Mapping[str, float]) -> Iterator[Run]:
    """Yields the runs at the arms' own learning rates, as far as these have been chosen."""
    for seed, arm in itertools.product(profile.seeds, trained(profile, world)):
        rate = rates.get(ARMS[arm].rate_of or arm)
        if rate is not None:
            yield _main_run(profile, world)(arm=arm, rate=rate, seed=seed)


def arguments(profile: Profile, run: Run, world: Path, folder: Path) -> list[str]:
    """Returns the settings of `cepo train` for a run on the problems in `world`."""
    arm, steps = ARMS[run.arm], run.steps
    prompts = run.batch // arm.group_size
    shares = {"half": max(1, steps // 2), "fifth": max(1, steps // 5), "all": steps}
    plugins = [str(ROOT / "lab" / "studies" / "support" / arm.plugin)] if arm.plugin else []
    return [
        f"config={ROOT}/{'configs/microgeo/base' if run.world == 'shapes' else 'lab/studies/chain'}.yaml",
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/validation.parquet",
        f"data.rollout_batch_size={prompts}",
        "data.max_prompt_length=512",
        f"data.seed={run.seed}",
        f"algorithm.adv_estimator={arm.estimator}",
        *(f"algorithm.{key}={shares.get(value, value)}" for key, value in arm.settings.items()),
        f"worker.actor.model.model_path={world}/model",
        f"worker.actor.global_batch_size={prompts}",
        f"worker.actor.optim.lr={run.rate}",
        "worker.rollout.name=transformers",
        f"worker.rollout.n={arm.group_size}",
        f"worker.rollout.seed={run.seed}",
        f"trainer.plugins=[{','.join(plugins)}]",
        f"trainer.seed={run.seed}",
        f"trainer.max_steps={steps}",
        f"trainer.val_freq={max(1, steps // profile.validations)}",
        "trainer.val_greedy=true",
        "trainer.rollouts_to_log=0",
        "trainer.logger=[file]",
        f"trainer.save_freq={max(1, steps // 3)}",
        "trainer.save_limit=1",
        f"trainer.save_checkpoint_path={folder}",
    ]
