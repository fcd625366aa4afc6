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
    assert [(row["problem_id"], row["sample"]) for row in rows] == [(str(n), k) for n in range(24) for k in range(4)]
    answers = [problem.answer for problem in split_problems(0, 1, 24)[1]]
    processing = Processing(str(ASSETS))
    by_problem: list[list[bool]] = [[] for _ in range(24)]
    for row in rows:
        boxes = re.findall(r"\\boxed\{([^{}]*)\}", row["response"])
        is_right = bool(boxes) and re.fullmatch(r"[\d.]+", boxes[-1]) is not None
        is_right = is_right and Fraction(boxes[-1]) == Fraction(answers[int(row["problem_id"])])
        assert row["correct"] is is_right, row
        assert (row["answer"] is None) == (not boxes)
        if row["finished"]:
            assert row["length"] == len(processing.encode_text(row["response"])) + 1
        by_problem[int(row["problem_id"])].append(is_right)

    figures = json.loads((evaluation / "evaluation.json").read_text())["benchmarks"]["held_out"]
    shares = [statistics.fmean(verdicts) for verdicts in by_problem]
    assert 0.1 < statistics.fmean(shares) < 0.9, "a model that is always right or always wrong shows nothing"
    assert figures["num_problems"] == 24
    assert figures["num_right"] == sum(map(sum, by_problem))
    assert figures["accuracy"]["mean"] == pytest.approx(statistics.fmean(shares))
    assert figures["accuracy"]["error"] == pytest.approx(statistics.stdev(shares) / math.sqrt(24))
    assert figures["by_kind"]["numeric"]["mean"] == figures["accuracy"]["mean"]
    assert figures["pass_at_k"]["4"]["mean"] == pytest.approx(statistics.fmean(any(each) for each in by_problem))
    assert figures["response_length"]["max"] == max(row["length"] for row in rows)
    assert figures["share_cut_off"] == pytest.approx(statistics.fmean(not row["finished"] for row in rows))
    assert figures["share_without_answer"] == pytest.approx(
        statistics.fmean("boxed" not in row["response"] for row in rows)
    )


@pytest.mark.heavy
def test_the_same_command_gives_the_same_responses(
    evaluation: Path, held_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paired difference is 0."""
    from cepo.microgeo.world import ASSETS

    again = ("config=configs/microgeo/base.yaml", f"checkpoint={ASSETS}", f"data={held_out}", "n=4", *ENGINE)
    assert main(["evaluate", *again, "out=again"]) == 0
    assert [row["response"] for row in lines(tmp_path / "again")] == [row["response"] for row in lines(evaluation)]
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
    assert {name: each["num_problems"] for name, each in figures.items()} == dict.fromkeys(
        ("dynamath", "mathvision", "wemath", "mmmu"), 6
    )
    assert all(each["num_left_out"] == 0 for each in figures.values())
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
        benchmark = next(each for each in BENCHMARKS if name.startswith(each.name))
        problems = converted(rows, benchmark, name, skip_bad_rows=False)
        assert len(problems) == count
        right = compute_score([_sampled(row, f"so \\boxed{{{row['answer']}}}") for row in problems])
        assert [score["accuracy"] for score in right] == [1.0] * count
        others = [next(one["answer"] for one in problems if one["answer"] != row["answer"]) for row in problems]
        wrong = compute_score(
            [_sampled(row, f"so \\boxed{{{other}}}") for row, other in zip(problems, others, strict=True)]
        )
        assert [score["accuracy"] for score in wrong] == [0.0] * count
        for row in problems:
            seen[row["answer_kind"]] += 1
            assert row["problem"].count("<image>") == len(row["images"]) == 1
            by_text = row["choices"] and row["choices"]["ABCDEFGHIJ".index(row["answer"])]
            if by_text and len(by_text) > 1:
                assert compute_score([_sampled(row, f"<answer>{by_text}</answer>")])[0]["accuracy"] == 1.0, row
    assert seen == {"choice": 66, "numeric": 23, "text": 10}


def _sampled(row: dict[str, Any], response: str) -> dict[str, Any]:
    columns = {key: row[key] for key in ("answer_kind", "choices", "tolerance")}
    return columns | {"response": response, "response_length": 5, "ground_truth": row["answer"]}


def test_a_dry_run_prints_the_plan_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ("config=configs/geo3k/base.yaml", "data=hiyouga/geometry3k@test,my/other", "n=8", "top_p=0.9")
    assert main(["evaluate", *command, "dry_run=true"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "model: Qwen/Qwen3-VL-2B-Instruct"
    assert "data: hiyouga/geometry3k@test, my/other" in shown
    assert any(
        line.startswith("sampling: 8 per problem, temperature 1, top_p 0.9, top_k -1, presence penalty 0, at most 2048")
        for line in shown
    )
    assert shown[-1] == "folder: evaluations/Qwen-Qwen3-VL-2B-Instruct"
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
    shown = [{key: picture if value is benchmark_rows.PICTURE else value for key, value in row.items()} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(shown), folder / name)
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
    own = [{"question": "<image>How many?", "answer": number, "image": picture} for number in (3, 4)]
    of_list = row | {"answer_type": "list", "answer": "[1, 2]", "precision": None}
    sources = {
        "own": written(tmp_path, "mmmu.parquet", *own),
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
    assert {name: each["benchmark"] for name, each in figures.items()} == {name: name for name in figures} | {
        "mmmu (own)": None
    }
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
    shown = capsys.readouterr().out.splitlines()
    assert "data: mathvista:AI4Math/MathVista@testmini, wemath:my/other@test" in shown
    assert "format prompt: None" in shown
    assert "judge: org/judge" in shown
    sampled = "temperature 0, top_p 1, top_k -1, presence penalty 0"
    assert any(line.startswith(f"sampling: 1 per problem, {sampled}, at most 49152 tokens") for line in shown)


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
