"""Rows over ranks: prompts stay together, passes of a step agree, results come back in order, pictures travel once."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cepo.algorithms.settings import TeacherConfig
from cepo.config import load_config
from cepo.data.batch import CriticBatch, OptimizerBatch, ScoringRow, token_array
from cepo.data.dataset import ProblemSet
from cepo.data.image_store import ImageStore
from cepo.data.prompts import ContextBuilder, mask_for
from cepo.data.row_settings import RowRules
from cepo.losses.aggregation import LossDenominators
from cepo.models.interface import EncodedPrompt, ImageInputs, ImageSource, Video
from cepo.models.processing import Processing
from cepo.rollout.generator import Generation, GenerationRequest, SamplingSettings
from cepo.runtime import dispatch
from cepo.runtime.dispatch import Receiver, Sender, encode
from cepo.types import Distillation, DivergenceConfig, ImageReference, RolloutGroup


def row(prompt: int, length: int = 1, images: ImageInputs | None = None) -> ScoringRow:
    context = EncodedPrompt(token_ids=(1,) * (length - 1), engine_ids=(1,), images=images)
    return ScoringRow(context=context, response_ids=token_array([2]), prompt=prompt)


def optimizer_batch(rows: Sequence[ScoringRow]) -> OptimizerBatch:
    values = torch.arange(len(rows), dtype=torch.float32).unsqueeze(1)
    return OptimizerBatch(
        rows=rows,
        sampled_log_probs=values,
        old_log_probs=values,
        advantages=10 * values,
        response_mask=torch.ones(len(rows), 1, dtype=torch.bool),
        denominators=LossDenominators(num_tokens=99, num_sequences=33, max_response_length=7),
        reference_log_probs=-values,
        distillation=Distillation(divergence=DivergenceConfig(), token_weight=values, view="hinted"),
    )


def homes_of_prompts(rows: Sequence[ScoringRow], places: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Each prompt with each rank that has a row of it."""
    homes: set[tuple[int, int]] = set()
    for rank, indices in enumerate(places):
        for index in indices:
            homes.add((rows[index].prompt, rank))
    return homes


@given(
    prompts=st.lists(st.integers(0, 6), max_size=30),
    lengths=st.lists(st.integers(2, 50), min_size=30, max_size=30),
    num_ranks=st.integers(1, 5),
    per_update=st.integers(1, 4),
)
def test_rows_go_to_one_rank_and_results_return_in_order(
    prompts: list[int], lengths: list[int], num_ranks: int, per_update: int
) -> None:
    rows = [row(prompt, length) for prompt, length in zip(prompts, lengths, strict=False)]
    assignment = dispatch.Assignment(num_ranks, prompts_per_update=per_update)
    places = assignment.indices_of(rows)
    assert sorted(itertools.chain.from_iterable(places)) == list(range(len(rows)))
    homes = homes_of_prompts(rows, places)
    assert len(homes) == len(set(prompts))

    results = [f"row {index}" for index in range(len(rows))]
    parts = dispatch.select(results, places)
    assert dispatch.in_order(parts, places) == results

    backwards = rows[::-1]
    places_backwards = assignment.indices_of(backwards)
    assert homes_of_prompts(backwards, places_backwards) == homes


@pytest.mark.parametrize(
    ("costs", "num_ranks", "expected"),
    [
        ([5, 9, 4, 4, 6], 2, [[1, 2], [0, 3, 4]]),
        ([0, 0, 0, 0], 2, [[0, 2], [1, 3]]),
        ([3], 3, [[0], [], []]),
    ],
)
def test_groups_go_longest_first_and_ties_by_number(
    costs: list[int], num_ranks: int, expected: list[list[int]]
) -> None:
    assert dispatch.balance_groups(costs, num_ranks) == expected


