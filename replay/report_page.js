// The page around the timeline: mouse and keys, the list of requests, and what happened to one.
"use strict";

const element = (id) => document.getElementById(id);
const ITEM = 26;
let shown = [];
let pending = false;

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

// An element with text; never markup.
function make(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// --- moving --------------------------------------------------------------------------------------

function show(from, to) {
  const whole = Math.max(1, data.durationUs), least = Math.min(whole, 20);
  const length = Math.min(Math.max(to - from, least), whole * 1.02);
  view.from = Math.min(Math.max(from, -0.01 * whole), 1.01 * whole - length);
  view.to = view.from + length;
  findVisible();
  scrollRows(view.top);
}

function zoom(factor, x) {
  const at = usOf(x === undefined ? LEFT + (size().width - LEFT) / 2 : x);
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

function scrollRows(top) {
  const most = Math.max(0, numRows() * rowHeight() - lanesHeight());
  view.top = Math.min(Math.max(0, top), most);
  redraw();
}

function fit() {
  view.rowHeight = 0;
  view.top = 0;
  show(0, data.durationUs);
}

function setMode(bySlot) {
  view.bySlot = bySlot;
  view.rowHeight = 0;
  view.top = 0;
  element("by-slot").setAttribute("aria-selected", bySlot);
  element("by-request").setAttribute("aria-selected", !bySlot);
  redraw();
}

// Rows high enough to see one, around the selected request.
function revealSelected() {
  const request = view.selected;
  if (!request || view.bySlot) return;
  findVisible();
  if (rowHeight() < 9) view.rowHeight = 12;
  scrollRows((visible.rowOf.get(request) || 0) * rowHeight() - lanesHeight() / 2);
}

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (event.shiftKey) scrollRows(view.top + (event.deltaY || event.deltaX));
  else if (event.ctrlKey && !view.bySlot) {
    const row = (view.top + event.offsetY - AXIS) / rowHeight();
    view.rowHeight = Math.min(40, Math.max(fitHeight(), rowHeight() * Math.exp(-event.deltaY / 300)));
    scrollRows(row * rowHeight() - event.offsetY + AXIS);
  } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const move = event.deltaX / scale();
    show(view.from + move, view.to + move);
  } else zoom(Math.exp(event.deltaY / 400), event.offsetX);
}, { passive: false });

let drag = null;
canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  drag = { x: event.offsetX, y: event.offsetY, from: view.from, to: view.to, top: view.top, moved: false };
});
canvas.addEventListener("pointermove", (event) => {
  view.hover = event.offsetX;
  if (drag) {
    const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
    if (drag.moved || Math.abs(dx) + Math.abs(dy) > 4) {
      drag.moved = true;
      show(drag.from - dx / scale(), drag.to - dx / scale());
      scrollRows(drag.top - dy);
    }
  } else tip(event);
  redraw();
});
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) {
    const found = requestAt(event.offsetX, event.offsetY);
    if (found) select(found.request, false);
  }
  drag = null;
});
canvas.addEventListener("pointerleave", () => {
  view.hover = null;
  element("tip").hidden = true;
  redraw();
});
canvas.addEventListener("dblclick", fit);

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { select(null); event.target.blur(); return; }
  if (event.target.tagName === "INPUT" || event.target.tagName === "SELECT") return;
  const width = view.to - view.from;
  if (event.key === "+" || event.key === "=") zoom(0.6);
  else if (event.key === "-") zoom(1 / 0.6);
  else if (event.key === "0") fit();
  else if (event.key === "ArrowLeft") show(view.from - width / 5, view.to - width / 5);
  else if (event.key === "ArrowRight") show(view.from + width / 5, view.to + width / 5);
  else if (event.key === "ArrowDown") scrollRows(view.top + 60);
  else if (event.key === "ArrowUp") scrollRows(view.top - 60);
  else if (event.key === "/") element("search").focus();
  else return;
  event.preventDefault();
});

// --- what is under the mouse ---------------------------------------------------------------------

