"""The launchers of scripts/geo3k as users call them: from another folder, with variables and overrides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from case_files import cases

from cepo.algorithms import available_estimators
from cepo.files.trees import leaves

pytestmark = pytest.mark.heavy

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHERS = REPOSITORY / "scripts" / "geo3k"
CONFIGS = REPOSITORY / "configs" / "geo3k"
METHODS = [name for name in available_estimators() if (CONFIGS / f"{name}.yaml").is_file()]
MODELS = {"2b": "Qwen/Qwen3-VL-2B-Instruct", "4b": "Qwen/Qwen3-VL-4B-Instruct"}
NUM_ROWS = 8
EVALUATE = "../evaluate.sh"


VARIABLES = (
    "NUM_GPUS", "NUM_NODES", "MODEL_PATH", "TRAIN_FILES", "VAL_FILES", "CHECKPOINTS", "DRY_RUN", "SKIP_DOCTOR", "CEPO_VENV",
    "PYTHONPATH", "DATA", "CONFIG", "OUT",
)  # fmt: skip


def launch(script: str, *arguments: object, folder: Path, **variables: object) -> subprocess.CompletedProcess[str]:
    """One launcher run from `folder` by this interpreter, with no other variable of a launcher set."""
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment = inherited | {"CEPO_PYTHON": sys.executable} | {name: str(value) for name, value in variables.items()}
    command = ["bash", str(LAUNCHERS / script), *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


def old_python(folder: Path) -> tuple[Path, Path]:
    """A program that answers questions about its version as Python 3.9 does, and a folder with what scripts need beside it."""
    old = folder / "python3.9"
    programs = folder / "bin"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 18); $2"\n')
    old.chmod(0o755)
    programs.mkdir()
    for name in ("bash", "dirname", "sed", "sort", "find", "tr", "cksum", "cat"):
        (programs / name).symlink_to(str(shutil.which(name)))
    return old, programs


def resolved(script: str, *arguments: object, folder: Path, **variables: object) -> dict[str, object]:
    """All settings of a dry run under their dotted keys."""
    done = launch(script, *arguments, folder=folder, DRY_RUN=1, **variables)
    assert done.returncode == 0, done.stderr
    return dict(leaves(yaml.safe_load(done.stdout)))


def test_there_is_one_launcher_for_each_of_the_papers_5_methods() -> None:
    assert len(METHODS) == 5
    launchers = {path.stem for path in LAUNCHERS.glob("*.sh")} - {"train", "sweep"}
    assert launchers == set(METHODS)
    texts = {(LAUNCHERS / f"{name}.sh").read_text(encoding="utf-8") for name in METHODS}
    assert len(texts) == 1, "a launcher says nothing but its name"


@pytest.mark.parametrize(("method", "size", "by_name_of_file"), [("cepo", "2b", True), ("rlsd", "4b", False)])
def test_every_method_and_size_resolves_from_another_folder(
    method: str, size: str, by_name_of_file: bool, tmp_path: Path
) -> None:
    """It resolves to its config and model, whatever the method. All files named after a method are one and the same."""
    call = (f"{method}.sh", size) if by_name_of_file else ("train.sh", method, size)
    (tmp_path / "cepo").mkdir()  # which is not taken for the package
    settings = resolved(*call, folder=tmp_path)
    assert settings["algorithm.adv_estimator"] == method
    assert settings["worker.actor.model.model_path"] == MODELS[size]
    assert settings["worker.actor.optim.lr"] == (5e-6 if method == "cepo" else 1e-6)
    assert settings["trainer.max_steps"] == 50
    assert (settings["data.rollout_batch_size"], settings["worker.rollout.n"]) == (32, 8)
    assert Path(str(settings["data.format_prompt"])).samefile(REPOSITORY / "configs/format_prompt/geo3k.jinja")
    assert settings["trainer.save_checkpoint_path"] == f"{REPOSITORY}/checkpoints/cepo/geo3k-{method}-{size}"
    assert [path.name for path in tmp_path.iterdir()] == ["cepo"], "a dry run leaves nothing"


def test_arguments_win_over_variables(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "held out.parquet").touch()
    settings = resolved(
        "train.sh", "own_paper/rlsd", "worker.rollout.n=4", "data.train_files=other/set@train", "trainer.seed=7",
        folder=tmp_path, MODEL_PATH="weights", TRAIN_FILES="my/set@train", VAL_FILES="held out.parquet",
        CHECKPOINTS=tmp_path / "runs",
    )  # fmt: skip
    assert settings["worker.actor.model.model_path"] == "weights"
    assert settings["data.train_files"] == "other/set@train"
    assert settings["data.val_files"] == "held out.parquet"
    assert (settings["worker.rollout.n"], settings["trainer.seed"]) == (4, 7)
    assert settings["algorithm.weight.clip_radius"] == 0.2
    assert settings["trainer.save_checkpoint_path"] == f"{tmp_path}/runs/cepo/geo3k-own-paper-rlsd-2b"


MISTAKES = cases(__file__, "launcher_mistakes.yaml")


@pytest.mark.parametrize(("script", "arguments", "variables", "message"), MISTAKES)
def test_a_mistake_ends_with_a_message_that_names_it(
    script: str, arguments: str, variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    old, programs = old_python(tmp_path)
    places = {name: value.format(old=old, bin=programs) for name, value in variables.items()}
    done = launch(script, *arguments.split(), folder=tmp_path, **({"DRY_RUN": "1"} | places))
    assert done.returncode in (1, 2)
    assert message.format(old=old) in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_help_lists_all_configurations_and_ends_with_0(tmp_path: Path) -> None:
    done = launch("train.sh", "--help", folder=tmp_path, CEPO_PYTHON="/no/python")
    assert done.returncode == 0
    listed = done.stdout.partition("names:\n")[2].split()
    assert listed == sorted(
        str(file.relative_to(CONFIGS).with_suffix("")) for file in CONFIGS.rglob("*.yaml") if file.stem != "base"
    )


def test_a_dry_sweep_lists_a_folders_runs_and_starts_nothing(tmp_path: Path) -> None:
    """Each of the three has a folder of its own; tests/config/test_presets.py holds that for all that are shipped."""
    done = launch("sweep.sh", "4b", "own_paper", folder=tmp_path, DRY_RUN=1, CHECKPOINTS=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    listed = [line.split() for line in done.stdout.splitlines()]
    assert [words[2] for words in listed] == ["own_paper/opsd", "own_paper/rlsd", "own_paper/sdpo"]
    folders = {words[3] for words in listed}
    assert len(folders) == 3
    for folder in folders:
        assert folder.startswith(f"{tmp_path}/runs/cepo/geo3k-own-paper-")
        assert folder.endswith("-4b")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def geo3k_slice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parquet file of rows spread over the real training set, as they stand in it."""
    folder = Path(os.environ.get("CEPO_GEO3K") or REPOSITORY.parent / "shared" / "data" / "geo3k")
    if not (folder / "train.parquet").is_file():
        pytest.skip(f"Geometry3K is not here: no train.parquet in {folder}; name its folder in CEPO_GEO3K")
    from pyarrow import parquet

    table = parquet.read_table(folder / "train.parquet")
    file = tmp_path_factory.mktemp("geo3k") / "train.parquet"
    distance = len(table) // NUM_ROWS
    spread = table.take([distance * number for number in range(NUM_ROWS)])
    parquet.write_table(spread, file)
    return file


