# Shared by the scripts: the repository root, a virtual environment, and messages that say what to do.
# Sourced, never run. Variables a caller may set: CEPO_VENV (where the environment lives), PYTHON (which Python makes it),
# CEPO_PYTHON (a Python that has everything already: it is used as it is, and nothing is installed).

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${CEPO_VENV:-$ROOT/.venv}"
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

# What an environment with these extras takes on the disk, in GB of 10^9 bytes. The wheels of the CUDA builds have 8.5 GB unpacked
# (torch 1.1, vLLM 0.8, Triton 0.7, CUDA's libraries 3), and 4 GB packed, which pip keeps in its cache.
install_gb() {
    case "$1" in
    gpu*) echo 10 ;;
    *) echo 5 ;;
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

# Where vLLM's CPU build or the CPU build of torch it needs cannot be had, everything but the engine still works.
install_without_vllm() {
    local extras
    [[ "$1" == cpu* ]] || die "pip could not install cepo[$1]: see above. CEPO_PYTHON names a Python that has it already."
    extras="$(printf '%s' "$1" | sed -e 's/^cpu,\{0,1\}//')"
    echo "vLLM's CPU build could not be installed (see above): going on with plain torch and the transformers generator." >&2
    "$VENV/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --editable "$ROOT${extras:+[$extras]}" ||
        die "pip could not install cepo: see above. It needs a package index that has torch, or wheels named by PIP_FIND_LINKS."
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
        export CEPO_PYTHON="$python"
        return
    fi
    [[ "$extras" != gpu* || -n "${CEPO_VENV:-}" ]] || VENV="$ROOT/.venv-gpu"
    export CEPO_PYTHON="$VENV/bin/python"
    stamp="$VENV/.cepo-$(printf '%s' "$extras" | tr ',' '-')-$(cksum "$ROOT"/{pyproject.toml,_cepo_cpu_torch.*} | cut -d' ' -f1 | tr '\n' '-')"
    if [[ -e "$stamp" ]]; then
        return
    fi
    python="$(find_python)"
    [[ -x "$VENV/bin/python" ]] || "$python" -m venv "$VENV" || die "No virtual environment could be made in $VENV."
    require_disk "$extras"
    echo "Installing cepo[$extras] into $VENV (once; a few minutes and about $(install_gb "$extras") GB) ..."
    "$VENV/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --editable "$ROOT[$extras]" 2>&1 |
        { grep -v "^WARNING: Location" || true; } ||
        install_without_vllm "$extras"
    # pip compiles on one core. Packages hold files for other Pythons, which do not compile: no failure.
    "$VENV/bin/python" -m compileall -qq -j 0 "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" ||
        true
    "$VENV/bin/python" -c 'import torch, transformers, cepo' || die "The install is broken; remove $VENV and try again."
    touch "$stamp"
}
