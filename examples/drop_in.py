"""A small engine around ``DecodeStep``: requests come and go, slots and pages are handed out, every step is one call.

    k3plan checkpoint make demo/tiny-k3
    python examples/drop_in.py demo/tiny-k3            # on the CPU
    python examples/drop_in.py demo/tiny-k3 h200       # on a GPU: the same, as CUDA graphs

Prompts are fed a token a step here; an engine with a prefill of its own writes the states and pages of its slots.
"""
from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import k3plan

SEQUENCES, CONTEXT, PAGE = 4, 64, 16
PAGES = CONTEXT // PAGE


@dataclass
class Request:
    """A text that grows. ``fed`` tokens of it are in the states already."""

    text: list[int]
    wanted: int
    fed: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)


class Engine:
    """Serves at most SEQUENCES requests at a time, more wait. One page of the cache holds PAGE tokens."""

    def __init__(self, step: k3plan.DecodeStep) -> None:
        self.step = step
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.slots = list(range(SEQUENCES))
        self.pages = list(range(SEQUENCES * PAGES))

    def submit(self, prompt: list[int], wanted: int) -> Request:
        """Queues a request for ``wanted`` tokens behind ``prompt``; its ``text`` grows while the engine runs."""
        request = Request(list(prompt), len(prompt) + wanted)
        self.waiting.append(request)
        return request

    def run_step(self) -> int:
        """One token for every running request; returns how many there were."""
        while self.waiting and self.slots:
            request = self.waiting.pop(0)
            request.slot = self.slots.pop(0)
            self.step.reset(request.slot)
            self.running.append(request)
        for request in self.running:
            if request.fed % PAGE == 0:
                request.pages.append(self.pages.pop(0))
        live = self.running
        made = self.step.step(
            torch.tensor([[r.text[r.fed]] for r in live], dtype=torch.int32),
            torch.tensor([[r.fed] for r in live], dtype=torch.int32),
            torch.tensor([r.slot for r in live], dtype=torch.int32),
            torch.tensor([r.pages + [-1] * (PAGES - len(r.pages)) for r in live], dtype=torch.int32),
        )["tokens"][:, 0].tolist()
        for request, token in zip(live, made, strict=True):
            request.fed += 1
            if request.fed == len(request.text):
                request.text.append(token)
        self.running = [r for r in live if len(r.text) < r.wanted]
        for request in live:
            if request not in self.running:
                self.slots.append(request.slot)
                self.pages += request.pages
        return len(live)


def main(folder: str = "demo/tiny-k3", gpu: str = "cpu") -> None:
    """Six requests of different lengths through four slots."""
    settings = ["parallel.tp=1", "capture.buckets=[1, 2, 4]", f"target.gpu={gpu}",
                f"step.context={CONTEXT}", f"step.page_size={PAGE}"]
    plans = k3plan.compile_buckets(Path(__file__).parent / "tiny-k3.yaml", settings)
    device = "cpu" if gpu == "cpu" else "cuda"
    torch.set_num_threads(1)  # these tensors are small: a second thread costs more than it brings
    step = k3plan.DecodeStep.from_plan(plans, k3plan.Checkpoint(folder), device=device)
    engine = Engine(step)
    requests = [engine.submit([7 * i + 3, 11 * i + 5, i + 1], 4 + 3 * i) for i in range(6)]
    started, tokens, sizes = time.perf_counter(), 0, []
    while engine.waiting or engine.running:
        sizes.append(engine.run_step())
        tokens += sizes[-1]
    seconds = time.perf_counter() - started
    for request in requests:
        print(" ".join(map(str, request.text)))
    print(f"{len(sizes)} steps of {min(sizes)} to {max(sizes)} sequences, {tokens / seconds:.0f} tokens/s on {device}")


if __name__ == "__main__":
    main(*sys.argv[1:])
