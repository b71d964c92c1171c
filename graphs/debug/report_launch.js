'use strict';
// The selected launch with all its reasons.

const paragraph = text => el('p', { class: 'soft small' }, text);
const titled = (title, ...content) => [el('h3', {}, title), content];
const list = items => el('ul', { class: 'plainlist' }, items.length ? items : el('li', { class: 'soft' }, 'nothing'));
const linked = indices => indices.map((index, n) => [n ? ', ' : '', linkTo(index)]);

// `others` says for a tensor which launches wrote or read it
function tensorList(title, names, direction, others) {
  const items = names.map(name => {
    const t = tensors.get(name);
    const part = t.buffer === name ? '' : ` (part of ${t.buffer})`;
    const facts = ` ${shape(t)}, ${size(t.bytes)}, ${buffers.get(t.buffer).kind}${part}`;
    const found = others(name, t.buffer);
    const more = found.length > 4 ? ` and ${found.length - 4} more` : '';
    return el(
      'li',
      {},
      el('code', {}, name),
      el('span', { class: 'soft' }, facts),
      found.length ? [el('br'), el('span', { class: 'soft' }, `${direction} `), linked(found.slice(0, 4)), more] : '',
    );
  });
  return titled(title, list(items));
}

function chosenBecause(c) {
  const priced = c.losers.find(([, v]) => v !== null);
  if (!c.losers.length) return 'No other kernel of the menu computes this here.';
  if (!priced) return 'No other kernel of the menu can compute this here; the reasons stand below.';
  return `The step with it is the cheapest. The nearest other way is ${priced[2].replace(/^split: /, '')}.`;
}

function whyNot(c) {
  if (!c.losers.length) return [];
  const items = c.losers.map(([kernel, v, reason]) => {
    const price = v === null ? '' : el('span', { class: 'soft' }, ` ${us(v)} µs predicted`);
    // a reason may begin with the kernel and its price
    const text = reason.startsWith(`${kernel} `) ? reason.slice(kernel.length + 1) : reason;
    return el('li', {}, el('code', {}, kernel), price, el('br'), text);
  });
  return titled('Why not another kernel', list(items), c.more_losers ? paragraph(`and ${c.more_losers} more`) : '');
}

function configured(c) {
  const values = Object.entries(c.config);
  if (!values.length) return titled('Configuration', paragraph('none'));
  const text = values.map(([k, v], i) => [i ? ', ' : '', el('code', {}, `${k} ${v}`)]);
  return titled('Configuration', el('p', { class: 'small' }, text), paragraph(c.config_source));
}

// which part of `deciding` speaks of a launch: the stage outside the layers, else the kind of attention or of MLP
function decidingKind(l) {
  if (l.layer === null) return l.stage;
  if (l.stage === 'attn') return l.span.kind.split(' ')[0].toLowerCase();
  return l.span.kind.endsWith('MoE') ? 'moe' : 'dense';
}

function decidedBy(l) {
  const fields = [...(raw.deciding[decidingKind(l)] || []), ...raw.deciding.all].filter(name => spec.has(name));
  const values = fields.map(name => [el('code', {}, name), spec.get(name).value]);
  if (![...spec.values()].some(s => s.origin !== null)) {
    const note = 'Values of the plan; for their lines, make the report from the plan file or with --yaml.';
    return titled('Asked for by the plan file', paragraph(note), grid(['field', 'value'], values));
  }
  const places = fields.map(name => el('code', {}, spec.get(name).origin || 'not given'));
  const body = values.map((cells, i) => [...cells, places[i]]);
  return titled('Asked for by the plan file', grid(['field', 'value', 'where'], body));
}

function captured(l) {
  if (!head.record) return [];
  const title = 'In the captured graph';
  if (!l.graph_nodes.length) return titled(title, paragraph('No node: the captured graph does not hold this launch.'));
  const items = l.graph_nodes.map(i => {
    const n = graphNodes[i];
    if (n.kind !== 'kernel') return el('li', {}, `node ${i}: ${n.kind}`);
    const blocks = `${n.grid.join('×')} blocks of ${n.block.join('×')}`;
    const shared = n.shared_bytes ? `, ${size(n.shared_bytes)} shared` : '';
    return el('li', {}, el('code', {}, n.function), el('span', { class: 'soft' }, ` node ${i}: ${blocks}${shared}`));
  });
  return titled(title, list(items));
}