def test_tokens_are_balanced_within_each_optimizer_step() -> None:
    """Prompts of 8, 2, 2, 8 tokens, two per update: over the whole 0+1 against 2+3 would be even, and within no update."""
    two_per_update = dispatch.Assignment(2, prompts_per_update=2)
    places = two_per_update.indices_of([row(0, 8), row(1, 2), row(2, 2), row(3, 8)])
    assert places == [[0, 2], [1, 3]]
    all_in_one_update = dispatch.Assignment(2, prompts_per_update=4)
    places = all_in_one_update.indices_of([row(0, 9), row(1, 4), row(2, 3), row(3, 2)])
    assert places == [[0], [1, 2, 3]]


def test_prompts_seen_later_go_to_the_rank_with_less_work() -> None:
    assignment = dispatch.Assignment(2, prompts_per_update=8)
    assert assignment.indices_of([row(0, 5), row(1, 9)]) == [[1], [0]]
    assert assignment.indices_of([row(2, 3), row(1, 2), row(0, 2)]) == [[1], [0, 2]]


def test_an_optimizer_batch_is_cut_along_the_ranks() -> None:
    rows = [dataclasses.replace(row(index % 2, 5), row=index) for index in range(4)]
    batch = optimizer_batch(rows)
    (first,), (second,) = dispatch.split_batches([batch], dispatch.Assignment(2, prompts_per_update=2), 2)
    assert first.rows == [rows[0], rows[2]]
    assert second.rows == [rows[1], rows[3]]
    assert [part.name for part in second.rows] == [("", 1), ("", 3)]
    assert first.advantages.flatten().tolist() == [0.0, 20.0]
    assert second.old_log_probs.flatten().tolist() == [1.0, 3.0]
    assert second.reference_log_probs is not None
    assert second.reference_log_probs.flatten().tolist() == [-1.0, -3.0]
    assert first.denominators == second.denominators == batch.denominators
    assert first.distillation is not None
    assert second.distillation is not None
    assert first.distillation.token_weight.flatten().tolist() == [0.0, 2.0]
    assert first.distillation.view == second.distillation.view == "hinted"


def test_a_critics_batch_is_cut_along_the_ranks() -> None:
    rows = [row(index % 2, 5) for index in range(4)]
    values = torch.tensor([[0.0], [10.0], [20.0], [30.0]])
    critic = CriticBatch(
        rows=rows,
        old_values=values,
        returns=values / 10,
        response_mask=torch.ones(4, 1, dtype=torch.bool),
        denominators=LossDenominators(num_tokens=99, num_sequences=33, max_response_length=7),
    )
    _, (second,) = dispatch.split_batches([critic], dispatch.Assignment(2, prompts_per_update=2), 2)
    assert second.old_values.flatten().tolist() == [10.0, 30.0]


def test_a_rank_without_rows_gets_an_empty_part() -> None:
    one_row = optimizer_batch([row(0, 5)])
    _, (empty,) = dispatch.split_batches([one_row], dispatch.Assignment(2, prompts_per_update=1), 2)
    assert empty.rows == []
    assert empty.advantages.shape == (0, 1)


def test_a_batch_of_several_epochs_is_cut_once_and_travels_once() -> None:
    batch = optimizer_batch([row(0, 400), row(1, 400)])
    parts = dispatch.split_batches([batch] * 3, dispatch.Assignment(2, prompts_per_update=2), 2)
    assert parts[0][0] is parts[0][2]
    assert len(encode(parts[0])) < 1.1 * len(encode(parts[0][:1]))


def test_requests_are_spread_by_the_tokens_they_may_come_to() -> None:
    """4 samples of at most 10 tokens: prompts of 100, 10, 20, 30 come to 140, 50, 60, 70."""
    requests: list[GenerationRequest] = []
    for length in (100, 10, 20, 30):
        requests.append(GenerationRequest(prompt_ids=(1,), num_prompt_tokens=length, images=(), seed=0))
    settings = SamplingSettings(num_samples=4, max_response_length=10)
    assert dispatch.request_indices(requests, settings, 2) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_tensors_arrive_bit_for_bit_and_slices_alone(dtype: torch.dtype) -> None:
    whole = torch.arange(4000).reshape(1000, 4).to(dtype)
    sent = {"slice": whole[3:5], "empty": whole[:0], "scalar": whole[1, 1], "column": whole[:3, 1]}
    message = encode(sent)
    assert len(message) < 1500
    arrived = pickle.loads(message)
    for name, tensor in sent.items():
        assert arrived[name].dtype == dtype
        assert torch.equal(arrived[name], tensor)
    arrived["slice"] += torch.ones((), dtype=dtype)  # arrived tensors can be written to


