#!/usr/bin/env bash
# Prints the interpreters that kvatlas can be tested with, oldest first, one of each version, as paths.
#
#   PYTHONS   names or paths of those to take, instead of what is found
#
# Looked for: python3.N on PATH, what pyenv has installed, python3. A name on PATH may be a shim that leads
# nowhere, so each one is run, and must have the venv module.
set -euo pipefail

describe() { # VERSION PATH, if it is one that fits
    "$1" -c 'import sys, venv, ensurepip
if sys.version_info >= (3, 11): print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null
}

candidates() {
    if [ -n "${PYTHONS:-}" ]; then
        printf '%s\n' $PYTHONS # meant to split
        return
    fi
    printf '%s\n' python3.11 python3.12 python3.13 python3.14
    if command -v pyenv >/dev/null; then
        ls -d "$(pyenv root)"/versions/*/bin/python3.1? 2>/dev/null || true
    fi
    echo python3
}

candidates | while read -r candidate; do describe "$candidate" || true; done | sort -s -V -u -k1,1 | cut -d' ' -f2-
