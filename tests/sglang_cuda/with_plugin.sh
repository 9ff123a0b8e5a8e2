#!/usr/bin/env bash
# Runs a command where the plugin is installed by its entry point alone, on a host that has sglang's CUDA build:
#   tests/sglang_cuda/with_plugin.sh python3 -m tests.sglang_cuda.servers start FOLDER
#   tests/sglang_cuda/with_plugin.sh python3 -m tests.sglang_cuda.show FOLDER OUT.json
# SHOW_PLUGINS names other plugins that such a host needs.
set -euo pipefail
cd "$(dirname "$0")/../.."
site=${TMPDIR:-/tmp}/sglang_cuda_site
mkdir -p "$site/show-0.dist-info"
printf 'Metadata-Version: 2.1\nName: show\nVersion: 0\n' >"$site/show-0.dist-info/METADATA"
cat >"$site/show-0.dist-info/entry_points.txt" <<'ENTRY'
[sglang.srt.plugins]
miles_sc = miles_ext.sglang_plugin.register:register
miles_sc_probe = miles_ext.sglang_plugin.probe:register
miles_sc_sabotage = miles_ext.sglang_plugin.sabotage:register
no_verifier = tests.sglang_cuda.no_verifier:register
ENTRY
export SGLANG_PLUGINS=${SHOW_PLUGINS:+$SHOW_PLUGINS,}miles_sc,miles_sc_probe,miles_sc_sabotage
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH}
exec "$@"