def test_a_response_travels_in_8_bytes_a_token_and_its_text() -> None:
    """4 for the token and 4 for its log-prob; it is the same afterwards."""
    number = 100_000
    ids = numpy.arange(number) % 151_936
    log_probs = -ids / number
    sent = replace(Generation.of(ids, log_probs, finished=True), text="seven" * 100)
    message = encode(sent)
    assert len(message) < 8 * number + 500 + 500
    arrived: Generation = pickle.loads(message)
    assert arrived.finished
    assert arrived.text == sent.text
    numpy.testing.assert_array_equal(arrived.response_ids, sent.response_ids, strict=True)
    numpy.testing.assert_array_equal(arrived.log_probs, sent.log_probs, strict=True)


def test_rows_of_one_response_carry_its_tokens_once() -> None:
    """As a student's row and those of two teachers do in one pass."""
    ids = token_array(range(50_000))
    context = EncodedPrompt(token_ids=(1,), engine_ids=(1,), images=None)
    rows = [ScoringRow(context=context, response_ids=ids, view=view) for view in ("", "correct", "wrong")]
    assert len(encode(rows)) < 1.01 * 4 * len(ids)


class _Reading:
    """Stands for the processor: a picture's inputs are its brightness."""

    def load_images(self, images: Sequence[Image.Image], source: ImageSource | None = None) -> ImageInputs:
        pixels = torch.tensor([[float(image.getpixel((0, 0))[0])] for image in images])  # type: ignore[index]
        return ImageInputs(tensors={"pixel_values": pixels}, source=source)


@pytest.fixture
def store() -> ImageStore:
    config = load_config(["config=configs/microgeo/base.yaml"])
    return ImageStore(RowRules.of(config.data), _Reading())  # type: ignore[arg-type]


def test_sent_images_travel_once_per_step(store: ImageStore) -> None:
    """This holds whatever the number of rows and passes."""
    images = ImageInputs(tensors={"pixel_values": torch.zeros(100, 1000)})
    sender = Sender(by_source=False)
    receiver = Receiver(store)
    score = sender.encode([row(0, 5, images)] * 8)
    update = sender.encode([row(0, 5, images)])
    assert 400_000 < len(score) < 405_000
    assert len(update) < 1000
    arrived = receiver.decode(score)
    assert len({id(arrived_row.context.images) for arrived_row in arrived}) == 1
    assert receiver.decode(update)[0].context.images is arrived[0].context.images
    sender.forget()
    receiver.forget()
    assert receiver._received == {}
    again = sender.encode([row(0, 5, images)])
    assert len(again) > 400_000
    (received,) = receiver.decode(again)
    assert torch.equal(received.context.images.tensors["pixel_values"], images.tensors["pixel_values"])


def test_images_of_a_dataset_travel_as_a_handle(store: ImageStore, tmp_path: Path) -> None:
    """The row of the file has another image than the sent one, so that what arrives is the file's."""
    file = write_images(tmp_path / "train.parquet", reds=[10, 20, 30])
    source = ImageSource(data=str(file), row=1)
    request = GenerationRequest(
        prompt_ids=(1,),
        num_prompt_tokens=1,
        images=(Image.new("RGB", (500, 500)),),
        seed=0,
        image_source=source,
    )
    inputs = ImageInputs(tensors={"pixel_values": torch.zeros(100, 1000)}, source=source)
    message = Sender(by_source=True).encode(([request], [row(0, 5, inputs)]))
    assert len(message) < 1500
    (arrived_request,), (arrived_row,) = Receiver(store).decode(message)
    assert arrived_request.images[0].getpixel((0, 0)) == (20, 0, 0)
    assert arrived_row.context.images.tensors["pixel_values"].tolist() == [[20.0]]
    assert dataclasses.replace(arrived_request, images=()) == dataclasses.replace(request, images=())


