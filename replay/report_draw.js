// Paints the timeline: lanes above, charts below, one time axis. Reads `view`, changes nothing.
"use strict";

const LEFT = 54, AXIS = 22, CHART = 74, GAP = 16;
const view = { from: 0, to: Math.max(1, data.durationUs), top: 0, rowHeight: 0, bySlot: false,
  selected: null, hover: null };
const canvas = document.getElementById("canvas");
const pen = canvas.getContext("2d");
let colors = {};

function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["panel", "text", "soft", "line", "grid", "queued", "prefill", "decode",
    "preempted", "select", "accent", "second"]) colors[name] = style.getPropertyValue(`--${name}`).trim();
  colors.states = [colors.queued, colors.prefill, colors.decode, colors.preempted];
}

// The requests that live in the time shown, each with its row: zooming in time brings them closer.
const visible = { rows: [], rowOf: new Map(), from: NaN, to: NaN };

function findVisible() {
  if (visible.from === view.from && visible.to === view.to) return;
  visible.from = view.from;
  visible.to = view.to;
  visible.rows = requests.filter((r) => r.states.length && r.to >= view.from && r.from <= view.to);
  visible.rowOf = new Map(visible.rows.map((request, row) => [request, row]));
}

// Asked for with every rectangle, so it is not read from the document each time.
const measured = { width: 1, height: 1 };
const size = () => measured;
function measure() {
  measured.width = canvas.clientWidth;
  measured.height = canvas.clientHeight;
}
const lanesBottom = () => Math.max(60, size().height - 2 * (CHART + GAP) - 6);
const lanesHeight = () => lanesBottom() - AXIS;
const scale = () => (size().width - LEFT - 8) / (view.to - view.from);
const xOf = (us) => LEFT + (us - view.from) * scale();
const usOf = (x) => view.from + (x - LEFT) / scale();
const numRows = () => Math.max(1, view.bySlot ? slots.length : visible.rows.length);
const fitHeight = () => Math.min(26, lanesHeight() / numRows());
const rowHeight = () => view.rowHeight || fitHeight();
const yOf = (row) => AXIS + row * rowHeight() - view.top;

function draw() {
  measure();
  const { width, height } = size(), ratio = window.devicePixelRatio || 1;
  findVisible();
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = colors.panel;
  pen.fillRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  drawAxis(width, height);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, AXIS, width - LEFT, lanesHeight());
  pen.clip();
  if (view.bySlot) drawSlots(); else drawRequests();
  pen.restore();
  drawRowNames();
  const first = lanesBottom() + GAP, second = first + CHART + GAP;
  const blocks = data.config.num_blocks, budget = data.config.max_num_batched_tokens;
  drawChart(first, `KV blocks held (of ${blocks})`, steps.held, blocks, colors.accent);
  drawChart(second, `tokens in a step (of ${budget})`, steps.tokens, budget, colors.prefill);
  drawQueue(second);
  drawPreemptions(first);
  if (view.hover !== null && view.hover >= LEFT) {
    pen.fillStyle = colors.soft;
    pen.fillRect(Math.round(view.hover), AXIS, 1, height - AXIS);
  }
}

function drawAxis(width, height) {
  const wanted = (view.to - view.from) / Math.max(2, width / 130);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const unit = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
  pen.textBaseline = "middle";
  for (let us = Math.ceil(view.from / unit) * unit; us <= view.to; us += unit) {
    const x = Math.round(xOf(us));
    pen.fillStyle = colors.grid;
    pen.fillRect(x, AXIS, 1, height - AXIS);
    pen.fillStyle = colors.soft;
    pen.fillText(us === 0 ? "0" : time(us), x + 3, AXIS / 2);
  }
}

// A rectangle at least as wide as can be seen; into the pixels where there are too many to paint.
function bar(kind, from, to, y, height, least) {
  const x = xOf(from), width = Math.max(least, xOf(to) - x);
  if (pixels) {
    fillPixels(kind, x - LEFT, y - AXIS, width, height);
    return;
  }
  pen.fillStyle = colors.states[kind];
  pen.fillRect(x, y, width, height);
}

const MANY = 1500;
let pixels = null;

function beginPixels() {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round((size().width - LEFT) * ratio));
  const height = Math.max(1, Math.round(lanesHeight() * ratio));
  const image = new ImageData(width, height);
  pixels = { ratio, width, height, image, words: new Uint32Array(image.data.buffer),
    colors: colors.states.map((hex) => {
      const value = parseInt(hex.slice(1), 16);
      return (0xff000000 | (value & 0xff) << 16 | (value & 0xff00) | value >> 16) >>> 0;
    }) };
}

function fillPixels(kind, x, y, width, height) {
  const { ratio, words, width: stride } = pixels;
  const left = Math.max(0, Math.floor(x * ratio));
  const right = Math.min(stride, Math.max(left + 1, Math.round((x + width) * ratio)));
  const top = Math.max(0, Math.floor(y * ratio));
  const bottom = Math.min(pixels.height, Math.max(top + 1, Math.round((y + height) * ratio)));
  for (let row = top; row < bottom && left < right; row++) {
    words.fill(pixels.colors[kind], row * stride + left, row * stride + right);
  }
}

