'use strict';
// The selected launch with all its reasons; findings; the plan file; the head of the page. Draws the page at the end.

function tensorList(title, l, names, from) {
  const body = names.map(name => {
    const t = tensors.get(name), kind = buffers.get(t.buffer).kind;
    const others = from ? (l.producers.has(name) ? [l.producers.get(name)] : []) : (l.readers.get(t.buffer) || []);
    return el('li', {}, el('code', {}, name), el('span', { class: 'soft' }, ` ${shape(t)}, ${size(t.bytes)}, ${kind}${t.buffer !== name ? ` (part of ${t.buffer})` : ''}`),
      others.length ? [el('br'), el('span', { class: 'soft' }, from ? 'from ' : 'to '), others.slice(0, 4).map((i, n) => [n ? ', ' : '', linkTo(i)]), others.length > 4 ? ` and ${others.length - 4} more` : ''] : null);
  });
  return [el('h3', {}, title), el('ul', { class: 'plainlist' }, body.length ? body : el('li', { class: 'soft' }, 'nothing'))];
}

function chosenBecause(c) {
  const priced = c.losers.find(([, v]) => v !== null);
  if (!c.losers.length) return 'No other kernel of the menu computes this here.';
  if (!priced) return 'No other kernel of the menu can compute this here; the reasons stand below.';
  return `The step with it is the cheapest. The nearest other way is ${priced[2].replace(/^split: /, '')}.`;
}

function whyNot(c) {
  if (!c.losers.length) return null;
  // a reason may begin with the kernel and its price
  const body = c.losers.map(([kernel, v, reason]) => el('li', {}, el('code', {}, kernel), v === null ? '' : el('span', { class: 'soft' }, ` ${us(v)} µs predicted`), el('br'), reason.replace(`${kernel} `, '')));
  return [el('h3', {}, 'Why not another kernel'), el('ul', { class: 'plainlist' }, body), c.more_losers ? el('p', { class: 'soft small' }, `and ${c.more_losers} more`) : null];
}

function decidedBy(l) {
  const kind = l.layer === null ? l.stage : l.stage === 'attn' ? l.span.kind.split(' ')[0].toLowerCase() : l.span.kind.endsWith('MoE') ? 'moe' : 'dense';
  const names = [...(raw.deciding[kind] || []), ...raw.deciding.all].filter(n => spec.has(n));
  const known = [...spec.values()].some(s => s.origin !== null);
  const body = names.map(n => [el('code', {}, n), spec.get(n).value, known ? el('code', {}, spec.get(n).origin || 'not given') : '']);
  return [el('h3', {}, 'Asked for by the plan file'), known ? null : el('p', { class: 'soft small' }, 'Values of the plan; for their lines, make the report from the plan file or with --yaml.'),
    grid(known ? ['field', 'value', 'where'] : ['field', 'value', ''], body)];
}

function captured(l) {
  if (!head.record) return null;
  if (!l.graph_nodes.length) return [el('h3', {}, 'In the captured graph'), el('p', { class: 'soft small' }, 'No node: the record does not hold this launch.')];
  const body = l.graph_nodes.map(i => { const n = graphNodes[i]; return [{ n: i }, n.kind === 'kernel' ? el('code', {}, n.function) : n.kind, { n: n.grid.join('×') }, { n: n.block.join('×') }, { n: size(n.shared_bytes) }]; });
  return [el('h3', {}, 'In the captured graph'), grid([{ n: 'node' }, 'function', { n: 'grid' }, { n: 'block' }, { n: 'shared' }], body)];
}

function findingsOf(l) {
  const mine = raw.findings.filter(f => f.launch === l.id);
  return mine.length ? [el('h3', {}, 'Findings'), el('ul', { class: 'findings' }, mine.map(f => findingItem([f])))] : null;
}