function findingsOf(l) {
  const mine = raw.findings.filter(f => f.launch === l.id).map(f => findingItem([f]));
  return mine.length ? titled('Findings', el('ul', { class: 'findings' }, mine)) : [];
}

function startOf(l) {
  const lost = l.into.some(link => link.kind === 'lost');
  const planned = `${l.dependent ? 'with' : 'after'} the launch before it`;
  const how = lost ? `planned to start ${planned}; the captured graph lost that edge` : planned;
  return `at ${us(l.start_us)} µs on stream ${l.stream}, ${how}`;
}

function launchHead(l) {
  const place = l.layer === null ? l.stage : `layer ${l.layer}, ${l.span.kind}`;
  const figure = (v, text) =>
    el('div', { class: 'figure' }, el('b', {}, us(v), el('small', {}, 'µs')), el('span', {}, text));
  const part = (v, more = '') =>
    `width: ${(100 * v) / Math.max(l.us, l.floor_us)}%; background: var(--${l.choice.family})${more}`;
  const source =
    l.basis === 'graph'
      ? `Measured inside the graph on ${device}; the plan said ${us(l.planned_us)} µs.`
      : `${raw.bases[l.basis]}. ${l.choice.source}`;
  const label = `floor ${us(l.floor_us)} of ${us(l.us)} µs`;
  return [
    el(
      'div',
      { class: 'bar' },
      el('span', { class: 'soft small grow' }, `Launch ${l.index} of ${launches.length}, ${place}`),
      act('‹', 'Launch before', () => select(l.index - 1)),
      act('›', 'Next launch', () => select(l.index + 1)),
    ),
    el('h2', { 'aria-live': 'polite' }, l.id),
    el('p', {}, swatch(l.choice.family), el('b', {}, l.choice.kernel), el('br'), el('code', {}, l.choice.entry)),
    el(
      'div',
      { class: 'figures' },
      figure(l.us, word(l.basis)),
      figure(l.floor_us, 'floor'),
      figure(l.gap_us, 'above it'),
    ),
    el(
      'div',
      { class: 'meter', role: 'img', 'aria-label': label },
      el('i', { style: part(l.us, '; opacity: .3') }),
      el('i', { style: part(l.floor_us) }),
    ),
    paragraph(source),
  ];
}

function launchFacts(l) {
  const c = l.choice;
  const alike = launches.filter(other => other.choice === c);
  const layers = [...new Set(alike.map(other => other.layer).filter(layer => layer !== null))];
  const others = (edges, end) =>
    edges.length ? edges.map((x, i) => [i ? ', ' : '', linkTo(x[end]), ` (${x.kind})`]) : 'nothing';
  const ran = `${us(l.busy_us || 0)} µs with its waits, after ${us(l.idle_us || 0)} µs in which nothing ran`;
  const facts = {
    moves: `${size(c.bytes)}, ${count(c.flops)} operations`,
    ...(l.busy_us === null ? {} : { ran }),
    starts: startOf(l),
    'waits for': others(l.into, 'source'),
    'let go': others(l.from, 'target'),
    alike: `${plural(alike.length, 'launch')} with this choice${layers.length ? `, layers ${ranges(layers)}` : ''}`,
  };
  return el(
    'dl',
    {},
    Object.entries(facts).map(([name, text]) => [el('dt', {}, name), el('dd', {}, text)]),
  );
}

function drawLaunch(l) {
  const written = name => (l.producers.has(name) ? [l.producers.get(name)] : []);
  const read = (name, buffer) => l.readers.get(buffer) || [];
  const ops = l.choice.ops.map((op, i) =>
    el('li', {}, el('code', {}, op), el('span', { class: 'soft' }, ` ${l.nodes[i] || ''}`)),
  );
  const content = [
    launchHead(l),
    launchFacts(l),
    findingsOf(l),
    titled('Computes', list(ops)),
    titled('Chosen because', el('p', { class: 'small' }, chosenBecause(l.choice))),
    whyNot(l.choice),
    configured(l.choice),
    tensorList('Reads', l.inputs, 'from', written),
    tensorList('Writes', l.outputs, 'to', read),
    l.scratch.length ? tensorList('Workspace', l.scratch, 'to', read) : [],
    captured(l),
    decidedBy(l),
  ];
  at('launch').replaceChildren(...content.flat(9));
  at('launch').scrollTop = 0;
}
