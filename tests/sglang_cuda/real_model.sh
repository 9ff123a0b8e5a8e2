#!/usr/bin/env bash
# SmolLM2 and its drafts on one GPU: three servers of sglang, their throughput, and training beside them.
#   tests/sglang_cuda/real_model.sh serve MODELS [regular dflash dflash2]   start servers together, wait until healthy
#   tests/sglang_cuda/real_model.sh throughput MODELS OUT SECONDS           -> OUT/throughput.json, .runs.json
#   tests/sglang_cuda/real_model.sh integrate MODELS OUT [--key VALUE ...]  a Ray job -> OUT/integration.tar.gz
# MODELS/target comes from `models import smollm2`, MODELS/draft from `models train-draft`. OUT exists.
# serve runs under with_plugin.sh with the python3 that has sglang; logs and pids lie in ${LOGS:-/tmp/real_model}.
# The others run with a python3 that has this package's requirements; RUNS gets the run, about 12 GB, and
# GPUS=1 tells Ray of a GPU that it does not find.
set -euo pipefail
cd "$(dirname "$0")/../.."
action=$1 models=$(realpath "$2")
shift 2
logs=${LOGS:-/tmp/real_model}
declare -A port=([regular]=30100 [dflash]=30200 [dflash2]=30300)
mkdir -p "$logs"

launch() {
    local arm=$1 flags=()
    if [ "$arm" != regular ]; then
        rm -rf "$logs/$arm"
        mkdir -p "$logs/$arm"
        local draft
        draft=$(python3 -c '
import sys
from pathlib import Path
from rollout.sglang_engine.drafts import draft_for
print(draft_for(sys.argv[1], *map(Path, sys.argv[2:])))' "$arm" "$models/target" "$models/draft" "$logs/$arm")
        flags=(--speculative-algorithm DFLASH --speculative-draft-model-path "$draft"
            --speculative-draft-attention-backend triton
            --speculative-accept-threshold-single 1.0 --speculative-accept-threshold-acc 1.0)
    fi
    # A capped pool: servers that start together cannot size their memory by what is free at that moment.
    MILES_SC_STRICT=1 MILES_SC_ENGINE_ID=$arm setsid nohup python3 -W ignore -m sglang.launch_server \
        --model-path "$models/target" --host 127.0.0.1 --port "${port[$arm]}" --random-seed "${port[$arm]}" \
        --dtype bfloat16 --attention-backend triton --cuda-graph-backend-prefill=disabled \
        --context-length 1024 --mem-fraction-static "${MEMORY:-0.4}" --max-total-tokens 131072 \
        --max-running-requests 64 --sampling-mask-max-tokens 4096 --weight-version 0 --skip-server-warmup \
        "${flags[@]}" >"$logs/$arm.log" 2>&1 </dev/null &
    echo $! >"$logs/$arm.pid"
}

case $action in
serve)
    arms=("$@")
    [ $# -gt 0 ] || arms=(regular dflash dflash2)
    for arm in "${arms[@]}"; do launch "$arm"; done
    for arm in "${arms[@]}"; do
        until curl -sf -m 2 -o /dev/null "http://127.0.0.1:${port[$arm]}/health"; do
            if ! kill -0 "$(cat "$logs/$arm.pid")" 2>/dev/null || [ $SECONDS -gt "${WAIT:-420}" ]; then
                echo "$arm is dead or not healthy after $SECONDS s:"
                tail -n 25 "$logs/$arm.log"
                exit 1
            fi
            sleep 1
        done
        echo "$arm healthy after $SECONDS s"
    done
    ;;
throughput)
    out=$1 seconds=$2 servers=()
    for arm in regular dflash dflash2; do
        curl -sf -m 5 -o /dev/null "http://127.0.0.1:${port[$arm]}/health" || { echo "no $arm" && continue; }
        servers+=(--server "$arm=http://127.0.0.1:${port[$arm]}")
    done
    python3 -m experiments.bench.throughput --target "$models/target" --json "$out/throughput.json" \
        --seconds "$seconds" "${servers[@]}"
    ;;
integrate)
    out=$(realpath "$1")
    shift
    runs=${RUNS:-/tmp/real_model_runs} config=${CONFIG:-experiments/configs/smollm2_sglang.yaml}
    address=http://127.0.0.1:${DASHBOARD:-8265}
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} RAY_USAGE_STATS_ENABLED=0 RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
    RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')  # of this head and its jobs alone
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
    # A machine whose memory grows as it is used looks full to Ray, which would kill workers.
    export RAY_memory_monitor_refresh_ms=0
    export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0  # the audit, in the job's own process, computes on the GPU
    export WANDB_MODE=offline HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
    rm -rf "$runs"
    mkdir -p "$runs"
    ray=(python3 -m ray.scripts.scripts)
    # --block: the head is a child of this script and ends with it.
    "${ray[@]}" start --head --block --port=0 --dashboard-host=127.0.0.1 --dashboard-port="${DASHBOARD:-8265}" \
        --dashboard-agent-listen-port=0 \
        --memory=4000000000 --object-store-memory=2000000000 ${GPUS:+--num-gpus=$GPUS} --disable-usage-stats \
        >"$logs/ray.log" 2>&1 &
    head=$!
    trap 'kill $head 2>/dev/null; wait $head 2>/dev/null || true' EXIT
    until curl -s -m 2 -o /dev/null $address/api/version; do
        kill -0 $head || { cat "$logs/ray.log" && exit 1; }
        sleep 0.5
    done
    echo "Ray up after $SECONDS s"
    code=0
    command="python3 -m experiments run $config --output_dir $runs"
    command+=" --model.target $models/target --model.draft $models/draft $*"
    timeout "${LIMIT:-280}" "${ray[@]}" job submit --address $address -- bash -c "cd $PWD && exec $command" || code=$?
    echo "job ended with $code after $SECONDS s"
    # Laws, weights and checkpoints stay here; what was measured and judged goes.
    (cd "$runs" && tar czf "$out/integration.tar.gz" --exclude=rollouts --exclude=checkpoints --exclude=weights \
        --exclude=probe.safetensors --exclude='*.part' .)
    exit $code
    ;;
*)
    sed -n 2,9p "$0"
    exit 2
    ;;
esac
