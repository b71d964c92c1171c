'use strict';
// Where the captured graph points: every storage whose address it has baked in.

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
const MAP = { left: 74, row: 18, gap: 5, least: 6 };
const hex = n => `0x${n.toString(16)}`;

// addresses in segments, the empty parts between them left out
function segments(items, apart) {
  const found = [];
  for (const p of [...items].sort((a, b) => a.address - b.address)) {
    const last = found.at(-1);
    const end = p.address + p.bytes;
    if (last && p.address - last.to < apart) {
      last.to = Math.max(last.to, end);
      last.items.push(p);
    } else {
      found.push({ from: p.address, to: end, items: [p] });
    }
  }
  return found;
}

// segments side by side: as wide as their bytes, but never too narrow to see
function placeSegments(found, width) {
  const bytes = sum(found, s => s.to - s.from);
  const free = width - MAP.left - found.length * (MAP.least + MAP.gap);
  let x = MAP.left;
  return found.map(s => {
    const placed = { ...s, x, wide: MAP.least + (free * (s.to - s.from)) / bytes };
    placed.per = placed.wide / (s.to - s.from);
    x += placed.wide + MAP.gap;
    return placed;
  });
}

function pointerCanvas(found, kinds) {
  const label = `Addresses of ${pointers.length} pointers of the captured graph, by kind`;
  const canvas = el('canvas', { role: 'img', 'aria-label': label });
  const high = MAP.row - 4;
  const height = kinds.length * MAP.row + 20;
  paint(canvas, height, (pen, width) => {
    const placed = placeSegments(found, width);
    for (const [i, kind] of kinds.entries()) {
      const y = i * MAP.row;
      pen.fillStyle = colour('soft');
      pen.fillText(kind, 0, y + 8);
      for (const s of placed) {
        pen.fillStyle = colour('sunk');
        pen.fillRect(s.x, y, s.wide, high);
        pen.fillStyle = colour(KIND_HUE[kind]);
        for (const p of s.items.filter(p => p.kind === kind)) {
          pen.fillRect(s.x + (p.address - s.from) * s.per, y, Math.max(1.5, p.bytes * s.per), high);
        }
      }
    }
    const last = hex(found.at(-1).to);
    pen.fillStyle = colour('soft');
    pen.fillText(hex(found[0].from), MAP.left, height - 8);
    pen.fillText(last, width - pen.measureText(last).width, height - 8);
  });
  canvas.addEventListener('pointermove', e => {
    const box = canvas.getBoundingClientRect();
    const x = e.clientX - box.left;
    const kind = kinds[Math.floor((e.clientY - box.top) / MAP.row)];
    const s = placeSegments(found, box.width).find(s => s.x <= x && x <= s.x + s.wide);
    if (!s) return hideTip();
    const address = s.from + (x - s.x) / s.per;
    const away = p => Math.abs(p.address + p.bytes / 2 - address);
    const near = s.items.filter(p => p.kind === kind).sort((a, b) => away(a) - away(b))[0];
    showTip(e, near ? pointerText(near) : `${hex(s.from)} to ${hex(s.to)}`);
  });
  canvas.addEventListener('pointerleave', hideTip);
  return canvas;
}

function pointerText(p) {
  const users = `read by ${plural(p.readers.length, 'launch')}, written by ${p.writers.length}`;
  return `${p.name}\n${hex(p.address)}, ${size(p.bytes)}, ${p.kind}\n${users}`;
}

function pointerTable(kinds) {
  const numbers = ['launches that read', 'that write'].map(n => ({ n }));
  const body = kinds.map(kind => {
    const of = pointers.filter(p => p.kind === kind);
    const ends = [Math.min(...of.map(p => p.address)), Math.max(...of.map(p => p.address + p.bytes))];
    const users = ['readers', 'writers'].map(end => ({ n: new Set(of.flatMap(p => p[end])).size }));
    const name = el('span', {}, swatch(KIND_HUE[kind]), kind);
    return [
      name,
      { n: of.length },
      { n: size(sum(of, p => p.bytes)) },
      ...ends.map(a => el('code', {}, hex(a))),
      ...users,
    ];
  });
  return grid(['kind', { n: 'storages' }, { n: 'bytes' }, 'from', 'to', ...numbers], body);
}

function drawPointers(box) {
  box.append(el('h3', {}, 'Where the graph points'));
  if (!pointers.length) {
    const none = `No addresses: this report was made from a plan alone. Record a capture with k3plan graph record to see
      where the graph points.`;
    box.append(paragraph(head.record ? 'The record of this capture holds no pointers.' : none));
    return;
  }
  const ends = pointers.map(p => p.address + p.bytes);
  const whole = Math.max(...ends) - Math.min(...pointers.map(p => p.address));
  const found = segments(pointers, Math.max(2 ** 21, whole / 200));
  const kinds = [...new Set(pointers.map(p => p.kind))];
  const note = `${plural(pointers.length, 'storage')} that the captured graph has baked in, in
    ${plural(found.length, 'range')} of addresses; the empty ranges between them are left out. An address that moves
    makes the graph read what is no longer there.`;
  box.append(paragraph(note), pointerCanvas(found, kinds), pointerTable(kinds));
}
