'use strict';
// One layer as a flow: launches from top to bottom, what they load on the left, what they hand on to the right.

const TOP = 10,
  SPACE = 12,
  LANE = 13,
  LETTER = 6.3;

function wrap(words, width) {
  const lines = [[]];
  let used = 0;
  for (const text of words) {
    const wide = text.length * 6.3 + 15;
    if (used && used + wide > width) {
      lines.push([]);
      used = 0;
    }
    lines.at(-1).push([text, used, wide - 4]);
    used += wide;
  }
  return lines;
}

// what of a layer is drawn: a row for what comes in, one a launch, one for what goes out
function flowOf(span) {
  const inside = i => i >= span.first && i <= span.last;
  const row = i => (i < span.first ? 0 : i > span.last ? span.last - span.first + 2 : i - span.first + 1);
  const lanes = new Map();
  const loads = [];
  for (let i = span.first; i <= span.last; i++) {
    const l = launches[i];
    loads.push(l.inputs.filter(n => !l.producers.has(n)));
    for (const [name, from] of l.producers) {
      const buffer = tensors.get(name).buffer,
        key = `${from} ${buffer}`;
      if (!lanes.has(key)) lanes.set(key, { from, buffer, name, start: row(from), ends: new Set() });
      lanes.get(key).ends.add(row(i));
    }
    for (const name of l.outputs) {
      const t = tensors.get(name),
        key = `${i} ${t.buffer}`;
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
  const look = { x: 0, y: -8, height: 8, rx: 2, fill: `var(--${l.choice.family})` };
  const floor = Math.min(1, l.floor_us / l.us) * width;
  return [svg('rect', { ...look, width, opacity: 0.28 }), svg('rect', { ...look, width: floor })];
}

function flowChips(lines) {
  const chip = ([text, left, wide], i) =>
    svg(
      'g',
      { transform: `translate(${14 + left} ${40 + i * 18})` },
      svg('rect', { width: wide, height: 15, rx: 4, fill: 'var(--sunk)' }),
      svg('text', { x: 6, y: 11, class: 'tiny' }, text),
    );
  return lines.map((line, i) => line.map(op => chip(op, i)));
}

function flowCard(l, x, { y, height, ops }, width) {
  const hue = `var(--${l.choice.family})`;
  const times = `${us(l.us)} µs ${word(l.basis)}, floor ${us(l.floor_us)}, ${size(l.choice.bytes)}`;
  const choose = e => {
    if (e.type === 'keydown' && e.key !== 'Enter' && e.key !== ' ') return;
    e.preventDefault();
    select(l.index);
  };
  const card = svg(
    'g',
    {
      class: `hit${l.index === selected ? ' chosen' : ''}`,
      tabindex: 0,
      role: 'button',
      transform: `translate(${x} ${y})`,
      'data-launch': l.index,
      'aria-label': `${l.id}, ${l.choice.kernel}, ${us(l.us)} µs ${word(l.basis)}`,
      onclick: choose,
      onkeydown: choose,
    },
    svg('rect', { class: 'edge', width, height, rx: 7, fill: 'var(--card)', stroke: 'var(--line)' }),
    svg('rect', { width: 5, height: height - 2, x: 1, y: 1, rx: 3, fill: hue }),
    svg('text', { x: 14, y: 17, 'font-weight': 600 }, kernelName(l.choice)),
    svg('text', { x: 14, y: 32, class: 'soft mono' }, shorten(l.id, l.layer)),
    flowChips(ops),
    svg('g', { transform: `translate(14 ${height - 20})` }, flowTime(l, width - 28)),
    svg('text', { x: 14, y: height - 7, class: 'soft tiny' }, times),
  );
  return tipped(card, launchWord(l));
}

// name, shape and bytes: on one line, or where there is no room on two
const labelLines = (t, layer, room) =>
  (shorten(t.name, layer).length + shape(t).length + size(t.bytes).length + 3) * LETTER > room ? 2 : 1;
const labelHeight = lines => (lines === 2 ? 29 : 16);

function flowLabel(t, layer, x, y, anchor, room, writer) {
  const facts = `${shape(t)}  ${size(t.bytes)}`;
  const letters = Math.floor(room / LETTER);
  const whole = shorten(t.name, layer);
  const name = whole.length > letters ? `…${whole.slice(whole.length - letters + 1)}` : whole;
  const second = labelLines(t, layer, room) === 2 ? { x, dy: 12 } : {};
  const where = `${buffers.get(t.buffer).kind}${t.buffer === t.name ? '' : ` ${t.buffer}`}`;
  const label = svg(
    'text',
    { x, y, 'text-anchor': anchor, style: 'font-size: 11px' },
    svg('tspan', {}, `${name} `),
    svg('tspan', { ...second, fill: 'var(--soft)' }, facts),
  );
  return tipped(label, `${t.name}\n${facts}\n${where}${writer ? `\nwritten by ${writer}` : ''}`);
}

// where everything stands: columns from left to right, a row for each launch, a place for each lane in its row
function placeFlow(span, width) {
  const { lanes, loads, columns } = flowOf(span);
  const card = Math.min(270, Math.round(width * 0.3));
  const left = Math.round((width - card - columns * LANE) * 0.47);
  const laneX = column => left + card + 16 + column * LANE;
  const labelX = laneX(columns) + 4;
  const room = { right: width - labelX - 2, left: left - 18 };
  const tall = (name, space) => labelHeight(labelLines(tensors.get(name), span.layer, space));
  const starting = groupBy(lanes, lane => lane.start);
  const high = n => sum(starting.get(n) || [], lane => tall(lane.name, room.right));
  const entering = starting.has(0);
  const leaving = lanes.filter(lane => lane.later && lane.later.length);
  const rows = [{ y: TOP, height: entering ? high(0) + 6 : 0 }];
  let y = TOP + rows[0].height + SPACE;
  loads.forEach((names, n) => {
    const ops = wrap(launches[span.first + n].choice.ops, card - 22);
    const labels =
      Math.max(
        sum(names, name => tall(name, room.left)),
        high(n + 1),
      ) + 12;
    const height = Math.max(72 + ops.length * 18, labels);
    rows.push({ y, height, ops });
    y += height + SPACE;
  });
  rows.push({ y, height: leaving.length ? 22 : 0 });
  for (const [n, of] of starting) {
    let next = rows[n].y + (n ? 18 : 12);
    for (const lane of of) {
      lane.y = next - 4;
      next += tall(lane.name, room.right);
    }
  }
  return { span, lanes, loads, card, left, laneX, labelX, room, tall, entering, leaving, rows };
}

function flowLane(place, lane, incoming) {
  const { left, card, labelX, rows, span, room } = place;
  const x = place.laneX(lane.column);
  const hue = `var(--${launches[lane.from].choice.family})`;
  const line = d => svg('path', { class: 'lane', stroke: hue, d });
  const edge = left + card;
  const group = svg('g', { class: 'flowed' }, line(`M${lane.start ? edge : x} ${lane.y}H${labelX - 3}`));
  for (const end of [...lane.ends].sort((a, b) => a - b)) {
    if (end === rows.length - 1) {
      const to = rows[end].y + 6;
      group.append(line(`M${x} ${lane.y}V${to}`), svg('path', { fill: hue, d: `M${x - 4} ${to}h8l-4 6z` }));
    } else {
      const to = incoming(end);
      group.append(
        line(`M${x} ${lane.y}V${to - 4}q0 4 -4 4H${edge + 7}`),
        svg('path', { fill: hue, d: `M${edge + 8} ${to - 4}v8l-7 -4z` }),
      );
    }
  }
  group.append(
    svg('circle', { cx: x, cy: lane.y, r: 3, fill: hue }),
    flowLabel(tensors.get(lane.name), span.layer, labelX, lane.y + 4, 'start', room.right, launches[lane.from].id),
  );
  return group;
}

function flowLoads({ span, loads, rows, left, room, tall }) {
  return loads.map((names, n) => {
    let y = rows[n + 1].y + 18;
    return names.map(name => {
      const line = svg('path', { class: 'lane', stroke: 'var(--soft)', d: `M${left - 12} ${y - 4}H${left - 1}` });
      const label = flowLabel(tensors.get(name), span.layer, left - 16, y, 'end', room.left);
      y += tall(name, room.left);
      return [line, label];
    });
  });
}

function drawFlow(span, box) {
  const width = Math.max(700, box.clientWidth || 800);
  const place = placeFlow(span, width);
  const { rows, left, card } = place;
  const height = rows.at(-1).y + rows.at(-1).height + 6;
  // arrows that come into a launch stand one above another at its lower right
  const coming = new Map();
  const incoming = n => {
    coming.set(n, (coming.get(n) || 0) + 1);
    return rows[n].y + rows[n].height - 4 - coming.get(n) * 6;
  };
  const note = (x, y, text) => svg('text', { x, y, 'text-anchor': 'end', class: 'soft' }, text);
  const names = place.leaving.map(lane => shorten(lane.name, span.layer)).join(', ');
  const label = `Data flow of ${span.title}, ${span.kind}`;
  box.replaceChildren(
    svg(
      'svg',
      { viewBox: `0 0 ${width} ${height}`, width, height, role: 'group', 'aria-label': label },
      place.entering ? note(left, TOP + 12, 'from earlier launches') : '',
      place.lanes.map(lane => flowLane(place, lane, incoming)),
      names ? note(left + card, rows.at(-1).y + 14, `to later launches: ${names}`) : '',
      flowLoads(place),
      rows.slice(1, -1).map((row, n) => flowCard(launches[span.first + n], left, row, card)),
    ),
  );
}

function flowCaption(span) {
  const inside = launches.slice(span.first, span.last + 1);
  const alike = spans.filter(s => s.form === span.form && s.layer !== null).map(s => s.layer);
  const times = `${time(sum(inside, l => l.us))} ${totalWord}, floor ${time(sum(inside, l => l.floor_us))}`;
  const others = alike.length > 1 ? `; the same launches in layers ${ranges(alike)}` : '';
  return `${span.title}, ${span.kind}: ${plural(inside.length, 'launch')}, ${times}${others}`;
}

function drawFlows() {
  const box = el('div', { id: 'flow-box', role: 'tabpanel', 'aria-label': 'Data flow', class: 'scroll', tabindex: 0 });
  const caption = el('p', { class: 'soft small', 'aria-live': 'polite' });
  const tabs = raw.kinds.map(kind => ({ span: launches[kind.first].span, title: kind.title }));
  let current = spans[0];
  const open = span => {
    current = span;
    drawFlow(span, box);
    caption.textContent = flowCaption(span);
    buttons.forEach((b, i) => {
      const on = tabs[i].span.kind === span.kind;
      b.setAttribute('aria-selected', on);
      b.tabIndex = on ? 0 : -1;
    });
    pick.value = spans.indexOf(span);
  };
  const turn = (e, i) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!by) return;
    const next = (i + by + buttons.length) % buttons.length;
    buttons[next].focus();
    open(tabs[next].span);
  };
  const tab = ({ span, title }, i) =>
    el(
      'button',
      {
        type: 'button',
        role: 'tab',
        title,
        'aria-controls': 'flow-box',
        onclick: () => open(span),
        onkeydown: e => turn(e, i),
      },
      span.kind,
    );
  const buttons = tabs.map(tab);
  const pick = spanPicker('Layer of the data flow', open);
  const note = `A box is a launch with the ops that it computes. On the left what it loads from weights, caches and
    states; on the right what it hands on, with shape and bytes, along a line to each reader. Bytes are the tensor’s; a
    launch may read a part of it, such as the experts of its rows.`;
  const kinds = el('div', { role: 'tablist', 'aria-label': 'Kind of layer', class: 'tools' }, buttons);
  at('flow').append(el('p', { class: 'soft small' }, note), el('div', { class: 'tools' }, kinds, pick), caption, box);
  listeners.push(l => {
    if (l.span !== current || !box.firstChild) return open(l.span);
    for (const card of box.querySelectorAll('[data-launch]')) {
      card.classList.toggle('chosen', Number(card.dataset.launch) === l.index);
    }
  });
  whenWidthChanges(box, () => drawFlow(current, box));
}
