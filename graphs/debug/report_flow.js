'use strict';
// One layer as a flow: launches from top to bottom, what they load on the left, what they hand on to the right.

const TOP = 10, SPACE = 12, LANE = 13, WIDE = 300;

function wrap(words, width) {
  const lines = [[]];
  let used = 0;
  for (const text of words) {
    const wide = text.length * 6 + 15;
    if (used && used + wide > width) { lines.push([]); used = 0; }
    lines.at(-1).push([text, used, wide - 4]);
    used += wide;
  }
  return lines;
}

// what of a layer is drawn: a row for what comes in, one a launch, one for what goes out
function flowOf(span) {
  const inside = i => i >= span.first && i <= span.last;
  const row = i => i < span.first ? 0 : i > span.last ? span.last - span.first + 2 : i - span.first + 1;
  const lanes = new Map(), loads = [];
  for (let i = span.first; i <= span.last; i++) {
    const l = launches[i];
    loads.push(l.inputs.filter(n => !l.producers.has(n)));
    for (const [name, from] of l.producers) {
      const buffer = tensors.get(name).buffer, key = `${from} ${buffer}`;
      if (!lanes.has(key)) lanes.set(key, { from, buffer, name, start: row(from), ends: new Set() });
      lanes.get(key).ends.add(row(i));
    }
    for (const name of l.outputs) {
      const t = tensors.get(name), key = `${i} ${t.buffer}`;
      if (!lanes.has(key)) lanes.set(key, { from: i, buffer: t.buffer, name, start: row(i), ends: new Set() });
      const lane = lanes.get(key);
      lane.name = name;
      lane.later = (l.readers.get(t.buffer) || []).filter(r => !inside(r));
      if (lane.later.length) lane.ends.add(span.last - span.first + 2);
    }
  }
  const found = [...lanes.values()].sort((a, b) => a.start - b.start);
  const free = [];
  for (const lane of found) {
    const last = Math.max(lane.start, ...lane.ends);
    lane.column = free.findIndex(busy => busy < lane.start);
    if (lane.column < 0) lane.column = free.length;
    free[lane.column] = last;
  }
  return { lanes: found, loads, columns: free.length };
}

function flowTime(l, width) {
  const part = Math.min(1, l.floor_us / l.us) * width;
  return [svg('rect', { x: 0, y: -8, width, height: 8, rx: 2, fill: `var(--${l.choice.family})`, opacity: 0.28 }),
    svg('rect', { x: 0, y: -8, width: part, height: 8, rx: 2, fill: `var(--${l.choice.family})` })];
}

function flowCard(l, x, y, width, height, chips) {
  const name = shorten(l.id, l.layer);
  const card = svg('g', { class: `hit${l.index === selected ? ' chosen' : ''}`, tabindex: 0, role: 'button', transform: `translate(${x} ${y})`, 'data-launch': l.index,
    'aria-label': `${l.id}, ${l.choice.kernel}, ${us(l.us)} µs ${word(l.basis)}`,
    onclick: () => select(l.index), onkeydown: e => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); select(l.index); } } },
    svg('rect', { class: 'edge', width, height, rx: 7, fill: 'var(--card)', stroke: 'var(--line)' }),
    svg('rect', { width: 5, height: height - 2, x: 1, y: 1, rx: 3, fill: `var(--${l.choice.family})` }),
    svg('text', { x: 14, y: 17, 'font-weight': 600 }, kernelName(l.choice)),
    svg('text', { x: 14, y: 32, class: 'soft mono' }, name),
    chips.map((line, i) => line.map(([text, left, wide]) => svg('g', { transform: `translate(${14 + left} ${40 + i * 18})` },
      svg('rect', { width: wide, height: 15, rx: 4, fill: 'var(--sunk)' }), svg('text', { x: 6, y: 11, style: 'font-size: 10.5px' }, text)))),
    svg('g', { transform: `translate(14 ${height - 20})` }, flowTime(l, width - 28)),
    svg('text', { x: 14, y: height - 7, class: 'soft', style: 'font-size: 10.5px' }, `${us(l.us)} µs ${word(l.basis)}, floor ${us(l.floor_us)}, ${size(l.choice.bytes)}`));
  return tipped(card, launchWord(l));
}