function endPixels() {
  const { image, width, height, ratio } = pixels, sheet = document.createElement("canvas");
  sheet.width = width;
  sheet.height = height;
  sheet.getContext("2d").putImageData(image, 0, 0);
  pen.drawImage(sheet, LEFT, AXIS, width / ratio, height / ratio);
  pixels = null;
}

// Every state of every request that can be seen; a preemption is never hidden by another row.
function drawRequests() {
  const height = rowHeight(), bottom = lanesBottom();
  const first = Math.max(0, Math.floor(view.top / height));
  const last = Math.min(visible.rows.length - 1, Math.ceil((view.top + lanesHeight()) / height));
  const pad = height >= 5 ? Math.min(2, height * 0.15) : 0, thick = Math.max(height - 2 * pad, 0.8);
  const many = (last - first) * 3 > MANY;
  if (many) beginPixels();
  for (const kind of [QUEUED, DECODE, PREFILL, PREEMPTED]) {
    const least = kind === PREEMPTED ? 2 : 0.5;
    const tall = kind === PREEMPTED ? Math.max(thick, 2) : thick;
    for (let row = first; row <= last; row++) {
      const request = visible.rows[row], y = yOf(row) + pad;
      if (y > bottom) break;
      const s = request.states;
      for (let i = 0; i < s.length; i += 3) {
        if (s[i] === kind && s[i + 1] <= view.to && s[i + 1] + s[i + 2] >= view.from) {
          bar(kind, s[i + 1], s[i + 1] + s[i + 2], y, tall, least);
        }
      }
    }
  }
  if (many) endPixels();
  drawSelection(visible.rowOf.get(view.selected), height);
  if (height >= 6 && !many) for (let row = first; row <= last; row++) drawChunks(visible.rows[row], yOf(row) + pad, thick);
}

// Lines where one prefill chunk ends and the next begins.
function drawChunks(request, y, height) {
  pen.fillStyle = colors.panel;
  for (let i = 0; i < request.work.length; i += 7) {
    const from = request.work[i + 2];
    if (request.work[i + 1] !== PREFILL || from < view.from || from > view.to) continue;
    if (request.work[i + 3] * scale() > 5) pen.fillRect(xOf(from), y, 1, height);
  }
}

function drawSelection(row, height) {
  if (row === undefined) return;
  pen.globalAlpha = 0.14;
  pen.fillStyle = colors.select;
  pen.fillRect(LEFT, yOf(row) - 1, size().width, Math.max(height, 3) + 2);
  pen.globalAlpha = 1;
  pen.fillStyle = colors.select;
  pen.fillRect(LEFT, yOf(row) - 1, 3, Math.max(height, 3) + 2);
}

// What the batch rows do; pieces that fall on one pixel are one.
function drawSlots() {
  const height = rowHeight(), pad = height >= 5 ? 1 : 0, thick = Math.max(1, height - 2 * pad);
  const begins = slots.map((pieces) => lowerBound(pieces.length, (n) => pieces[n].to, view.from));
  const ends = slots.map((pieces) => lowerBound(pieces.length, (n) => pieces[n].from, view.to));
  const many = ends.reduce((sum, end, row) => sum + end - begins[row], 0) > MANY;
  if (many) beginPixels();
  slots.forEach((pieces, row) => {
    const y = yOf(row) + pad;
    if (y > lanesBottom() || y + thick < AXIS) return;
    for (let i = begins[row]; i < ends[row]; i++) {
      bar(pieces[i].kind, pieces[i].from, pieces[i].to, y, thick, 1);
      if (!many) drawPieceText(pieces[i], y, thick);
    }
  });
  if (many) endPixels();
  if (view.selected) drawSelectedPieces(pad, thick);
  drawSlotPreemptions(height);
}

function drawPieceText(piece, y, height) {
  const x = xOf(piece.from), right = xOf(piece.to);
  if (right - x > 4 && height >= 4) {
    pen.fillStyle = colors.panel;
    pen.fillRect(x, y, 1, height);
  }
  if (height >= 11) label(piece.request.id, Math.max(LEFT, x) + 4, y + height / 2, right);
}

function drawSelectedPieces(pad, height) {
  const work = view.selected.work;
  pen.strokeStyle = colors.select;
  pen.lineWidth = 2;
  for (let i = 0; i < work.length; i += 7) {
    const x = xOf(work[i + 2]), width = work[i + 3] * scale();
    pen.strokeRect(x, yOf(work[i]) + pad, Math.max(2, width), height);
  }
}

// A mark where a request loses its row.
function drawSlotPreemptions(height) {
  pen.fillStyle = colors.preempted;
  for (const { step, request } of preemptions) {
    const us = steps.planned[step];
    if (us < view.from || us > view.to) continue;
    let slot = -1;
    for (let i = 0; i < request.work.length && request.work[i + 2] < us; i += 7) slot = request.work[i];
    if (slot >= 0) pen.fillRect(xOf(us) - 2, yOf(slot), 4, Math.max(2, height));
  }
}

