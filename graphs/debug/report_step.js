'use strict';
// The section with the timeline: its controls, the pointer and the keys.

// the launch or the span at a place of the detailed timeline
function under(e, canvas) {
  const box = canvas.getBoundingClientRect();
  const t = view.from + ((e.clientX - box.left) / box.width) * (view.to - view.from);
  const y = e.clientY - box.top;
  if (y < AXIS + BAND) return { t, span: spans.find(s => spanOf(s)[0] <= t && t <= spanOf(s)[1]) };
  const inLane = l => laneTop(l.stream) <= y && y <= laneTop(l.stream) + BAR;
  return { t, launch: launches.find(l => l.start_us <= t && t <= l.end_us && inLane(l)) };
}

function underWord({ launch, span }) {
  if (launch) return launchWord(launch);
  return span ? `${span.title}: ${span.kind}\n${plural(span.last - span.first + 1, 'launch')}, click to zoom` : '';
}

function listenToPointer(canvas) {
  let drag = null;
  const move = by => show(view.from + by, view.to + by);
  canvas.addEventListener('pointerdown', e => {
    drag = { x: e.clientX, moved: false };
    canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener('pointermove', e => {
    if (!drag) return showTip(e, underWord(under(e, canvas)));
    const by = e.clientX - drag.x;
    if (!drag.moved && Math.abs(by) < 5) return;
    move(((view.from - view.to) * by) / canvas.clientWidth);
    drag = { x: e.clientX, moved: true };
    hideTip();
  });
  canvas.addEventListener('pointerup', e => {
    const { launch, span } = under(e, canvas);
    const moved = drag && drag.moved;
    drag = null;
    if (!moved && launch) select(launch.index);
    else if (!moved && span) showSpan(span);
  });
  canvas.addEventListener('pointerleave', hideTip);
  const turn = e => {
    if (e.ctrlKey || e.metaKey) zoom(Math.exp(e.deltaY * 0.002), under(e, canvas).t);
    else if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) move((e.deltaX / canvas.clientWidth) * (view.to - view.from));
    else return;
    e.preventDefault();
  };
  canvas.addEventListener('wheel', turn, { passive: false });
}

function listenToKeys(canvas) {
  const keys = {
    ArrowLeft: () => select(selected - 1),
    ArrowRight: () => select(selected + 1),
    Home: () => select(0),
    End: () => select(launches.length - 1),
    '+': () => zoom(0.6),
    '=': () => zoom(0.6),
    '-': () => zoom(1 / 0.6),
    0: () => show(0, stepEnd),
  };
  canvas.addEventListener('keydown', e => {
    if (!keys[e.key] || e.ctrlKey || e.metaKey || e.altKey) return;
    keys[e.key]();
    e.preventDefault();
  });
}

function listenToOverview(canvas) {
  const jump = e => {
    const box = canvas.getBoundingClientRect();
    const t = ((e.clientX - box.left) / box.width) * stepEnd;
    const half = (view.to - view.from) / 2;
    show(t - half, t + half);
  };
  canvas.addEventListener('pointerdown', e => {
    canvas.setPointerCapture(e.pointerId);
    jump(e);
  });
  canvas.addEventListener('pointermove', e => e.buttons && jump(e));
}

function timelineNote() {
  const kinds = groupBy(links, link => link.kind);
  const number = kind => (kinds.get(kind) || []).length;
  const edges = plural(number('programmatic'), 'programmatic edge');
  const where = head.record ? `in the captured graph, ${number('lost')} lost` : 'planned';
  const share = `A measured launch reaches from the end of what ran before it to its own end; pale at its left nothing
    ran, and the line above it is how long its kernel was on the GPU.`;
  return `${totalWord[0].toUpperCase()}${totalWord.slice(1)} times of ${plural(launches.length, 'launch')} on
    ${plural(streams.length, 'stream')}. A bar is a launch; the solid part inside it is its floor: its bytes at the
    bandwidth of the device, or its operations at the matrix rate, and nothing else. ${anyGraph ? share : ''}
    ${edges} ${where}.`;
}

function timelineLegend() {
  const line = kind => `background: var(--${EDGE[kind]}); height: 4px; vertical-align: 3px`;
  const kinds = new Set(links.map(link => link.kind));
  return el(
    'div',
    { class: 'legend' },
    [...new Set(choices.map(c => c.family))].map(f => el('span', {}, swatch(f), f.replace('_', ' '))),
    [...kinds].map(kind => el('span', {}, el('i', { class: 'swatch', style: line(kind) }), `${kind} edge`)),
  );
}

function drawTimeline() {
  const overview = el('canvas', { 'aria-hidden': 'true' });
  const keys = 'Timeline. Arrow keys go from launch to launch, plus and minus zoom, 0 shows the whole step.';
  const detail = el('canvas', { class: 'live', tabindex: 0, role: 'group', 'aria-label': keys });
  const pick = spanPicker('Layer of the timeline', showSpan);
  const step = by => {
    pick.value = Math.max(0, Math.min(spans.length - 1, Number(pick.value) + by));
    showSpan(spans[pick.value]);
  };
  const tools = [
    act('‹', 'Layer before', () => step(-1)),
    pick,
    act('›', 'Next layer', () => step(1)),
    act('+', 'Zoom in', () => zoom(0.6)),
    act('−', 'Zoom out', () => zoom(1 / 0.6)),
    act('Whole step', 'Show the whole step', () => show(0, stepEnd)),
    el('span', { class: 'soft small' }, 'Drag to move, Ctrl and wheel to zoom, click for the reasons of a launch.'),
  ];
  at('timeline').append(
    el('p', { class: 'soft small' }, timelineNote()),
    overview,
    el('div', { class: 'tools' }, tools),
    detail,
    timelineLegend(),
  );
  const redraw = [paint(overview, 58, drawOverview), paint(detail, laneTop(streams.at(-1)) + BAR + HANG, drawDetail)];
  viewers.push(() => {
    redraw.forEach(f => f());
    const middle = (view.from + view.to) / 2;
    pick.value = Math.max(
      0,
      spans.findIndex(s => spanOf(s)[1] >= middle),
    );
  });
  listeners.push((l, options) => {
    const wide = view.to - view.from;
    if (options.first) showSpan(l.span);
    else if (l.start_us < view.from || l.end_us > view.to) show(l.start_us - wide / 3, l.start_us + (wide * 2) / 3);
    else redraw[1]();
  });
  listenToPointer(detail);
  listenToKeys(detail);
  listenToOverview(overview);
}
