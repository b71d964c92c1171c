'use strict';
// What a rank holds, where the captured graph points, and the arena: which bytes are alive from which launch to which.

const KIND_HUE = {
  weight: 'linear',
  cache: 'mla',
  state: 'kda',
  arena: 'moe',
  zeroed: 'comm',
  index: 'norm',
  table: 'norm',
  input: 'norm',
  output: 'head',
};

// addresses in segments, the empty parts between them left out
function segments(items, apart) {
  const found = [];
  for (const p of [...items].sort((a, b) => a.address - b.address)) {
    const last = found.at(-1);
    if (last && p.address - last.to < apart) {
      last.to = Math.max(last.to, p.address + p.bytes);
      last.items.push(p);
    } else found.push({ from: p.address, to: p.address + p.bytes, items: [p] });
  }
  return found;
}
const hex = n => `0x${n.toString(16)}`;

function pointerMap(box) {
  if (!pointers.length) {
    box.append(
      el(
        'p',
        { class: 'soft small' },
        head.record
          ? 'The record of this capture holds no pointers.'
          : 'No addresses: this report was made from a plan alone. Record a capture with k3plan graph record to see where the graph points.',
      ),
    );
    return;
  }
  const total = Math.max(...pointers.map(p => p.address + p.bytes)) - Math.min(...pointers.map(p => p.address));
  const found = segments(pointers, Math.max(1 << 21, total / 200)),
    kinds = [...new Set(pointers.map(p => p.kind))];
  const most = sum(found, s => s.to - s.from),
    gapWidth = 5;
  const place = width => {
    const small = 6,
      free = width - found.length * (small + gapWidth);
    let x = 0;
    return found.map(s => {
      const wide = small + (free * (s.to - s.from)) / most,
        at = { s, x, wide };
      x += wide + gapWidth;
      return at;
    });
  };
  const rowHeight = 18,
    left = 74,
    height = kinds.length * rowHeight + 20;
  const canvas = el('canvas', {
    role: 'img',
    'aria-label': `Addresses of ${pointers.length} pointers of the captured graph, by kind`,
  });
  paint(canvas, height, (pen, width) => {
    const segs = place(width - left);
    kinds.forEach((kind, row) => {
      pen.fillStyle = colour('soft');
      pen.fillText(kind, 0, row * rowHeight + 8);
      for (const { s, x, wide } of segs) {
        pen.fillStyle = colour('sunk');
        pen.fillRect(left + x, row * rowHeight, wide, rowHeight - 4);
        pen.fillStyle = colour(KIND_HUE[kind]);
        for (const p of s.items)
          if (p.kind === kind)
            pen.fillRect(
              left + x + ((p.address - s.from) / (s.to - s.from)) * wide,
              row * rowHeight,
              Math.max(1.5, (p.bytes / (s.to - s.from)) * wide),
              rowHeight - 4,
            );
      }
    });
    pen.fillStyle = colour('soft');
    pen.fillText(hex(found[0].from), left, height - 8);
    const last = hex(found.at(-1).to);
    pen.fillText(last, width - pen.measureText(last).width, height - 8);
  });
  canvas.addEventListener('pointermove', e => {
    const r = canvas.getBoundingClientRect(),
      x = e.clientX - r.left - left,
      kind = kinds[Math.floor((e.clientY - r.top) / rowHeight)];
    const seg = place(r.width - left).find(s => x >= s.x && x <= s.x + s.wide);
    if (!seg) {
      hideTip();
      return;
    }
    const address = seg.s.from + ((x - seg.x) / seg.wide) * (seg.s.to - seg.s.from),
      mine = seg.s.items.filter(p => p.kind === kind);
    const near = mine.sort(
      (a, b) => Math.abs(a.address + a.bytes / 2 - address) - Math.abs(b.address + b.bytes / 2 - address),
    )[0];
    showTip(
      e,
      near
        ? `${near.name}\n${hex(near.address)}, ${size(near.bytes)}, ${near.kind}\nread by ${plural(near.readers.length, 'launch')}, written by ${near.writers.length}`
        : `${hex(seg.s.from)} to ${hex(seg.s.to)}`,
    );
  });
  canvas.addEventListener('pointerleave', hideTip);
  const body = kinds.map(kind => {
    const of = pointers.filter(p => p.kind === kind),
      end = Math.max(...of.map(p => p.address + p.bytes));
    return [
      el('span', {}, swatch(KIND_HUE[kind]), kind),
      { n: of.length },
      { n: size(sum(of, p => p.bytes)) },
      el('code', {}, hex(Math.min(...of.map(p => p.address)))),
      el('code', {}, hex(end)),
      { n: new Set(of.flatMap(p => p.readers)).size },
      { n: new Set(of.flatMap(p => p.writers)).size },
    ];
  });
  box.append(
    el(
      'p',
      { class: 'soft small' },
      `${plural(pointers.length, 'storage')} that the captured graph has baked in, in ${plural(found.length, 'range')} of addresses; the empty ranges between them are left out. An address that moves makes the graph read what is no longer there.`,
    ),
    canvas,
    grid(
      ['kind', { n: 'storages' }, { n: 'bytes' }, 'from', 'to', { n: 'launches that read' }, { n: 'that write' }],
      body,
    ),
  );
}

const arena = [...buffers.values()].filter(b => b.kind === 'arena');
// the family of the launch that writes a buffer first gives its colour
const madeBy = new Map();
for (const l of launches)
  for (const name of [...l.outputs, ...l.scratch]) {
    const b = tensors.get(name).buffer;
    if (!madeBy.has(b)) madeBy.set(b, l);
  }

function liveBytes() {
  const changes = new Float64Array(launches.length + 1);
  for (const b of arena) {
    changes[b.first] += b.bytes;
    changes[b.last + 1] -= b.bytes;
  }
  let now = 0;
  return Array.from(changes.slice(0, launches.length), c => (now += c));
}

