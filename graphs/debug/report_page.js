'use strict';
// Findings, the plan file and the head of the page; what the controls at the top do. Draws the page at the end.

const SEVERITIES = ['error', 'warning', 'note'];
const numbers = new Map(launches.map(l => [l.id, l.index]));

// findings that say the same of several launches, as one
function findingItem(same) {
  const f = same[0];
  const known = same.filter(x => numbers.has(x.launch)).map(x => numbers.get(x.launch));
  const more = known.length > 6 ? el('span', { class: 'soft small' }, ` and ${known.length - 6} more`) : '';
  return el(
    'li',
    { class: f.severity },
    el('span', { class: `pill ${f.severity}` }, f.severity),
    ' ',
    el('b', {}, f.code),
    ` ${f.text}`,
    f.where ? [el('br'), el('code', { class: 'soft' }, f.where)] : '',
    known.length ? [el('br'), el('span', { class: 'soft small' }, 'at '), linked(known.slice(0, 6)), more] : '',
    el('br'),
    el('b', { class: 'small' }, 'fix: '),
    f.fix,
  );
}

function drawFindings() {
  const box = at('findings');
  if (!raw.findings.length) {
    const why = 'No capture was examined: this report was made from a plan alone.';
    box.append(el('p', { class: 'soft' }, head.record ? 'No findings: the captured graph is the plan.' : why));
    return;
  }
  const sorted = [...raw.findings].sort((a, b) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity));
  const groups = groupBy(sorted, f => `${f.code}\n${f.text}\n${f.fix}`);
  const counts = [...groupBy(sorted, f => f.severity)].map(([severity, of]) => plural(of.length, severity));
  box.append(
    paragraph(`${counts.join(', ')}; k3plan explain CODE says more.`),
    el('ul', { class: 'findings' }, [...groups.values()].map(findingItem)),
  );
}

function drawPlanFile() {
  const known = raw.spec.some(([, , origin]) => origin !== null);
  const fields = raw.spec.map(([name, value, origin]) => {
    return [el('code', {}, name), value, ...(known ? [el('code', {}, origin || 'not given')] : [])];
  });
  const rates = Object.entries(raw.device.figures).map(([name, [value, source]]) => {
    return [el('code', {}, name), { n: value }, source];
  });
  at('planfile').append(
    grid(['field', 'value', ...(known ? ['where it came from'] : [])], fields),
    ...titled('What the passes did', list(raw.notes.map(note => el('li', {}, note)))).flat(),
    ...titled(`Figures of ${raw.device.name}`, grid(['figure', { n: 'value' }, 'source'], rates)).flat(),
  );
}

function captureFacts(r) {
  if (!r) return ['no capture'];
  const m = r.machine;
  const software = `driver ${m.driver}, torch ${m.torch}, triton ${m.triton}`;
  const kinds = Object.entries(r.node_kinds).map(([kind, n]) => `${n} ${kind}`);
  const took = r.capture_s ? [`captured in ${r.capture_s.toFixed(2)} s, ${size(r.captured_bytes)}`] : [];
  return [
    `captured on ${m.name} (${m.sms} SMs, ${software}), bucket ${r.bucket}`,
    `${plural(r.nodes, 'node')} (${kinds.join(', ')}), ${plural(r.edges, 'edge')}`,
    ...took,
    ...r.notes,
  ];
}

function stepBar(h) {
  const part = h.floor_us / h.step_us;
  const alone = h.measured_alone_us
    ? `launches measured alone are ${share(h.measured_alone_us / h.planned_us)} of it`
    : 'no launch was measured';
  const times = h.record
    ? `launches sum to ${time(h.record.sum_us)}, nothing ran for ${time(h.record.idle_us)}, planned ${time(h.planned_us)}`
    : alone;
  const label = `the floor is ${share(part)} of the step`;
  return el(
    'div',
    { class: 'figure wide' },
    el(
      'div',
      { class: 'meter', role: 'img', 'aria-label': label },
      el('i', { style: 'width: 100%; background: var(--accent); opacity: .25' }),
      el('i', { style: `width: ${100 * part}%; background: var(--accent)` }),
    ),
    el('span', {}, !h.record || h.record.timed ? `${label}; ${times}` : label),
  );
}

