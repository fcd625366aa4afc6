"""Runs the notebooks in examples/ and writes their outputs into them: `run_notebooks.py [NAME ...]`.

Needs `pip install nbclient ipykernel`. Each notebook runs in a temporary folder, with one thread. Logs and progress are left
out, and paths are shortened, so that an output says nothing about the machine. The digest of the code that was run is kept
in the notebook; a test compares it with the code that is there.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"
DIGEST = "digest_of_code"
_MOST_SECONDS = 600


def digest_of_code(cells: list[Any]) -> str:
    """Returns the digest of the code cells of a notebook, in their order."""
    digest = hashlib.sha256()
    for cell in cells:
        if cell["cell_type"] == "code":
            digest.update("".join(cell["source"]).encode() + b"\0")
    return digest.hexdigest()


def run(notebook: Path) -> None:
    """Executes a notebook and replaces its outputs; raises the kernel's error if a cell fails."""
    import nbformat  # pyright: ignore[reportMissingImports]
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    content = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            content, timeout=_MOST_SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute()
        for cell in content.cells:
            if cell.cell_type == "code":
                cell.metadata = {}
                cell.outputs = [_public(output, folder) for output in cell.outputs if output.output_type != "stream"]
    content.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "cepo": {DIGEST: digest_of_code(content.cells)},
    }
    nbformat.write(content, notebook)


def _public(output: Any, folder: str) -> Any:
    """Shortens the paths of this machine in an output."""
    for kind, text in output.get("data", {}).items():
        for path in (os.path.realpath(folder), folder, str(REPOSITORY), str(Path.home())):
            text = text.replace(f"{path}/", "")
        output["data"][kind] = text
    return output


def main() -> int:
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY))
    names = sys.argv[1:] or sorted(path.name for path in EXAMPLES.glob("*.ipynb"))
    for name in names:
        run(EXAMPLES / name)
        print(f"written: examples/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
