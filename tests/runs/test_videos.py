"""Videos: read from every form, seen by the model as transformers shows them, sampled and trained on."""

from __future__ import annotations

import importlib.util
import io
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from generator_cases import picture, reference_model
from image_files import encoded as encoded_image
from image_files import grey_png
from json_files import write_lines
from PIL import Image
from rounding import LOG_PROBS
from training_runs import TWO_TEACHERS, BuildActor, Train, encoded, largest_gap, random_response, reference_log_probs

from cepo.config.schema import DataConfig
from cepo.data.batch import ScoringRow, token_array
from cepo.data.dataset import ProblemSet
from cepo.data.images import ImageRules
from cepo.data.videos import load_video
from cepo.errors import ConfigError, DataError
from cepo.models.interface import EncodedPrompt, ImageSource, Video
from cepo.models.processing import Processing
from cepo.report.page import write_report

av = pytest.importorskip("av", reason="the extra video is not installed")
if importlib.util.find_spec("qwen_vl_utils") is None:  # importing it needs a repair of the code under test
    pytest.skip("the extra video is not installed", allow_module_level=True)

QUESTION = "<video>Which <video> shows <image> first?"


def frames(count: int, seed: int, size: tuple[int, int] = (64, 64)) -> list[Image.Image]:
    """A picture of noise that grows brighter from frame to frame: coding keeps its order."""
    width, height = size
    small = picture(seed, (width // 16, height // 16))
    brightest = numpy.asarray(small.resize(size, Image.Resampling.NEAREST))
    images: list[Image.Image] = []
    for number in range(1, count + 1):
        pixels = brightest * (number / count)
        images.append(Image.fromarray(pixels.astype(numpy.uint8)))
    return images


def write_video(file: Path, count: int, *, fps: int = 6, seed: int = 1, size: tuple[int, int] = (64, 64)) -> Path:
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for image in frames(count, seed, size):
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return file


@pytest.fixture(scope="module")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.mp4`: 12 frames of 64 x 64 in 2 seconds; `b.mp4`: 24 frames of 96 x 64 in 4 seconds."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "a.mp4", 12)
    write_video(folder / "b.mp4", 24, seed=2, size=(96, 64))
    return folder


@pytest.fixture(scope="module")
def two(video_folder: Path) -> tuple[Video, Video]:
    first = read("a.mp4", video_folder)
    second = read("b.mp4", video_folder)
    return first, second


def read(
    value: object, folder: Path | None, fps: float = 2.0, least: int | None = 4096, most: int | None = None
) -> Video:
    image_dir = None if folder is None else str(folder)
    rules = ImageRules(image_dir=image_dir, min_pixels=least, max_pixels=most)
    return load_video(value, rules, fps=fps, factor=32)


def test_fps_chooses_frames_evenly_and_pixel_bounds_their_size(video_folder: Path) -> None:
    """Of 12 frames in 2 seconds it takes an even number, and at least 4."""
    for fps, numbers in ((2.0, (0, 4, 7, 11)), (3.0, (0, 2, 4, 7, 9, 11)), (0.5, (0, 4, 7, 11))):
        video = read("a.mp4", video_folder, fps)
        assert video.frame_numbers == numbers
        assert video.source_fps == 6.0
        assert video.num_source_frames == 12
        assert video.size == (64, 64)
        brightness = video.frames.reshape(len(numbers), -1).mean(axis=1)
        assert (numpy.diff(brightness) > 0).all(), "the frames come in their order"
        assert brightness[0] < brightness[-1] / 8
    for least, most, pixels in (
        (None, 20000, (1, 20000)),
        (16384, 20000, (16384, 20000)),
        (None, None, (128 * 32 * 32, 10**9)),  # qwen-vl-utils' own 128 tokens
    ):
        width, height = read("a.mp4", video_folder, 2.0, least, most).size
        assert pixels[0] <= width * height <= pixels[1]
        assert width % 32 == height % 32 == 0


def test_bytes_a_mapping_and_a_path_give_the_same_frames(video_folder: Path) -> None:

    file = video_folder / "a.mp4"
    content = file.read_bytes()
    by_path = read("a.mp4", video_folder)
    for value in (content, {"bytes": content, "path": None}, {"bytes": None, "path": str(file)}):
        assert (read(value, None).frames == by_path.frames).all()


def test_a_list_of_3_images_becomes_a_video_of_4_frames() -> None:
    images = [encoded_image(image) for image in frames(3, seed=1)]
    video = read(images, None)
    assert video.frame_numbers == (0, 1, 2, 3)
    assert video.source_fps == 2.0
    assert (video.frames[3] == video.frames[2]).all()


def test_what_is_no_video_is_refused_with_the_reason(
    video_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (video_folder / "b.mp4").read_bytes()
    cut = write_video(tmp_path / "cut.avi", 40, size=(96, 64))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    cases: list[tuple[Any, str]] = [
        (str(tmp_path / "gone.mp4"), "does not exist"),
        (b"no video at all", "cannot be read"),
        (whole[:200], "cannot be read"),
        (7, "accepted: path, bytes"),
        ([], "has no frame"),
        (str(write_video(tmp_path / "one.mp4", 1)), "at least 2"),
        (str(cut), "damaged|cannot be read"),
    ]
    for value, words in cases:
        with pytest.raises(DataError, match=words):
            read(value, None)
    monkeypatch.setattr("cepo.data.videos._VIDEO_LIBRARIES", ("no_such_library",))
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[video\]"):
        read(whole, None)


def video_of(image: Image.Image, count: int, *, form: str = "mp4", codec: str = "mpeg4") -> bytes:
    """A file in memory that shows one image."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=30)
        stream.width, stream.height, stream.pix_fmt = *image.size, "yuv420p"
        frame = av.VideoFrame.from_image(image)
        for number in range(count):
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["mp4", "matroska", "mpegts"])
def test_frames_are_counted_where_a_file_states_no_number(form: str) -> None:
    content = video_of(Image.new("RGB", (64, 64)), 300, form=form)
    assert read(content, None).num_source_frames == 300


@pytest.mark.parametrize(
    ("matrix", "corner"),
    [((1, 0, 0, 1), (0, 0)), ((0, 1, -1, 0), (0, 1)), ((-1, 0, 0, -1), (1, 1)), ((0, -1, 1, 0), (1, 0))],
)
def test_a_video_is_turned_as_its_file_states(matrix: tuple[int, ...], corner: tuple[int, int]) -> None:
    """Phones store videos on their side, with a matrix: red is stored at the top left, and shown at (row, column)."""
    image = Image.new("RGB", (96, 64), "blue")
    image.paste("red", (0, 0, 48, 32))
    content = bytearray(video_of(image, 8))
    a, b, c, d = (number << 16 for number in matrix)
    place = content.index(b"tkhd") + 4 + 40
    content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    upright = read(bytes(content), None).frames[0].astype(int)
    height, width, _ = upright.shape
    assert (width, height) == ((96, 64) if a else (64, 96))
    for row in (0, 1):
        for column in (0, 1):
            middle_y = height // 4 + row * height // 2
            middle_x = width // 4 + column * width // 2
            red, _, blue = upright[middle_y, middle_x]
            assert (red > blue) == ((row, column) == corner)


def test_a_frame_that_is_not_there_or_thin_is_refused() -> None:
    """A list's first frame decides the size; each is named by its file."""
    with pytest.raises(DataError, match=r"the image '/nowhere/frame\.png' does not exist"):
        read([{"bytes": grey_png(64)}, {"path": "/nowhere/frame.png"}], None)
    thin = encoded_image(Image.new("L", (900, 2)))
    with pytest.raises(DataError, match=r"the video's frames are 900 x 2"):
        read([{"bytes": thin}], None)


def test_a_transparent_frame_is_white() -> None:
    transparent = encoded_image(Image.new("RGBA", (64, 64)))
    video = read([{"bytes": transparent}], None)
    assert (video.frames == 255).all()


def test_damaged_videos_end_in_no_other_error(video_folder: Path) -> None:
    """Cut or with random bytes anywhere, a file is read or refused."""
    whole = (video_folder / "a.mp4").read_bytes()
    random = numpy.random.default_rng(0)
    for number in range(60):
        content = bytearray(whole)
        for place in random.integers(0, len(whole), 30):
            content[place] = random.integers(256)
        with suppress(DataError):
            assert read(bytes(content[: len(whole) - 20 * number]), None).frames.dtype == numpy.uint8


PLAYLISTS = {
    "hls.mp4": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{0}/other.ts\n#EXT-X-ENDLIST\n",
    "hls.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{0}/other.ts\n#EXT-X-ENDLIST\n",
    "relative.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nlink.ts\n#EXT-X-ENDLIST\n",
    "concat.mp4": "ffconcat version 1.0\nfile 'link.ts'\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_opens_no_other_file(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.ts").symlink_to(write_video(tmp_path / "other.ts", 12))
    assert read(str(tmp_path / "other.ts"), None).num_source_frames == 12
    (folder / name).write_text(PLAYLISTS[name].format(tmp_path), encoding="utf-8")
    for value in (name, (folder / name).read_bytes()):
        with pytest.raises(DataError, match=r"cannot be read .*; accepted: mov,mp4"):
            read(value, folder)


def test_a_path_like_a_protocol_opens_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg takes `concat:/other/file` for the other file, also where a stranger's folder has a file of this name."""
    secret = tmp_path / "private" / "secret.avi"
    secret.parent.mkdir()
    secret.write_bytes(video_of(Image.new("RGB", (64, 64), "red"), 8, form="avi"))
    data = tmp_path / "data"
    own = data / f"concat:{secret}"
    own.parent.mkdir(parents=True)
    own.write_bytes(video_of(Image.new("RGB", (64, 64), "blue"), 8, form="avi"))
    monkeypatch.chdir(data)
    for folder in (None, "."):
        red, _, blue = load_video(f"concat:{secret}", ImageRules(image_dir=folder), fps=2.0, factor=32).frames[0, 0, 0]
        assert blue > 200 > 50 > red


def transformers_inputs(processing: Processing, videos: Sequence[Video], images: Sequence[Image.Image]) -> Any:
    """What the model's own processor makes of `QUESTION`."""
    parts: list[dict[str, str]] = []
    for piece in ("<video>", "Which ", "<video>", " shows ", "<image>", " first?"):
        kind = piece.strip("<>")
        parts.append({"type": kind} if piece != kind else {"type": "text", "text": piece})
    processor = processing._processor
    rendered = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    return processor(
        text=[rendered],
        images=list(images),
        videos=[video.frames for video in videos],
        video_metadata=[video.metadata() for video in videos],
        do_sample_frames=False,
        return_tensors="pt",
    )


def asked(processing: Processing, videos: Sequence[Video], *images: Image.Image) -> EncodedPrompt:
    text = QUESTION if images else "<video>" * len(videos) + "What happens?"
    return processing.encode(text, processing.load_images(images, videos=videos))


@pytest.mark.heavy
def test_inputs_and_scores_of_video_rows_are_transformers_own(
    build_actor: BuildActor, tiny_model_folder: Path, tiny_processing: Processing, two: tuple[Video, Video]
) -> None:
    image = picture(5, (64, 96))
    of_two_videos = asked(tiny_processing, two, image)
    of_one_video = asked(tiny_processing, two[:1])
    pictured = encoded(tiny_processing, "Find x.", image)
    text = encoded(tiny_processing, "Find <video>.")
    taught = tiny_processing.encode(QUESTION, of_two_videos.images, assistant_prefix="It is 4.")
    theirs = transformers_inputs(tiny_processing, two, [image])
    assert list(of_two_videos.token_ids) == theirs["input_ids"][0].tolist()
    alone = tiny_processing._processor.video_processor(
        videos=[two[0].frames], video_metadata=[two[0].metadata()], do_sample_frames=False, return_tensors="pt"
    )
    names = ["image_grid_thw", "pixel_values", "pixel_values_videos", "video_grid_thw"]
    for context, inputs, tensor_names in (
        (of_two_videos, theirs, names),
        (of_one_video, alone, names[2:]),
        (pictured, theirs, names[:2]),
    ):
        assert context.images is not None
        assert sorted(context.images.tensors) == tensor_names
        assert all(torch.equal(tensor, inputs[name]) for name, tensor in context.images.tensors.items())
    assert text.images is None
    single = tiny_processing.video_token_id
    assert of_two_videos.engine_ids.count(single) == 2
    assert of_two_videos.engine_ids.count(tiny_processing.image_token_id) == 1
    rows = [
        ScoringRow(context=context, response_ids=token_array(random_response(3 + n, seed=n)))
        for n, context in enumerate([of_two_videos, of_one_video, of_two_videos, pictured, text, of_one_video, taught])
    ]
    scores = build_actor().score(rows)
    assert largest_gap(scores, reference_log_probs(reference_model(tiny_model_folder), rows)) < LOG_PROBS
    darker = Video(frames=two[0].frames // 2, frame_numbers=two[0].frame_numbers, source_fps=6.0, num_source_frames=12)
    darker_row = ScoringRow(context=asked(tiny_processing, [darker]), response_ids=rows[1].response_ids)
    [moved] = build_actor().score([darker_row])
    assert float((moved - scores[1]).abs().mean()) > 1e-3, "the video matters"


@pytest.fixture(scope="module")
def video_file(video_folder: Path) -> Path:
    """8 problems: videos, a picture beside a video, a picture alone, text alone."""
    picture(3).save(video_folder / "p.png")
    rows = [
        {"problem": "<video>What happens?", "videos": ["a.mp4"], "images": []},
        {"problem": "<video>or<video>?", "videos": ["a.mp4", "b.mp4"], "images": []},
        {"problem": "<image>in<video>?", "videos": ["b.mp4"], "images": ["p.png"]},
        {"problem": "<image>How long?", "videos": [], "images": ["p.png"]},
    ] * 2
    return write_lines(video_folder / "train.jsonl", (row | {"answer": str(n)} for n, row in enumerate(rows)))


ReadProblems = Callable[..., ProblemSet]


@pytest.fixture
def read_problems(video_file: Path, tiny_processing: Processing) -> ReadProblems:
    def reader(file: Path, **settings: Any) -> ProblemSet:
        usual: dict[str, Any] = {
            "train_files": str(file),
            "prompt_key": "problem",
            "image_dir": str(video_file.parent),
            "min_pixels": 4096,
        }
        return ProblemSet(str(file), DataConfig(**(usual | settings)), tiny_processing)

    return reader


@pytest.mark.heavy
def test_rows_with_videos_are_measured_as_they_are_encoded(
    video_file: Path, tiny_processing: Processing, read_problems: ReadProblems
) -> None:
    problems = read_problems(video_file)
    assert len(problems) == 8
    assert problems.most_visuals == (1, 2)
    lengths: list[int] = []
    for number, problem in enumerate(problems):
        assert "videos" not in problem.columns
        visuals = tiny_processing.load_images(problem.images, videos=problem.videos)
        prompt = tiny_processing.encode(problem.text, visuals)
        measured = problems._reader.measure(dict(problems._rows[number]))
        assert measured.length == len(prompt.token_ids)
        lengths.append(measured.length)

    assert lengths[1] == max(lengths)
    shorter = read_problems(video_file, max_prompt_length=lengths[1] - 1)
    assert [problem.prompt_id for problem in shorter] == ["0", "2", "3", "4", "6", "7"]
    assert shorter.skipped == {"overlong": 2}
    with pytest.raises(DataError, match="filter_overlong_prompts=true"):
        read_problems(video_file, max_prompt_length=lengths[1] - 1, filter_overlong_prompts=False)


@pytest.mark.heavy
def test_a_video_is_sampled_at_the_configured_rate(video_file: Path, read_problems: ReadProblems) -> None:
    problem = read_problems(video_file, video_fps=3.0)[0]
    assert len(problem.videos[0].frames) == 6


@pytest.mark.heavy
def test_a_row_needs_a_video_for_each_placeholder(tmp_path: Path, read_problems: ReadProblems) -> None:
    row = {"problem": "<video>or<video>?", "videos": ["a.mp4"], "answer": "1"}
    file = write_lines(tmp_path / "row.jsonl", [row])
    with pytest.raises(DataError, match="2 '<video>' in the text but 1 videos"):
        read_problems(file)


@pytest.mark.heavy
def test_the_probe_of_images_is_a_row_with_images_alone(
    video_file: Path, tmp_path: Path, read_problems: ReadProblems
) -> None:
    assert read_problems(video_file).image_probe() == ImageSource(data=str(video_file), row=3)
    video_alone = {"problem": "<video>What?", "videos": ["a.mp4"], "images": [], "answer": "1"}
    file = write_lines(tmp_path / "video.jsonl", [video_alone])
    assert read_problems(file).image_probe() is None
    text_alone = {"problem": "What?", "videos": [], "images": [], "answer": "1"}
    file = write_lines(tmp_path / "text.jsonl", [text_alone])
    assert read_problems(file).image_probe() is None


@pytest.mark.heavy
def test_a_video_run_samples_with_the_log_probs_it_trains_on(train: Train, video_file: Path) -> None:
    """Two steps over every kind of row: the log-probs agree to 1e-3, and teachers see the same frames."""
    finished = train(
        *TWO_TEACHERS,
        f"data.train_files={video_file}",
        f"data.image_dir={video_file.parent}",
        "data.min_pixels=4096",
        "data.shuffle=false",
        "data.max_prompt_length=1024",
        "worker.actor.fsdp.mp_param_dtype=fp32",
        "worker.rollout.dtype=fp32",
        f"worker.rollout.name={'vllm' if importlib.util.find_spec('vllm') else 'transformers'}",
    )
    assert [row["step"] for row in finished.metrics] == [1, 2]
    assert max(row["rollout/log_prob_gap_max"] for row in finished.metrics) < 1e-3
    assert finished.total("work/teacher_rows") > 0
    assert finished.metrics[1]["actor/grad_norm"] > 0
    for group in finished.rollouts:  # what the report shows of them
        assert [Image.open(io.BytesIO(frame)).format for frame in group["images"]] == ["PNG"] * len(group["images"])
        assert 1 <= len(group["images"]) <= 1 + 2 * 4, "an image, and up to four frames of each of two videos"
    write_report(finished.folder)
    assert (finished.folder / "report.html").is_file()
