"""A word that a kernel waits for is read by one thread: several would each see it come at a time of their own."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/cross/polled.py"
# one row, where tiles are smallest: the query's exchange, a key of every rank, stripes, sums by two ranks
FEW = (r"(query_absorb|reduce_token|stripe_gather)-T1-.*-tp8-c0$|"
       r"(all_reduce-T1-1-|reduce_token|stripe_gather).*-tp2-c0$")
LAYOUTS = """
#small = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [2, 4], order = [1, 0]}>
#row = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4], order = [1, 0]}>
%got = tt.load %at, %real, %zero {isVolatile = true} : tensor<SHAPEx!tt.ptr<i64>, #LAYOUT> loc(#loc412)
%epoch = tt.load %epochs {isVolatile = true} : !tt.ptr<i32> loc(#loc291)
"""


def _run(code: str, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    environment["PYTHONPATH"] = str(PROGRAM.parent)
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(("shape", "layout", "found"), [
    ("1x128", "row", 0), ("4x256", "row", 0), ("2x128", "small", 0), ("1x128", "small", 1), ("2x64", "small", 1),
    ("1x128", "unknown", 1)])
def test_threads_that_share_a_word_are_found(shape: str, layout: str, found: int) -> None:
    """[1, 128] by 8 warps is what the query had: half of the warps repeated the other half."""
    ir = LAYOUTS.replace("SHAPE", shape).replace("LAYOUT", layout)
    said = json.loads(_run("import json, sys, polled; print(json.dumps(polled.problems(sys.argv[1])))", ir))
    assert len(said) == found, said


def _table(folder: Path, wanted: str) -> dict[str, list[str]]:
    out = folder / "polled.json"
    _run("import polled; polled.main()", str(out), wanted)
    return json.loads(out.read_text())


def _check(table: dict[str, list[str]]) -> None:
    shared = [f"{name}: {text}" for name, found in table.items() for text in found]
    assert not shared, "\n".join([*shared, "give the tile a word for each thread: exchange.polled"])


def test_a_few_kernels_poll_each_word_once(tmp_path: Path) -> None:
    table = _table(tmp_path, FEW)
    assert len(table) >= 5, sorted(table)
    _check(table)


# 254 launches, with what tests/cross/launches.py has by default
@pytest.mark.slow
def test_all_kernels_poll_each_word_once(tmp_path: Path) -> None:
    table = _table(tmp_path, "")
    assert len(table) > 200
    _check(table)
