#!/usr/bin/env bash
# Tests and measures everything that needs a GPU, in at most eight minutes: docs/gpu.md.
#
#     benchmarks/gpu.sh [--dry] [--parts tests,kernels] [--seconds 470] [--results DIR]
#
# Needs nothing but a copy of the repository and Python with torch, triton, transformers and pytest. Of the
# packages that hybridserve needs besides, those that are missing are installed from wheels/, if that is there,
# into a directory of their own: the machine's Python stays as it is, and no network is asked.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$( [ -x .venv/bin/python ] && echo .venv/bin/python || echo python3 )}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# Triton keeps what it compiles in ~/.triton, where nobody may be allowed to write
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/hybridserve-triton-$(id -u)}
export TRITON_INTERPRET=0 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
for argument in "$@"; do
    [ "$argument" != --dry ] || export TRITON_INTERPRET=1
done

missing=$("$python" - <<'EOS'
from importlib.util import find_spec

needed = {"pydantic": "pydantic", "msgspec": "msgspec", "ruamel": "ruamel.yaml"}
print(*(package for module, package in needed.items() if find_spec(module) is None))
EOS
)
if [ -n "$missing" ]; then
    if ! compgen -G "wheels/*.whl" > /dev/null; then
        echo "missing: $missing; wheels/ has none to install (docs/gpu.md says how to fill it)" >&2
        exit 2
    fi
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    # shellcheck disable=SC2086 # several names
    "$python" -m pip install --quiet --no-index --find-links wheels --target "$site" $missing
    export PYTHONPATH=$PYTHONPATH:$site
fi

"$python" -m benchmarks.gpu "$@"