function drawLaunch(l) {
  const c = l.choice, alike = launches.filter(o => o.choice === c), bar = Math.max(l.us, l.floor_us);
  const layers = [...new Set(alike.map(o => o.layer).filter(n => n !== null))];
  const edges = list => list.length ? list.map((x, i) => [i ? ', ' : '', linkTo(x.other), ` (${x.kind})`]) : 'nothing';
  at('launch').replaceChildren(...[
    el('div', { class: 'bar', style: 'gap: 6px; justify-content: space-between' }, el('span', { class: 'soft small' }, `Launch ${l.index} of ${launches.length}, ${l.layer === null ? l.stage : `layer ${l.layer}, ${l.span.kind}`}`),
      el('span', {}, el('button', { type: 'button', 'aria-label': 'Launch before', onclick: () => select(l.index - 1) }, '‹'), ' ', el('button', { type: 'button', 'aria-label': 'Next launch', onclick: () => select(l.index + 1) }, '›'))),
    el('h2', { 'aria-live': 'polite' }, l.id),
    el('p', {}, swatch(c.family), el('b', {}, c.kernel), el('br'), el('code', { class: 'soft' }, c.entry)),
    el('div', { class: 'figures', style: 'gap: 6px 22px; margin: 8px 0 6px' },
      [[us(l.us), 'µs', word(l.basis)], [us(l.floor_us), 'µs', 'floor'], [us(l.gap_us), 'µs', 'above it']].map(([v, unit, text]) => el('div', { class: 'figure' }, el('b', { style: 'font-size: 20px' }, v, el('small', {}, unit)), el('span', {}, text)))),
    el('div', { class: 'meter', role: 'img', 'aria-label': `floor ${us(l.floor_us)} of ${us(l.us)} µs` }, el('i', { style: `width: ${100 * l.us / bar}%; background: var(--${c.family}); opacity: .3` }), el('i', { style: `width: ${100 * l.floor_us / bar}%; background: var(--${c.family})` })),
    el('p', { class: 'small soft', style: 'margin-top: 6px' }, l.basis === 'graph' ? `Measured inside the graph on ${device}; the plan said ${us(l.planned_us)} µs. ` : `${raw.bases[l.basis]}. `, l.basis === 'graph' ? '' : c.source),
    el('dl', {}, el('dt', {}, 'moves'), el('dd', {}, `${size(c.bytes)}, ${count(c.flops)} operations`),
      el('dt', {}, 'starts'), el('dd', {}, `at ${us(l.start_us)} µs on stream ${l.stream}, ${l.dependent ? 'with' : 'after'} the launch before it`),
      el('dt', {}, 'waits for'), el('dd', {}, edges(l.into.map(x => ({ other: x.source, kind: x.kind })))),
      el('dt', {}, 'let go'), el('dd', {}, edges(l.from.map(x => ({ other: x.target, kind: x.kind })))),
      el('dt', {}, 'alike'), el('dd', {}, `${plural(alike.length, 'launch')} with this choice${layers.length ? `, layers ${ranges(layers)}` : ''}`)),
    el('h3', {}, 'Computes'), el('ul', { class: 'plainlist' }, c.ops.map((op, i) => el('li', {}, el('code', {}, op), el('span', { class: 'soft' }, l.nodes[i] ? ` ${l.nodes[i]}` : '')))),
    el('h3', {}, 'Chosen because'), el('p', { class: 'small' }, chosenBecause(c)),
    whyNot(c),
    el('h3', {}, 'Configuration'), Object.keys(c.config).length ? [el('p', { class: 'small' }, Object.entries(c.config).map(([k, v], i) => [i ? ', ' : '', el('code', {}, `${k} ${v}`)])), el('p', { class: 'soft small' }, c.config_source)] : el('p', { class: 'soft small' }, 'none'),
    tensorList('Reads', l, l.inputs, true), tensorList('Writes', l, l.outputs, false),
    l.scratch.length ? tensorList('Workspace', l, l.scratch, false) : null,
    captured(l), findingsOf(l), decidedBy(l)].flat(9).filter(Boolean));
}

function findingItem(same) {
  const f = same[0];
  const index = new Map(launches.map(l => [l.id, l.index])), known = same.filter(x => index.has(x.launch));
  return el('li', { class: f.severity }, el('span', { class: `pill ${f.severity}` }, f.severity), ' ', el('b', {}, f.code), ` ${f.text}`,
    f.where ? [el('br'), el('code', { class: 'soft' }, f.where)] : null,
    known.length ? [el('br'), el('span', { class: 'soft small' }, 'at '), known.slice(0, 6).map((x, i) => [i ? ', ' : '', linkTo(index.get(x.launch))]), known.length > 6 ? el('span', { class: 'soft small' }, ` and ${known.length - 6} more`) : null] : null,
    el('br'), el('b', { class: 'small' }, 'fix: '), f.fix);
}

function drawFindings() {
  const box = at('findings'), order = ['error', 'warning', 'note'];
  if (!raw.findings.length) {
    box.append(el('p', { class: 'soft' }, head.record ? 'No findings.' : 'No capture was examined: this report was made from a plan alone.'));
    return;
  }
  const groups = [...groupBy([...raw.findings].sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity)), f => `${f.code}\n${f.text}\n${f.fix}`).values()];
  box.append(el('p', { class: 'soft small' }, order.map(s => [s, raw.findings.filter(f => f.severity === s).length]).filter(([, n]) => n).map(([s, n]) => plural(n, s)).join(', '), '; k3plan explain CODE says more.'), el('ul', { class: 'findings' }, groups.map(findingItem)));
}