function requestAt(x, y) {
  if (x < LEFT || y < AXIS || y > lanesBottom()) return null;
  const row = Math.floor((y - AXIS + view.top) / rowHeight()), us = usOf(x);
  if (view.bySlot) {
    const pieces = slots[row] || [];
    const at = lowerBound(pieces.length, (n) => pieces[n].to, us);
    const piece = pieces[at];
    return piece && piece.from <= us + 2 / scale() ? { request: piece.request, us, piece } : null;
  }
  // Where rows are thinner than a pixel, the preempted one among them is meant.
  const until = Math.max(row, Math.floor((y + 2 - AXIS + view.top) / rowHeight()));
  let best = null;
  for (let i = row; i <= until && i < visible.rows.length; i++) {
    const request = visible.rows[i], state = stateAt(request, us);
    if (state >= 0 && (!best || state > best.state)) best = { request, us, state };
  }
  return best || (visible.rows[row] ? { request: visible.rows[row], us, state: -1 } : null);
}

function stateAt(request, us) {
  const s = request.states;
  for (let i = 0; i < s.length; i += 3) if (s[i + 1] <= us && us < s[i + 1] + s[i + 2]) return s[i];
  return -1;
}

function tip(event) {
  const box = element("tip"), found = requestAt(event.offsetX, event.offsetY), step = stepAt(usOf(event.offsetX));
  const lines = [];
  if (found && (found.piece || found.state >= 0)) {
    const { request, us } = found, state = found.piece ? found.piece.kind : found.state;
    lines.push(`request ${request.id}: ${data.states[state]}`);
    if (state === QUEUED || state === PREEMPTED) {
      const reason = reasonAt(request, us);
      if (reason && reason.name) lines.push(reasonText(reason));
    }
  }
  if (step >= 0 && event.offsetX >= LEFT) {
    lines.push(`${time(usOf(event.offsetX))}, step ${steps.firstId + step}: ${steps.decodes[step]} decodes,`
      + ` ${steps.prefill[step]} prefill tokens, ${steps.held[step]} blocks held,`
      + ` ${steps.running[step]} run, ${steps.waiting[step]} wait`);
  }
  box.hidden = lines.length === 0;
  box.textContent = lines.join("\n");
  const { width, height } = size();
  box.style.left = `${Math.min(event.offsetX + 14, width - 330)}px`;
  box.style.top = `${Math.min(event.offsetY + 14, height - 90)}px`;
}

function reasonText(reason) {
  if (!reason.name) return "no reason is logged";
  if (reason.behind === null) return `${reason.name}: ${inWords(reason.name)}`;
  return `behind request ${reason.behind}, which waits for ${reason.name}: ${inWords(reason.name)}`;
}

// --- the list ------------------------------------------------------------------------------------

const ORDERS = {
  preemptions: (a, b) => b.preemptions.length - a.preemptions.length || b.waited - a.waited,
  waited: (a, b) => b.waited - a.waited,
  ttft: (a, b) => (b.ttft || 0) - (a.ttft || 0),
  stall: (a, b) => b.stall - a.stall,
  arrival: (a, b) => a.index - b.index,
};

function fillList() {
  const wanted = element("search").value.trim().toLowerCase();
  shown = requests.filter((r) => !wanted || String(r.id).startsWith(wanted) || r.ended.toLowerCase().includes(wanted));
  shown.sort(ORDERS[element("sort").value]);
  element("list-space").style.height = `${shown.length * ITEM}px`;
  element("list").scrollTop = 0;
  paintList();
}

function paintList() {
  const list = element("list"), space = element("list-space");
  const first = Math.max(0, Math.floor(list.scrollTop / ITEM) - 3);
  const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ITEM) + 6);
  space.replaceChildren();
  for (let i = first; i < last; i++) {
    const request = shown[i], item = make("button", undefined, "item");
    item.type = "button";
    item.style.top = `${i * ITEM}px`;
    item.append(make("span", request.id), make("span", time(request.waited)), make("span", time(request.ttft)));
    const count = request.preemptions.length;
    item.append(make("span", count ? `${count} ×` : "–", count ? "hot" : "soft"), make("span", request.ended, "soft"));
    item.addEventListener("click", () => select(request, true));
    space.append(item);
  }
}

// --- one request ---------------------------------------------------------------------------------

function select(request, zoomTo) {
  view.selected = request;
  element("detail").hidden = !request;
  element("list-view").hidden = Boolean(request);
  history.replaceState(null, "", request ? `#request=${request.id}` : "#");
  if (request) {
    explain(request);
    if (zoomTo) {
      const pad = Math.max(500, (request.to - request.from) * 0.15);
      show(request.from - pad, request.to + pad);
    }
    revealSelected();
  } else paintList();
  redraw();
}

