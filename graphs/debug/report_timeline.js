'use strict';
// The step over time: the whole of it above, a part of it below. Each launch is a bar with its floor inside.

const AXIS = 20;
const BAND = 22;
const BAR = 46;
const HANG = 30;
const LABEL = 20;
const streams = [...new Set(launches.map(l => l.stream))].sort((a, b) => a - b);
const spanOf = span => [
  launches[span.first].start_us,
  Math.max(...launches.slice(span.first, span.last + 1).map(l => l.end_us)),
];
const EDGE = { programmatic: 'accent', full: 'soft', lost: 'bad' };
const view = { from: 0, to: stepEnd };
const viewers = [];

function show(from, to) {
  const width = Math.min(stepEnd, Math.max(2, to - from));
  view.from = Math.max(0, Math.min(from, stepEnd - width));
  view.to = view.from + width;
  viewers.forEach(f => f());
}
const showSpan = span => {
  const [a, b] = spanOf(span);
  show(a - (b - a) * 0.02, b + (b - a) * 0.02);
};
const zoom = (factor, middle = (view.from + view.to) / 2) =>
  show(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);

function ticks(from, to, width) {
  const rough = (to - from) / Math.max(2, width / 90);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  const found = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) found.push(t);
  return [found, step];
}

function drawAxis(pen, width, x, from, to) {
  const [found, step] = ticks(from, to, width);
  pen.fillStyle = colour('soft');
  pen.textAlign = 'left';
  for (const t of found) {
    pen.fillRect(Math.round(x(t)), AXIS - 5, 1, 5);
    const text = to > 3000 && step >= 100 ? `${(t / 1e3).toFixed(1)} ms` : `${+t.toFixed(2)} µs`;
    if (x(t) + 60 < width) pen.fillText(text, x(t) + 4, 8);
  }
}

function drawBands(pen, x, top, height, named) {
  spans.forEach((span, i) => {
    const [a, b] = spanOf(span).map(x);
    const outside = b < 0 || a > pen.canvas.clientWidth;
    if (outside) return;
    pen.fillStyle = colour(spanHue(span));
    pen.globalAlpha = i % 2 ? 0.2 : 0.32;
    pen.fillRect(a, top, Math.max(0.6, b - a - (b - a > 6 ? 1 : 0)), height);
    pen.globalAlpha = 1;
    const left = Math.max(a, 0) + 6;
    const room = Math.min(b, pen.canvas.clientWidth) - left - 4;
    if (!named || room < 16) return;
    pen.fillStyle = colour('ink');
    const total = sum(launches.slice(span.first, span.last + 1), l => l.us);
    pen.fillText(
      fit(pen, `${span.title}${room > 120 ? ` · ${span.kind} · ${time(total)}` : ''}`, room),
      left,
      top + height / 2 + 1,
    );
  });
}

function drawOverview(pen, width, height) {
  const x = t => (t / stepEnd) * width;
  const top = 12;
  const deep = height - top;
  drawBands(pen, x, 0, 9, false);
  for (const l of launches) {
    const a = x(l.start_us);
    const w = Math.max(0.25, (l.us / stepEnd) * width);
    pen.fillStyle = colour(l.choice.family);
    pen.globalAlpha = 0.28;
    pen.fillRect(a, top, w, deep);
    pen.globalAlpha = 1;
    const part = Math.min(1, l.floor_us / l.us) * deep;
    pen.fillRect(a, height - part, w, part);
  }
  pen.strokeStyle = colour('chosen');
  pen.lineWidth = 2;
  const a = x(view.from);
  const b = x(view.to);
  pen.strokeRect(Math.max(1, a - 1), 1, Math.max(4, Math.min(width - 2, b - a + 2)), height - 2);
}

const laneTop = stream => {
  const label = streams.length > 1 ? LABEL : 0;
  return AXIS + BAND + 6 + label + streams.indexOf(stream) * (BAR + HANG + label);
};

