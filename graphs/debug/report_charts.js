'use strict';
// Roofline, where the time goes, and what the alternatives would have cost.

function groupBy(items, key) {
  const found = new Map();
  for (const item of items) found.set(key(item), [...(found.get(key(item)) || []), item]);
  return found;
}

// a dot for each kind of launch: the same kernel at the same price
const dots = [...groupBy(launches, l => l.choice)].map(([choice, of]) => {
  const times = of.map(l => l.us);
  return { choice, of, us: sum(times, t => t) / of.length, low: Math.min(...times), high: Math.max(...times), gap: sum(of, l => l.gap_us), basis: of[0].basis };
});

function logScale(values, from, to) {
  const low = Math.log10(Math.min(...values)), high = Math.log10(Math.max(...values)), pad = (high - low || 1) * 0.07;
  const scale = v => from + (Math.log10(v) - low + pad) / (high - low + 2 * pad) * (to - from);
  scale.powers = [];
  for (let p = Math.ceil(low - pad); p <= high + pad; p++) scale.powers.push(10 ** p);
  scale.ends = [10 ** (low - pad), 10 ** (high + pad)];
  return scale;
}

function rooflinePanel(title, amount, unit, lines, reach, width) {
  const height = 340, left = 46, bottom = 40, shown = dots.filter(d => amount(d.choice) > 0);
  // so far to the right that the floor meets the times
  const x = logScale([...shown.map(d => amount(d.choice)), reach], left, width - 12);
  const y = logScale([...shown.flatMap(d => [d.low, d.high]), figures.boundary_us], height - bottom, 22);
  const picture = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'group', 'aria-label': title });
  picture.append(svg('clipPath', { id: `clip-${unit}` }, svg('rect', { x: left, y: 22, width: width - left - 12, height: height - bottom - 22 })));
  for (const p of x.powers) picture.append(svg('line', { x1: x(p), x2: x(p), y1: 22, y2: height - bottom, stroke: 'var(--line)' }),
    svg('text', { x: x(p), y: height - bottom + 16, 'text-anchor': 'middle', class: 'soft' }, unit === 'bytes' ? size(p).replace('.0', '') : count(p).replace('.0', '')));
  for (const p of y.powers.flatMap(p => y.powers.length < 4 ? [p / 5, p / 2, p, p * 2, p * 5] : [p]).filter((p, i, all) => p >= y.ends[0] && p <= y.ends[1] && all.indexOf(p) === i)) picture.append(svg('line', { x1: left, x2: width - 12, y1: y(p), y2: y(p), stroke: 'var(--line)' }),
    svg('text', { x: left - 6, y: y(p) + 4, 'text-anchor': 'end', class: 'soft' }, `${+p.toPrecision(3)}`));
  picture.append(svg('text', { x: width - 12, y: height - 6, 'text-anchor': 'end', class: 'soft' }, title), svg('text', { x: 4, y: 12, class: 'soft' }, `µs, ${totalWord}`));
  for (const line of lines) {
    const points = [];
    for (let i = 0; i <= 60; i++) { const v = x.ends[0] * (x.ends[1] / x.ends[0]) ** (i / 60), t = line.at(v); if (t > 0) points.push(`${x(v).toFixed(1)},${y(t).toFixed(1)}`); }
    picture.append(tipped(svg('polyline', { points: points.join(' '), fill: 'none', stroke: `var(--${line.colour})`, 'stroke-width': 1.6, 'stroke-dasharray': line.dash, 'clip-path': `url(#clip-${unit})` }), line.text));
  }
  for (const d of [...shown].sort((a, b) => b.of.length - a.of.length)) {
    const cx = x(amount(d.choice)), r = 3.5 + Math.sqrt(d.of.length) * 0.55, name = `${d.choice.kernel}, ${us(d.us)} µs ${word(d.basis)}`;
    if (d.high > d.low * 1.02) picture.append(svg('line', { x1: cx, x2: cx, y1: y(d.low), y2: y(d.high), stroke: `var(--${d.choice.family})`, 'stroke-width': 1.5 }));
    picture.append(tipped(svg('g', { class: 'hit', tabindex: 0, role: 'button', 'aria-label': name, onclick: () => select(d.of[0].index), onkeydown: e => { if (e.key === 'Enter') select(d.of[0].index); } },
      svg('circle', { class: 'edge', cx, cy: y(d.us), r, fill: `var(--${d.choice.family})`, 'fill-opacity': 0.75, stroke: 'var(--card)' })),
      `${d.choice.kernel}\n${plural(d.of.length, 'launch')}, such as ${d.of[0].id}\n${word(d.basis)} ${us(d.us)} µs${d.high > d.low * 1.02 ? ` (${us(d.low)} to ${us(d.high)})` : ''}, floor ${us(d.choice.floor_us)} µs\n`
      + `${size(d.choice.bytes)}, ${count(d.choice.flops)} operations\n${us(d.gap)} µs above the floors in all`));
  }
  const placed = [];
  for (const d of [...shown].sort((a, b) => b.gap - a.gap).slice(0, 9)) {
    const text = kernelName(d.choice), wide = text.length * 6.2, cx = x(amount(d.choice)), cy = y(d.us);
    const spots = [[cx + 9, cy + 4], [cx + 9, cy - 9], [cx - wide - 9, cy + 4], [cx - wide - 9, cy - 9], [cx + 9, cy + 17], [cx - wide / 2, cy - 14], [cx - wide - 9, cy + 17]];
    const spot = spots.find(([a, b]) => a > left && a + wide < width - 8 && b > 30 && b < height - bottom - 4
      && placed.every(([c, e, w]) => a > c + w + 4 || c > a + wide + 4 || Math.abs(b - e) > 12)
      && shown.every(o => { const ox = x(amount(o.choice)), oy = y(o.us); const r = 4 + Math.sqrt(o.of.length) * 0.55;
        return o === d || ox < a - r || ox > a + wide + r || Math.abs(oy - b + 4) > r + 5; }));
    if (!spot || placed.some(p => p[3] === text)) continue;
    placed.push([...spot, wide, text]);
    picture.append(svg('text', { x: spot[0], y: spot[1], 'pointer-events': 'none' }, text));
  }
  return picture;
}

