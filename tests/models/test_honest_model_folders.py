"""Published folders of the supported families pass the checks without trust, with the oddities that they have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_checkpoint
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from cepo.microgeo.world import ASSETS
from cepo.models.folder_check import check_model_folder
from cepo.models.pretrained import load_model
from cepo.models.processing import Processing

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
SEEN = {"image_mean": MEAN, "image_std": STD, "rescale_factor": 0.00392156862745098, "resample": 3}
QWEN_IMAGES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **SEEN}
EOS = {"eos_token_id": [151645, 151643], "pad_token_id": 151643, "bos_token_id": 151643}
QWEN_TOKENS = {
    "tokenizer_class": "Qwen2Tokenizer",
    "add_bos_token": False,
    "errors": "replace",
    "model_max_length": 131072,
    "bos_token": None,
    "additional_special_tokens": ["<|im_start|>", "<|vision_pad|>"],
    "added_tokens_decoder": {"151643": {"content": "<|endoftext|>", "special": True}},
}
PINPOINTS = [[384 * row, 384 * column] for row in range(1, 7) for column in range(1, 7)]
SMOL_TEXT = {
    "_name_or_path": "/fsx/m4/experiments/local_experiment_dir/s3_async_temporary_checkpoint_folder/tr_324",
    "_flash_attn_2_enabled": True,
    "architectures": ["VLlama3ForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49280,
    "pad_token_id": 2,
    "neftune_noise_alpha": 0.0,
}
FAMILIES: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "Qwen2-VL": {
        "config.json": {
            "model_type": "qwen2_vl",
            "vocab_size": 152064,
            "image_token_id": 151655,
            "vision_token_id": 151654,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {
                "depth": 32,
                "embed_dim": 1280,
                "mlp_ratio": 4,
                "num_heads": 16,
                "in_chans": 3,
                "hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "temporal_patch_size": 2,
            },
        },
        "preprocessor_config.json": {
            **QWEN_IMAGES,
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
        },
        "chat_template.json": {"chat_template": "{% for message in messages %}{% endfor %}"},
        "tokenizer_config.json": QWEN_TOKENS,
        "generation_config.json": {**EOS, "top_k": 1, "top_p": 0.001, "temperature": 0.01},
    },
    "Qwen2.5-VL of its first days": {
        "config.json": {
            "model_type": "qwen2_5_vl",
            "vocab_size": 152064,
            "vision_config": {
                "depth": 32,
                "model_type": "qwen2_5_vl",
                "patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
            },
        },
        "preprocessor_config.json": {
            **QWEN_IMAGES,
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "image_processor_type": "Qwen2_5_VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
        },
        "tokenizer_config.json": QWEN_TOKENS | {"processor_class": "Qwen2_5_VLProcessor"},
        "added_tokens.json": {"<tool_call>": 151657, "<|im_end|>": 151645},
        "special_tokens_map.json": {
            "eos_token": {"content": "<|im_end|>"},
            "additional_special_tokens": ["<|im_start|>"],
        },
    },
    "Qwen2.5-VL as transformers 5 writes it": {
        "config.json": {
            "model_type": "qwen2_5_vl",
            "dtype": "bfloat16",
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                "vocab_size": 152064,
                "num_hidden_layers": 2,
                "layer_types": ["full_attention"] * 2,
                "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
            },
            "vision_config": {"model_type": "qwen2_5_vl_vision", "depth": 32, "patch_size": 14},
        },
        "processor_config.json": {
            "processor_class": "Qwen2_5_VLProcessor",
            "image_processor": {
                **QWEN_IMAGES,
                "image_processor_type": "Qwen2VLImageProcessor",
                "size": {"shortest_edge": 3136, "longest_edge": 12845056},
            },
            "video_processor": {
                **QWEN_IMAGES,
                "video_processor_type": "Qwen2VLVideoProcessor",
                "size": {"shortest_edge": 100352, "longest_edge": 301056},
            },
        },
        "tokenizer_config.json": {
            "backend": "tokenizers",
            "tokenizer_class": "Qwen2Tokenizer",
            "is_local": True,
            "local_files_only": False,
            "extra_special_tokens": ["<|vision_start|>"],
            "processor_class": "Qwen2_5_VLProcessor",
        },
    },
    "Qwen3-VL": {
        "config.json": {
            "model_type": "qwen3_vl",
            "text_config": {"model_type": "qwen3_vl_text", "vocab_size": 151936, "eos_token_id": 151645},
            "vision_config": {
                "model_type": "qwen3_vl",
                "depth": 27,
                "deepstack_visual_indexes": [8, 16, 24],
                "num_position_embeddings": 2304,
                "patch_size": 16,
            },
            "image_token_id": 151655,
            "video_token_id": 151656,
        },
        "preprocessor_config.json": {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Qwen3VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        "video_preprocessor_config.json": {
            "size": {"longest_edge": 25165824, "shortest_edge": 4096},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "fps": 2,
            "min_frames": 4,
            "max_frames": 768,
            "return_metadata": False,
            "processor_class": "Qwen3VLProcessor",
            "video_processor_type": "Qwen3VLVideoProcessor",
        },
        "tokenizer_config.json": QWEN_TOKENS | {"extra_special_tokens": {}},
    },
    "Qwen3.5": {
        "config.json": {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5_text",
                "vocab_size": 248320,
                "num_hidden_layers": 4,
                "full_attention_interval": 4,
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
                "mlp_only_layers": [],
                "eos_token_id": 248044,
                "rope_parameters": {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25},
            },
            "vision_config": {"model_type": "qwen3_5", "deepstack_visual_indexes": [], "depth": 12, "patch_size": 16},
        },
        "preprocessor_config.json": {
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "processor_class": "Qwen3VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        "tokenizer_config.json": QWEN_TOKENS | {"tokenizer_class": "Qwen2Tokenizer"},
    },
    "InternVL3": {
        "config.json": {
            "model_type": "internvl",
            "downsample_ratio": 0.5,
            "image_seq_length": 256,
            "image_token_id": 151667,
            "text_config": {
                "_name_or_path": "/root/codespace/sample/Qwen2.5-32B-Instruct",
                "model_type": "qwen2",
                "vocab_size": 151674,
                "max_window_layers": 70,
                "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            },
            "vision_config": {
                "model_type": "internvl_vision",
                "architectures": ["InternVisionModel"],
                "image_size": [448, 448],
                "patch_size": [14, 14],
                "hidden_size": 1024,
                "initializer_range": 1e-10,
            },
            "vision_feature_layer": -1,
        },
        "preprocessor_config.json": {
            "crop_size": None,
            "crop_to_patches": False,
            "data_format": "channels_first",
            "default_to_square": True,
            "device": None,
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "max_patches": 12,
            "min_patches": 1,
            "processor_class": "InternVLProcessor",
            "size": {"height": 448, "width": 448},
            "size_divisor": None,
        },
        "processor_config.json": {"image_seq_length": 256, "processor_class": "InternVLProcessor"},
        "video_preprocessor_config.json": {
            "video_processor_type": "InternVLVideoProcessor",
            "size": {"height": 384, "width": 384},
        },
        "tokenizer_config.json": QWEN_TOKENS
        | {
            "context_image_token": "<IMG_CONTEXT>",
            "end_image_token": "</img>",
            "start_image_token": "<img>",
            "video_token": "<video>",
        },
    },
    "SmolVLM2": {
        "config.json": {
            "model_type": "smolvlm",
            "image_token_id": 49190,
            "pad_token_id": 128002,
            "scale_factor": 4,
            "vocab_size": 49280,
            "text_config": SMOL_TEXT,
            "vision_config": {
                "model_type": "smolvlm_vision",
                "image_size": 512,
                "max_image_size": {"longest_edge": 512},
                "size": {"longest_edge": 2048},
                "patch_size": 16,
                "use_base_siglip": False,
            },
        },
        "preprocessor_config.json": {
            "do_image_splitting": True,
            "image_processor_type": "SmolVLMImageProcessor",
            "max_image_size": {"longest_edge": 512},
            "processor_class": "SmolVLMProcessor",
            "resample": 1,
            "size": {"longest_edge": 2048},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
        },
        "processor_config.json": {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "truncation_side": "left",
            "end_of_utterance_token": "<end_of_utterance>",
            "extra_special_tokens": {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"},
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 49279, "pad_token_id": 128002},
    },
    "Idefics3": {
        "config.json": {
            "model_type": "idefics3",
            "image_token_id": 128257,
            "text_config": {
                "_name_or_path": "None",
                "model_type": "llama",
                "vocab_size": 128259,
                "pad_token_id": 128002,
            },
            "perceiver_config": {
                "_name_or_path": "",
                "model_type": "idefics3",
                "resampler_n_latents": 64,
                "finetuning_task": None,
            },
            "vision_config": {
                "model_type": "idefics3",
                "image_size": 364,
                "size": {"longest_edge": 1820},
                "patch_size": 14,
            },
        },
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "max_image_size": {"longest_edge": 364},
            "processor_class": "Idefics3Processor",
            "size": {"longest_edge": 1456},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "legacy": False},
    },
    "Gemma 3": {
        "config.json": {
            "model_type": "gemma3",
            "boi_token_index": 255999,
            "image_token_index": 262144,
            "eos_token_id": [1, 106],
            "mm_tokens_per_image": 256,
            "text_config": {"model_type": "gemma3_text", "sliding_window": 1024, "rope_scaling": {"factor": 8.0}},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        "preprocessor_config.json": {
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 256,
            "pan_and_scan_max_num_crops": None,
            "processor_class": "Gemma3Processor",
            "size": {"height": 896, "width": 896},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "GemmaTokenizer",
            "sp_model_kwargs": None,
            "spaces_between_special_tokens": False,
            "boi_token": "<start_of_image>",
            "model_max_length": 1000000000000000019884624838656,
        },
        "added_tokens.json": {"<image_soft_token>": 262144},
        "generation_config.json": {"cache_implementation": "hybrid", "eos_token_id": [1, 106], "pad_token_id": 0},
    },
    "LLaVA-OneVision": {
        "config.json": {
            "model_type": "llava_onevision",
            "image_grid_pinpoints": PINPOINTS,
            "image_token_index": 151646,
            "video_token_index": 151647,
            "text_config": {"_name_or_path": "Qwen/Qwen2-7B-Instruct", "model_type": "qwen2", "vocab_size": 152000},
            "vision_aspect_ratio": "anyres_max_9",
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
        },
        "preprocessor_config.json": {
            "do_pad": True,
            "image_grid_pinpoints": PINPOINTS,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "processor_class": "LlavaOnevisionProcessor",
            "size": {"height": 384, "width": 384},
        },
        "processor_config.json": {
            "num_image_tokens": 729,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
        },
        "tokenizer_config.json": QWEN_TOKENS,
        "video_preprocessor_config.json": {
            "video_processor_type": "LlavaOnevisionVideoProcessor",
            "size": {"height": 384, "width": 384},
        },
    },
    "Llama 3": {
        "config.json": {
            "model_type": "llama",
            "vocab_size": 128256,
            "eos_token_id": [128001, 128008, 128009],
            "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "generation_config.json": {"eos_token_id": [128001, 128008, 128009], "do_sample": True},
    },
    "Llama 2, with unset padding": {
        "config.json": {"model_type": "llama", "vocab_size": 32000, "pad_token_id": -1, "pretraining_tp": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "sp_model_kwargs": {},
            "bos_token": {"__type": "AddedToken", "content": "<s>"},
            "tokenizer_file": None,
            "name_or_path": "/admin/home/model",
        },
    },
    "SmolLM2 from a GGUF file": {
        "config.json": {"model_type": "llama", "_model_name_or_path": "../Smollm2 135M", "vocab_size": 49152},
    },
    "Mistral": {
        "config.json": {"model_type": "mistral", "vocab_size": 32768, "sliding_window": None},
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "use_default_system_prompt": False,
        },
    },
    "Phi-3": {
        "config.json": {
            "model_type": "phi3",
            "vocab_size": 32064,
            "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
            "sliding_window": 262144,
        },
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"},
    },
    "a text model that was part of a vision-language model": {
        "config.json": {"model_type": "qwen2", "vocab_size": 152064},
        "tokenizer_config.json": QWEN_TOKENS | {"processor_class": "Qwen2_5_VLProcessor"},
    },
    "EasyR1's merged checkpoint": {
        "config.json": {
            "_name_or_path": "/mnt/models/Qwen2.5-VL-7B-Instruct",
            "_attn_implementation_autoset": True,
            "model_type": "qwen2_5_vl",
            "vocab_size": 152064,
            "vision_config": {"depth": 32, "model_type": "qwen2_5_vl", "patch_size": 14},
        },
        "preprocessor_config.json": {**QWEN_IMAGES, "image_processor_type": "Qwen2VLImageProcessor"},
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_folder_needs_no_trust(tmp_path: Path, name: str) -> None:
    for file, tree in FAMILIES[name].items():
        (tmp_path / file).write_text(json.dumps(tree), encoding="utf-8")
    check_model_folder(str(tmp_path))


def test_files_that_nothing_reads_are_left_alone(tmp_path: Path) -> None:
    """Published folders have cards, licences, old forms of the tokenizer, and weights of other programs."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text('{"dim": "/etc"}', encoding="utf-8")
    (folder / "original" / "consolidated.00.pth").write_bytes(b"x")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / "vocab.json").write_text("{}", encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    for name in ("README.md", "LICENSE", ".gitattributes", "tf_model.h5", "flax_model.msgpack", "tokenizer.model"):
        (folder / name).write_bytes(b"x")
    (folder / "trainer_state.json").write_text('{"best_model_checkpoint": "/tmp/x"}', encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3")


def published_text_model(folder: Path) -> Path:
    return write_checkpoint("qwen2", folder / "model")


def test_a_tokenizer_needs_no_weights(tmp_path: Path) -> None:
    """A folder of a tokenizer alone, from which the weights were left out, although its index names them."""
    folder = published_text_model(tmp_path)
    (folder / "model.safetensors").unlink()
    names = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names), encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3")


def test_a_tokenizer_may_have_its_older_form(tmp_path: Path) -> None:
    """A vocabulary and a list of merges in place of `tokenizer.json`."""
    folder = published_text_model(tmp_path)
    expected = Processing(str(folder)).encode_text("2 + 3 = 5")
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    (folder / "tokenizer.json").unlink()
    assert Processing(str(folder)).encode_text("2 + 3 = 5") == expected


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "NFKC"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": r"(\w+|\s)+?"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 40}},
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    ],
)
def test_a_tokenizer_of_any_parts_needs_no_trust(tmp_path: Path, part: dict[str, Any]) -> None:
    folder = published_text_model(tmp_path)
    tree = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(tree | part), encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3")


