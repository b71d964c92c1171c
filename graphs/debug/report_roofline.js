'use strict';
// Roofline: what each kind of launch moves and computes against its time, and what the device could do.

const PLOT = { height: 340, left: 46, right: 12, top: 22, bottom: 40 };

// a dot for each kind of launch: the same kernel at the same price
const dots = [...groupBy(launches, l => l.choice)].map(([choice, of]) => {
  const times = of.map(l => l.us);
  return {
    choice,
    of,
    us: sum(times, t => t) / of.length,
    low: Math.min(...times),
    high: Math.max(...times),
    gap: sum(of, l => l.gap_us),
    basis: of[0].basis,
    radius: 3.5 + Math.sqrt(of.length) * 0.55,
  };
});

function logScale(values, from, to) {
  const low = Math.log10(Math.min(...values));
  const high = Math.log10(Math.max(...values));
  const pad = (high - low || 1) * 0.07;
  const scale = v => from + ((Math.log10(v) - low + pad) / (high - low + 2 * pad)) * (to - from);
  scale.powers = [];
  for (let p = Math.ceil(low - pad); p <= high + pad; p++) scale.powers.push(10 ** p);
  scale.ends = [10 ** (low - pad), 10 ** (high + pad)];
  return scale;
}

// a plot: which amount of a launch is on its x axis, up to where, and the device's lines as functions of it
function panelOf(kind, width) {
  const shown = dots.filter(d => d.choice[kind.amount] > 0);
  const amounts = [...shown.map(d => d.choice[kind.amount]), kind.reach];
  const times = [...shown.flatMap(d => [d.low, d.high]), figures.boundary_us];
  const x = logScale(amounts, PLOT.left, width - PLOT.right);
  const y = logScale(times, PLOT.height - PLOT.bottom, PLOT.top);
  return { ...kind, shown, x, y, width, at: d => [x(d.choice[kind.amount]), y(d.us)] };
}

function panelAxes({ x, y, width, title, amount }) {
  const low = PLOT.height - PLOT.bottom;
  const end = width - PLOT.right;
  const every = Math.ceil(52 / (x(10 * x.powers[0]) - x(x.powers[0])));
  const text = p => (amount === 'bytes' ? size(p) : count(p)).replace('.0', '');
  const steps = y.powers.length < 4 ? [0.2, 0.5, 1, 2, 5] : [1];
  const times = new Set(y.powers.flatMap(p => steps.map(s => +(p * s).toPrecision(3))));
  return [
    x.powers.map((p, i) => [
      svg('line', { x1: x(p), x2: x(p), y1: PLOT.top, y2: low, stroke: 'var(--line)' }),
      i % every ? '' : svg('text', { x: x(p), y: low + 16, 'text-anchor': 'middle', class: 'soft' }, text(p)),
    ]),
    [...times]
      .filter(t => t >= y.ends[0] && t <= y.ends[1])
      .map(t => [
        svg('line', { x1: PLOT.left, x2: end, y1: y(t), y2: y(t), stroke: 'var(--line)' }),
        svg('text', { x: PLOT.left - 6, y: y(t) + 4, 'text-anchor': 'end', class: 'soft' }, `${t}`),
      ]),
    svg('text', { x: end, y: PLOT.height - 6, 'text-anchor': 'end', class: 'soft' }, title),
    svg('text', { x: 4, y: 12, class: 'soft' }, `µs, ${totalWord}`),
  ];
}

function panelLine({ x, y, amount }, line) {
  const points = [];
  for (let i = 0; i <= 60; i++) {
    const v = x.ends[0] * (x.ends[1] / x.ends[0]) ** (i / 60);
    points.push(`${x(v).toFixed(1)},${y(line.time(v)).toFixed(1)}`);
  }
  const look = { fill: 'none', stroke: `var(--${line.colour})`, 'stroke-width': 1.6, 'stroke-dasharray': line.dash };
  return tipped(svg('polyline', { points: points.join(' '), 'clip-path': `url(#clip-${amount})`, ...look }), line.text);
}

function dotText(d) {
  const spread = d.high > d.low * 1.02 ? ` (${us(d.low)} to ${us(d.high)})` : '';
  return [
    d.choice.kernel,
    `${plural(d.of.length, 'launch')}, such as ${d.of[0].id}`,
    `${word(d.basis)} ${us(d.us)} µs${spread}, floor ${us(d.choice.floor_us)} µs`,
    `${size(d.choice.bytes)}, ${count(d.choice.flops)} operations`,
    `${us(d.gap)} µs above the floors in all`,
  ].join('\n');
}

function panelDot(panel, d) {
  const [cx, cy] = panel.at(d);
  const hue = `var(--${d.choice.family})`;
  const choose = () => select(d.of[0].index);
  const dot = svg(
    'g',
    {
      class: 'hit',
      tabindex: 0,
      role: 'button',
      'aria-label': `${d.choice.kernel}, ${us(d.us)} µs ${word(d.basis)}`,
      onclick: choose,
      onkeydown: e => e.key === 'Enter' && choose(),
    },
    d.high > d.low * 1.02
      ? svg('line', { x1: cx, x2: cx, y1: panel.y(d.low), y2: panel.y(d.high), stroke: hue, 'stroke-width': 1.5 })
      : '',
    svg('circle', { class: 'edge', cx, cy, r: d.radius, fill: hue, 'fill-opacity': 0.75, stroke: 'var(--card)' }),
  );
  return tipped(dot, dotText(d));
}

