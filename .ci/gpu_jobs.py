"""What only a machine with GPUs can show: measurements and tests, in the order in which they are worth their time.

`python .ci/gpu.py --list` prints them. A time is only worth something when nothing else runs on its GPU (``share`` 1),
and a kernel that waits for another rank must not share a GPU with anybody else's (``gpus`` 2, or ``share`` 1).
"""
from __future__ import annotations

from dataclasses import dataclass

TP16, TP2 = "examples/k3-h200-tp16.yaml", "examples/k3-h200-tp2.yaml"
ROWS = "1x1,1x8,8x1,64x1"
TABLE = "ops_cute/tuned/h200.json"
# not timed at all sizes in their present form
NEW = "cute.mla,cute.moe_experts,cute.all_reduce,cute.kda"


@dataclass(frozen=True)
class Job:
    """A shell command. ``$OUT`` is its folder, ``$SECONDS_LEFT`` what it has; it is ended after ``limit`` seconds."""

    name: str
    command: str
    limit: int
    share: float = 1.0  # of a GPU's time
    gpus: int = 1
    asked: bool = False  # runs only when it is named


JOBS = (
    Job("ranks", "pytest -v -m gpu tests/distributed/test_on_gpus.py", 300, gpus=2),
    Job("ranks-check", f"k3plan launch check {TP2} --set 'model.layers=[0,1,2,3,4]'", 100, gpus=2),
    Job("ranks-bench", f"k3plan launch bench {TP2} --set 'model.layers=[0,1,2,3,4,5,6,7,8,9,10,11]'", 100, gpus=2),
    Job("links", f"k3plan launch links {TP2} --seconds $((SECONDS_LEFT - 40))", 240, gpus=2),
    Job("module-ranks", "pytest -q -m gpu tests/module/test_on_gpu.py -k two_ranks", 150, gpus=2),
    # kernels whose blocks all wait for each other: before they are timed
    Job("waits", "pytest -q -m gpu tests/cute/test_moe_experts_tail.py tests/cute/test_settled_blocks.py "
                 "-n 6", 400),
    Job("attend", "pytest -q -m gpu tests/cute/test_mla_attend.py -n 6", 300),
    # each GPU a kernel; on one of them the plan that follows from it
    Job("tune", f"cp {TABLE} $OUT/h200.json && k3plan tune {TP16} --only {NEW} --rows {ROWS} --shapes 2 --most 8 "
                "--seconds $((SECONDS_LEFT - 300)) --times $OUT/times.json --in-step --out $OUT/h200.json && "
                f"cp $OUT/h200.json {TABLE} && k3plan bench {TP16} --profiles auto,stock --rows {ROWS}", 580, gpus=2),
    # from the table as it is: other configurations, and plans without a kernel, in the whole step
    Job("exchanges", f"cp {TABLE} $OUT/h200.json && k3plan tune {TP16} --only none --rows 1x1 --in-step "
                     "--exchanges 100 --out $OUT/h200.json", 360),
    Job("bench", f"k3plan bench {TP16} --profiles auto,stock --rows {ROWS}", 200, asked=True),
    Job("buckets", f"k3plan graph record {TP16} --buckets --out $OUT/step.json", 280),
    Job("step", f"k3plan graph record {TP16} --rows 1x1 --out $OUT/step.json && k3plan graph time $OUT/step.json", 90),
    Job("numerics", f"k3plan tune {TP16} --only mla_attend,experts --rows 1x1,8x1 --shapes 1 --most 4 "
                    "--seconds $((SECONDS_LEFT - 30)) --set numerics.kv_cache=fp8_e4m3 "
                    "--set numerics.expert_activation=mxfp8 --out $OUT/fp8.json", 400),
    # correct before fast: two of these share a GPU
    Job("collectives", "pytest -q -m gpu tests/cute/test_collectives.py -n 8", 400),
    Job("cute", "pytest -q -m gpu tests/cute/test_on_device.py -n 4", 300, share=0.5),
    Job("experts", "pytest -q -m gpu tests/cute/test_moe.py tests/cute/test_moe_emulated.py -n 4", 200, share=0.5),
    Job("staged", "pytest -q -m gpu tests/cute/test_staged_linear.py -n 2", 100, share=0.5),
    # calls of the driver that fail by design are no errors; frames of the host say nothing about a kernel
    Job("sanitizers", "worst=0; for tool in memcheck racecheck synccheck; do echo $tool; compute-sanitizer "
                      "--target-processes all --tool $tool --report-api-errors no --error-exitcode 9 --print-limit 20 "
                      "pytest -q -m gpu tests/cute/test_on_device.py -k tp16-S2xL1 > $OUT/$tool.txt 2>&1 || worst=9; "
                      "grep -v 'Host Frame' $OUT/$tool.txt | head -200; done; exit $worst", 300, asked=True),
    # warps that wait for each other at barriers of shared memory, and ranks: small models, or it takes hours
    Job("sanitizers-small", "compute-sanitizer --target-processes all --tool memcheck --report-api-errors no "
                            "--error-exitcode 9 --print-limit 20 pytest -q -m gpu tests/cute/test_collectives.py "
                            "tests/cute/test_moe.py -k 'small_models and c2 and tp2 and not T8 or experts and small "
                            "and tp1'", 100, asked=True),
    Job("triton", "pytest -q -m gpu tests/math/test_kernels.py tests/math/test_query_exchange.py -n 6", 400, share=0.5),
    Job("crash", "pytest -v -m gpu tests/debug/test_failures_gpu.py -k 'waits_for_ever or fault_in_an_eager'", 200),
    Job("debugger", "pytest -q -m gpu tests/debug tests/graphs -n 2 --dist loadfile", 300, share=0.5),
    Job("module", "pytest -q -m gpu tests/module -k 'not two_ranks'", 150, share=0.5),
)
