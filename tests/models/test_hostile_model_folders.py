"""A model folder of a stranger is loaded or refused by one message: no traceback, no file from elsewhere, no long wait."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cepo.errors import CepoError, ConfigError, EngineError
from cepo.microgeo.world import ASSETS
from cepo.models.pretrained import load_model
from cepo.models.processing import Processing

Change = Callable[[Path], object]


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def changed(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda folder: (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text("utf-8")))))


def sizes(section: str, **entries: Any) -> Change:
    return changed("config.json", lambda tree: tree | {section: tree[section] | entries})


def instead(name: str, make: Callable[[Path], object]) -> Change:
    """Puts what `make` makes in the place of a file."""
    return lambda folder: ((folder / name).unlink(missing_ok=True), make(folder / name))


def link(name: str, target: str) -> Change:
    return instead(name, lambda file: file.symlink_to(target))


def pipe(name: str) -> Change:
    return instead(name, os.mkfifo)


def index(content: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
        (folder / "model.safetensors.index.json").write_text(content, encoding="utf-8")

    return apply


HOSTILE: dict[str, Change] = {
    "a deep config": text("config.json", "[" * 100_000),
    "a config that is a list": text("config.json", "[]"),
    "a number of 10,000 digits": text("config.json", '{"vocab_size": ' + "9" * 10_000 + "}"),
    "a tokenizer without added_tokens": changed("tokenizer.json", lambda tree: tree.pop("added_tokens") and tree),
    "an empty tokenizer": text("tokenizer.json", "{}"),
    "a deep tokenizer": text("tokenizer.json", "[" * 100_000),
    "a negative vocabulary": sizes("text_config", vocab_size=-1),
    "a vocabulary of text": sizes("text_config", vocab_size="many"),
    "no heads": sizes("text_config", num_attention_heads=0),
    "10^7 layers": sizes("text_config", num_hidden_layers=10**7),
    "10^7 layers of the tower": sizes("vision_config", depth=10**7),
    "a vocabulary of 10^15": sizes("text_config", vocab_size=10**15),
    "a pipe for a config": pipe("config.json"),
    "a pipe for a tokenizer": pipe("tokenizer.json"),
    "a pipe for a template": pipe("chat_template.jinja"),
    "a device for a config": link("config.json", "/dev/zero"),
    "a device for a template": link("chat_template.jinja", "/dev/zero"),
    "a template from elsewhere": link("chat_template.jinja", "../secret.txt"),
    "an index that leads out": index(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "../outside.safetensors"}})),
    "a deep index": index("[" * 100_000),
    "a pipe for weights": pipe("model.safetensors"),
    "a processor of text": text("processor_config.json", '"text"'),
    "a pipe for a processor": pipe("processor_config.json"),
}  # fmt: skip


def load(folder: Path) -> None:
    Processing(str(folder))
    load_model(str(folder), dtype=torch.float32, trust_remote_code=False, override_config={})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    (tmp_path / "secret.txt").write_text("s3cret {{ messages }}", encoding="utf-8")
    HOSTILE[name](folder)
    with pytest.raises(CepoError) as caught:
        load(folder)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../../x", "/tmp/x", "a/b"])
def test_a_template_whose_name_is_a_path_is_written_nowhere(tmp_path: Path, name: str) -> None:
    folder, out = tmp_path / "model", tmp_path / "a" / "b" / "out"
    shutil.copytree(ASSETS, folder)
    out.mkdir(parents=True)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": template}, {"name": name, "template": "x"}]
    changed("tokenizer_config.json", lambda tree: tree | {"chat_template": templates})(folder)
    before = sorted(path for path in tmp_path.rglob("*") if out not in path.parents)
    words = r"tokenizer and processor of .* cannot be written|which leads out of the folder"
    with pytest.raises(ConfigError, match=words):
        Processing(str(folder)).save(out)
    assert sorted(path for path in tmp_path.rglob("*") if out not in path.parents) == before


def tokenizer(change: Callable[[Any], Any]) -> Change:
    return changed("tokenizer.json", lambda tree: change(tree) or tree)


def part(name: str, value: Any) -> Change:
    """Another part of the tokenizer."""
    return tokenizer(lambda tree: tree.update({name: value}))


def entry(file: str, **entries: Any) -> Change:
    """Further entries of a JSON file, which need not exist."""

    def apply(folder: Path) -> None:
        path = folder / file
        tree = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(json.dumps(tree | entries))

    return apply


def images(**entries: Any) -> Change:
    return changed("processor_config.json", lambda tree: tree | {"image_processor": tree["image_processor"] | entries})


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    """Other tensors in the folder's file."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def relabelled(folder: Path) -> None:
    """One tensor's F32 is called I32; the numbers remain."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.language_model.norm.weight"]["dtype"] = "I32"
    text_of_header = json.dumps(header).encode()
    text_of_header += b" " * (length - len(text_of_header))
    file.write_bytes(len(text_of_header).to_bytes(8, "little") + text_of_header + content[8 + length :])


SHARD = "model-00001-of-00001.safetensors"


def with_index(change: Callable[[dict[str, str]], Any]) -> Change:
    """The weights in a file that an index names."""

    def apply(folder: Path) -> None:
        names = dict.fromkeys(load_file(folder / "model.safetensors"), SHARD)
        change(names)
        (folder / "model.safetensors").rename(folder / SHARD)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    return apply


NORM = "model.language_model.norm.weight"


def halved(folder: Path) -> None:
    """One weight has a file of its own, which the index does not name."""
    with_index(lambda names: names.pop(NORM))(folder)
    tensors = load_file(folder / SHARD)
    save_file({NORM: tensors.pop(NORM)}, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})


ADAPTER = {"peft_type": "LORA", "r": 4, "target_modules": "((([a-z]+)+)+[.]?)+[A-Z]", "base_model_name_or_path": "x"}
GROWING = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 10}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
PIECES = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}]
LONG_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": PIECES,
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [1] * 10**6, "tokens": ["x"] * 10**6}},
}
NOT_DATA: dict[str, tuple[Change, str]] = {
    # Names of files, of programs and of classes.
    "a tokenizer's text file": (
        both(
            lambda folder: (folder / "tokenizer.json").unlink(),
            entry("tokenizer_config.json", tokenizer_class="BertTokenizer", init_inputs=["SECRET"]),
        ),
        "init_inputs names a file|tokenizer_class is 'BertTokenizer'",
    ),
    "init_inputs alone": (entry("tokenizer_config.json", init_inputs=["SECRET"]), "init_inputs names a file"),
    "a vocabulary elsewhere": (entry("tokenizer_config.json", vocab_file="SECRET"), "vocab_file names a file"),
    "a vocabulary in words": (entry("tokenizer_config.json", vocab="SECRET"), "vocab names a file"),
    "another tokenizer file": (
        entry("tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.json"]),
        "fast_tokenizer_files names a file",
    ),
    "another configuration file": (
        entry("config.json", configuration_files=["config.4.0.json"]),
        "configuration_files names a file",
    ),
    "another file of weights": (
        entry("config.json", transformers_weights="other.safetensors"),
        "transformers_weights names a file",
    ),
    "a path above": (
        entry("processor_config.json", note="../secret.txt"),
        r"note is '\.\./secret\.txt', which leads out",
    ),
    "a path of a part": (sizes("vision_config", backbone="/etc/passwd"), "backbone is '/etc/passwd', which leads out"),
    "an address": (entry("preprocessor_config.json", source="http://127.0.0.1/x"), "which leads out of the folder"),
    "a path in a list": (
        entry("generation_config.json", words=["a", "/etc/passwd"]),
        "words is '/etc/passwd', which leads out",
    ),
    "a token's file": (entry("special_tokens_map.json", vocab_file="/etc/passwd"), "vocab_file names a file"),
    "a setting among tokens": (entry("special_tokens_map.json", errors="x"), "'errors' is not the name of a token"),
    "code of the tokenizer": (
        entry("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "x.Y"]}),
        "auto_map names code",
    ),
    "code of the model": (
        entry("config.json", auto_map={"AutoModel": "x.Y"}, model_type="unheard_of"),
        "auto_map names code",
    ),
    "code of a part": (sizes("text_config", auto_map={"AutoModel": "evil/x--x.Y"}), "auto_map names code"),
    "code of the processor": (
        entry("preprocessor_config.json", auto_map={"AutoProcessor": "x.Y"}),
        "auto_map names code",
    ),
    "code that generates": (entry("generation_config.json", custom_generate="evil/x"), "custom_generate names code"),
    "another tokenizer": (
        entry("tokenizer_config.json", tokenizer_class="TapexTokenizer"),
        "TapexTokenizer', which no supported family has",
    ),
    "another tokenizer in the configuration": (
        entry("config.json", tokenizer_class="RagTokenizer"),
        "RagTokenizer', which no",
    ),
    "a class in a list": (
        entry("tokenizer_config.json", tokenizer_class=["Qwen2Tokenizer"]),
        "which no supported family has",
    ),
    "another backend": (
        entry("tokenizer_config.json", backend="sentencepiece"),
        "backend is 'sentencepiece', which no",
    ),
    "another processor": (
        entry("processor_config.json", processor_class="TrOCRProcessor"),
        "TrOCRProcessor', which no",
    ),
    "another image processor": (
        images(image_processor_type="LayoutLMv2ImageProcessor"),
        "LayoutLMv2ImageProcessor', which no",
    ),
    "another feature extractor": (
        entry("preprocessor_config.json", feature_extractor_type="ClapFeatureExtractor"),
        "ClapFeatureExtractor', which no",
    ),
    "another video processor": (
        entry("video_preprocessor_config.json", video_processor_type="X"),
        "video_processor_type is 'X', which no",
    ),
    "another text model": (sizes("text_config", model_type="rag"), "text_config.model_type is 'rag', which no"),
    "an adapter": (entry("adapter_config.json", **ADAPTER), "would change the model whose config.json is beside it"),
    # Weights.
    "a tensor of another model": (
        weights(lambda tensors: [tensors.clear(), tensors.update(x=torch.ones(2))]),
        "lack weights|its files have 2",
    ),
    "one weight missing": (weights(lambda tensors: tensors.pop(NORM)), f"lack weights of the model: 1 .{NORM}"),
    "one weight too many": (
        weights(lambda tensors: tensors.update({"model.x": torch.ones(2)})),
        "weights that the model does not have: 1 .model.x",
    ),
    "one weight of another shape": (weights(lambda tensors: tensors.update({NORM: torch.ones(2)})), "cannot be loaded"),
    "200 layers declared": (sizes("text_config", num_hidden_layers=200), "lack weights of the model|its files have"),
    "2,000 layers declared": (
        sizes("text_config", num_hidden_layers=2000),
        "num_hidden_layers is 2000, which is out of range",
    ),
    "1,000 wide layers declared": (
        sizes("text_config", num_hidden_layers=1000, hidden_size=8192, intermediate_size=65536),
        "declares a model of",
    ),
    "weights of integers": (relabelled, "has the type I32; weights are"),
    "an index of another tensor": (
        with_index(lambda names: names.update(x=SHARD)),
        "lacks 1 weights of the index, such as 'x'",
    ),
    "an index without a name": (with_index(dict.clear), "does not map weights to files"),
    "an index of half the files": (halved, "lack weights of the model"),
    "an index of pickles": (
        with_index(lambda names: names.update(x="model.bin")),
        "names 'model.bin', which is no file of safetensors",
    ),
    # Tokenizers.
    "a growing normalizer": (part("normalizer", GROWING), "replaces a text by a longer one"),
    "a growing decoder": (
        part("decoder", {"type": "Sequence", "decoders": GROWING["normalizers"]}),
        "replaces a text by a longer one",
    ),
    "40 parts": (part("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 40}), "has 41 parts"),
    "a normalizer by a pattern": (
        part("normalizer", {"type": "Replace", "pattern": {"Regex": "(a|aa)+$"}, "content": "a"}),
        "which may take forever: accepted in a Replace",
    ),
    "an endless split": (part("pre_tokenizer", SPLIT), "which may take forever: it repeats a group"),
    "an endless split in a sequence": (
        part("pre_tokenizer", {"type": "Sequence", "pretokenizers": [SPLIT]}),
        "may take forever",
    ),
    "a normalizer of nobody": (
        part("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "'Precompiled', which no",
    ),
    "a normalizer to 18 letters": (part("normalizer", {"type": "NFKC"}), "'NFKC', which no supported family has"),
    "words without [UNK]": (
        part("model", {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
        "'WordLevel', which no",
    ),
    "a unigram": (part("model", {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}), "'Unigram', which no"),
    "a model of nobody": (part("model", None), "it has no model"),
    "a part that is text": (part("normalizer", "NFC"), "is 'NFC', not a mapping"),
    "parts that are text": (part("decoder", {"type": "Sequence", "decoders": "x"}), "decoders is not a list"),
    "random tokens": (tokenizer(lambda tree: tree["model"].update(dropout=0.5)), "has a dropout"),
    "a token of 10^9": (
        tokenizer(lambda tree: tree["added_tokens"][0].update(id=10**9)),
        "has a token 1,000,000,000",
    ),
    "a negative token": (
        tokenizer(lambda tree: tree["model"]["vocab"].update(a=-1)),
        "numbers of its tokens are not integers",
    ),
    "an empty token": (tokenizer(lambda tree: tree["added_tokens"][0].update(content="")), "an added token is ''"),
    "tokens that are numbers": (
        tokenizer(lambda tree: tree.update(added_tokens=[1])),
        "added_tokens are not a list of tokens",
    ),
    "added tokens that are texts": (entry("added_tokens.json", x="y"), "does not map tokens to their numbers"),
    # Sizes.
    "a merge of 1,000": (
        images(merge_size=1000, size={"shortest_edge": 10**9, "longest_edge": 10**9}),
        "merge_size is 1000|shortest_edge is",
    ),
    "images of 10^9 pixels": (
        images(size={"shortest_edge": 10**9, "longest_edge": 10**9}),
        "size.shortest_edge is 1000000000",
    ),
    "crossed sizes": (images(size={"shortest_edge": 10**6, "longest_edge": 10**5}), "more than its longest_edge"),
    "no patches": (images(patch_size=0), "patch_size is 0, which is out of range"),
    "negative patches": (images(patch_size=-16), "patch_size is -16"),
    "a patch that is true": (images(patch_size=True), "patch_size is True"),
    "a patch of text": (images(patch_size="16"), "patch_size is '16'"),
    "other patches than the tower": (images(patch_size=32), "patch_size is 32, but the vision tower's patch_size"),
    "another merge than the tower": (
        images(merge_size=4),
        "merge_size is 4, but the vision tower's spatial_merge_size",
    ),
    "no frames of a patch": (images(temporal_patch_size=0), "temporal_patch_size is 0"),
    "a mean of two colours": (images(image_mean=[0.5, 0.5]), "image_mean is"),
    "a deviation of 0": (images(image_std=[0.5, 0.5, 0.0]), "image_std is"),
    "an infinite factor": (images(rescale_factor=float("inf")), "rescale_factor is inf"),
    "a factor of text": (images(rescale_factor="x"), "rescale_factor is 'x'"),
    "a switch of text": (images(do_resize="yes"), "do_resize is 'yes'"),
    "a resampling of nobody": (images(resample=99), "resample is 99"),
    "more pixels in another file": (
        entry("preprocessor_config.json", max_pixels=10**12),
        "max_pixels is 1000000000000",
    ),
    "10^5 levels of features": (
        sizes("vision_config", deepstack_visual_indexes=list(range(10**5))),
        "has 100,000 entries",
    ),
    "levels that do not exist": (
        sizes("vision_config", deepstack_visual_indexes=[0, 7]),
        "different blocks from 0 to 1",
    ),
    "one level twice": (sizes("vision_config", deepstack_visual_indexes=[0, 0]), "different blocks from 0 to 1"),
    "kinds of no layers": (sizes("text_config", layer_types=["full_attention"]), "one entry for each of the 4 layers"),
    "half a layer": (sizes("text_config", num_hidden_layers=2.5), "num_hidden_layers is 2.5"),
    "an infinite number": (sizes("text_config", rms_norm_eps=float("inf")), "rms_norm_eps is inf"),
    "10^6 experts": (sizes("text_config", num_experts=10**6), "num_experts is 1000000"),
    "a number beyond all sizes": (sizes("text_config", attention_window=10**15), "attention_window is out of range"),
    "10^9 labels": (entry("config.json", num_labels=10**9), "num_labels is 1000000000"),
    "10^5 entries": (entry("config.json", **{f"k{k}": 1 for k in range(10**5)}), "it has 100,011 entries"),
    "a type of nobody": (sizes("text_config", dtype="load"), "dtype is 'load'"),
    "attention to download": (
        sizes("text_config", _attn_implementation="evil/kernel:f"),
        "names code to download",
    ),
    "experts to download": (entry("config.json", experts_implementation="evil/kernel"), "names code to download"),
    "tiles of 8,000 x 8,000": (
        images(size={"height": 8000, "width": 8000}, max_patches=256),
        "max_patches is 256, which",
    ),
    "64 million tiles": (
        images(size={"height": 1, "width": 1}, image_grid_pinpoints=[[8000, 8000]]),
        "image_grid_pinpoints has",
    ),
    "10^9 frames": (images(max_frames=10**9), "max_frames is 1000000000"),
    "a size in a list": (images(size=[1, 2]), "size is "),
    "a device": (images(device="cuda:99"), "device is 'cuda:99'"),
    "the images of another family": (images(image_processor_type="Gemma3ImageProcessor"), "accepted: Qwen2VLImage"),
    "a tokenizer of another library": (text("tekken.json", "{}"), "would be read in place of tokenizer.json"),
    "tokens without input_ids": (entry("tokenizer_config.json", model_input_names=["x"]), "it has no input_ids"),
    "a length of text": (entry("tokenizer_config.json", model_max_length="x"), "model_max_length is 'x'"),
    "10^5 added tokens": (
        entry("tokenizer_config.json", added_tokens_decoder={str(k): {"content": f"t{k}"} for k in range(10**5 + 1)}),
        "not a mapping of at most 100,000 tokens",
    ),
    "an added token without text": (
        entry("tokenizer_config.json", added_tokens_decoder={"500": {"content": ""}}),
        "added_tokens_decoder.500 is not a text",
    ),
    "a text of 10^6 tokens": (
        part("post_processor", LONG_TEMPLATE),
        "tokens of",
    ),
    "a generation config that is a list": (text("generation_config.json", "[]"), "does not hold an object"),
    "end tokens of many kinds": (entry("generation_config.json", eos_token_id=[-5, "x", None]), "eos_token_id is"),
    "an end token of text": (entry("generation_config.json", eos_token_id="x"), "eos_token_id is 'x'"),
    "an end token that is true": (entry("generation_config.json", eos_token_id=True), "eos_token_id is True"),
    "an end token beyond the vocabulary": (
        entry("generation_config.json", eos_token_id=500),
        "numbers of tokens from 0 to 499",
    ),
    "a padding beyond the vocabulary": (sizes("text_config", pad_token_id=10**6), "pad_token_id is 1000000"),
    "an image token beyond the vocabulary": (entry("config.json", image_token_id=500), "image_token_id is 500"),
    "end tokens in a mapping": (sizes("text_config", eos_token_id={"a": 1}), "eos_token_id is"),
}


@pytest.mark.parametrize("name", NOT_DATA)
def test_a_model_folder_is_data(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The message names the file and the entry; nothing of another file is read, and it takes seconds."""
    folder, secret = tmp_path / "model", tmp_path / "secret.txt"
    shutil.copytree(ASSETS, folder)
    secret.write_text("s3cret", encoding="utf-8")
    change, words = NOT_DATA[name]
    change(folder)
    for file in folder.glob("*.json"):
        file.write_bytes(file.read_bytes().replace(b"SECRET", str(secret).encode()))
    before = time.process_time()
    with pytest.raises(CepoError, match=words) as caught:
        load(folder)
    assert isinstance(caught.value, ConfigError | EngineError)
    assert time.process_time() - before < 20
    assert "s3cret" not in str(caught.value) + caplog.text