function drawRoofline() {
  const f = figures, source = name => raw.device.figures[name][1];
  const byBytes = [
    { at: b => b / f.bandwidth_gbs / 1e3, colour: 'good', text: `floor: bytes / ${f.bandwidth_gbs} GB/s\n${source('bandwidth_gbs')}` },
    { at: b => f.ramp_us + b / f.bandwidth_gbs / 1e3, colour: 'ink', dash: '6 4', text: `a cold stream: ${f.ramp_us} µs ramp + bytes / ${f.bandwidth_gbs} GB/s\n${source('ramp_us')}` },
    { at: () => f.boundary_us, colour: 'soft', dash: '2 3', text: `kernel boundary ${f.boundary_us} µs\n${source('boundary_us')}` }];
  const byFlops = [
    { at: n => n / f.matrix_tflops / 1e6, colour: 'good', text: `floor: operations / ${f.matrix_tflops} TFLOP/s\n${source('matrix_tflops')}` }, byBytes[2]];
  const box = el('div', { class: 'columns' });
  const note = line => el('span', {}, el('i', { class: 'swatch', style: `background: none; height: 0; border-radius: 0; vertical-align: 3px; width: 18px; border-top: 2px ${line.dash ? 'dashed' : 'solid'} var(--${line.colour})` }), line.text.split('\n')[0]);
  at('roofline').append(el('p', { class: 'soft small' }, 'A dot is a kernel at one price, larger where more launches have it; the lines are the device’s. Names stand at the dots that lose most above their floor. ',
    `Rates of ${raw.device.name}; hover a line for the source of its figure.`), box, el('div', { class: 'legend' }, [...byBytes, byFlops[0]].map(note)));
  const redraw = () => {
    const inner = at('roofline').clientWidth - 32, width = Math.max(330, inner > 700 ? Math.floor((inner - 24) / 2) : inner);
    box.replaceChildren(rooflinePanel('bytes that a launch moves', c => c.bytes, 'bytes', byBytes, f.bandwidth_gbs * 1e3 * f.boundary_us, width), rooflinePanel('operations of a launch', c => c.flops, 'flops', byFlops, f.matrix_tflops * 1e6 * f.boundary_us * 4, width));
  };
  let wide = 0;
  new ResizeObserver(() => { if (Math.abs(at('roofline').clientWidth - wide) > 8) { wide = at('roofline').clientWidth; redraw(); } }).observe(at('roofline'));
  redraw();
}

function stack(families, floor, total, most) {
  const colour = `background: var(--${families})`, part = v => `${(100 * v / most).toFixed(2)}%`;
  return el('div', { class: 'stack', role: 'img', 'aria-label': `floor ${us(floor)} of ${us(total)} µs` },
    el('i', { style: `${colour}; width: ${part(Math.min(floor, total))}` }), el('i', { class: 'gap', style: `${colour}; width: ${part(Math.max(0, total - floor))}` }));
}

