"""`cepo evaluate` as users call it: real sampling, and figures that a recount of the written responses gives again."""

from __future__ import annotations

import io
import json
import math
import os
import re
import statistics
from collections.abc import Iterator
from fractions import Fraction
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import benchmark_rows
import pytest
from isolation import own_caches, restored_process
from local_server import local_server

from cepo.commands.cli import main
from cepo.evaluation.benchmarks import BENCHMARKS, converted
from cepo.rewards.benchmark import compute_score

SAMPLES = Path(os.environ.get("CEPO_EVAL_SAMPLES") or Path(__file__).parents[3] / "shared" / "data" / "eval_samples")
ROWS = {"dynamath": 30, "mathvision_testmini": 30, "wemath_testmini": 30, "mmmu_val": 9}
ENGINE = ("worker.rollout.name=transformers", "worker.rollout.dtype=fp32")

needs_samples = pytest.mark.skipif(
    not (SAMPLES / "dynamath").is_dir(),
    reason=f"no rows of the benchmarks in {SAMPLES}; name their folder in CEPO_EVAL_SAMPLES",
)


@pytest.fixture(scope="module", autouse=True)
def _no_trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On one thread, and without a file in the user's cache."""
    with restored_process(), own_caches(tmp_path_factory.mktemp("caches")):
        yield


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cepo.microgeo.world import split_problems, write_problems

    file = tmp_path_factory.mktemp("problems") / "held_out.parquet"
    write_problems(file, split_problems(0, 1, 24)[1])
    return file


