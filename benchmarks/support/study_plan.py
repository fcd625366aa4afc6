"""What the study trains: its arms, profiles and parts, in the order of the runs. `benchmarks/study.py` runs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.machine import ROOT

GROUP_SIZE = 8
EQUAL_RATE = 1e-4
"""The learning rate of the comparison at equal rates: that of configs/microgeo, from trials on other problems."""
PAPER_RATIO = 5
"""The paper trains cepo at 5e-6 and the others at 1e-6."""
REPORTED_SEED, TUNING_SEED = 0, 101
"""Of the worlds' problems. Learning rates are chosen on the tuning world's training and validation problems alone."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A method with settings, as the tables name it.

    Attributes:
        settings: `{half}`, `{fifth}` and `{steps}` stand for those shares of the run's steps.
        plugin: its file in benchmarks/support.
        rate_of: the arm whose learning rate it takes, where rates are swept; itself where empty.
        worlds: where it is trained.
    """

    name: str
    estimator: str
    settings: tuple[str, ...] = ()
    plugin: str = ""
    rate_of: str = ""
    group_size: int = GROUP_SIZE
    worlds: tuple[str, ...] = ("shapes", "chain")


def _weighted(name: str, estimator: str = "", *settings: str, plugin: str = "", rate_of: str = "") -> Arm:
    """An arm with an evidence weight, whose lambda falls to 0 over half of the run, as over 25 of the paper's 50 steps."""
    section = f"algorithm.{estimator or name}"
    own = tuple(f"{section}.{setting}" for setting in settings)
    decay = (f"{section}.lambda_decay_steps={{half}}",)
    return Arm(name=name, estimator=estimator or name, settings=decay + own, plugin=plugin, rate_of=rate_of)