@pytest.mark.heavy
def test_a_tokenizer_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user trusts the model's code, any pattern is tried, in the process with limits."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    endless = SPLIT | {"pattern": {"Regex": r"(?:(a+)+)+\1\1$b"}}
    part("pre_tokenizer", endless)(folder)
    monkeypatch.setattr("cepo.models.tokenizer_check.SECONDS", 2.0)
    with pytest.raises(ConfigError, match=r"not done with a short text within 2 s|cannot be used"):
        Processing(str(folder), trust_remote_code=True)
    part("normalizer", GROWING | {"normalizers": GROWING["normalizers"] * 4})(folder)
    with pytest.raises(
        ConfigError, match=r"not done with a short text|takes more than|cannot be used|ends its process"
    ):
        Processing(str(folder), trust_remote_code=True)


def test_a_critic_may_lack_a_head_and_bring_another(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    weights(lambda tensors: tensors.update({"score.weight": torch.ones(1, 128)}))(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "override_config": {}}
    with pytest.raises(EngineError, match=r"weights that the model does not have: 1 \(score\.weight\)"):
        load_model(str(folder), **options)
    assert load_model(str(folder), **options, section="worker.critic.model") is not None


def test_a_token_beyond_the_embeddings_is_named(tmp_path: Path) -> None:
    """The forward pass would end in an index error. Such a token is only an error where a text has it."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    tokenizer(lambda tree: tree["model"]["vocab"].update({"\u00c3\u00bc": 700}))(folder)
    tokenizer(lambda tree: tree["model"]["merges"].append(["\u00c3", "\u00bc"]))(folder)
    processing = Processing(str(folder))
    assert processing.encode_text("2 + 3")
    assert max(processing.banned_token_ids) < 500
    with pytest.raises(ConfigError, match=r"a token 700, and the model has embeddings of 500 tokens"):
        processing.encode_text("ü")


def test_where_a_folder_once_was_is_no_path(tmp_path: Path) -> None:
    """Published folders name the machines that wrote them, and tokens that look like paths."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    entry("config.json", _name_or_path="/fsx/model")(folder)
    sizes("text_config", _name_or_path="../model")(folder)
    entry(
        "tokenizer_config.json", name_or_path="/fsx/model", special_tokens_map_file="/fsx/x.json", model_max_length=1e30
    )(folder)
    with_index(lambda names: None)(folder)
    load(folder)