@pytest.fixture(scope="module")
def evaluation(held_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 problems of the built-in toy task with 4 responses of its shipped model each."""
    from cepo.microgeo.world import ASSETS

    folder = tmp_path_factory.mktemp("evaluation") / "out"
    named = (f"checkpoint={ASSETS}", f"data={held_out}", f"out={folder}")
    sampling = ("n=4", "temperature=1.0", "data.val_batch_size=16")
    assert main(["evaluate", "config=configs/microgeo/base.yaml", *named, *sampling, *ENGINE]) == 0
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "generations.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.heavy
def test_the_figures_are_a_recount_of_the_written_responses(evaluation: Path, held_out: Path) -> None:
    from cepo.microgeo.world import ASSETS, split_problems
    from cepo.models.processing import Processing

    rows = lines(evaluation)
    expected_places = [(str(number), sample) for number in range(24) for sample in range(4)]
    assert [(row["problem_id"], row["sample"]) for row in rows] == expected_places
    _, held_out_problems = split_problems(0, 1, 24)
    processing = Processing(str(ASSETS))
    by_problem: list[list[bool]] = [[] for _ in range(24)]
    for row in rows:
        answer = held_out_problems[int(row["problem_id"])].answer
        boxes = re.findall(r"\\boxed\{([^{}]*)\}", row["response"])
        is_number = bool(boxes) and re.fullmatch(r"[\d.]+", boxes[-1]) is not None
        is_right = is_number and Fraction(boxes[-1]) == Fraction(answer)
        assert row["correct"] is is_right, row
        assert (row["answer"] is None) == (not boxes)
        if row["finished"]:
            token_ids = processing.encode_text(row["response"])
            assert row["length"] == len(token_ids) + 1
        by_problem[int(row["problem_id"])].append(is_right)

    figures = json.loads((evaluation / "evaluation.json").read_text())["benchmarks"]["held_out"]
    shares = [statistics.fmean(verdicts) for verdicts in by_problem]
    assert 0.1 < statistics.fmean(shares) < 0.9, "a model that is always right or always wrong shows nothing"
    assert figures["num_problems"] == 24
    assert figures["num_right"] == sum(map(sum, by_problem))
    assert figures["accuracy"]["mean"] == pytest.approx(statistics.fmean(shares))
    assert figures["accuracy"]["error"] == pytest.approx(statistics.stdev(shares) / math.sqrt(24))
    assert figures["by_kind"]["numeric"]["mean"] == figures["accuracy"]["mean"]
    share_solved = statistics.fmean(any(verdicts) for verdicts in by_problem)
    assert figures["pass_at_k"]["4"]["mean"] == pytest.approx(share_solved)
    assert figures["response_length"]["max"] == max(row["length"] for row in rows)
    share_cut_off = statistics.fmean(not row["finished"] for row in rows)
    assert figures["share_cut_off"] == pytest.approx(share_cut_off)
    share_without_box = statistics.fmean("boxed" not in row["response"] for row in rows)
    assert figures["share_without_answer"] == pytest.approx(share_without_box)


@pytest.mark.heavy
def test_the_same_command_gives_the_same_responses(
    evaluation: Path, held_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paired difference is 0."""
    from cepo.microgeo.world import ASSETS

    again = ("config=configs/microgeo/base.yaml", f"checkpoint={ASSETS}", f"data={held_out}", "n=4", *ENGINE)
    assert main(["evaluate", *again, "out=again"]) == 0
    responses_of_again = [row["response"] for row in lines(tmp_path / "again")]
    assert responses_of_again == [row["response"] for row in lines(evaluation)]
    assert main(["evaluate", *again, "out=again"]) == 2
    assert "--out again is not empty" in capsys.readouterr().err
    assert main(["compare", str(evaluation), "again"]) == 0
    assert "+0.0 points (95 % interval +0.0 to +0.0)" in capsys.readouterr().out


@needs_samples
@pytest.mark.heavy
def test_rows_of_4_benchmarks_are_asked_with_images_and_graded(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """24 rows are asked and graded by kind."""
    sources = ",".join(f"{name.partition('_')[0]}:{SAMPLES / name / 'sample.parquet'}@train[:6]" for name in ROWS)
    command = (
        "evaluate",
        "config=configs/geo3k/base.yaml",
        f"checkpoint={tiny_model_folder}",
        f"data={sources}",
        "out=out",
    )
    # Small pictures: the tiny model's vision tower on a CPU takes seconds for one of a million pixels.
    small = ("data.max_response_length=8", "data.max_pixels=65536", "data.min_pixels=4096")
    assert main([*command, *ENGINE, "protocol=paper", *small]) == 0
    results = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    figures = results["benchmarks"]
    assert figures.keys() == {"dynamath", "mathvision", "wemath", "mmmu"}
    for name, of_benchmark in figures.items():
        assert of_benchmark["num_problems"] == 6, name
        assert of_benchmark["num_left_out"] == 0, name
    assert figures["dynamath"]["accuracy"]["num_clusters"] == 2
    assert figures["dynamath"]["by_kind"].keys() == {"text", "numeric"}
    assert results["average"]["num_benchmarks"] == 4
    assert results["sampling"]["presence_penalty"] == 2.0
    rows = lines(tmp_path / "out")
    assert len(rows) == 24
    assert "average" in capsys.readouterr().out


@needs_samples
def test_sample_rows_are_right_with_their_own_answers_only() -> None:
    from cepo.data.tables import read_source

    seen = {"choice": 0, "numeric": 0, "text": 0}
    for name, count in ROWS.items():
        rows = read_source(str(SAMPLES / name / "sample.parquet"))
        (benchmark,) = [benchmark for benchmark in BENCHMARKS if name.startswith(benchmark.name)]
        problems = converted(rows, benchmark, name, skip_bad_rows=False)
        assert len(problems) == count
        answers = [row["answer"] for row in problems]
        for row in problems:
            seen[row["answer_kind"]] += 1
            assert row["problem"].count("<image>") == len(row["images"]) == 1
            right_answer = row["answer"]
            assert _accuracy(row, f"so \\boxed{{{right_answer}}}") == 1.0, row
            wrong_answer = next(answer for answer in answers if answer != right_answer)
            assert _accuracy(row, f"so \\boxed{{{wrong_answer}}}") == 0.0, row
            by_text = row["choices"] and row["choices"]["ABCDEFGHIJ".index(right_answer)]
            if by_text and len(by_text) > 1:
                assert _accuracy(row, f"<answer>{by_text}</answer>") == 1.0, row
    assert seen == {"choice": 66, "numeric": 23, "text": 10}


def _accuracy(row: dict[str, Any], response: str) -> float:
    columns = {key: row[key] for key in ("answer_kind", "choices", "tolerance")}
    sample = columns | {"response": response, "response_length": 5, "ground_truth": row["answer"]}
    return compute_score([sample])[0]["accuracy"]


def test_a_dry_run_prints_the_plan_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ("config=configs/geo3k/base.yaml", "data=hiyouga/geometry3k@test,my/other", "n=8", "top_p=0.9")
    assert main(["evaluate", *command, "dry_run=true"]) == 0
    plan = capsys.readouterr().out.splitlines()
    assert plan[0] == "model: Qwen/Qwen3-VL-2B-Instruct"
    assert "data: hiyouga/geometry3k@test, my/other" in plan
    assert any(
        line.startswith("sampling: 8 per problem, temperature 1, top_p 0.9, top_k -1, presence penalty 0, at most 2048")
        for line in plan
    )
    assert plan[-1] == "folder: evaluations/Qwen-Qwen3-VL-2B-Instruct"
    assert not list(tmp_path.iterdir())


def test_the_papers_protocol_is_one_word_and_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its section on experiments: temperature 1, top-p 1, top-k 40, presence penalty 2, at most 32,000 tokens."""
    command = ("evaluate", "config=configs/geo3k/base.yaml", "data=my/other", "protocol=paper", "dry_run=true")
    sampled = "temperature 1, top_p 1, top_k 40, presence penalty"
    assert main([*command]) == 0
    assert f"sampling: 1 per problem, {sampled} 2, at most 32000 tokens" in capsys.readouterr().out
    assert main([*command, "n=4", "presence_penalty=1.5", "data.max_response_length=64"]) == 0
    assert f"sampling: 4 per problem, {sampled} 1.5, at most 64 tokens" in capsys.readouterr().out


def written(folder: Path, name: str, *rows: dict[str, Any]) -> str:
    """Writes rows with a picture in place of the bytes `picture`, and returns the file."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(content, "PNG")
    picture = {"bytes": content.getvalue(), "path": None}
    with_pictures: list[dict[str, Any]] = []
    for row in rows:
        with_picture = {key: picture if value is benchmark_rows.PICTURE else value for key, value in row.items()}
        with_pictures.append(with_picture)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(with_pictures), folder / name)
    return str(folder / name)


SHORT = ("data.max_response_length=8", "data.max_prompt_length=2048", "config=configs/microgeo/grpo.yaml")


@pytest.mark.heavy
def test_own_data_and_benchmarks_are_graded_each_by_its_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's reward calls the answer 3 right, under a name and threshold of its own, and 4 wrong: 1 of 2.

    MathVista's row with a list is left out without a judge. What the tiny model says is right nowhere.
    """
    row = benchmark_rows.MATHVISTA
    picture = benchmark_rows.PICTURE
    own_rows = [{"question": "<image>How many?", "answer": number, "image": picture} for number in (3, 4)]
    of_list = row | {"answer_type": "list", "answer": "[1, 2]", "precision": None}
    sources = {
        "own": written(tmp_path, "mmmu.parquet", *own_rows),
        "mathvista": f"Math-Vista:{written(tmp_path, 'vista.parquet', row, row | {'pid': '2'}, of_list)}",
        "logicvista": f"logicvista:{written(tmp_path, 'l.parquet', benchmark_rows.LOGICVISTA)}",
    }
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(rows):\n    return [{'overall': 0.0, 'is_three': 5.0 * (row['ground_truth'] == '3')} for row in rows]\n"
    )
    keys = ("data.prompt_key=question", "data.answer_key=answer", "data.image_key=image")
    rules = (f"worker.reward.reward_function={reward}:score", "algorithm.correct_key=is_three")
    command = ("evaluate", f"data={','.join(sources.values())}", "out=out", *SHORT, *keys, *rules, *ENGINE)
    assert main([*command, "algorithm.correct_threshold=5"]) == 0
    figures = json.loads((tmp_path / "out" / "evaluation.json").read_text())["benchmarks"]
    # The file is not MMMU's, whatever its name is.
    assert [*figures] == ["mmmu (own)", "mathvista", "logicvista"]
    assert figures["mmmu (own)"]["benchmark"] is None
    assert figures["mathvista"]["benchmark"] == "mathvista"
    assert figures["logicvista"]["benchmark"] == "logicvista"
    assert figures["mmmu (own)"]["accuracy"]["mean"] == 0.5
    assert figures["mathvista"]["num_problems"] == 2
    assert figures["mathvista"]["num_without_judge"] == 1
    assert figures["mathvista"]["by_category"]["grade"].keys() == {"college"}
    assert [row["correct"] for row in lines(tmp_path / "out")] == [True, False, False, False, False]
    printed = capsys.readouterr().out
    assert "left out: need a judge" in printed
    assert "left out: need a judge" in (tmp_path / "out" / "evaluation.html").read_text("utf-8")


@pytest.mark.heavy
def test_lmms_evals_protocol_is_asked_and_judged(tmp_path: Path) -> None:
    """The judge calls the list right: 1 of 2."""
    row = benchmark_rows.MATHVISTA
    judged = row | {"answer_type": "list", "answer": "[1, 2]", "precision": None}
    file = written(tmp_path, "vista.parquet", row, judged)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.rfile.read(int(handler.headers["Content-Length"]))
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(json.dumps({"choices": [{"message": {"content": "<score>10</score>"}}]}).encode())

    command = (
        "evaluate",
        f"data=mathvista:{file}",
        "out=out",
        "protocol=lmms",
        "judge_model=judge",
        *SHORT,
    )
    with local_server(answer) as address:
        assert main([*command, f"judge=http://{address}/v1", *ENGINE]) == 0
    results = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert results["protocol"] == "lmms"
    assert results["judge"] == "judge"
    assert results["sampling"]["temperature"] == 0.0
    assert results["sampling"]["num_samples"] == 1
    assert results["benchmarks"]["mathvista"]["accuracy"]["mean"] == 0.5
    first, second = lines(tmp_path / "out")
    assert first["problem"].startswith(
        "<image>Question: How far?\nHint: Please answer the question requiring a floating"
    )
    assert second["kind"] == "judged"
    assert second["correct"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("data=mathvist:rows.parquet",), "Did you mean 'mathvista'"),
        (("data=mathvista",), "no data; give mathvista:SOURCE"),
        (("data=mathvista:no/such/file.parquet",), "not found ("),
        (("data=my/other", "judge=http://localhost/v1"), "both judge=ADDRESS"),
        (("data=my/other", "judge_model=m"), "both judge=ADDRESS"),
        (("data=my/other", "judge=localhost", "judge_model=m"), "begins with http://"),
        (("data=my/other", "protocol=other"), "'other' is not one of 'paper', 'lmms'"),
    ],
)
def test_wrong_names_and_judges_are_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "config=configs/geo3k/base.yaml", *arguments, "dry_run=true"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_names_benchmarks_protocol_and_judge(capsys: pytest.CaptureFixture[str]) -> None:
    data = "data=MathVista:AI4Math/MathVista@testmini,we-math:my/other@test"
    judge = ("judge=http://localhost:8000/v1", "judge_model=org/judge")
    command = ("config=configs/geo3k/base.yaml", data, "protocol=lmms", *judge, "dry_run=true")
    assert main(["evaluate", *command]) == 0
    plan = capsys.readouterr().out.splitlines()
    assert "data: mathvista:AI4Math/MathVista@testmini, wemath:my/other@test" in plan
    assert "format prompt: None" in plan
    assert "judge: org/judge" in plan
    sampled = "temperature 0, top_p 1, top_k -1, presence penalty 0"
    assert any(line.startswith(f"sampling: 1 per problem, {sampled}, at most 49152 tokens") for line in plan)


@pytest.mark.parametrize(
    ("name", "row", "arguments", "words"),
    [
        ("", {"question": "How many?", "answer": 3, "image": None}, (), "For a benchmark, name it: NAME:"),
        (
            "",
            {"question": "How many?", "answer": 3},
            ("data.prompt_key=question", "protocol=lmms"),
            "is read by data.prompt_key",
        ),
        (
            "mathvista:",
            benchmark_rows.MATHVISTA | {"answer_type": "list", "answer": "[1, 2]", "precision": None},
            (),
            "each of its 1 rows needs a judge",
        ),
        (
            "mathvista:",
            benchmark_rows.MATHVISTA | {"decoded_image": None, "image": None},
            (),
            "row 0: it does not match",
        ),
    ],
)
def test_sources_that_cannot_be_graded_are_refused(
    name: str,
    row: dict[str, Any],
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = written(tmp_path, "rows.parquet", row)
    assert main(["evaluate", f"data={name}{file}", "out=out", *SHORT, *ENGINE, *arguments]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