def test_mistrals_own_tokenizer_may_lie_beside_the_common_one(tmp_path: Path) -> None:
    folder = published_text_model(tmp_path)
    expected = Processing(str(folder)).encode_text("2 + 3")
    (folder / "tekken.json").write_text("{}", encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3") == expected


def test_an_index_may_name_a_tied_head(tmp_path: Path) -> None:
    """Some programs list `lm_head.weight` and store the embeddings alone; transformers ties them."""
    folder = tmp_path / "model"
    shutil.copytree(ASSETS, folder)
    tensors = load_file(folder / "model.safetensors")
    places = dict.fromkeys([*tensors, "lm_head.weight"], "model-00001-of-00001.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8"
    )
    model: Any = load_model(str(folder), dtype=torch.float32, trust_remote_code=False, override_config={})
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_qwen_weights_of_the_old_names_are_loaded(tmp_path: Path) -> None:
    """Published Qwen2.5-VL checkpoints have `visual.*` and `model.layers.*`, without a part for the language model."""
    rotations = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tower = {"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
    tokens: dict[str, Any] = {
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 7,
        "vision_end_token_id": 8,
    }
    config = Qwen2_5_VLConfig(
        text_config=text
        | {"num_key_value_heads": 2, "rope_parameters": rotations}
        | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        vision_config=tower | {"fullatt_block_indexes": [1]},
        **tokens,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.save_pretrained(tmp_path)
    old = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): weight.clone()
        for name, weight in model.state_dict().items()
    }
    old["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), dtype=torch.float32, trust_remote_code=False, override_config={})
    pairs = zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_code_beside_a_supported_model_is_not_run(tmp_path: Path) -> None:
    """Phi-3 has an `auto_map` and modules, for versions of transformers without its classes."""
    folder, trace = tmp_path / "model", tmp_path / "it_ran"
    shutil.copytree(ASSETS, folder)
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoTokenizer")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["auto_map"] = dict.fromkeys([*names, "AutoProcessor", "AutoImageProcessor"], "modeling_x.X")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "modeling_x.py").write_text(f"import os\nos.mkdir({str(trace)!r})\nclass X: ...\n", encoding="utf-8")
    assert Processing(str(folder)).encode_text("2 + 3")
    model = load_model(str(folder), dtype=torch.float32, trust_remote_code=False, override_config={})
    assert type(model).__module__.startswith("transformers.models.")
    assert not trace.exists()
