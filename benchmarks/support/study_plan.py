"""Reads the study's plan from benchmarks/study.yaml: its arms and profiles, and the runs in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.machine import ROOT

PLAN: Mapping[str, Any] = yaml.safe_load((ROOT / "benchmarks" / "study.yaml").read_text(encoding="utf-8"))
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
        name=name,
        estimator=own["estimator"],
        settings={**own["settings"], **(settings or {})},
        group_size=group_size,
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
    repeated: Mapping[str, Mapping[str, Sequence[Any]]]


PROFILES = {name: Profile(name=name, **own) for name, own in PLAN["profiles"].items()}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run; equal runs of several parts of the study are one run."""

    world: str
    arm: str
    rate: float
    batch: int
    seed: int
    tuning: bool = False

    @property
    def folder(self) -> str:
        """The run's folder within the study's."""
        part = "tuning" if self.tuning else "reported"
        return f"{self.world}/{part}/{self.arm.replace(' ', '-')}-lr{self.rate:g}-b{self.batch}-s{self.seed}"


def first_runs(profile: Profile) -> Iterator[Run]:
    """Yields the runs that do not depend on the sweep's result, the most important first, seed by seed."""
    for world in profile.worlds:
        for batch, seed in itertools.product(profile.batches[world], profile.seeds):
            for arm in trained(profile, world):
                yield Run(world=world, arm=arm, rate=EQUAL_RATES[world], batch=batch, seed=seed)
        batch = profile.batches[world][0]
        again = profile.repeated.get(world, {"arms": (), "seeds": ()})
        for seed, arm in itertools.product(again["seeds"], again["arms"]):
            if arm in profile.arms:
                yield Run(world=world, arm=arm, rate=EQUAL_RATES[world], batch=batch, seed=seed)
        if not profile.rates:
            continue
        for seed in profile.seeds:
            yield Run(world=world, arm=RATIO_ARM, rate=RATIO_RATES[world], batch=batch, seed=seed)
        for seed in profile.seeds if world in profile.ablations else ():
            for arm in itertools.chain(*ABLATIONS.values()):
                yield Run(world=world, arm=arm.name, rate=EQUAL_RATES[world], batch=batch, seed=seed)
        yield from itertools.chain.from_iterable(sweep(profile, world, arm) for arm in swept(profile))


def trained(profile: Profile, world: str) -> list[str]:
    """Returns the arms that are trained in a world."""
    return [name for name in profile.arms if world in ARMS[name].worlds]


def swept(profile: Profile) -> list[str]:
    """Returns the arms whose learning rate is swept."""
    return [name for name in profile.arms if not ARMS[name].rate_of]


def sweep(profile: Profile, world: str, arm: str) -> list[Run]:
    """Returns the runs that choose an arm's learning rate, all on the tuning world's problems."""
    rates = itertools.product(profile.tuning_seeds, profile.rates)
    return [
        Run(world=world, arm=arm, rate=rate, batch=profile.batches[world][0], seed=seed, tuning=True)
        for seed, rate in rates
    ]


def own_rate_runs(profile: Profile, world: str, rates: Mapping[str, float]) -> Iterator[Run]:
    """Yields the runs at the arms' own learning rates, as far as these have been chosen."""
    for seed, arm in itertools.product(profile.seeds, trained(profile, world)):
        rate = rates.get(ARMS[arm].rate_of or arm)
        if rate is not None:
            yield Run(world=world, arm=arm, rate=rate, batch=profile.batches[world][0], seed=seed)


def num_steps(profile: Profile, run: Run) -> int:
    """Returns the number of steps of a run; all runs have the same number of rollouts."""
    return profile.rollouts // run.batch


def arguments(profile: Profile, run: Run, world: Path, folder: Path) -> list[str]:
    """Returns the settings of `cepo train` for a run on the problems in `world`."""
    arm, steps = ARMS[run.arm], num_steps(profile, run)
    prompts = run.batch // arm.group_size
    shares = {"half": max(1, steps // 2), "fifth": max(1, steps // 5), "all": steps}
    plugins = [str(ROOT / "benchmarks" / "support" / arm.plugin)] if arm.plugin else []
    return [
        f"config={ROOT}/configs/microgeo/{'base' if run.world == 'shapes' else run.world}.yaml",
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/validation.parquet",
        f"data.rollout_batch_size={prompts}",
        "data.max_prompt_length=512",
        f"data.seed={run.seed}",
        f"algorithm.adv_estimator={arm.estimator}",
        *(f"algorithm.{arm.estimator}.{key}={shares.get(value, value)}" for key, value in arm.settings.items()),
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