function explain(request) {
  const box = element("detail"), back = make("button", "← all requests", "back");
  back.type = "button";
  back.addEventListener("click", () => select(null));
  box.replaceChildren(back, make("h2", `Request ${request.id}`), because(request), figures(request));
  box.append(make("h2", "What happened"));
  let stay = 0;
  const s = request.states;
  for (let i = 0; i < s.length; i += 3) {
    const waits = s[i] === QUEUED || s[i] === PREEMPTED;
    box.append(span(request, s[i], s[i + 1], s[i + 2], waits ? stay++ : -1));
  }
  box.append(make("p", `ended: ${request.ended}`, "soft"));
  box.scrollTop = 0;
}

// The answer in a sentence or two.
function because(request) {
  const box = make("div", undefined, "because"), times = request.preemptions.length;
  if (!times) box.classList.add("calm");
  const parts = [];
  if (times) {
    const at = request.preemptions.map((step) => steps.firstId + step).join(", ");
    parts.push(`It was preempted ${times === 1 ? "once" : `${times} times`} (${times === 1 ? "step" : "steps"} ${at}):`
      + ` the pool had no free block left for those that arrived before it.`);
  }
  const [main] = waitedFor(request);
  if (main && request.waited > 0) {
    const where = main.behind ? "behind others that waited for" : "for";
    parts.push(`It waited ${time(request.waited)} in all, mostly ${where} ${main.name}: ${inWords(main.name)}.`);
  } else parts.push(request.ended.startsWith("REFUSED") ? "It was refused at the door." : "It did not wait.");
  box.textContent = parts.join(" ");
  return box;
}

function figures(request) {
  const box = make("dl"), rows = [
    ["prompt", request.prompt], ["output", `${request.outputs} / ${request.maxTokens}`],
    ["queue", time(request.queue)], ["waited", time(request.waited)],
    ["TTFT", time(request.ttft)], ["total", time(request.total)],
    ["ITL p50", time(request.itl50)], ["ITL p99", time(request.itl99)],
    ["from cache", request.hit], ["recomputed", request.recomputed],
    ["stall", time(request.stall)], ["preempted", `${request.preemptions.length} ×`],
  ];
  for (const [name, value] of rows) box.append(make("dt", name), make("dd", value));
  return box;
}

function span(request, kind, from, length, stay) {
  const row = make("button", undefined, "span");
  row.type = "button";
  row.append(make("i", undefined, data.states[kind]));
  const title = { [QUEUED]: "queued", [PREFILL]: "prefill", [DECODE]: "decode", [PREEMPTED]: "preempted, waits again" };
  row.append(make("b", `${title[kind]} for ${time(length)}`), make("span", `at ${time(from)}`, "when"));
  const lines = make("ul");
  if (stay >= 0) waitLines(request, stay, lines);
  else workLines(request, kind, from, from + length, lines);
  if (lines.childElementCount) row.append(lines);
  row.addEventListener("click", () => show(from - length * 0.2 - 100, from + length * 1.2 + 100));
  return row;
}

function stepText(first, last) {
  const a = steps.firstId + first, b = steps.firstId + last;
  return a === b ? `step ${a}` : `steps ${a}–${b}`;
}

function waitLines(request, stay, lines) {
  const [first, last] = queueSteps(request, stay);
  if (stay) {
    const others = within(preemptions, first, first, request);
    const line = make("li", `put out in step ${steps.firstId + first}: no free block was left`);
    if (others.length) line.append(`; so were ${ids(others)}`);
    lines.append(line);
  }
  const found = reasons(request, first, last), most = 12;
  for (const reason of found.slice(0, most)) {
    const line = make("li");
    line.append(make("b", reason.name || "?"), ` ${stepText(reason.first, reason.last)},`
      + ` ${time(stepEnd(reason.last) - steps.planned[reason.first])}:`
      + ` ${reason.behind === null ? inWords(reason.name || "no reason is logged") : `behind request ${reason.behind}`}`);
    const admitted = within(admissions, reason.first, reason.last, request);
    const lost = within(preemptions, reason.first, reason.last, request);
    if (admitted.length) line.append(`; let in: ${ids(admitted)}`);
    if (lost.length) line.append(`; put out: ${ids(lost)}`);
    lines.append(line);
  }
  if (found.length > most) lines.append(make("li", `… and ${found.length - most} changes of reason more`));
  if (first > last) lines.append(make("li", "let in with the next step"));
}