// the end of the highest buffer that is alive between two launches
const topOf = (from, to) =>
  Math.max(1, ...arena.filter(b => b.last >= from && b.first < to).map(b => b.offset + b.bytes));

function gantt(title, domain, height) {
  const canvas = el('canvas', { role: 'img', 'aria-label': title });
  const left = 56,
    low = 18;
  const redraw = paint(canvas, height, (pen, width, high) => {
    const [from, to] = domain(),
      most = topOf(from, to),
      x = i => left + ((i - from) / (to - from)) * (width - left),
      y = o => (high - low) * (1 - o / most);
    pen.fillStyle = colour('sunk');
    pen.fillRect(left, 0, width - left, high - low);
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left, high);
    pen.clip();
    for (const b of arena) {
      if (b.last < from || b.first >= to) continue;
      const top = y(b.offset + b.bytes),
        deep = Math.max(1, y(b.offset) - top),
        a = x(b.first),
        wide = Math.max(1, x(b.last + 1) - a - 0.5);
      pen.fillStyle = colour(madeBy.has(b.name) ? madeBy.get(b.name).choice.family : 'norm');
      pen.fillRect(a, top, wide, Math.max(1, deep - 0.5));
      if (wide > 60 && deep > 12) {
        pen.fillStyle = colour('card');
        pen.fillText(
          fit(pen, shorten(b.name, madeBy.get(b.name)?.layer ?? null), Math.min(wide, x(to) - Math.max(a, left)) - 8),
          Math.max(a, left) + 4,
          top + deep / 2,
        );
      }
    }
    if (to - from < 60)
      for (let i = Math.ceil(from); i < to; i++) {
        pen.fillStyle = colour('line');
        pen.fillRect(x(i), 0, 0.5, high - low);
      }
    pen.restore();
    pen.fillStyle = colour('soft');
    for (const part of [0, 0.5, 1])
      pen.fillText(size(most * part), 0, Math.max(7, Math.min(high - low - 6, y(most * part))));
    pen.fillText(`launch ${Math.max(0, Math.floor(from))}`, left, high - 7);
    const last = `launch ${Math.min(launches.length, Math.ceil(to)) - 1}`;
    pen.fillText(last, width - pen.measureText(last).width, high - 7);
  });
  canvas.addEventListener('pointermove', e => {
    const r = canvas.getBoundingClientRect(),
      [from, to] = domain(),
      i = Math.floor(from + ((e.clientX - r.left - left) / (r.width - left)) * (to - from)),
      most = topOf(from, to),
      offset = (1 - (e.clientY - r.top) / (height - low)) * most;
    const b = arena.find(
      b =>
        b.first <= i &&
        i <= b.last &&
        b.offset <= offset &&
        offset < b.offset + Math.max(b.bytes, most / (height - low)),
    );
    showTip(
      e,
      b
        ? `${b.name}\n${size(b.bytes)} at ${b.offset}\nalive from launch ${b.first} (${launches[b.first].id})\nto launch ${b.last} (${launches[b.last].id})`
        : '',
    );
  });
  canvas.addEventListener('pointerleave', hideTip);
  return [canvas, redraw];
}

function drawMemory() {
  const box = at('memory'),
    kinds = groupBy([...buffers.values()], b => b.kind);
  const bytes = kind => (kind === 'arena' ? head.arena_bytes : sum(kinds.get(kind), b => b.bytes)),
    total = sum([...kinds.keys()], bytes);
  box.append(
    grid(
      ['a rank holds', { n: 'buffers' }, { n: 'bytes' }, { n: 'share' }, 'what it is'],
      [...kinds.keys()]
        .sort((a, b) => bytes(b) - bytes(a))
        .map(kind => [
          el('span', {}, swatch(KIND_HUE[kind] || 'norm'), kind),
          { n: kinds.get(kind).length },
          { n: size(bytes(kind)) },
          { n: share(bytes(kind) / total) },
          {
            weight: 'parameters, packed as the kernels read them',
            cache: 'latent cache of the MLA layers',
            state: 'KDA states and convolution windows',
            arena: 'values of the step, one on top of another by lifetime',
            zeroed: 'workspace that stays zero between launches, mailboxes',
            index: 'inputs of the step',
            output: 'outputs of the step',
          }[kind] || '',
        ]),
    ),
    el('h3', {}, 'Where the graph points'),
  );
  pointerMap(box);
  const live = liveBytes(),
    peak = Math.max(0, ...live),
    peakAt = live.indexOf(peak);
  const [whole] = gantt('The arena over the whole step', () => [0, launches.length], 150);
  const windowed = () => {
    const seen = launches.filter(l => l.end_us > view.from && l.start_us < view.to);
    return seen.length
      ? [Math.min(...seen.map(l => l.index)), Math.max(...seen.map(l => l.index)) + 1]
      : [0, launches.length];
  };
  const [part, redraw] = gantt('The arena over the launches that the timeline shows', windowed, 190);
  viewers.push(redraw);
  box.append(
    el('h3', {}, 'The arena, launch by launch'),
    el(
      'p',
      { class: 'soft small' },
      `${plural(arena.length, 'value')} share ${size(head.arena_bytes)}. Most bytes alive at once: ${size(peak)}, at launch ${peakAt} (`,
      arena.length ? linkTo(peakAt) : '',
      '). Across: from the launch that writes a value to the last that reads it. Up: its place. Coloured as the launch that writes it.',
    ),
    el('p', { class: 'small' }, 'The whole step'),
    whole,
    el('p', { class: 'small', style: 'margin-top: 10px' }, 'The part that the timeline shows, as high as it needs'),
    part,
  );
}