def write_images(file: Path, reds: Sequence[int]) -> Path:
    """A data set of one small image a row, each of one shade of red."""
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    rows: list[dict[str, object]] = []
    for red in reds:
        image = Image.new("RGB", (8, 8), (red, 0, 0))
        rows.append({"images": [image], "problem": "<image>?", "answer": "1"})
    features = Features({"images": List(ImageFeature()), "problem": Value("string"), "answer": Value("string")})
    Dataset.from_list(rows, features=features).to_parquet(str(file))
    return file


@pytest.mark.parametrize("by_source", [True, False])
def test_masked_images_arrive_with_the_same_black_patches(
    tiny_processing: Processing, tmp_path: Path, by_source: bool
) -> None:
    """A rank that can read the data gets the row and the mask, and blackens the patches itself."""
    from cepo.microgeo.world import split_problems, write_problems

    train, _ = split_problems(0, 4, 1)
    file = tmp_path / "train.parquet"
    write_problems(file, train)
    config = load_config(["config=configs/microgeo/base.yaml", f"data.train_files={file}"])
    rules = config.data
    problem = ProblemSet(str(file), rules, tiny_processing)[2]
    contexts = ContextBuilder(tiny_processing, TeacherConfig(), max_context_length=512)
    student = contexts.student(problem)
    group = RolloutGroup(prompt_id=problem.prompt_id, ground_truth="1", rollouts=[], seed=3, step=7)
    mask = mask_for(group, ImageReference(masked=0.5))
    masked = contexts.masked(problem, student, mask)
    response = token_array([5, 6])
    rows = [ScoringRow(context=context, response_ids=response) for context in (student, masked, masked)]
    message = Sender(by_source=by_source).encode(rows)
    assert (len(message) < 2000) == by_source
    arrived = Receiver(ImageStore(RowRules.of(rules), tiny_processing)).decode(message)
    keys = [row.context.images.content_key for row in arrived]
    for row, key in zip(rows, keys, strict=True):
        assert row.context.images is not None
        assert row.context.images.content_key == key
    assert keys[0] != keys[1]
    assert keys[1] == keys[2]
    assert arrived[1].context.images is arrived[2].context.images


@pytest.mark.parametrize("by_source", [True, False])
def test_videos_travel_by_value_with_times_and_frames(store: ImageStore, by_source: bool) -> None:
    video = Video(
        frames=numpy.arange(4 * 2 * 2 * 3, dtype=numpy.uint8).reshape(4, 2, 2, 3),
        frame_numbers=(0, 4, 7, 11),
        source_fps=6.0,
        num_source_frames=12,
    )
    inputs = ImageInputs(
        tensors={
            "pixel_values_videos": torch.rand(100, 1000),
            "video_grid_thw": torch.tensor([[2, 4, 6], [1, 2, 2]]),
        },
        expansions={7: ((5, 7, 7), (7,))},
    )
    request = GenerationRequest(prompt_ids=(1, 2), num_prompt_tokens=9, images=(), seed=3, videos=(video,))
    message = Sender(by_source=by_source).encode(([request], [row(0, 5, inputs)] * 8))
    assert 400_000 < len(message) < 405_000
    (arrived_request,), arrived_rows = Receiver(store).decode(message)

    (arrived_video,) = arrived_request.videos
    assert (arrived_video.frames == video.frames).all()
    assert dataclasses.replace(arrived_video, frames=video.frames).metadata() == video.metadata()
    assert dataclasses.replace(arrived_request, videos=()) == dataclasses.replace(request, videos=())

    arrived_inputs = arrived_rows[0].context.images
    assert all(arrived.context.images is arrived_inputs for arrived in arrived_rows)
    assert arrived_inputs.content_key == inputs.content_key
    assert arrived_inputs.expansions == inputs.expansions
    assert arrived_inputs.grids["video"].tolist() == [[1, 4, 6], [1, 4, 6], [1, 2, 2]]
