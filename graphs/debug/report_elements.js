'use strict';
// Elements, tables, tips and canvases: what every section is made of.

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
const svg = (tag, attrs, ...children) =>
  build(document.createElementNS('http://www.w3.org/2000/svg', tag), attrs, children);
const at = id => document.getElementById(id);
const swatch = family => el('i', { class: 'swatch', style: `background: var(--${family})` });
const pill = basis => el('span', { class: `pill ${word(basis)}`, title: raw.bases[basis] }, word(basis));
const headPill = () =>
  head.basis === 'measured'
    ? el('span', { class: 'pill measured' }, `measured on ${device}`)
    : el('span', { class: 'pill' }, 'predicted');
const act = (text, label, onclick) =>
  el('button', { type: 'button', 'aria-label': label, title: label, onclick }, text);
function spanPicker(label, choose) {
  const options = spans.map((s, i) => el('option', { value: i }, `${s.title} · ${s.kind}`));
  const pick = el('select', { 'aria-label': label }, options);
  pick.addEventListener('change', () => choose(spans[pick.value]));
  return pick;
}
const linkTo = index =>
  el('button', { type: 'button', class: 'plain', onclick: () => select(index) }, launches[index].id);
function launchWord(l) {
  const times = `${word(l.basis)} ${us(l.us)} µs, floor ${us(l.floor_us)} µs, ${size(l.choice.bytes)}`;
  return `${l.id}\n${l.choice.kernel}\n${times}`;
}
// a table; a cell { n } holds a number and stands to the right
function grid(titles, body, foot, style) {
  const cell = (tag, c) => {
    if (c instanceof Node && ['TD', 'TH'].includes(c.tagName)) return c;
    return c !== null && typeof c === 'object' && 'n' in c ? el(tag, { class: 'n' }, c.n) : el(tag, {}, c);
  };
  const row = (tag, cells) => build(document.createElement('tr'), {}, [cells.map(c => cell(tag, c))]);
  const lines = body.map(cells => row('td', cells));
  const last = foot ? el('tfoot', {}, row('td', foot)) : null;
  const table = el('table', { class: style }, el('thead', {}, row('th', titles)), el('tbody', {}, lines), last);
  return el('div', { class: 'scroll' }, table);
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
const hideTip = () => {
  tip.hidden = true;
};
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
    const width = Math.max(200, canvas.clientWidth);
    const scale = Math.max(1, devicePixelRatio || 1);
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
  whenWidthChanges(canvas, redraw);
  return redraw;
}
// draws now, and again in the next frame after the box got another width
function whenWidthChanges(box, draw) {
  let wide = box.clientWidth;
  draw(wide);
  const changed = () => {
    if (Math.abs(box.clientWidth - wide) < 8) return;
    wide = box.clientWidth;
    draw(wide);
  };
  new ResizeObserver(() => requestAnimationFrame(changed)).observe(box);
}
function redrawAll() {
  colours.clear();
  drawn.forEach(f => f());
}
function fit(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let n = Math.floor((text.length * width) / pen.measureText(text).width);
  while (n > 0 && pen.measureText(`${text.slice(0, n)}…`).width > width) n--;
  return n > 1 ? `${text.slice(0, n)}…` : '';
}
