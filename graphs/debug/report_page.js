'use strict';
// Findings, the plan file and the head of the page; what the controls at the top do. Draws the page at the end.

function findingItem(same) {
  const f = same[0];
  const index = new Map(launches.map(l => [l.id, l.index])),
    known = same.filter(x => index.has(x.launch));
  return el(
    'li',
    { class: f.severity },
    el('span', { class: `pill ${f.severity}` }, f.severity),
    ' ',
    el('b', {}, f.code),
    ` ${f.text}`,
    f.where ? [el('br'), el('code', { class: 'soft' }, f.where)] : null,
    known.length
      ? [
          el('br'),
          el('span', { class: 'soft small' }, 'at '),
          known.slice(0, 6).map((x, i) => [i ? ', ' : '', linkTo(index.get(x.launch))]),
          known.length > 6 ? el('span', { class: 'soft small' }, ` and ${known.length - 6} more`) : null,
        ]
      : null,
    el('br'),
    el('b', { class: 'small' }, 'fix: '),
    f.fix,
  );
}

function drawFindings() {
  const box = at('findings'),
    order = ['error', 'warning', 'note'];
  if (!raw.findings.length) {
    box.append(
      el(
        'p',
        { class: 'soft' },
        head.record ? 'No findings.' : 'No capture was examined: this report was made from a plan alone.',
      ),
    );
    return;
  }
  const groups = [
    ...groupBy(
      [...raw.findings].sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity)),
      f => `${f.code}\n${f.text}\n${f.fix}`,
    ).values(),
  ];
  box.append(
    el(
      'p',
      { class: 'soft small' },
      order
        .map(s => [s, raw.findings.filter(f => f.severity === s).length])
        .filter(([, n]) => n)
        .map(([s, n]) => plural(n, s))
        .join(', '),
      '; k3plan explain CODE says more.',
    ),
    el('ul', { class: 'findings' }, groups.map(findingItem)),
  );
}

function drawPlanFile() {
  const known = raw.spec.some(([, , origin]) => origin !== null);
  at('planfile').append(
    grid(
      known ? ['field', 'value', 'where it came from'] : ['field', 'value'],
      raw.spec.map(([name, value, origin]) => [
        el('code', {}, name),
        value,
        ...(known ? [el('code', {}, origin || 'not given')] : []),
      ]),
    ),
    el('h3', {}, 'What the passes did'),
    el(
      'ul',
      { class: 'plainlist' },
      raw.notes.map(n => el('li', {}, n)),
    ),
    el('h3', {}, `Figures of ${raw.device.name}`),
    grid(
      ['figure', { n: 'value' }, 'source'],
      Object.entries(raw.device.figures).map(([name, [value, source]]) => [el('code', {}, name), { n: value }, source]),
    ),
  );
}