function drawTime() {
  const kernels = [...groupBy(launches, l => l.choice.kernel)].map(([name, of]) => ({
    name, of, family: of[0].choice.family, launches: of.length, total: sum(of, l => l.us), floor: sum(of, l => l.floor_us), gap: sum(of, l => l.gap_us),
    planned: sum(of, l => l.planned_us), each: sum(of, l => l.us) / of.length, word: [...new Set(of.map(l => word(l.basis)))].join(' and '), bytes: sum(of, l => l.choice.bytes) }));
  const all = sum(kernels, k => k.total), compared = anyGraph;
  const columns = [['kernel', 'name'], ['launches', 'launches'], ['µs each', 'each'], ['floor µs', 'floor'], ['above µs', 'gap'], ['total µs', 'total'], ...(compared ? [['plan said µs', 'planned']] : []), ['share', 'total']];
  const holder = el('div');
  let by = 'total';
  const render = () => {
    kernels.sort((a, b) => by === 'name' ? a.name.localeCompare(b.name) : b[by] - a[by]);
    const most = Math.max(...kernels.map(k => k.total));
    const titles = [...columns.map(([title, key], i) => el('th', { class: i ? 'n' : '', 'aria-sort': key === by && title !== 'share' ? (key === 'name' ? 'ascending' : 'descending') : null },
      el('button', { type: 'button', title: `Sort by ${title}`, onclick: () => { by = key; render(); } }, title))), 'floor, above'];
    holder.replaceChildren(grid(titles, kernels.map(k => [
      el('td', {}, el('span', { style: 'white-space: nowrap' }, swatch(k.family), el('button', { type: 'button', class: 'plain', title: `Select ${k.of[0].id}`, onclick: () => select(k.of[0].index) }, k.name))),
      { n: k.launches }, { n: us(k.each) }, { n: us(k.floor) }, { n: us(k.gap) }, el('td', { class: 'n', title: k.word }, us(k.total)), ...(compared ? [{ n: us(k.planned) }] : []), { n: share(k.total / all) },
      stack(k.family, k.floor, k.total, most)]),
      ['all', { n: launches.length }, '', { n: us(sum(kernels, k => k.floor)) }, { n: us(sum(kernels, k => k.gap)) }, { n: us(all) }, ...(compared ? [{ n: us(sum(kernels, k => k.planned)) }] : []), { n: '100 %' }, '']));
  };
  render();
  const kinds = [...groupBy(spans, s => s.kind)].map(([kind, of]) => {
    const inside = of.flatMap(s => launches.slice(s.first, s.last + 1)), total = sum(inside, l => l.us), floor = sum(inside, l => l.floor_us);
    return [kind, { n: of.length }, { n: (inside.length / of.length).toFixed(1) }, { n: us(total / of.length) }, { n: us(floor / of.length) }, { n: us(total) }, { n: share(total / all) }, stack(kind.startsWith('MLA') ? 'mla' : kind.startsWith('KDA') ? 'kda' : 'head', floor, total, all)];
  });
  at('time').append(el('p', { class: 'soft small' }, `All times ${totalWord}. Dark is the floor, light what is above it. A launch that beats its floor counts as at its floor.`), holder,
    el('h3', {}, 'By kind of layer'), grid(['kind', { n: 'how many' }, { n: 'launches each' }, { n: 'µs each' }, { n: 'floor each' }, { n: 'total µs' }, { n: 'share' }, 'floor, above'], kinds));
}

function drawAlgebra() {
  const box = at('algebra');
  if (!raw.alternatives.length) { box.append(el('p', { class: 'soft' }, 'The plan has no choice of algebra.')); return; }
  box.append(el('p', { class: 'soft small' }, 'What a step would cost with the other value of each choice, the rest as taken. ',
    el('span', { class: 'pill' }, 'predicted'), ' from one layer of each kind times their number, so the taken value need not equal the sum over all launches above.'));
  const body = raw.alternatives.flatMap(a => {
    const prices = Object.entries(a.us), most = Math.max(...prices.map(([, v]) => v)), best = Math.min(...prices.map(([, v]) => v));
    if (!prices.length) return [[el('code', {}, a.choice), el('b', {}, a.taken), { n: '–' }, { n: '–' }, '', a.why]];
    return prices.map(([value, v], i) => [i ? '' : el('code', {}, a.choice), value === a.taken ? el('b', {}, `${value} ✓`) : value, { n: (v / 1e3).toFixed(3) }, { n: v > best ? `+${us(v - best)}` : '' },
      el('div', { class: 'meter', style: 'min-width: 120px' }, el('i', { style: `width: ${(100 * v / most).toFixed(2)}%; background: var(--${value === a.taken ? 'accent' : 'norm'})` })), value === a.taken ? a.why : '']);
  });
  box.append(grid(['choice', 'value', { n: 'ms a step' }, { n: 'µs dearer' }, '', 'taken because'], body));
}