function drawBar(pen, l, x, per) {
  const a = x(l.start_us);
  const w = Math.max(0.5, l.us * per);
  const top = laneTop(l.stream);
  const inner = w > 5 ? 1 : 0;
  // idle time before the launch is a part of its share, and stays pale
  const idle = Math.min(w, (l.idle_us || 0) * per);
  pen.fillStyle = colour(l.choice.family);
  pen.globalAlpha = 0.08;
  pen.fillRect(a, top, w - inner, BAR);
  pen.globalAlpha = 0.24;
  pen.fillRect(a + idle, top, w - inner - idle, BAR);
  pen.globalAlpha = 1;
  if (l.busy_us !== null && w > 5) pen.fillRect(x(l.end_us - l.busy_us), top - 4, l.busy_us * per - inner, 2);
  pen.fillRect(a, top + BAR - 11, Math.min(w - inner, Math.max(l.floor_us * per, 0)), 11);
  if (w > 34) {
    const left = Math.max(a, 0) + 5;
    const room = Math.min(a + w, pen.canvas.clientWidth) - left - 4;
    pen.fillStyle = colour('ink');
    pen.fillText(fit(pen, kernelName(l.choice), room), left, top + 10);
    pen.fillStyle = colour('soft');
    pen.fillText(fit(pen, room > 60 ? `${us(l.us)} µs` : us(l.us), room), left, top + 25);
  }
}

function drawEdges(pen, x, per) {
  const arcs = launches.length && (per * stepEnd) / launches.length > 5;
  for (const link of links) {
    const a = launches[link.source];
    const b = launches[link.target];
    const x0 = x(a.start_us + a.us / 2);
    const x1 = x(b.start_us + Math.min(b.us / 2, 0.8));
    const y0 = laneTop(a.stream) + BAR;
    const y1 = laneTop(b.stream) + BAR;
    if (Math.max(x0, x1) < 0 || Math.min(x0, x1) > pen.canvas.clientWidth) continue;
    pen.strokeStyle = pen.fillStyle = colour(EDGE[link.kind]);
    if (!arcs) {
      pen.fillRect(x0, y0 + 5, Math.max(0.5, x1 - x0), link.kind === 'lost' ? 7 : 3);
      continue;
    }
    pen.lineWidth = link.kind === 'programmatic' ? 1.6 : 1.2;
    pen.setLineDash(link.kind === 'lost' ? [4, 3] : []);
    pen.beginPath();
    pen.moveTo(x0, y0 + 1);
    if (a.stream === b.stream) pen.bezierCurveTo(x0, y0 + HANG - 8, x1, y0 + HANG - 8, x1, y0 + 4);
    else pen.lineTo(x1, y1 + 4);
    pen.stroke();
    pen.setLineDash([]);
    pen.beginPath();
    pen.moveTo(x1 - 3, y1 + 6);
    pen.lineTo(x1 + 3, y1 + 6);
    pen.lineTo(x1, y1 + 1);
    pen.fill();
  }
}

function drawDetail(pen, width) {
  const per = width / (view.to - view.from);
  const x = t => (t - view.from) * per;
  drawAxis(pen, width, x, view.from, view.to);
  drawBands(pen, x, AXIS, BAND - 2, true);
  if (streams.length > 1)
    for (const s of streams) {
      pen.fillStyle = colour('soft');
      pen.fillText(`stream ${s}`, 2, laneTop(s) - 13);
    }
  const visible = launches.filter(l => l.end_us >= view.from && l.start_us <= view.to);
  for (const l of visible) drawBar(pen, l, x, per);
  drawEdges(pen, x, per);
  const l = launches[selected];
  pen.strokeStyle = colour('chosen');
  pen.lineWidth = 2;
  pen.strokeRect(x(l.start_us), laneTop(l.stream) - 1, Math.max(3, l.us * per - 1), BAR + 2);
}
