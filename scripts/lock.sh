#!/usr/bin/env bash
# Writes requirements/image.txt and requirements/build.txt: every package of the container image, with the hashes of
# its files, for the Python of the Dockerfile; and requirements/dev.txt: the versions that development and CI install,
# for every supported Python. Needs uv ($BIN/uv); `make lock` installs it.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(sed -n 's/^ARG BASE=python:\([0-9]*\.[0-9]*\).*/\1/p' Dockerfile)
pin() { # pin FILE WHAT SOURCE...
    local file=$1 what=$2
    shift 2
    {
        echo "# $what, each file by its hash. Made by \`make lock\`; do not edit."
        "${BIN:-.venv/bin}/uv" pip compile "$@" --universal --python-version "$python" \
            --generate-hashes --no-annotate --no-header --quiet
    } >"$file.new"
    mv "$file.new" "$file"
}

# The image finds engines everywhere: also what these sources need.
pin requirements/image.txt "What the container image installs" pyproject.toml --extra kubernetes --extra dns
sed -n 's/^requires = \["\(.*\)"\]/\1/p' pyproject.toml |
    pin requirements/build.txt "What builds the wheel for the container image" -

{
    echo "# Versions that development and CI install. Made by \`make lock\`; do not edit."
    "${BIN:-.venv/bin}/uv" pip compile pyproject.toml --extra release --universal --python-version 3.11 \
        --no-emit-package kvatlas --no-annotate --no-header --quiet
} >requirements/dev.txt.new
mv requirements/dev.txt.new requirements/dev.txt