function drawHead() {
  const h = head,
    r = h.record,
    ratio = h.step_us / h.floor_us,
    rowCount = h.sequences * h.query;
  at('title').textContent = `${h.model} decode step on ${h.gpu} TP${h.tp}`;
  at('facts').append(
    'Plan ',
    el('b', {}, h.key),
    ` · ${plural(h.layers, 'layer')} (${h.layer_numbers}) · `,
    el('b', {}, `${plural(rowCount, 'row')}`),
    ` (${plural(h.sequences, 'sequence')} × ${h.query}) · context ${h.context} · experts ${h.experts} · profile ${h.profile}`,
    r
      ? ` · captured on ${r.machine.name} (${r.machine.sms} SMs, driver ${r.machine.driver}, torch ${r.machine.torch}, triton ${r.machine.triton}), bucket ${r.bucket}`
      : ' · no capture',
    r && r.notes.length ? ` · ${r.notes.join(' · ')}` : '',
  );
  const figure = (value, unit, text, more) =>
    el(
      'div',
      { class: 'figure' },
      el('b', {}, value, el('small', {}, unit)),
      el('span', {}, text, more ? [' ', more] : ''),
    );
  at('figures').append(
    figure((h.step_us / 1e3).toFixed(3), 'ms', 'a step', headPill()),
    figure((h.floor_us / 1e3).toFixed(3), 'ms', 'floor: bytes at bandwidth'),
    figure(((h.step_us - h.floor_us) / 1e3).toFixed(3), 'ms', `above it: ${ratio.toFixed(2)} times the floor`),
    figure(h.launches, '', 'launches'),
    figure(size(h.bytes).split(' ')[0], size(h.bytes).split(' ')[1], 'moved a step'),
    figure(size(h.held.weight || 0).split(' ')[0], size(h.held.weight || 0).split(' ')[1], 'of weights a rank'),
    r && r.host_us !== null
      ? figure(us(r.host_us), 'µs', 'host time a replay', el('span', { class: 'pill measured' }, 'measured'))
      : '',
    el(
      'div',
      { class: 'figure wide' },
      el(
        'div',
        {
          class: 'meter',
          style: 'height: 14px',
          role: 'img',
          'aria-label': `the floor is ${share(1 / ratio)} of the step`,
        },
        el('i', { style: 'width: 100%; background: var(--accent); opacity: .25' }),
        el('i', { style: `width: ${100 / ratio}%; background: var(--accent)` }),
      ),
      el(
        'span',
        {},
        `the floor is ${share(1 / ratio)} of the step; ` +
          (r && r.timed
            ? `launches ${time(r.sum_us)}, idle ${time(r.idle_us)}, the plan said ${time(h.planned_us)}`
            : `launches measured alone are ${share(h.measured_alone_us / h.planned_us)} of it`),
      ),
    ),
  );
}

function start() {
  drawHead();
  drawTimeline();
  drawFlows();
  drawRoofline();
  drawTime();
  drawMemory();
  drawFindings();
  drawAlgebra();
  drawPlanFile();
  listeners.push(drawLaunch);
  const themes = ['auto', 'light', 'dark'];
  at('theme').addEventListener('click', e => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme || 'auto') + 1) % 3];
    document.documentElement.dataset.theme = next;
    e.target.textContent = `Colours: ${next}`;
    redrawAll();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawAll);
  let before = null;
  addEventListener('beforeprint', () => {
    before = document.documentElement.dataset.theme || 'auto';
    document.documentElement.dataset.theme = 'light';
    redrawAll();
  });
  addEventListener('afterprint', () => {
    document.documentElement.dataset.theme = before;
    redrawAll();
  });
  const names = new Map([...launches.map(l => [l.id, l.index]), ...[...madeBy].map(([name, l]) => [name, l.index])]);
  at('names').append(...launches.map(l => el('option', { value: l.id })));
  at('find').addEventListener('submit', e => {
    e.preventDefault();
    const query = at('query').value.trim(),
      order = launches.map((_, i) => (selected + 1 + i) % launches.length);
    const hit =
      names.get(query) ??
      order.find(i =>
        [
          launches[i].id,
          launches[i].choice.kernel,
          ...launches[i].nodes,
          ...launches[i].inputs,
          ...launches[i].outputs,
        ].some(n => n.includes(query)),
      );
    at('found').textContent = query && hit === undefined ? 'nothing found' : '';
    if (query && hit !== undefined) select(hit);
  });
  const named = () => names.get(decodeURIComponent(location.hash.slice(1)));
  addEventListener('hashchange', () => {
    if (named() !== undefined) select(named());
  });
  const dearest = [...dots].sort((a, b) => b.gap - a.gap)[0];
  select(named() ?? dearest.of[Math.min(1, dearest.of.length - 1)].index, { first: true });
  document.documentElement.dataset.ready = 'yes';
}
try {
  start();
} catch (error) {
  at('failure').textContent = `The page could not be drawn: ${error.message}. Report it with the plan.`;
  at('failure').hidden = false;
  throw error;
}
