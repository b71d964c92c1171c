"""Compiled kernels kept on disk, so that a process does not compile what another one has. Decides where and how.

A file a kernel, named by the content key, which says all that the binary depends on (``launching.py``). It holds one
line of JSON (function, digest) and then the cubin. What cannot be read, or is not what was written, is compiled again.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from ..compiler.knobs import CACHE


def folder() -> Path | None:
    """Where cubins are kept; None when ``K3PLAN_CACHE`` says ``off``."""
    text = CACHE.read()
    return None if text == "off" else Path(text).expanduser() / "cute"


def load(key: str) -> tuple[str, bytes] | None:
    """Name of the function and cubin that were kept under ``key``; None when there is none, or not a whole one."""
    at = folder()
    if at is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        head, _, cubin = (at / key).read_bytes().partition(b"\n")
        told = json.loads(head)
        if hashlib.sha256(cubin).hexdigest() == told["sha256"]:
            return str(told["name"]), cubin
    return None


def store(key: str, name: str, cubin: bytes) -> None:
    """Keeps a cubin. A folder that cannot be written to is left alone: the kernel is compiled again next time."""
    at = folder()
    if at is None:
        return
    head = json.dumps({"name": name, "sha256": hashlib.sha256(cubin).hexdigest()}).encode()
    with contextlib.suppress(OSError):
        at.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=at)
        with os.fdopen(handle, "wb") as file:
            file.write(head + b"\n" + cubin)
        os.replace(written, at / key)
