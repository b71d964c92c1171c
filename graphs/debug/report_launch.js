'use strict';
// The selected launch with all its reasons.

function tensorList(title, l, names, from) {
  const body = names.map(name => {
    const t = tensors.get(name),
      kind = buffers.get(t.buffer).kind;
    const others = from ? (l.producers.has(name) ? [l.producers.get(name)] : []) : l.readers.get(t.buffer) || [];
    return el(
      'li',
      {},
      el('code', {}, name),
      el(
        'span',
        { class: 'soft' },
        ` ${shape(t)}, ${size(t.bytes)}, ${kind}${t.buffer !== name ? ` (part of ${t.buffer})` : ''}`,
      ),
      others.length
        ? [
            el('br'),
            el('span', { class: 'soft' }, from ? 'from ' : 'to '),
            others.slice(0, 4).map((i, n) => [n ? ', ' : '', linkTo(i)]),
            others.length > 4 ? ` and ${others.length - 4} more` : '',
          ]
        : null,
    );
  });
  return [
    el('h3', {}, title),
    el('ul', { class: 'plainlist' }, body.length ? body : el('li', { class: 'soft' }, 'nothing')),
  ];
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
  const body = c.losers.map(([kernel, v, reason]) =>
    el(
      'li',
      {},
      el('code', {}, kernel),
      v === null ? '' : el('span', { class: 'soft' }, ` ${us(v)} µs predicted`),
      el('br'),
      reason.startsWith(`${kernel} `) ? reason.slice(kernel.length + 1) : reason,
    ),
  );
  return [
    el('h3', {}, 'Why not another kernel'),
    el('ul', { class: 'plainlist' }, body),
    c.more_losers ? el('p', { class: 'soft small' }, `and ${c.more_losers} more`) : null,
  ];
}

function decidedBy(l) {
  const kind =
    l.layer === null
      ? l.stage
      : l.stage === 'attn'
        ? l.span.kind.split(' ')[0].toLowerCase()
        : l.span.kind.endsWith('MoE')
          ? 'moe'
          : 'dense';
  const names = [...(raw.deciding[kind] || []), ...raw.deciding.all].filter(n => spec.has(n));
  const known = [...spec.values()].some(s => s.origin !== null);
  const body = names.map(n => [
    el('code', {}, n),
    spec.get(n).value,
    known ? el('code', {}, spec.get(n).origin || 'not given') : '',
  ]);
  return [
    el('h3', {}, 'Asked for by the plan file'),
    known
      ? null
      : el(
          'p',
          { class: 'soft small' },
          'Values of the plan; for their lines, make the report from the plan file or with --yaml.',
        ),
    grid(known ? ['field', 'value', 'where'] : ['field', 'value', ''], body),
  ];
}

function captured(l) {
  if (!head.record) return null;
  if (!l.graph_nodes.length)
    return [
      el('h3', {}, 'In the captured graph'),
      el('p', { class: 'soft small' }, 'No node: the record does not hold this launch.'),
    ];
  const body = l.graph_nodes.map(i => {
    const n = graphNodes[i];
    return [
      { n: i },
      n.kind === 'kernel' ? el('code', {}, n.function) : n.kind,
      { n: n.grid.join('×') },
      { n: n.block.join('×') },
      { n: size(n.shared_bytes) },
    ];
  });
  return [
    el('h3', {}, 'In the captured graph'),
    grid([{ n: 'node' }, 'function', { n: 'grid' }, { n: 'block' }, { n: 'shared' }], body),
  ];
}

function findingsOf(l) {
  const mine = raw.findings.filter(f => f.launch === l.id);
  return mine.length
    ? [
        el('h3', {}, 'Findings'),
        el(
          'ul',
          { class: 'findings' },
          mine.map(f => findingItem([f])),
        ),
      ]
    : null;
}

function startOf(l) {
  if (l.into.some(x => x.kind === 'lost'))
    return 'planned to start with the launch before it; the captured graph lost that edge';
  return `${l.dependent ? 'with' : 'after'} the launch before it`;
}