// name, shape and bytes, on two lines where there is no room for one
function flowLabel(t, layer, x, y, anchor, room) {
  const facts = `${shape(t)}  ${size(t.bytes)}`, letters = Math.floor(room / 6.2);
  let name = shorten(t.name, layer);
  if (name.length > letters) name = `…${name.slice(name.length - letters + 1)}`;
  const second = room < WIDE ? { x, dy: 12 } : {};
  return tipped(svg('text', { x, y, 'text-anchor': anchor, style: 'font-size: 11px' }, svg('tspan', {}, `${name} `), svg('tspan', { ...second, fill: 'var(--soft)' }, facts)),
    `${t.name}\n${shape(t)}, ${size(t.bytes)}\n${buffers.get(t.buffer).kind}${t.buffer === t.name ? '' : ` ${t.buffer}`}`);
}

function laneColour(lane) {
  return lane.from === undefined ? 'soft' : launches[lane.from].choice.family;
}

function drawFlow(span, box) {
  const width = Math.max(700, box.clientWidth || 800), { lanes, loads, columns } = flowOf(span);
  const card = Math.min(270, Math.round(width * 0.3)), left = Math.round((width - card - columns * LANE) * 0.47);
  const laneX = c => left + card + 16 + c * LANE, labelX = laneX(columns) + 4, room = width - labelX - 2, line = Math.min(room, left) < WIDE ? 29 : 16;
  const entering = lanes.filter(l => l.start === 0), leaving = lanes.filter(l => (l.later || []).length);
  const labels = new Map();
  for (const lane of lanes) labels.set(lane.start, [...(labels.get(lane.start) || []), lane]);
  const rowsAt = [{ y: TOP, height: entering.length ? entering.length * line + 6 : 0 }];
  let y = TOP + rowsAt[0].height + SPACE;
  const chips = [];
  for (let i = span.first; i <= span.last; i++) {
    const l = launches[i], ops = wrap(l.choice.ops, card - 22), n = i - span.first + 1;
    chips.push(ops);
    const height = Math.max(72 + ops.length * 18, Math.max(loads[n - 1].length, (labels.get(n) || []).length) * line + 12);
    rowsAt.push({ y, height });
    y += height + SPACE;
  }
  rowsAt.push({ y, height: leaving.length ? 22 : 0 });
  const high = y + rowsAt.at(-1).height + 6;
  const picture = svg('svg', { viewBox: `0 0 ${width} ${high}`, width, height: high, role: 'group', 'aria-label': `Data flow of ${span.title}, ${span.kind}` });
  // where each lane leaves its row, and where it comes into the others
  const slot = new Map();
  for (const [n, of] of labels) of.forEach((lane, i) => slot.set(lane, rowsAt[n].y + (n ? 18 : 12) + i * line));
  const comes = new Map();
  const incoming = n => { comes.set(n, (comes.get(n) || 0) + 1); return rowsAt[n].y + rowsAt[n].height - 4 - comes.get(n) * 6; };
  if (entering.length) picture.append(svg('text', { x: left, y: TOP + 12, 'text-anchor': 'end', class: 'soft' }, 'from earlier launches'));
  for (const lane of lanes) {
    const x = laneX(lane.column), from = slot.get(lane), ends = [...lane.ends].sort((a, b) => a - b), hue = `var(--${laneColour(lane)})`;
    const group = svg('g', { class: 'flowed' });
    if (lane.start) group.append(svg('path', { class: 'lane', stroke: hue, d: `M${left + card} ${from - 4}H${labelX - 3}` }));
    else group.append(svg('path', { class: 'lane', stroke: hue, d: `M${x} ${from - 4}H${labelX - 3}` }));
    for (const end of ends) {
      const last = end === rowsAt.length - 1, to = last ? rowsAt[end].y + 6 : incoming(end);
      group.append(svg('path', { class: 'lane', stroke: hue, d: last ? `M${x} ${from - 4}V${to}` : `M${x} ${from - 4}V${to - 4}q0 4 -4 4H${left + card + 7}` }));
      group.append(svg('path', { fill: hue, d: last ? `M${x - 4} ${to}h8l-4 6z` : `M${left + card + 8} ${to - 4}v8l-7 -4z` }));
    }
    group.append(svg('circle', { cx: x, cy: from - 4, r: 3, fill: hue }));
    group.append(flowLabel(tensors.get(lane.name), span.layer, labelX, from, 'start', Math.min(room, left)));
    if (!lane.start) tipped(group, `written by ${launches[lane.from].id}`);
    picture.append(group);
  }
  if (leaving.length) picture.append(svg('text', { x: left + card, y: rowsAt.at(-1).y + 14, 'text-anchor': 'end', class: 'soft' },
    `to later launches: ${leaving.map(l => shorten(l.name, span.layer)).join(', ')}`));
  loads.forEach((names, n) => names.forEach((name, i) => {
    const t = tensors.get(name), mid = rowsAt[n + 1].y + 18 + i * line;
    picture.append(svg('path', { class: 'lane', stroke: 'var(--soft)', d: `M${left - 12} ${mid - 4}H${left - 1}` }));
    picture.append(flowLabel(t, span.layer, left - 16, mid, 'end', Math.min(room, left - 18)));
  }));
  for (let i = span.first; i <= span.last; i++) {
    const n = i - span.first + 1;
    picture.append(flowCard(launches[i], left, rowsAt[n].y, card, rowsAt[n].height, chips[n - 1]));
  }
  box.replaceChildren(picture);
}

