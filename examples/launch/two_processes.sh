#!/usr/bin/env bash
# Two processes of four CPU devices each, on one machine: bash examples/launch/two_processes.sh
# Further options go to both: --steps 20, --resume auto, …
set -euo pipefail
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4
started=()
for process in 0 1; do
  twinkle-jax train --mesh.data 8 --output_dir runs/two "$@" \
    --distributed.coordinator_address "localhost:${PORT:-8476}" \
    --distributed.num_processes 2 \
    --distributed.process_id "$process" &
  started+=("$!")
done
status=0
for process in "${started[@]}"; do wait "$process" || status=$?; done
exit "$status"