function drawPlanFile() {
  const known = raw.spec.some(([, , origin]) => origin !== null);
  at('planfile').append(grid(known ? ['field', 'value', 'where it came from'] : ['field', 'value'], raw.spec.map(([name, value, origin]) => [el('code', {}, name), value, ...(known ? [el('code', {}, origin || 'not given')] : [])])),
    el('h3', {}, 'What the passes did'), el('ul', { class: 'plainlist' }, raw.notes.map(n => el('li', {}, n))),
    el('h3', {}, `Figures of ${raw.device.name}`), grid(['figure', { n: 'value' }, 'source'], Object.entries(raw.device.figures).map(([name, [value, source]]) => [el('code', {}, name), { n: value }, source])));
}

function drawHead() {
  const h = head, r = h.record, ratio = h.step_us / h.floor_us, rowCount = h.sequences * h.query;
  at('title').textContent = `${h.model} decode step on ${h.gpu} TP${h.tp}`;
  at('facts').append('Plan ', el('b', {}, h.key), ` · ${plural(h.layers, 'layer')} (${h.layer_numbers}) · `, el('b', {}, `${plural(rowCount, 'row')}`), ` (${plural(h.sequences, 'sequence')} × ${h.query}) · context ${h.context} · experts ${h.experts} · profile ${h.profile}`,
    r ? ` · captured on ${r.machine.name} (${r.machine.sms} SMs, driver ${r.machine.driver}, torch ${r.machine.torch}, triton ${r.machine.triton}), bucket ${r.bucket}` : ' · no capture',
    r && r.notes.length ? ` · ${r.notes.join(' · ')}` : '');
  const figure = (value, unit, text, more) => el('div', { class: 'figure' }, el('b', {}, value, el('small', {}, unit)), el('span', {}, text, more ? [' ', more] : ''));
  at('figures').append(
    figure((h.step_us / 1e3).toFixed(3), 'ms', 'a step', headPill()), figure((h.floor_us / 1e3).toFixed(3), 'ms', 'floor: bytes at bandwidth'), figure(((h.step_us - h.floor_us) / 1e3).toFixed(3), 'ms', `above it: ${ratio.toFixed(2)} times the floor`),
    figure(h.launches, '', 'launches'), figure(size(h.bytes).split(' ')[0], size(h.bytes).split(' ')[1], 'moved a step'), figure(size(h.held.weight || 0).split(' ')[0], size(h.held.weight || 0).split(' ')[1], 'of weights a rank'),
    r && r.host_us !== null ? figure(us(r.host_us), 'µs', 'host time a replay', el('span', { class: 'pill measured' }, 'measured')) : '',
    el('div', { class: 'figure wide' }, el('div', { class: 'meter', style: 'height: 14px', role: 'img', 'aria-label': `the floor is ${share(1 / ratio)} of the step` }, el('i', { style: 'width: 100%; background: var(--accent); opacity: .25' }), el('i', { style: `width: ${100 / ratio}%; background: var(--accent)` })),
      el('span', {}, `the floor is ${share(1 / ratio)} of the step; ` + (r && r.timed ? `launches ${time(r.sum_us)}, idle ${time(r.idle_us)}, the plan said ${time(h.planned_us)}` : `launches measured alone are ${share(h.measured_alone_us / h.planned_us)} of it`))));
}

function start() {
  drawHead(); drawTimeline(); drawFlows(); drawRoofline(); drawTime(); drawMemory(); drawFindings(); drawAlgebra(); drawPlanFile();
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
  addEventListener('beforeprint', () => { before = document.documentElement.dataset.theme || 'auto'; document.documentElement.dataset.theme = 'light'; redrawAll(); });
  addEventListener('afterprint', () => { document.documentElement.dataset.theme = before; redrawAll(); });
  const names = new Map([...launches.map(l => [l.id, l.index]), ...[...madeBy].map(([name, l]) => [name, l.index])]);
  at('names').append(...launches.map(l => el('option', { value: l.id })));
  at('find').addEventListener('submit', e => {
    e.preventDefault();
    const query = at('query').value.trim(), order = launches.map((_, i) => (selected + 1 + i) % launches.length);
    const hit = names.get(query) ?? order.find(i => [launches[i].id, launches[i].choice.kernel, ...launches[i].nodes, ...launches[i].inputs, ...launches[i].outputs].some(n => n.includes(query)));
    at('found').textContent = query && hit === undefined ? 'nothing found' : '';
    if (query && hit !== undefined) select(hit);
  });
  const named = () => names.get(decodeURIComponent(location.hash.slice(1)));
  addEventListener('hashchange', () => { if (named() !== undefined) select(named()); });
  const dearest = [...dots].sort((a, b) => b.gap - a.gap)[0];
  select(named() ?? dearest.of[Math.min(1, dearest.of.length - 1)].index, { first: true });
  document.documentElement.dataset.ready = 'yes';
}
try { start(); } catch (error) {
  at('failure').textContent = `The page could not be drawn: ${error.message}. Report it with the plan.`;
  at('failure').hidden = false;
  throw error;
}