function drawFlows() {
  const box = el('div', { id: 'flow-box', role: 'tabpanel', 'aria-label': 'Data flow', class: 'scroll' });
  const tabs = raw.kinds.map(kind => ({ span: launches[kind.first].span, title: kind.title }));
  let current = null;
  const open = span => {
    current = span;
    drawFlow(span, box);
    const total = sum(launches.slice(span.first, span.last + 1), l => l.us), floor = sum(launches.slice(span.first, span.last + 1), l => l.floor_us);
    const alike = spans.filter(s => s.form === span.form && s.layer !== null).map(s => s.layer);
    caption.textContent = `${span.title}, ${span.kind}: ${plural(span.last - span.first + 1, 'launch')}, ${time(total)} ${totalWord}, floor ${time(floor)}`
      + (alike.length > 1 ? `; the same launches in layers ${ranges(alike)}` : '');
    buttons.forEach((b, i) => { const on = tabs[i].span.kind === span.kind; b.setAttribute('aria-selected', on); b.tabIndex = on ? 0 : -1; });
    pick.value = spans.indexOf(span);
  };
  const buttons = tabs.map((tab, i) => el('button', { type: 'button', role: 'tab', title: tab.title, onclick: () => open(tab.span),
    onkeydown: e => { const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key]; if (by) { const b = buttons[(i + by + buttons.length) % buttons.length]; b.focus(); b.click(); } } }, tab.span.kind));
  const pick = el('select', { 'aria-label': 'Layer of the data flow', onchange: () => open(spans[pick.value]) }, spans.map((s, i) => el('option', { value: i }, `${s.title} · ${s.kind}`)));
  const caption = el('p', { class: 'soft small', 'aria-live': 'polite' });
  at('flow').append(
    el('p', { class: 'soft small' }, 'A box is a launch with the ops that it computes. On the left what it loads from weights, caches and states; on the right what it hands on, with shape and bytes, along a line to each reader. Bytes are the tensor’s; a launch may read a part of it, such as the experts of its rows.'),
    el('div', { class: 'tools' }, el('div', { role: 'tablist', 'aria-label': 'Kind of layer', class: 'tools', style: 'margin: 0' }, buttons), pick), caption, box);
  listeners.push(l => {
    if (!current || l.index < current.first || l.index > current.last) return open(l.span);
    box.querySelectorAll('[data-launch]').forEach(g => g.classList.toggle('chosen', Number(g.dataset.launch) === l.index));
  });
  let wide = 0;
  new ResizeObserver(() => { if (current && Math.abs(box.clientWidth - wide) > 8) { wide = box.clientWidth; drawFlow(current, box); } }).observe(box);
}
