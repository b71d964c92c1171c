"""Drawings that stand alone: the data flow as a dot graph, and the timeline of a layer of each kind as an SVG.

Both say what the report says, for a document or another tool. Decides nothing about times: they are
``report_times``'.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from ...compiler.errors import PlanError
from ...compiler.explain import kinds, ranges, size
from ...compiler.memory import Tensor
from ...compiler.plan import LaunchPlan
from .record import Record
from .report_times import GRAPH, Slice, bytes_of, family, links, reads_from, slices, spans

# the colours of the report on white: each has a contrast of 4.5 with it
HUES = {"linear": "#2f66c9", "kda": "#7b3fc4", "mla": "#bb3572", "moe": "#c25e00", "comm": "#007f70",
        "attn_res": "#5d7f12", "norm": "#67727f", "head": "#85623c"}
EDGES = {"programmatic": "#0a5bc4", "full": "#566170", "lost": "#b3261e"}
WIDTH, LEFT, BAR, ROW, TITLE = 1200, 12, 40, 108, 60  # px, and letters of a list of layers


def dot(plan: LaunchPlan, layer: int | None = None, *, whole: bool = False) -> str:
    """The data flow for Graphviz: launches as boxes with their ops, an edge for what one hands to another.

    Of ``layer``, of the ``whole`` step with a cluster for each layer, or of one layer of each kind. Raises PlanError
    when the plan does not have the layer.
    """
    if layer is not None and layer not in plan.spec.layers:
        raise PlanError(f"the plan has no layer {layer}\n  fix: take one of {ranges(plan.spec.layers)}")
    groups = [(f"{s.title} {s.kind}" if s.layer is not None else s.kind, range(s.first, s.last + 1))
              for s in spans(plan) if whole or (layer is not None and s.layer == layer)]
    if not groups:
        starts = [(title, plan.launches.index(found[0]), len(found)) for title, found in kinds(plan) if found]
        groups = [(title, range(first, first + count)) for title, first, count in starts]
    shown = {index for _, inside in groups for index in inside}
    lines = ["digraph step {", '  rankdir=TB; node [shape=box, style="rounded", fontname="sans-serif", fontsize=10];',
             '  edge [fontname="sans-serif", fontsize=9]; graph [fontname="sans-serif"];']
    for number, (title, inside) in enumerate(groups):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(title)};"]
        lines += [f"    {_box(plan, index)}" for index in inside]
        lines.append("  }")
    for target, producers in enumerate(reads_from(plan)):
        if target in shown:
            lines += [_arrow(plan, source, target, names, source in shown) for source, names in producers.items()]
    return "\n".join([*lines, "}", ""])


def _box(plan: LaunchPlan, index: int) -> str:
    launch = plan.launches[index]
    choice = plan.choice(launch)
    loads = [n for n in launch.inputs if plan.buffers[plan.tensors[n].buffer].kind in ("weight", "state", "cache")]
    how = "measured alone" if choice.measured else "predicted"
    text = [choice.kernel, launch.id, " + ".join(choice.ops), f"{choice.us:.2f} us {how}, {size(choice.bytes)}",
            *(f"loads {_tensor(n, plan.tensors[n])}" for n in loads)]
    return f"n{index} [label={_quoted(*text)}, color={_quoted(HUES[family(choice)])}];"


def _arrow(plan: LaunchPlan, source: int, target: int, names: Sequence[str], drawn: bool) -> str:
    text = [_tensor(n, plan.tensors[n]) for n in names]
    if drawn:
        return f"  n{source} -> n{target} [label={_quoted(*text)}];"
    # what comes from a launch that is not drawn
    outside = f"from{source}_{target}"
    box = f"  {outside} [shape=plaintext, label={_quoted('from ' + plan.launches[source].id)}];"
    return f"{box} {outside} -> n{target} [style=dashed, label={_quoted(*text)}];"


def _tensor(name: str, tensor: Tensor) -> str:
    return f"{name} {tensor.dtype}{list(tensor.shape)} {size(bytes_of(tensor))}"


def _quoted(*lines: str) -> str:
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'


def timeline_svg(plan: LaunchPlan, record: Record | None = None) -> str:
    """One layer of each kind over time, embedding and head too: bars with their floors inside, to one scale."""
    placed = slices(plan, record)
    rows = [(title, [plan.launches.index(launch) for launch in found]) for title, found in kinds(plan) if found]
    lengths = [_end(placed, inside) - placed[inside[0]].start_us for _, inside in rows]
    scale = (WIDTH - 2 * LEFT) / max(lengths)
    streams = 1 + max(launch.stream for launch in plan.launches)
    step = ROW + (streams - 1) * (BAR + 20)
    height = 44 + step * len(rows) + 26
    where = f"measured on {record.machine.name}" if record and any(s.basis == GRAPH for s in placed) else "predicted"
    body = [f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{escape(_title(plan))}</text>',
            f'<text x="{LEFT}" y="40" fill="#566170">times {escape(where)}; dark: floor, light: above it</text>']
    for number, (title, inside) in enumerate(rows):
        body += _row(plan, record, placed, title, inside, 44 + number * step, scale)
    body += _legend(plan, height - 10)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#14181d">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *body, "</svg>", ""])


def _title(plan: LaunchPlan) -> str:
    spec = plan.spec
    return (f"{spec.model.family} on {spec.gpu} TP{spec.parallel.tp}, {spec.step.sequences} x {spec.step.query} rows, "
            f"plan {plan.key}")


def _end(placed: list[Slice], inside: list[int]) -> float:
    return max(placed[index].end_us for index in inside)


def _row(plan: LaunchPlan, record: Record | None, placed: list[Slice], title: str, inside: list[int], top: float,
         scale: float) -> Iterator[str]:
    start, us = placed[inside[0]].start_us, sum(placed[index].us for index in inside)
    floor = sum(placed[index].floor_us for index in inside)
    # the list of layers may be as long as the drawing
    head, _, rest = title.partition(" (")
    layers = rest if len(rest) <= TITLE else rest[:TITLE].rpartition(",")[0] + ", ...)"
    text = f"{head}: {len(inside)} launches, {us:.1f} us, floor {floor:.1f} us" + (f" ({layers}" if layers else "")
    yield f'<text x="{LEFT}" y="{top + 28}" font-weight="600">{escape(text)}</text>'

    def left(at: float) -> float:
        return LEFT + (at - start) * scale

    def lane(index: int) -> float:
        return top + 40 + plan.launches[index].stream * (BAR + 20)

    for index in inside:
        yield from _bar(plan, placed[index], left(placed[index].start_us), lane(index), scale)
    shown = set(inside)
    for link in links(plan, record):
        if link.source in shown and link.target in shown:
            a, b = placed[link.source], placed[link.target]
            x0, x1 = left(a.start_us + a.us / 2), left(b.start_us + min(b.us / 2, 0.8))
            y0, y1 = lane(link.source) + BAR, lane(link.target) + BAR
            yield (f'<path d="M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + 20:.1f} {x1:.1f} {y1 + 20:.1f} {x1:.1f} {y1 + 4:.1f}" '
                   f'fill="none" stroke="{EDGES[link.kind]}" stroke-width="1.4"'
                   + (' stroke-dasharray="4 3"' if link.kind == "lost" else "")
                   + f'><title>{link.kind} edge</title></path>'
                   f'<path d="M{x1 - 3:.1f} {y1 + 6:.1f}h6l-3 -5z" fill="{EDGES[link.kind]}"/>')


def _bar(plan: LaunchPlan, at: Slice, x: float, y: float, scale: float) -> Iterator[str]:
    launch = plan.launches[at.index]
    choice = plan.choice(launch)
    hue, width = HUES[family(choice)], max(0.5, at.us * scale - 1)
    floor = min(width, at.floor_us * scale)
    yield (f'<g><title>{escape(launch.id)}: {escape(choice.kernel)}, {at.us:.2f} us, floor {at.floor_us:.2f} us, '
           f'{size(choice.bytes)}</title>'
           f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{hue}" fill-opacity="0.24"/>'
           f'<rect x="{x:.1f}" y="{y + BAR - 10}" width="{floor:.1f}" height="10" fill="{hue}"/>')
    room = int((width - 6) / 6.2)
    name = choice.kernel.rpartition(".")[2]
    if room >= 4:
        shown = name if len(name) <= room else name[: room - 1] + "…"
        yield f'<text x="{x + 4:.1f}" y="{y + 13}">{escape(shown)}</text>'
        yield f'<text x="{x + 4:.1f}" y="{y + 26}" fill="#566170">{at.us:.2f}</text>'
    yield "</g>"


def _legend(plan: LaunchPlan, y: float) -> Iterator[str]:
    x = float(LEFT)
    for name in dict.fromkeys(family(choice) for choice in plan.choices):
        yield (f'<rect x="{x}" y="{y - 9}" width="10" height="10" rx="2" fill="{HUES[name]}"/>'
               f'<text x="{x + 14}" y="{y}">{name.replace("_", " ")}</text>')
        x += 34 + 6.4 * len(name)
