#!/bin/sh
# The main job in three commands: a tiny checkpoint in the published format, a plan for it, 32 tokens. `make demo`
set -eu
cd "$(dirname "$0")/.."
set -x
k3plan checkpoint make demo/tiny-k3
k3plan compile examples/tiny-k3.yaml --out demo/plan.json
k3plan run demo/plan.json --checkpoint demo/tiny-k3 --tokens 32
