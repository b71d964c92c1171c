"""Puts a torch into the running Python if it has none. ``--check`` only says, by exit status, if it has one.

A torch that is there is kept: it may be built for this machine's GPU. Otherwise the build that fits:
with an NVIDIA GPU, or off Linux, the registry's default; on Linux without a GPU the CPU build, because the
default there is a CUDA build of several GB. ``TORCH="torch==2.13.0"`` overrides all of this.
"""
from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

OLDEST = (2, 9)
PIP = [sys.executable, "-m", "pip", "install", "-qq"]
DEFAULT = [*PIP, f"torch>={OLDEST[0]}.{OLDEST[1]}"]
CPU_ROUTES = [
    # the version that the tests run with; found where pip is configured with a source of CPU builds
    [[*PIP, "torch==2.13.0+cpu"]],
    # uv knows by itself where CPU builds are
    [[*PIP, "uv"], [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable,
                    "--torch-backend=cpu", DEFAULT[-1]]],
    [DEFAULT],
]


def installed() -> str | None:
    """Version of a torch that is new enough, without importing it."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    found = re.match(r"(\d+)\.(\d+)", version)
    return version if found and tuple(map(int, found.groups())) >= OLDEST else None


def works(route: list[list[str]]) -> bool:
    """Runs the commands of one way to install torch until one fails, and then says which and why."""
    for command in route:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stderr or done.stdout or f"exit status {done.returncode}").strip().splitlines()
            why = next((line for line in lines if "ERROR" in line), lines[-1]).strip()
            print(f"torch: `{' '.join(command[2:])}` did not work: {why[:160]}", flush=True)
            return False
    return True


def main() -> int:
    version = installed()
    if "--check" in sys.argv:
        return 0 if version else 1
    asked = os.environ.get("TORCH", "").strip()
    if version and not asked:
        print(f"torch: {version} is here and stays")
        return 0
    gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    if asked:
        why, routes = f"{asked}, as TORCH says", [[[*PIP, *asked.split()]]]
    elif gpu or platform.system() != "Linux":
        why, routes = "the default build" + (" (there is an NVIDIA GPU)" if gpu else ""), [[DEFAULT]]
    else:
        why, routes = "the CPU build (no NVIDIA GPU here)", CPU_ROUTES
    print(f"torch: installing {why}", flush=True)
    if any(works(route) for route in routes):
        return 0
    print("torch: no way worked; install it by hand into this Python and call make again", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