// names at the dots that lose most, where there is a free place beside the dot
function panelNames(panel) {
  const placed = [];
  const free = (d, [a, b], wide) =>
    a > PLOT.left &&
    a + wide < panel.width - 8 &&
    b > PLOT.top + 8 &&
    b < PLOT.height - PLOT.bottom - 4 &&
    placed.every(p => a > p.a + p.wide + 4 || p.a > a + wide + 4 || Math.abs(b - p.b) > 12) &&
    panel.shown.every(other => {
      const [x, y] = panel.at(other);
      const away = x < a - other.radius || x > a + wide + other.radius || Math.abs(y - b + 4) > other.radius + 5;
      return other === d || away;
    });
  for (const d of [...panel.shown].sort((p, q) => q.gap - p.gap).slice(0, 9)) {
    const name = kernelName(d.choice);
    const wide = name.length * 6.2;
    const [x, y] = panel.at(d);
    const right = x + d.radius + 3;
    const left = x - wide - d.radius - 3;
    const spots = [
      [right, y + 4],
      [right, y - 9],
      [left, y + 4],
      [left, y - 9],
      [right, y + 17],
      [x - wide / 2, y - 14],
      [left, y + 17],
    ];
    const spot = spots.find(s => free(d, s, wide));
    if (spot && placed.every(p => p.name !== name)) placed.push({ a: spot[0], b: spot[1], wide, name });
  }
  return placed.map(p => svg('text', { x: p.a, y: p.b, 'pointer-events': 'none' }, p.name));
}

function rooflinePanel(kind, width) {
  const panel = panelOf(kind, width);
  const area = {
    x: PLOT.left,
    y: PLOT.top,
    width: width - PLOT.left - PLOT.right,
    height: PLOT.height - PLOT.bottom - PLOT.top,
  };
  return svg(
    'svg',
    { viewBox: `0 0 ${width} ${PLOT.height}`, width, height: PLOT.height, role: 'group', 'aria-label': kind.title },
    svg('clipPath', { id: `clip-${kind.amount}` }, svg('rect', area)),
    panelAxes(panel),
    kind.lines.map(line => panelLine(panel, line)),
    [...panel.shown].sort((a, b) => b.of.length - a.of.length).map(d => panelDot(panel, d)),
    panelNames(panel),
  );
}

function rooflineKinds() {
  const f = figures;
  const line = (figure, colour, dash, text, time) => {
    return { colour, dash, time, text: `${text}\n${raw.device.figures[figure][1]}` };
  };
  const boundary = line('boundary_us', 'soft', '2 3', `kernel boundary ${f.boundary_us} µs`, () => f.boundary_us);
  const floor = b => b / f.bandwidth_gbs / 1e3;
  const cold = `a cold stream: ${f.ramp_us} µs ramp + bytes / ${f.bandwidth_gbs} GB/s`;
  // an axis reaches so far to the right that its floor meets the kernel boundary
  return [
    {
      amount: 'bytes',
      title: 'bytes that a launch moves',
      reach: f.bandwidth_gbs * 1e3 * f.boundary_us,
      lines: [
        line('bandwidth_gbs', 'good', null, `floor: bytes / ${f.bandwidth_gbs} GB/s`, floor),
        line('ramp_us', 'ink', '6 4', cold, b => f.ramp_us + floor(b)),
        boundary,
      ],
    },
    {
      amount: 'flops',
      title: 'operations of a launch',
      reach: f.matrix_tflops * 1e6 * f.boundary_us * 4,
      lines: [
        line(
          'matrix_tflops',
          'good',
          null,
          `floor: operations / ${f.matrix_tflops} TFLOP/s`,
          n => n / f.matrix_tflops / 1e6,
        ),
        boundary,
      ],
    },
  ];
}

function drawRoofline() {
  const box = el('div', { class: 'columns' });
  const kinds = rooflineKinds();
  const mark = line => `border-top: 2px ${line.dash ? 'dashed' : 'solid'} var(--${line.colour})`;
  const legend = new Map(kinds.flatMap(k => k.lines).map(line => [line.text.split('\n')[0], line]));
  const note = `A dot is a kernel at one price, larger where more launches have it; the lines are the device’s. Names
    stand at the dots that lose most above their floor. Rates of ${raw.device.name}; hover a line for the source of its
    figure.`;
  at('roofline').append(
    el('p', { class: 'soft small' }, note),
    box,
    el(
      'div',
      { class: 'legend' },
      [...legend].map(([text, line]) => el('span', {}, el('i', { class: 'swatch rule', style: mark(line) }), text)),
    ),
  );
  whenWidthChanges(at('roofline'), wide => {
    const inner = wide - 34;
    const width = Math.max(330, inner > 700 ? Math.floor((inner - 24) / 2) : inner);
    box.replaceChildren(...kinds.map(kind => rooflinePanel(kind, width)));
  });
}