function drawHead() {
  const h = head;
  at('title').textContent = `${h.model} decode step on ${h.gpu} TP${h.tp}`;
  const facts = [
    `${plural(h.layers, 'layer')} (${h.layer_numbers})`,
    `${plural(h.sequences * h.query, 'row')} (${plural(h.sequences, 'sequence')} × ${h.query})`,
    `context ${h.context}`,
    `experts ${h.experts}`,
    `profile ${h.profile}`,
    ...captureFacts(h.record),
  ];
  at('facts').append('Plan ', el('b', {}, h.key), facts.map(fact => ` · ${fact}`).join(''));
  const figure = (value, unit, text, more = '') =>
    el('div', { class: 'figure' }, el('b', {}, value, el('small', {}, unit)), el('span', {}, text, ' ', more));
  const ms = v => [(v / 1e3).toFixed(3), 'ms'];
  const ratio = (h.step_us / h.floor_us).toFixed(2);
  const { host_us: host = null, queued_us: queued = null } = h.record || {};
  const measured = () => el('span', { class: 'pill measured' }, 'measured');
  at('figures').append(
    figure(...ms(h.step_us), queued === null ? 'a step' : 'a step, replayed alone', headPill()),
    queued === null ? '' : figure(...ms(queued), 'queued behind another', measured()),
    figure(...ms(h.floor_us), 'floor: bytes at bandwidth'),
    figure(...ms(h.step_us - h.floor_us), `above it: ${ratio} times the floor`),
    figure(h.launches, '', 'launches'),
    figure(...size(h.bytes).split(' '), 'moved a step'),
    figure(...size(h.held.weight || 0).split(' '), 'of weights a rank'),
    host === null ? '' : figure(us(host), 'µs', 'host time a replay', measured()),
    stepBar(h),
  );
}

function listenToTheme() {
  const themes = ['auto', 'light', 'dark'];
  const root = document.documentElement;
  const current = () => root.dataset.theme || 'auto';
  const use = theme => {
    root.dataset.theme = theme;
    redrawAll();
  };
  at('theme').addEventListener('click', () => {
    use(themes[(themes.indexOf(current()) + 1) % themes.length]);
    at('theme').textContent = `Colours: ${current()}`;
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawAll);
  let before = 'auto';
  addEventListener('beforeprint', () => {
    before = current();
    use('light');
  });
  addEventListener('afterprint', () => use(before));
}

function listenToFind(names) {
  const texts = l => [l.id, l.choice.kernel, ...l.nodes, ...l.inputs, ...l.outputs];
  at('names').append(...launches.map(l => el('option', { value: l.id })));
  at('find').addEventListener('submit', e => {
    e.preventDefault();
    const query = at('query').value.trim();
    if (!query) return;
    const next = launches.map((_, i) => launches[(selected + 1 + i) % launches.length]);
    const hit = next.find(l => texts(l).some(text => text.includes(query)));
    const index = names.get(query) ?? (hit && hit.index);
    at('found').textContent = index === undefined ? 'nothing found' : '';
    if (index !== undefined) select(index);
  });
}

// the dearest kind of launch, as it stands in the layers that the plan repeats
function firstShown() {
  const { of } = [...dots].sort((a, b) => b.gap - a.gap)[0];
  return of[Math.min(1, of.length - 1)].index;
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
  listenToTheme();
  const names = new Map([...[...madeBy].map(([name, l]) => [name, l.index]), ...numbers]);
  listenToFind(names);
  const named = () => names.get(decodeURIComponent(location.hash.slice(1)));
  addEventListener('hashchange', () => named() !== undefined && select(named()));
  select(named() ?? firstShown(), { first: true });
  document.documentElement.dataset.ready = 'yes';
}

try {
  start();
} catch (error) {
  at('failure').textContent = `The page could not be drawn: ${error.message}. Report it with the plan.`;
  at('failure').hidden = false;
  throw error;
}
