'use strict';
// The data block as objects, how numbers read, and which launch is selected. Draws nothing by itself.

const raw = JSON.parse(document.getElementById('report-data').textContent);
const TEXTS = new Set(['id', 'name', 'buffer', 'dtype', 'kind', 'stage', 'basis', 'function']);
const TEXT_LISTS = new Set(['nodes', 'inputs', 'outputs', 'scratch']);

function rows(name) {
  const columns = raw.columns[name];
  return raw[name].map((row, index) => {
    const item = { index };
    columns.forEach((column, i) => {
      const cell = row[i];
      item[column] = TEXTS.has(column) ? raw.strings[cell]
        : TEXT_LISTS.has(column) ? cell.map(n => raw.strings[n])
        : ['shape', 'grid', 'block'].includes(column) ? raw.shapes[cell] : cell;
    });
    return item;
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
      const readers = launches[writer].readers;
      readers.set(buffer, [...(readers.get(buffer) || []), launch.index]);
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

const us = v => v < 100 ? v.toFixed(2) : v < 1000 ? v.toFixed(1) : v.toFixed(0);
const time = v => v < 1000 ? `${us(v)} µs` : `${(v / 1e3).toFixed(3)} ms`;
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
const word = basis => basis === 'graph' ? 'measured' : 'predicted';
const totalWord = anyGraph && launches.every(l => l.basis === 'graph') ? 'measured'
  : anyGraph ? 'measured and predicted' : 'predicted';
const shorten = (text, layer) => layer === null ? text : text.replace(new RegExp(`^L${layer}\\.`), '');
const shape = t => `${t.dtype}[${t.shape.join(', ')}]`;
const kernelName = choice => choice.kernel.replace(/^triton\./, '');
function ranges(numbers) {
  const parts = [];
  for (const n of [...numbers].sort((a, b) => a - b)) {
    if (parts.length && n === parts.at(-1)[1] + 1) parts.at(-1)[1] = n;
    else parts.push([n, n]);
  }
  return parts.map(([a, b]) => a === b ? `${a}` : `${a}-${b}`).join(', ');
}

// elements

function build(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(9).filter(c => c !== null && c !== undefined && c !== false));
  return node;
}
const el = (tag, attrs, ...children) => build(document.createElement(tag), attrs, children);
const svg = (tag, attrs, ...children) => build(document.createElementNS('http://www.w3.org/2000/svg', tag), attrs, children);
const at = id => document.getElementById(id);
const swatch = family => el('i', { class: 'swatch', style: `background: var(--${family})` });
const pill = basis => el('span', { class: `pill ${word(basis)}`, title: raw.bases[basis] }, word(basis));
const headPill = () => head.basis === 'measured'
  ? el('span', { class: 'pill measured' }, `measured on ${device}`) : el('span', { class: 'pill' }, 'predicted');
const linkTo = index => el('button', { type: 'button', class: 'plain', onclick: () => select(index) }, launches[index].id);
function launchWord(l) {
  return `${l.id}\n${l.choice.kernel}\n${word(l.basis)} ${us(l.us)} µs, floor ${us(l.floor_us)} µs, ${size(l.choice.bytes)}`;
}
function grid(titles, body, foot) {
  const cell = (tag, c) => c instanceof Node && ['TD', 'TH'].includes(c.tagName) ? c
    : typeof c === 'object' && c !== null && 'n' in c ? el(tag, { class: 'n' }, c.n) : el(tag, {}, c);
  return el('div', { class: 'scroll' }, el('table', {},
    el('thead', {}, el('tr', {}, titles.map(t => cell('th', t)))),
    el('tbody', {}, body.map(r => el('tr', {}, r.map(c => cell('td', c))))),
    foot ? el('tfoot', {}, el('tr', {}, foot.map(c => cell('td', c)))) : null));
}

// a tip that follows the pointer

const tip = at('tip');
function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = !text;
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  const below = event.clientY + 18;
  const y = below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : below;
  tip.style.left = `${x}px`;
  tip.style.top = `${y}px`;
}
const hideTip = () => { tip.hidden = true; };
const tipped = (node, text) => build(node, { onpointermove: e => showTip(e, text), onpointerleave: hideTip }, []);

// canvases: sized to their box, drawn again when the box or the colours change

const drawn = [];
const colours = new Map();
const probe = el('i', { hidden: true });
function colour(name) {
  if (!colours.has(name)) {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}
function paint(canvas, height, draw) {
  const redraw = () => {
    const width = Math.max(200, canvas.clientWidth), scale = Math.max(1, devicePixelRatio || 1);
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext('2d');
    pen.scale(scale, scale);
    pen.clearRect(0, 0, width, height);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = 'middle';
    draw(pen, width, height);
  };
  drawn.push(redraw);
  new ResizeObserver(redraw).observe(canvas);
  return redraw;
}
function redrawAll() { colours.clear(); drawn.forEach(f => f()); }
function fit(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let n = Math.floor(text.length * width / pen.measureText(text).width);
  while (n > 0 && pen.measureText(`${text.slice(0, n)}…`).width > width) n--;
  return n > 1 ? `${text.slice(0, n)}…` : '';
}

// selection

let selected = 0;
const listeners = [];
function select(index, options = {}) {
  selected = Math.max(0, Math.min(launches.length - 1, index));
  if (!options.first) history.replaceState(null, '', `#${encodeURIComponent(launches[selected].id)}`);
  listeners.forEach(f => f(launches[selected], options));
}