@pytest.mark.nightly("five commands of 5 to 10 seconds each")
def test_the_2b_launcher_trains_and_a_sweep_goes_on(geo3k_slice: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    """The paper's settings at the size of the tiny model, which writes an answer in no response."""
    variables = {
        "MODEL_PATH": tiny_model_folder, "TRAIN_FILES": geo3k_slice, "VAL_FILES": geo3k_slice,
        "CHECKPOINTS": tmp_path / "runs", "HF_DATASETS_CACHE": tmp_path / "cache", "HF_HUB_OFFLINE": 1,
    }  # fmt: skip
    (tmp_path / "even.py").write_text(
        "def even(samples):\n    return [{'overall': float(i % 2), 'accuracy': float(i % 2)} for i in range(len(samples))]\n"
    )
    overrides = [
        "data.max_response_length=8", "data.rollout_batch_size=2", "worker.actor.global_batch_size=2",
        "worker.actor.fsdp.mp_param_dtype=fp32", "worker.rollout.name=transformers", "worker.rollout.dtype=fp32",
        "worker.rollout.n=4", f"worker.reward.reward_function={tmp_path / 'even.py'}:even", "trainer.max_steps=2",
        "trainer.leak_probe_size=0", "trainer.val_freq=-1", "trainer.logger=[file]", "algorithm.negative.source=peer_full",
    ]  # fmt: skip
    done = launch("cepo.sh", "2b", *overrides, folder=tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert "Training can start." in done.stderr, "machine, engine and memory are looked at first"
    run = tmp_path / "runs" / "cepo" / "geo3k-cepo-2b"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "actor/skipped_updates" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["actor/skipped_updates"] == 0 for row in steps)
    assert all(row["prompt_length/mean"] > 100 for row in steps), "pictures are in the prompts"
    assert sum(row["work/teacher_rows"] for row in steps) > 0

    # One step more, without the doctor: a sweep resumes the run where it stood, and does not start it again once it is through.
    overrides.append("trainer.max_steps=3")
    resumed = launch("sweep.sh", "cepo", *overrides, folder=tmp_path, SKIP_DOCTOR=1, **variables)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.startswith("to do  ")
    assert "continues with step 3 of 3" in resumed.stderr
    again = launch("sweep.sh", "cepo", *overrides, folder=tmp_path, **variables)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith("finished  ")
    with_another_length = launch(
        "sweep.sh", "cepo", *overrides, "trainer.max_steps=4", folder=tmp_path, DRY_RUN=1, **variables
    )
    assert with_another_length.stdout.startswith("to do  "), "finished with other settings is not finished"


@pytest.mark.nightly("two launchers that load torch")
def test_a_sweep_of_two_failing_runs_tries_both_and_ends_with_1(geo3k_slice: Path, tmp_path: Path) -> None:
    (tmp_path / "no-model").mkdir()
    variables = {"MODEL_PATH": tmp_path / "no-model", "TRAIN_FILES": geo3k_slice, "HF_HUB_OFFLINE": 1, "SKIP_DOCTOR": 1}
    done = launch("sweep.sh", "grpo", "rlsd", folder=tmp_path, CHECKPOINTS=tmp_path / "runs", **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "2 of 2 runs failed: grpo rlsd. The same command tries them again."
    assert not list(tmp_path.rglob("sweep_finished.yaml"))


def test_an_evaluation_resolves_to_the_papers_prompts(tmp_path: Path) -> None:
    """A hub model is evaluated on Geometry3K's test set."""
    done = launch(EVALUATE, MODELS["4b"], "n=4", "temperature=0.6", folder=tmp_path, DRY_RUN=1)
    assert done.returncode == 0, done.stderr
    plan = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert plan["model"] == MODELS["4b"]
    assert plan["data"] == "hiyouga/geometry3k@test"
    assert Path(plan["format prompt"]).samefile(REPOSITORY / "configs/format_prompt/geo3k.jinja")
    assert plan["sampling"].startswith(
        "4 per problem, temperature 0.6, top_p 1, top_k -1, presence penalty 0, at most 2048"
    )
    assert not list(tmp_path.iterdir()), "a dry run leaves nothing"


def test_the_slurm_example_starts_ray_on_both_machines(tmp_path: Path) -> None:
    """Slurm and Ray are stand-ins that write down how they are called; the launcher is the real one, in a dry run."""
    programs = tmp_path / "bin"
    calls = tmp_path / "calls"
    programs.mkdir()
    for name, body in {
        "scontrol": "echo one; echo two",
        "getent": 'echo "10.0.0.1 STREAM $2"',
        "srun": f'echo "$RAY_AUTH_MODE ${{#RAY_AUTH_TOKEN}} $*" >>{calls}',
        "ray": "exit 0",
        "python": f'exec {sys.executable} "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": REPOSITORY, "SLURM_JOB_NODELIST": "one,two", "SLURM_GPUS_ON_NODE": "4", "DRY_RUN": "1"}
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = launch("nodes.sbatch", "grpo", "4b", folder=tmp_path, CEPO_PYTHON=programs / "python", PATH=path, **slurm)
    assert done.returncode == 0, done.stderr
    start = f"{programs}/ray start --block --num-gpus=4"
    assert sorted(calls.read_text().splitlines()) == [
        f"token 64 --overlap --nodes=1 --ntasks=1 --nodelist=one {start} --head --node-ip-address=10.0.0.1 --port=6379",
        f"token 64 --overlap --nodes=1 --ntasks=1 --nodelist=two {start} --address=10.0.0.1:6379",
    ]
    settings = yaml.safe_load(done.stdout)
    assert (settings["trainer"]["nnodes"], settings["trainer"]["n_gpus_per_node"]) == (2, 4)
    assert "devices: 8 (2 x 4), one worker each under Ray" in done.stdout + done.stderr
    assert settings["worker"]["actor"]["model"]["model_path"] == MODELS["4b"]