METHODS = (
    Arm(name="grpo", estimator="grpo"),
    _weighted("rlsd"),
    Arm(name="opsd", estimator="opsd"),
    Arm(name="sdpo", estimator="sdpo"),
    _weighted("cepo"),
    Arm(name="hindsight", estimator="hindsight"),
    _weighted("cepo+hindsight", "cepo", "baseline=hindsight"),
    _weighted("rlcsd"),
    _weighted("visual"),
)
CONTROLS = (
    _weighted("cepo-permuted", "permuted_cepo", plugin="permuted_cepo.py", rate_of="cepo"),
    _weighted("cepo-inverted", "inverted_cepo", plugin="inverted_cepo.py", rate_of="cepo"),
    Arm(name="oracle", estimator="chain_oracle", plugin="chain_oracle.py", rate_of="grpo", worlds=("chain",)),
)
_SOURCES = ("ground_truth", "peer_full"), ("peer_full",) * 2, ("peer_prefix",) * 2, ("peer_suffix",) * 2
_LAMBDAS = {
    "constant 0.5": ("lambda_schedule=constant",),
    "constant 1.0": ("lambda_schedule=constant", "lambda_init=1.0"),
    "1.0 over a fifth": ("lambda_init=1.0", "lambda_decay_steps={fifth}"),
    "1.0 over half": ("lambda_init=1.0",),
    "1.0 over all": ("lambda_init=1.0", "lambda_decay_steps={steps}"),
}
ABLATIONS: Mapping[str, Sequence[Arm]] = {
    "teacher source": (
        _weighted("teacher reference", "cepo", "teacher.source=reference"),
        _weighted("teacher snapshot", "cepo", "teacher.source=snapshot", "teacher.sync_every={half}"),
    ),
    "feedback source": tuple(
        _weighted(f"{right} + {wrong}", "cepo", f"positive.source={right}", f"negative.source={wrong}")
        for right, wrong in _SOURCES
    ),
    "lambda": tuple(_weighted(f"lambda {name}", "cepo", *settings) for name, settings in _LAMBDAS.items()),
    "clip radius": tuple(
        _weighted(f"clip radius {radius}", "cepo", f"clip_radius={radius}") for radius in (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
    ),
    "group size": tuple(
        Arm(name=f"group size {size}", estimator="cepo", settings=_weighted("cepo").settings, group_size=size)
        for size in (4, 16)
    ),
}
"""Each changes one setting of cepo, and is compared with it. Named as in the paper's tables."""
ARMS = {arm.name: arm for arm in (*METHODS, *CONTROLS, *itertools.chain(*ABLATIONS.values()))}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How much of the study is run. `batches` and `rollouts` count responses; all runs have equally many rollouts.

    Attributes:
        batches: rollouts per step; the first is that of the sweep, the paper's ratio and the ablations.
        validations: how often a run is validated after step 0, its end included.
        problems: of the training and of each held-out split.
    """

    name: str
    worlds: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    rates: tuple[float, ...]
    batches: tuple[int, ...]
    rollouts: int
    validations: int
    problems: tuple[int, int]
    ablations: bool


_ALL = tuple(arm.name for arm in (*METHODS, *CONTROLS))
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="full",
            worlds=("shapes", "chain"),
            methods=_ALL,
            seeds=(1, 2, 3, 4, 5),
            tuning_seeds=(11, 12),
            rates=(3e-5, 1e-4, 3e-4),
            batches=(256, 32),
            rollouts=12_800,
            validations=5,
            problems=(4096, 512),
            ablations=True,
        ),
        Profile(
            name="small",
            worlds=("shapes",),
            methods=_ALL,
            seeds=(1, 2, 3, 4, 5),
            tuning_seeds=(11,),
            rates=(3e-5, 1e-4, 3e-4),
            batches=(64,),
            rollouts=1920,
            validations=2,
            problems=(1024, 256),
            ablations=False,
        ),
        Profile(
            name="smoke",
            worlds=("shapes",),
            methods=("grpo", "cepo"),
            seeds=(1,),
            tuning_seeds=(),
            rates=(),
            batches=(16,),
            rollouts=32,
            validations=1,
            problems=(32, 8),
            ablations=False,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training. Runs that several parts of the study name are one run."""

    world: str
    arm: str
    rate: float
    batch: int
    seed: int
    tuning: bool = False

    @property
    def folder(self) -> str:
        """Of the study's folder."""
        arm = self.arm.replace(" ", "-")
        part = "tuning" if self.tuning else "reported"
        return f"{self.world}/{part}/{arm}-lr{self.rate:g}-b{self.batch}-s{self.seed}"


def first_runs(profile: Profile) -> Iterator[Run]:
    """All runs that are known before the sweep's result, the most wanted first: whole seeds one after the other."""
    for world in profile.worlds:
        for batch, seed in itertools.product(profile.batches, profile.seeds):
            for arm in trained(profile, world):
                yield Run(world=world, arm=arm, rate=EQUAL_RATE, batch=batch, seed=seed)
        if not profile.rates:
            continue
        batch = profile.batches[0]
        for seed in profile.seeds:
            yield Run(world=world, arm="cepo", rate=PAPER_RATIO * EQUAL_RATE, batch=batch, seed=seed)
        yield from itertools.chain.from_iterable(sweep(profile, world, arm) for arm in swept(profile))
        for seed in profile.seeds if profile.ablations else ():
            for arm in itertools.chain(*ABLATIONS.values()):
                yield Run(world=world, arm=arm.name, rate=EQUAL_RATE, batch=batch, seed=seed)


def trained(profile: Profile, world: str) -> list[str]:
    """The arms that are trained in a world."""
    return [name for name in profile.methods if world in ARMS[name].worlds]


def swept(profile: Profile) -> list[str]:
    """The arms whose learning rate is swept."""
    return [name for name in profile.methods if not ARMS[name].rate_of]


def sweep(profile: Profile, world: str, arm: str) -> list[Run]:
    """The runs that choose an arm's learning rate, all on the tuning world's problems."""
    rates = itertools.product(profile.tuning_seeds, profile.rates)
    return [
        Run(world=world, arm=arm, rate=rate, batch=profile.batches[0], seed=seed, tuning=True) for seed, rate in rates
    ]


def own_rate_runs(profile: Profile, world: str, rates: Mapping[str, float]) -> Iterator[Run]:
    """The runs at the arms' own learning rates, as far as they are chosen."""
    for seed, arm in itertools.product(profile.seeds, trained(profile, world)):
        rate = rates.get(ARMS[arm].rate_of or arm)
        if rate is not None:
            yield Run(world=world, arm=arm, rate=rate, batch=profile.batches[0], seed=seed)


def num_steps(profile: Profile, run: Run) -> int:
    return profile.rollouts // run.batch


def arguments(profile: Profile, run: Run, world: Path, folder: Path) -> list[str]:
    """The settings of `cepo train` for a run on the problems in `world`."""
    arm, steps = ARMS[run.arm], num_steps(profile, run)
    prompts = run.batch // arm.group_size
    shares = {"half": max(1, steps // 2), "fifth": max(1, steps // 5), "steps": steps}
    return [
        f"config={ROOT}/configs/microgeo/{'base' if run.world == 'shapes' else run.world}.yaml",
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/validation.parquet",
        f"data.rollout_batch_size={prompts}",
        "data.max_prompt_length=512",
        f"data.seed={run.seed}",
        f"algorithm.adv_estimator={arm.estimator}",
        *(setting.format(**shares) for setting in arm.settings),
        f"worker.actor.model.model_path={world}/model",
        f"worker.actor.global_batch_size={prompts}",
        f"worker.actor.optim.lr={run.rate}",
        "worker.rollout.name=transformers",
        f"worker.rollout.n={arm.group_size}",
        f"worker.rollout.seed={run.seed}",
        f"trainer.plugins=[{ROOT / 'benchmarks' / 'support' / arm.plugin if arm.plugin else ''}]",
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
