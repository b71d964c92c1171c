#!/bin/sh
# What `make demo` shows: a small checkpoint, its launch plan, and 32 tokens decoded with it.
set -eu
cd "$(dirname "$0")/.."
run() { printf '\n$ %s\n' "$*"; "$@"; }
run k3plan checkpoint make demo/tiny-k3
run k3plan compile examples/tiny-k3.yaml --out demo/plan.json
run k3plan run demo/plan.json --checkpoint demo/tiny-k3 --tokens 32
