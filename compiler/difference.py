"""What changed from one launch plan to another, in words."""
from __future__ import annotations

from collections.abc import Sequence

from .explain import ranges, settings, size
from .plan import Launch, LaunchPlan

NEAR = 0.01  # of a launch's price


def diff(old: LaunchPlan, new: LaunchPlan) -> str:
    """What changed from ``old`` to ``new``: spec fields, algebra, launches by layer, totals. Launches that cost
    another price by ``NEAR`` at most, and differ in nothing else, are counted."""
    if old.key == new.key:
        return f"equal: {old.key}"
    lines = [f"{old.key} -> {new.key}"]
    lines += [f"  {line}" for line in changed_fields(old, new)]
    before, after = ({launch.id: launch for launch in p.launches} for p in (old, new))
    changes: dict[str, list[tuple[Launch, list[float], list[float]]]] = {}
    near = 0
    for name in [*before, *(n for n in after if n not in before)]:
        a, b = before.get(name), after.get(name)
        text = _change(old, new, a, b)
        was, now = ([plan.choice(x).us] if x else [] for plan, x in ((old, a), (new, b)))
        if b and text == new.choice(b).kernel and abs(was[0] - now[0]) <= NEAR * was[0]:
            near += was != now
            continue
        launch = b or before[name]
        short = name.split(".", 1)[1] if launch.layer is not None else name
        changes.setdefault(f"{short}: {text}", []).append((launch, was, now))
    for text, found in changes.items():
        layers = [launch.layer for launch, _, _ in found if launch.layer is not None]
        both = ([us for x in found for us in x[1]], [us for x in found for us in x[2]])
        times = " -> ".join(_span(us) for us in both if us)
        lines.append(f"  {text}, {times} us{f' (layers {ranges(layers)})' if layers else ''}")
    lines += [f"  {near} more at another price, by {NEAR:.0%} at most"] if near else []
    lines.append(f"  launches {len(old.launches)} -> {len(new.launches)}, step {old.us / 1e3:.3f} -> "
                 f"{new.us / 1e3:.3f} ms, arena {size(old.arena_bytes)} -> {size(new.arena_bytes)}")
    return "\n".join(lines)


def _span(us: Sequence[float]) -> str:
    low, high = f"{min(us):.2f}", f"{max(us):.2f}"
    return low if low == high else f"{low} to {high}"


def changed_fields(old: LaunchPlan, new: LaunchPlan) -> list[str]:
    """Every value of the plan files that differs, a line each."""
    lines = []
    for section in ("parallel", "step", "numerics", "choices", "model"):
        a, b = getattr(old.spec, section), getattr(new.spec, section)
        lines += [f"{section}.{f}: {getattr(a, f)} -> {getattr(b, f)}" for f in a.__dataclass_fields__
                  if getattr(a, f) != getattr(b, f)]
    for name in ("gpu", "profile", "layers", "buckets"):
        a, b = getattr(old.spec, name), getattr(new.spec, name)
        if a != b:
            lines.append(f"{name}: {a} -> {b}")
    return lines


def _change(old: LaunchPlan, new: LaunchPlan, a: Launch | None, b: Launch | None) -> str:
    """What changed of a launch but its price; its kernel alone where nothing did."""
    if a is None or b is None:
        return f"added, {new.choice(b).kernel}" if b else f"removed, {old.choice(a).kernel}" if a else ""
    x, y = old.choice(a), new.choice(b)
    if x.kernel != y.kernel:
        return f"{x.kernel} -> {y.kernel}"
    if x.config != y.config:
        kept = x.config.items() & y.config.items()
        was, now = (settings({n: v for n, v in c.config.items() if (n, v) not in kept}) for c in (x, y))
        return f"{x.kernel} re-tiled ({was}) -> ({now})"
    if (a.stream, a.dependent) != (b.stream, b.dependent):
        return f"{x.kernel} stream {a.stream}{_early(a)} -> stream {b.stream}{_early(b)}"
    return x.kernel


def _early(launch: Launch) -> str:
    return " early" if launch.dependent else ""
