#!/usr/bin/env bash
# Makes, or reuses, an environment with the Python of a vLLM release that has no CPU build yet, over the compiled
# modules of the one that scripts/vllm_env.sh installs; prints its interpreter's path.
#
#   scripts/vllm_overlay_env.sh [VERSION]     default: 0.33.0
#
# The release's wheel (some 340 MB, for GPUs) is downloaded from the package index and everything but its compiled
# modules is unpacked; torch and all else come from the other environment, but for what only this release needs. The
# scheduler runs on it, and so does a server with a model of plain attention: 0.32's kernels serve it. Everything
# but the path goes to stderr.
set -euo pipefail

version=${1:-0.33.0}
here=$(cd "$(dirname "$0")" && pwd)
base=$("$here/vllm_env.sh")
base_packages=$("$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
env_dir=${XDG_CACHE_HOME:-$HOME/.cache}/kvatlas/vllm-$version-python
stamp=$env_dir/.kvatlas-complete
wanted="vllm==$version over $base_packages"
new_needs="orjson"  # what this release imports and the other environment lacks

say() { printf 'vllm_overlay_env: %s\n' "$*" >&2; }

mkdir -p "$(dirname "$env_dir")"
exec 9>"$env_dir.lock"
if command -v flock >/dev/null; then
    flock 9 # two builds at the same time would overwrite each other
fi

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    if [ -e "$env_dir" ]; then
        [ -e "$env_dir/pyvenv.cfg" ] || { say "$env_dir exists and is no virtual environment; remove it"; exit 1; }
        rm -rf "$env_dir"
    fi
    say "building $env_dir: the Python of vLLM $version (downloads its wheel)"
    "$base" -m venv --without-pip "$env_dir" >&2
    packages=$("$env_dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    "$base" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: \
        --dest "$download" "vllm==$version" >&2
    "$base" - "$download"/vllm-*.whl "$packages" "$base_packages" >&2 <<'PYTHON'
"""Unpack a wheel's package without its compiled modules, and link those of another environment into it."""

import sys
import zipfile
from pathlib import Path

wheel, packages, base = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.startswith("vllm/") and ".so" not in Path(name).suffixes]
    archive.extractall(packages, names)
for module in (base / "vllm").glob("*.so"):
    (packages / "vllm" / module.name).symlink_to(module)
# Imported before everything else: this package first, all others from the base, and no GPU looked for.
(packages / "base.pth").write_text(
    f"{base}\nimport os; os.environ.setdefault('VLLM_TARGET_DEVICE', 'cpu')\n", encoding="utf-8"
)
PYTHON
    (cd / && env -u PYTHONPATH "$env_dir/bin/python" -c "
import sys, vllm
from vllm.v1.core.sched.scheduler import Scheduler
print('vllm_overlay_env: the Python of vLLM', vllm.__version__, 'imports', file=sys.stderr)
sys.exit(vllm.__version__.split('+')[0] != '$version')" >&2)
    printf '%s' "$wanted" >"$stamp"
fi
if ! (cd / && "$env_dir/bin/python" -c "import ${new_needs// /, }") 2>/dev/null; then
    packages=$("$env_dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # shellcheck disable=SC2086
    "$base" -m pip --disable-pip-version-check install --quiet --no-deps --target "$packages" $new_needs >&2
fi
printf '%s\n' "$env_dir/bin/python"
