"""Real Geometry3K problems through the path that microgeo takes."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from training_runs import REPOSITORY, checked_config

from cepo.data.dataset import ProblemSet
from cepo.models.processing import Processing

pytestmark = pytest.mark.heavy
NUM_ROWS = 48


@pytest.fixture(scope="module")
def geo3k_rows() -> list[dict[str, Any]]:
    """Rows spread over the training set, as they stand in the file."""
    folder = Path(os.environ.get("CEPO_GEO3K", REPOSITORY.parent / "shared" / "data" / "geo3k"))
    file = folder / "train.parquet"
    if not file.is_file():
        pytest.skip(f"Geometry3K is not here: no file {file}; CEPO_GEO3K names the folder of train.parquet")
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file)
    return table.take(list(range(0, len(table), len(table) // NUM_ROWS))[:NUM_ROWS]).to_pylist()


@pytest.fixture(scope="module")
def geo3k_file(geo3k_rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    features = Features({"images": List(ImageFeature()), "problem": Value("string"), "answer": Value("string")})
    columns = {name: [row[name] for row in geo3k_rows] for name in features}
    file = tmp_path_factory.mktemp("geo3k") / "train.parquet"
    Dataset.from_dict(columns, features=features).to_parquet(str(file))
    return file


@pytest.fixture
def geo3k_run(geo3k_file: Path, tiny_model_folder: Path, parity_reward: str) -> list[str]:
    """The paper's cepo preset, at the size of the tiny model."""
    return [
        "config=configs/geo3k/cepo.yaml",
        f"data.train_files={geo3k_file}",
        "data.val_files=null",
        "data.max_prompt_length=1024",
        "data.max_response_length=12",
        "data.rollout_batch_size=4",
        f"worker.actor.model.model_path={tiny_model_folder}",
        "worker.actor.global_batch_size=4",
        "worker.actor.fsdp.mp_param_dtype=fp32",
        "worker.rollout.name=transformers",
        "worker.rollout.dtype=fp32",
        "worker.rollout.n=4",
        f"worker.reward.reward_function={parity_reward}",
        "algorithm.negative.source=peer_full",
        "trainer.max_steps=2",
        "trainer.val_before_train=false",
        "trainer.val_freq=-1",
        "trainer.logger=[file]",
    ]


def test_images_become_20_to_700_tokens_and_answers_stay(
    geo3k_run: list[str], geo3k_file: Path, geo3k_rows: list[dict[str, Any]]
) -> None:
    config = checked_config(geo3k_run)
    processing = Processing(config.worker.actor.model.model_path)
    problems = ProblemSet(str(geo3k_file), config.data, processing)
    assert len(problems) == NUM_ROWS
    assert not problems.skipped
    modes, counts = set(), []
    for problem, row in zip(problems, geo3k_rows, strict=True):
        modes.add(Image.open(io.BytesIO(row["images"][0]["bytes"])).mode)
        assert [image.mode for image in problem.images] == ["RGB"]
        assert problem.ground_truth == row["answer"]
        assert problem.text.startswith(row["problem"])
        assert problem.text.count("<image>") == 1
        prompt = processing.encode(problem.text, processing.load_images(problem.images))
        counts.append(prompt.token_ids.count(processing.image_token_id))
        assert counts[-1] == processing.reader.num_tokens(problem.images[0].size)
    assert modes - {"RGB"}, "the sample holds pictures that had to be converted"
    assert min(counts) >= 20
    assert max(counts) <= 700
    assert any("\\" in problem.ground_truth for problem in problems)