function workLines(request, kind, from, to, lines) {
  let chunks = 0, tokens = 0;
  for (let i = 0; i < request.work.length; i += 7) {
    const begin = request.work[i + 2];
    if (request.work[i + 1] !== kind || begin < from || begin >= to) continue;
    chunks++;
    tokens += request.work[i + 6];
  }
  if (kind === DECODE) lines.append(make("li", counted(tokens, "token")));
  else lines.append(make("li", `${counted(tokens, "token")} in ${counted(chunks, "chunk")}`));
}

function ids(list) {
  const most = 6, head = list.slice(0, most).join(", ");
  return list.length > most ? `${head} and ${list.length - most} more` : head;
}

// --- the rest ------------------------------------------------------------------------------------

function fillTotals() {
  const run = data.run, box = element("totals");
  const spread = (s, field) => (s ? time(s[field]) : "–");
  const pairs = [["requests", run.num_requests], ["steps", run.num_steps], ["", time(run.duration_us)],
    ["tok/s", run.output_tokens_per_s], ["TTFT p50", spread(run.ttft_us, "p50")], ["p99", spread(run.ttft_us, "p99")],
    ["ITL p50", spread(run.itl_us, "p50")], ["p99", spread(run.itl_us, "p99")],
    ["preemptions", run.num_preemptions], ["recomputed tokens", run.num_recomputed_tokens]];
  for (const [name, value] of pairs) {
    const item = make("span");
    item.append(make("b", value), ` ${name}`);
    box.append(item);
  }
  element("title").textContent = data.title;
  element("title").title = `${data.title}, written by cearx ${data.codeVersion}`;
  document.title = `${data.title} – cearx replay`;
}

function finding(text, request, kind) {
  const item = make("button");
  item.type = "button";
  item.append(make("i", undefined, kind), text);
  item.addEventListener("click", () => select(request, true));
  return item;
}

function fillFindings() {
  const box = element("findings"), worst = (order) => [...requests].sort(ORDERS[order])[0];
  box.append(make("h2", "Look here first"));
  if (!requests.length) { box.append(make("div", "no request in this log", "soft")); return; }
  const preempted = worst("preemptions"), waited = worst("waited"), ttft = worst("ttft");
  if (preempted.preemptions.length) {
    box.append(finding(`request ${preempted.id} was preempted ${preempted.preemptions.length} ×`
      + ` and waited ${time(preempted.waited)}`, preempted, "preempted"));
  } else box.append(make("div", "nobody was preempted", "soft"));
  if (waited.waited > 0) {
    const [main] = waitedFor(waited);
    box.append(finding(`request ${waited.id} waited longest, ${time(waited.waited)}`
      + `${main ? `: ${main.name}` : ""}`, waited, "queued"));
  }
  if (ttft.ttft) box.append(finding(`request ${ttft.id} has the longest TTFT, ${time(ttft.ttft)}`, ttft, "prefill"));
}

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  readColors();
  redraw();
}

element("by-request").addEventListener("click", () => { setMode(false); revealSelected(); });
element("by-slot").addEventListener("click", () => setMode(true));
element("zoom-in").addEventListener("click", () => zoom(0.6));
element("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
element("fit").addEventListener("click", fit);
element("search").addEventListener("input", fillList);
element("sort").addEventListener("change", fillList);
element("list").addEventListener("scroll", paintList);
element("theme").addEventListener("click", () => setTheme(!document.documentElement.classList.contains("dark")));
window.addEventListener("resize", () => { redraw(); paintList(); });

measure();
const flags = new URLSearchParams(location.hash.slice(1));
fillTotals();
fillFindings();
if (!preemptions.length) element("sort").value = "waited";
setTheme(flags.has("theme") ? flags.get("theme") === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
setMode(flags.get("view") === "rows");
fillList();
const asked = flags.has("request") ? byId.get(Number(flags.get("request"))) : undefined;
if (asked) select(asked, true);
draw();
document.documentElement.dataset.ready = "yes";
