#!/usr/bin/env bash
# The real sglang 0.5.23 without a GPU: makes .venv-sglang once, then runs what needs it. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${SGLANG_VENV:-.venv-sglang}
stamp=$venv/.installed
if [[ ! $stamp -nt requirements/sglang-cpu.txt ]]; then
    [[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
    pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_FLAGS:-})
    "${pip[@]}" torch==2.13.0
    "${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0
    "${pip[@]}" -r requirements/sglang-cpu.txt setuptools
    "${pip[@]}" --no-deps --no-build-isolation --editable .
    touch "$stamp"
fi
# sitecustomize and the test platform's entry points lie in site/. The folder's conftest is the only one that applies.
export PYTHONPATH=$PWD/tests/sglang_cpu/site:$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
exec "$venv/bin/python" -m pytest --confcutdir=tests/sglang_cpu "${@:-tests/sglang_cpu}"
