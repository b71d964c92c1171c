'use strict';
// Where the time goes, by kernel and by kind of layer, and what the alternatives would have cost.

function stack(hue, floor, total, most) {
  const part = v => `background: var(--${hue}); width: ${((100 * v) / most).toFixed(2)}%`;
  return el(
    'div',
    { class: 'stack', role: 'img', 'aria-label': `floor ${us(floor)} of ${us(total)} µs` },
    el('i', { style: part(Math.min(floor, total)) }),
    el('i', { class: 'gap', style: part(Math.max(0, total - floor)) }),
  );
}

function totals(of) {
  const total = sum(of, l => l.us);
  return {
    launches: of.length,
    each: total / of.length,
    floor: sum(of, l => l.floor_us),
    gap: sum(of, l => l.gap_us),
    total,
    planned: sum(of, l => l.planned_us),
  };
}

function kernelCell(kernel) {
  const first = kernel.of[0];
  const name = el('button', { type: 'button', class: 'plain', title: `Select ${first.id}` }, kernel.name);
  name.addEventListener('click', () => select(first.index));
  return el('span', { style: 'white-space: nowrap' }, swatch(first.choice.family), name);
}

function byKernel(holder) {
  const kernels = [...groupBy(launches, l => l.choice.kernel)].map(([name, of]) => ({ name, of, ...totals(of) }));
  const all = totals(launches);
  const most = Math.max(...kernels.map(k => k.total));
  const columns = [
    ['launches', 'launches', v => v],
    ['each', 'each', us],
    ['floor', 'floor', us],
    ['above', 'gap', us],
    ['total', 'total', us],
    ...(anyGraph ? [['planned', 'planned', us]] : []),
  ];
  const render = by => {
    kernels.sort((a, b) => (by === 'name' ? a.name.localeCompare(b.name) : b[by] - a[by]));
    const title = ([text, key], i) =>
      el(
        'th',
        { class: i ? 'n' : '', 'aria-sort': key === by ? (key === 'name' ? 'ascending' : 'descending') : null },
        el('button', { type: 'button', title: `Sort by ${text}`, onclick: () => render(key) }, text),
      );
    const cells = k => columns.map(([, key, show]) => ({ n: show(k[key]) }));
    holder.replaceChildren(
      grid(
        [...[['kernel', 'name'], ...columns].map(title), { n: 'share' }, 'floor, above'],
        kernels.map(k => [
          kernelCell(k),
          ...cells(k),
          { n: share(k.total / all.total) },
          stack(k.of[0].choice.family, k.floor, k.total, most),
        ]),
        ['all', ...cells(all), { n: '100 %' }, ''],
        'tight',
      ),
    );
  };
  render('total');
}

function byKind() {
  const all = sum(launches, l => l.us);
  const titles = ['how many', 'launches each', 'µs each', 'floor each', 'total µs', 'share'].map(n => ({ n }));
  const body = [...groupBy(spans, s => s.kind)].map(([kind, of]) => {
    const t = totals(of.flatMap(s => launches.slice(s.first, s.last + 1)));
    const each = [of.length, (t.launches / of.length).toFixed(1), us(t.total / of.length), us(t.floor / of.length)];
    const numbers = [...each, us(t.total), share(t.total / all)].map(n => ({ n }));
    return [kind, ...numbers, stack(spanHue(of[0]), t.floor, t.total, all)];
  });
  return grid(['kind', ...titles, 'floor, above'], body, null, 'tight');
}

function drawTime() {
  const holder = el('div');
  byKernel(holder);
  const note = `All times in µs, ${totalWord}. Dark is the floor, light what is above it. A launch below its floor counts
    as at it.`;
  at('time').append(el('p', { class: 'soft small' }, note), holder, el('h3', {}, 'By kind of layer'), byKind());
}

function priced(choice) {
  const prices = Object.entries(choice.us);
  const name = el('code', {}, choice.choice);
  if (!prices.length) return [[name, el('b', {}, choice.taken), { n: '–' }, { n: '–' }, '', choice.why]];
  const most = Math.max(...prices.map(([, v]) => v));
  const best = Math.min(...prices.map(([, v]) => v));
  return prices.map(([value, v], i) => {
    const taken = value === choice.taken;
    const bar = `width: ${((100 * v) / most).toFixed(2)}%; background: var(--${taken ? 'accent' : 'norm'})`;
    return [
      i ? '' : name,
      taken ? el('b', {}, `${value} ✓`) : value,
      { n: (v / 1e3).toFixed(3) },
      { n: v > best ? `+${us(v - best)}` : '' },
      el('div', { class: 'meter', style: 'min-width: 120px' }, el('i', { style: bar })),
      taken ? choice.why : '',
    ];
  });
}

function drawAlgebra() {
  const box = at('algebra');
  if (!raw.alternatives.length) {
    box.append(el('p', { class: 'soft' }, 'The plan has no choice of algebra.'));
    return;
  }
  box.append(
    el(
      'p',
      { class: 'soft small' },
      'What a step would cost with the other value of each choice, the rest as taken. ',
      el('span', { class: 'pill' }, 'predicted'),
      ' from one layer of each kind times their number, so the taken value need not equal the sum over all launches.',
    ),
    grid(
      ['choice', 'value', { n: 'ms a step' }, { n: 'µs dearer' }, 'against the dearest', 'taken because'],
      raw.alternatives.flatMap(priced),
    ),
  );
}
