#!/usr/bin/env bash
# Makes the virtual environment DIR with $PYTHON, or with the first Python that is 3.11 or later.
set -euo pipefail

dir=${1:?usage: make_venv.sh DIR}

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11}; do
    if fits "$candidate"; then
        echo "making $dir with $("$candidate" --version)"
        exec "$candidate" -m venv --clear "$dir"
    fi
done
echo "needs Python 3.11 or later with its venv module (on Debian: python3-venv), tried: ${PYTHON:-python3 and others};" \
    "name one with make PYTHON=/path/to/python" >&2
exit 1
