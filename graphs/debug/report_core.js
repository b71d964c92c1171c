'use strict';
// The data block as objects, how numbers read, and which launch is selected. Draws nothing by itself.

const raw = JSON.parse(document.getElementById('report-data').textContent);
const TEXTS = new Set(['id', 'name', 'buffer', 'dtype', 'kind', 'stage', 'basis', 'function']);
const SHAPES = new Set(['shape', 'grid', 'block']);
const TEXT_LISTS = new Set(['nodes', 'inputs', 'outputs', 'scratch']);

function cellOf(column, cell) {
  if (TEXTS.has(column)) return raw.strings[cell];
  if (TEXT_LISTS.has(column)) return cell.map(n => raw.strings[n]);
  return SHAPES.has(column) ? raw.shapes[cell] : cell;
}

function rows(name) {
  const columns = raw.columns[name];
  return raw[name].map((row, index) => {
    return { index, ...Object.fromEntries(columns.map((column, i) => [column, cellOf(column, row[i])])) };
  });
}

const head = raw.head;
const figures = Object.fromEntries(Object.entries(raw.device.figures).map(([name, [value]]) => [name, value]));
const choices = raw.choices;
const launches = rows('launches');
const tensors = new Map(rows('tensors').map(t => [t.name, t]));
const buffers = new Map(rows('buffers').map(b => [b.name, b]));
const links = rows('links');
const spans = rows('spans');
const graphNodes = rows('graph_nodes');
const pointers = rows('pointers');
const spec = new Map(raw.spec.map(([name, value, origin]) => [name, { value, origin }]));
const device = head.record ? head.record.machine.name : raw.device.name;

// who wrote a buffer last before a launch read it, and who reads what a launch wrote
for (const launch of launches) {
  launch.choice = choices[launch.choice];
  launch.floor_us = launch.choice.floor_us;
  launch.end_us = launch.start_us + launch.us;
  launch.gap_us = Math.max(0, launch.us - launch.floor_us);
  launch.into = [];
  launch.from = [];
  launch.readers = new Map();
}
{
  const written = new Map();
  for (const launch of launches) {
    launch.producers = new Map();
    for (const name of launch.inputs) {
      const buffer = tensors.get(name).buffer;
      const writer = written.get(buffer);
      if (writer === undefined) continue;
      launch.producers.set(name, writer);
      const { readers } = launches[writer];
      // a launch may read several parts of one buffer
      readers.set(buffer, [...new Set([...(readers.get(buffer) || []), launch.index])]);
    }
    for (const name of launch.outputs) written.set(tensors.get(name).buffer, launch.index);
  }
  for (const link of links) {
    launches[link.target].into.push(link);
    launches[link.source].from.push(link);
  }
  for (const span of spans) for (let i = span.first; i <= span.last; i++) launches[i].span = span;
}
const stepEnd = Math.max(...launches.map(l => l.end_us), 1e-9);
const anyGraph = launches.some(l => l.basis === 'graph');

// numbers

const us = v => (v < 100 ? v.toFixed(2) : v < 1000 ? v.toFixed(1) : v.toFixed(0));
const time = v => (v < 1000 ? `${us(v)} µs` : `${(v / 1e3).toFixed(3)} ms`);
const share = v => `${(100 * v).toFixed(v < 0.0995 ? 1 : 0)} %`;
function size(n) {
  for (const unit of ['B', 'kB', 'MB', 'GB']) {
    if (n < 1000 || unit === 'GB') return unit === 'B' ? `${n} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
}
function count(n) {
  for (const unit of ['', ' k', ' M', ' G', ' T']) {
    if (n < 1000 || unit === ' T') return unit ? `${n.toFixed(1)}${unit}` : `${n}`;
    n /= 1000;
  }
}
const sum = (items, f) => items.reduce((total, item) => total + f(item), 0);
const plural = (n, word) => `${n} ${word}${n === 1 ? '' : word.endsWith('ch') ? 'es' : 's'}`;
const word = basis => (basis === 'graph' ? 'measured' : 'predicted');
const totalWord = [...new Set(launches.map(l => word(l.basis)))].join(' and ');
const shorten = (text, layer) => (layer === null ? text : text.replace(new RegExp(`^L${layer}\\.`), ''));
const shape = t => `${t.dtype}[${t.shape.join(', ')}]`;
const kernelName = choice => choice.kernel.replace(/^triton\./, '');
function ranges(numbers) {
  const parts = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    if (parts.length && n === parts.at(-1)[1] + 1) parts.at(-1)[1] = n;
    else parts.push([n, n]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(', ');
}

function groupBy(items, key) {
  const found = new Map();
  for (const item of items) {
    if (!found.has(key(item))) found.set(key(item), []);
    found.get(key(item)).push(item);
  }
  return found;
}
const spanHue = span => (span.layer === null ? 'head' : span.kind.startsWith('MLA') ? 'mla' : 'kda');

// selection

let selected = 0;
const listeners = [];
function select(index, options = {}) {
  hideTip();
  selected = Math.max(0, Math.min(launches.length - 1, index));
  if (!options.first) history.replaceState(null, '', `#${encodeURIComponent(launches[selected].id)}`);
  listeners.forEach(f => f(launches[selected], options));
}