function drawLaunch(l) {
  const c = l.choice,
    alike = launches.filter(o => o.choice === c),
    bar = Math.max(l.us, l.floor_us);
  const layers = [...new Set(alike.map(o => o.layer).filter(n => n !== null))];
  const edges = list =>
    list.length ? list.map((x, i) => [i ? ', ' : '', linkTo(x.other), ` (${x.kind})`]) : 'nothing';
  at('launch').replaceChildren(
    ...[
      el(
        'div',
        { class: 'bar', style: 'gap: 6px; justify-content: space-between' },
        el(
          'span',
          { class: 'soft small' },
          `Launch ${l.index} of ${launches.length}, ${l.layer === null ? l.stage : `layer ${l.layer}, ${l.span.kind}`}`,
        ),
        el(
          'span',
          {},
          el('button', { type: 'button', 'aria-label': 'Launch before', onclick: () => select(l.index - 1) }, '‹'),
          ' ',
          el('button', { type: 'button', 'aria-label': 'Next launch', onclick: () => select(l.index + 1) }, '›'),
        ),
      ),
      el('h2', { 'aria-live': 'polite' }, l.id),
      el('p', {}, swatch(c.family), el('b', {}, c.kernel), el('br'), el('code', { class: 'soft' }, c.entry)),
      el(
        'div',
        { class: 'figures', style: 'gap: 6px 22px; margin: 8px 0 6px' },
        [
          [us(l.us), 'µs', word(l.basis)],
          [us(l.floor_us), 'µs', 'floor'],
          [us(l.gap_us), 'µs', 'above it'],
        ].map(([v, unit, text]) =>
          el(
            'div',
            { class: 'figure' },
            el('b', { style: 'font-size: 20px' }, v, el('small', {}, unit)),
            el('span', {}, text),
          ),
        ),
      ),
      el(
        'div',
        { class: 'meter', role: 'img', 'aria-label': `floor ${us(l.floor_us)} of ${us(l.us)} µs` },
        el('i', { style: `width: ${(100 * l.us) / bar}%; background: var(--${c.family}); opacity: .3` }),
        el('i', { style: `width: ${(100 * l.floor_us) / bar}%; background: var(--${c.family})` }),
      ),
      el(
        'p',
        { class: 'small soft', style: 'margin-top: 6px' },
        l.basis === 'graph'
          ? `Measured inside the graph on ${device}; the plan said ${us(l.planned_us)} µs. `
          : `${raw.bases[l.basis]}. `,
        l.basis === 'graph' ? '' : c.source,
      ),
      el(
        'dl',
        {},
        el('dt', {}, 'moves'),
        el('dd', {}, `${size(c.bytes)}, ${count(c.flops)} operations`),
        el('dt', {}, 'starts'),
        el('dd', {}, `at ${us(l.start_us)} µs on stream ${l.stream}, ${startOf(l)}`),
        el('dt', {}, 'waits for'),
        el('dd', {}, edges(l.into.map(x => ({ other: x.source, kind: x.kind })))),
        el('dt', {}, 'let go'),
        el('dd', {}, edges(l.from.map(x => ({ other: x.target, kind: x.kind })))),
        el('dt', {}, 'alike'),
        el(
          'dd',
          {},
          `${plural(alike.length, 'launch')} with this choice${layers.length ? `, layers ${ranges(layers)}` : ''}`,
        ),
      ),
      el('h3', {}, 'Computes'),
      el(
        'ul',
        { class: 'plainlist' },
        c.ops.map((op, i) =>
          el('li', {}, el('code', {}, op), el('span', { class: 'soft' }, l.nodes[i] ? ` ${l.nodes[i]}` : '')),
        ),
      ),
      el('h3', {}, 'Chosen because'),
      el('p', { class: 'small' }, chosenBecause(c)),
      whyNot(c),
      el('h3', {}, 'Configuration'),
      Object.keys(c.config).length
        ? [
            el(
              'p',
              { class: 'small' },
              Object.entries(c.config).map(([k, v], i) => [i ? ', ' : '', el('code', {}, `${k} ${v}`)]),
            ),
            el('p', { class: 'soft small' }, c.config_source),
          ]
        : el('p', { class: 'soft small' }, 'none'),
      tensorList('Reads', l, l.inputs, true),
      tensorList('Writes', l, l.outputs, false),
      l.scratch.length ? tensorList('Workspace', l, l.scratch, false) : null,
      captured(l),
      findingsOf(l),
      decidedBy(l),
    ]
      .flat(9)
      .filter(Boolean),
  );
}