function label(text, x, y, right) {
  if (right - x < 26) return;
  pen.fillStyle = "#ffffff";
  pen.textBaseline = "middle";
  pen.fillText(text, x, y);
}

function drawRowNames() {
  const height = rowHeight(), every = Math.max(1, Math.ceil(15 / height));
  pen.fillStyle = colors.panel;
  pen.fillRect(0, 0, LEFT, lanesBottom() + 4);
  pen.fillStyle = colors.soft;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  const first = Math.max(0, Math.floor(view.top / height));
  const count = view.bySlot ? slots.length : visible.rows.length;
  for (let row = first - (first % every); row < count; row += every) {
    const y = yOf(row) + height / 2;
    if (y < AXIS + 4) continue;
    if (y > lanesBottom() - 2) break;
    pen.fillText(view.bySlot ? `row ${row}` : `${visible.rows[row].id}`, LEFT - 6, y);
  }
  if (!view.bySlot && visible.rowOf.has(view.selected)) {
    const y = yOf(visible.rowOf.get(view.selected)) + height / 2;
    if (y > AXIS && y < lanesBottom()) {
      pen.fillStyle = colors.panel;
      pen.fillRect(0, y - 8, LEFT - 2, 16);
      pen.fillStyle = colors.select;
      pen.font = "bold 11px system-ui, sans-serif";
      pen.fillText(`▸${view.selected.id}`, LEFT - 6, y);
      pen.font = "11px system-ui, sans-serif";
    }
  }
  pen.textAlign = "left";
}

// The largest value of the steps on each pixel column, as an area.
function columns(values, paint) {
  const right = size().width - 8;
  let step = Math.max(0, stepAt(view.from));
  for (let x = LEFT; x < right && step < steps.count; x++) {
    const until = usOf(x + 1);
    let most = -1;
    while (step < steps.count && steps.planned[step] < until) {
      most = Math.max(most, values[step]);
      step++;
    }
    if (most < 0) { // within a long step, or between two
      const at = step - 1;
      if (at < 0) continue;
      if (usOf(x) > steps.planned[at] + steps.length[at] && values !== steps.held) continue;
      most = values[at];
    }
    paint(x, most);
  }
}

function drawChart(top, name, values, limit, color) {
  const right = size().width - 8, bottom = top + CHART;
  pen.fillStyle = colors.grid;
  pen.fillRect(LEFT, top, right - LEFT, 1);
  pen.fillRect(LEFT, bottom, right - LEFT, 1);
  pen.fillStyle = color;
  pen.globalAlpha = 0.75;
  pen.beginPath();
  pen.moveTo(LEFT, bottom);
  let last = LEFT;
  columns(values, (x, value) => {
    const y = bottom - Math.min(1, value / limit) * CHART;
    if (x > last) { pen.lineTo(last, bottom); pen.lineTo(x, bottom); }
    pen.lineTo(x, y);
    pen.lineTo(x + 1, y);
    last = x + 1;
  });
  pen.lineTo(last, bottom);
  pen.fill();
  pen.globalAlpha = 1;
  pen.fillStyle = colors.soft;
  pen.textBaseline = "bottom";
  pen.fillText(name, LEFT + 2, top - 1);
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillText(`${limit}`, LEFT - 6, top + 5);
  pen.fillText("0", LEFT - 6, top + CHART - 4);
  pen.textAlign = "left";
}

// Running and waiting requests as lines over the second chart.
function drawQueue(top) {
  const most = Math.max(1, steps.mostPresent = steps.mostPresent || largest(steps.waiting, steps.running));
  [[steps.waiting, colors.second, "waiting"], [steps.running, colors.decode, "running"]].forEach(
    ([values, color, name], index) => {
      pen.fillStyle = pen.strokeStyle = color;
      pen.lineWidth = 1.5;
      pen.beginPath();
      let last = -1;
      columns(values, (x, value) => {
        const y = top + CHART - 2 - (value / most) * (CHART - 4);
        if (x > last) pen.moveTo(x, y); else pen.lineTo(x, y);
        pen.lineTo(x + 1, y);
        last = x + 1;
      });
      pen.stroke();
      pen.textBaseline = "bottom";
      pen.fillText(`${name} (top ${most})`, LEFT + 180 + index * 120, top - 1);
    });
}

function largest(...lists) {
  let most = 0;
  for (const list of lists) for (const value of list) if (value > most) most = value;
  return most;
}

function drawPreemptions(top) {
  pen.fillStyle = colors.preempted;
  let any = false;
  for (const { step } of preemptions) {
    const us = steps.planned[step];
    if (us < view.from || us > view.to) continue;
    any = true;
    pen.fillRect(xOf(us) - 1, top, 2, 9);
  }
  if (any) {
    pen.textBaseline = "bottom";
    pen.fillText("▎preemption", LEFT + 180, top - 1);
  }
}
