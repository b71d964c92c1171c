'use strict';
// What a rank holds, and the arena: which bytes are alive from which launch to which.

const MEANING = {
  weight: 'parameters, packed as the kernels read them',
  cache: 'latent cache of the MLA layers',
  state: 'KDA states and convolution windows',
  arena: 'values of the step, one on top of another by lifetime',
  zeroed: 'workspace that stays zero between launches, mailboxes',
  index: 'inputs of the step',
  output: 'outputs of the step',
};
const GANTT = { left: 56, low: 18 };
const arena = [...buffers.values()].filter(b => b.kind === 'arena');
// the launch that writes a buffer first gives it its colour
const madeBy = new Map();
for (const l of launches) {
  for (const name of [...l.outputs, ...l.scratch]) {
    const buffer = tensors.get(name).buffer;
    if (!madeBy.has(buffer)) madeBy.set(buffer, l);
  }
}

function liveBytes() {
  const changes = new Float64Array(launches.length + 1);
  for (const b of arena) {
    changes[b.first] += b.bytes;
    changes[b.last + 1] -= b.bytes;
  }
  let now = 0;
  return Array.from(changes.slice(0, launches.length), change => (now += change));
}

// what of the arena is alive between two launches, and scales that show it in a box
function ganttOf([from, to], width, height) {
  const shown = arena.filter(b => b.last >= from && b.first < to);
  const most = Math.max(1, ...shown.map(b => b.offset + b.bytes));
  const high = height - GANTT.low;
  return {
    from,
    to,
    shown,
    most,
    high,
    x: i => GANTT.left + ((i - from) / (to - from)) * (width - GANTT.left),
    y: offset => high * (1 - offset / most),
    launch: x => Math.floor(from + ((x - GANTT.left) / (width - GANTT.left)) * (to - from)),
    offset: y => (1 - y / high) * most,
  };
}

function drawBuffers(pen, g, width) {
  pen.save();
  pen.beginPath();
  pen.rect(GANTT.left, 0, width - GANTT.left, g.high);
  pen.clip();
  for (const b of g.shown) {
    const maker = madeBy.get(b.name);
    const x = g.x(b.first);
    const top = g.y(b.offset + b.bytes);
    const wide = Math.max(1, g.x(b.last + 1) - x - 0.5);
    const deep = Math.max(1, g.y(b.offset) - top - 0.5);
    pen.fillStyle = colour(maker ? maker.choice.family : 'norm');
    pen.fillRect(x, top, wide, deep);
    const left = Math.max(x, GANTT.left) + 4;
    const room = Math.min(x + wide, width) - left - 4;
    if (room < 40 || deep < 12) continue;
    pen.fillStyle = colour('card');
    pen.fillText(fit(pen, shorten(b.name, maker ? maker.layer : null), room), left, top + deep / 2);
  }
  pen.restore();
}

function drawGantt(pen, g, width) {
  pen.fillStyle = colour('sunk');
  pen.fillRect(GANTT.left, 0, width - GANTT.left, g.high);
  drawBuffers(pen, g, width);
  pen.fillStyle = colour('line');
  if (g.to - g.from < 60) for (let i = g.from + 1; i < g.to; i++) pen.fillRect(g.x(i), 0, 0.5, g.high);
  pen.fillStyle = colour('soft');
  for (const part of [0, 0.5, 1]) {
    pen.fillText(size(g.most * part), 0, Math.max(7, Math.min(g.high - 6, g.y(g.most * part))));
  }
  const last = `launch ${g.to - 1}`;
  pen.fillText(`launch ${g.from}`, GANTT.left, g.high + 11);
  pen.fillText(last, width - pen.measureText(last).width, g.high + 11);
}

function bufferText(b) {
  const from = `alive from launch ${b.first} (${launches[b.first].id})`;
  return `${b.name}\n${size(b.bytes)} at ${b.offset}\n${from}\nto launch ${b.last} (${launches[b.last].id})`;
}

// the arena over the launches of `domain()`, a range without its end
function gantt(title, domain, height) {
  const canvas = el('canvas', { role: 'img', 'aria-label': title });
  const redraw = paint(canvas, height, (pen, width) => drawGantt(pen, ganttOf(domain(), width, height), width));
  canvas.addEventListener('pointermove', e => {
    const box = canvas.getBoundingClientRect();
    const g = ganttOf(domain(), box.width, height);
    const i = g.launch(e.clientX - box.left);
    const offset = g.offset(e.clientY - box.top);
    const alive = g.shown.filter(b => b.first <= i && i <= b.last);
    const found = alive.find(b => b.offset <= offset && offset < b.offset + Math.max(b.bytes, g.most / g.high));
    showTip(e, found ? bufferText(found) : '');
  });
  canvas.addEventListener('pointerleave', hideTip);
  return [canvas, redraw];
}

function inView() {
  const seen = launches.filter(l => l.end_us > view.from && l.start_us < view.to).map(l => l.index);
  return seen.length ? [Math.min(...seen), Math.max(...seen) + 1] : [0, launches.length];
}

function heldTable() {
  const kinds = groupBy([...buffers.values()], b => b.kind);
  const bytes = kind => (kind === 'arena' ? head.arena_bytes : sum(kinds.get(kind), b => b.bytes));
  const total = sum([...kinds.keys()], bytes);
  const order = [...kinds.keys()].sort((a, b) => bytes(b) - bytes(a));
  const body = order.map(kind => {
    const name = el('span', {}, swatch(KIND_HUE[kind] || 'norm'), kind);
    const numbers = [kinds.get(kind).length, size(bytes(kind)), share(bytes(kind) / total)].map(n => ({ n }));
    return [name, ...numbers, MEANING[kind] || ''];
  });
  return grid(['a rank holds', { n: 'buffers' }, { n: 'bytes' }, { n: 'share' }, 'what it is'], body);
}

function drawMemory() {
  const box = at('memory');
  box.append(heldTable());
  drawPointers(box);
  const live = liveBytes();
  const peak = Math.max(0, ...live);
  const peakAt = live.indexOf(peak);
  const [whole] = gantt('The arena over the whole step', () => [0, launches.length], 150);
  const [part, redraw] = gantt('The arena over the launches that the timeline shows', inView, 190);
  viewers.push(redraw);
  const note = `${plural(arena.length, 'value')} share ${size(head.arena_bytes)}. Across: from the launch that writes a
    value to the last that reads it. Up: its place. Coloured as the launch that writes it. Most bytes alive at once:
    ${size(peak)}, at launch ${peakAt} `;
  box.append(
    el('h3', {}, 'The arena, launch by launch'),
    el('p', { class: 'soft small' }, note, arena.length ? linkTo(peakAt) : ''),
    el('p', { class: 'small' }, 'The whole step'),
    whole,
    el('p', { class: 'small' }, 'The part that the timeline shows, as high as it needs'),
    part,
  );
}
