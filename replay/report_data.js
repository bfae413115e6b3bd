// The embedded data as columns and objects, and the reasons of each wait. No drawing, no DOM.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const QUEUED = 0, PREFILL = 1, DECODE = 2, PREEMPTED = 3;
const FIELDS = ["id", "arrived", "arrivedStep", "prompt", "maxTokens", "outputs", "hit", "recomputed",
  "queue", "waited", "ttft", "itl50", "itl99", "total", "stall", "ended", "states", "work",
  "admissions", "preemptions", "waits"];

function cumulated(differences) {
  const values = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < differences.length; i++) values[i] = sum += differences[i];
  return values;
}

const steps = (() => {
  const s = data.steps, count = s.length.length;
  const headId = new Int32Array(count), headReason = new Int8Array(count);
  for (let i = 0, at = 0; i < s.heads.length; i += 3) {
    for (let n = 0; n < s.heads[i]; n++, at++) {
      headId[at] = s.heads[i + 1];
      headReason[at] = s.heads[i + 2];
    }
  }
  const preempted = new Int32Array(count);
  for (let i = 0; i < s.preempted.length; i += 2) preempted[s.preempted[i]] = s.preempted[i + 1];
  const planned = cumulated(s.plannedDelta), tokens = new Float64Array(count);
  for (let i = 0; i < count; i++) tokens[i] = s.decodes[i] + s.prefill[i];
  return { count, planned, length: s.length, tokens, decodes: s.decodes, prefill: s.prefill,
    running: cumulated(s.runningDelta), waiting: cumulated(s.waitingDelta),
    held: cumulated(s.heldDelta), preempted, headId, headReason, firstId: s.firstId };
})();

const requests = data.requests.map((row, index) => {
  const request = { index };
  FIELDS.forEach((name, i) => { request[name] = row[i]; });
  const last = request.states.length - 3;
  request.from = request.arrived;
  request.to = last < 0 ? request.arrived : request.states[last + 1] + request.states[last + 2];
  return request;
});
const byId = new Map(requests.map((request) => [request.id, request]));

// Work of each batch row, in order of time.
const slots = [];
for (const request of requests) {
  for (let i = 0; i < request.work.length; i += 7) {
    const [slot, kind, from, length, first, more, tokens] = request.work.slice(i, i + 7);
    (slots[slot] = slots[slot] || []).push(
      { request, kind, from, to: from + length, first, last: first + more, tokens });
  }
}
for (const slot of slots) slot.sort((a, b) => a.from - b.from);

// Who was let in or put out in which step, in order of steps.
const admissions = [], preemptions = [];
for (const request of requests) {
  for (let i = 0; i < request.admissions.length; i += 2) {
    admissions.push({ step: request.admissions[i], request });
  }
  for (const step of request.preemptions) preemptions.push({ step, request });
}
admissions.sort((a, b) => a.step - b.step);
preemptions.sort((a, b) => a.step - b.step);

// The first position with a value of at least `wanted`.
function lowerBound(count, valueAt, wanted) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (valueAt(middle) < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

function within(events, first, last, except) {
  const found = [];
  for (let i = lowerBound(events.length, (n) => events[n].step, first);
    i < events.length && events[i].step <= last; i++) {
    if (events[i].request !== except) found.push(events[i].request.id);
  }
  return found;
}

const stepAt = (us) => lowerBound(steps.count, (n) => steps.planned[n], us + 1) - 1;
const stepEnd = (step) => step + 1 < steps.count
  ? steps.planned[step + 1] : steps.planned[step] + steps.length[step];

const WORDS = {
  NO_SEAT: `all ${data.config.max_num_seqs} seats are taken (max_num_seqs)`,
  NO_BUDGET: `the step's ${data.config.max_num_batched_tokens} tokens are used up (max_num_batched_tokens)`,
  NO_BLOCKS: "not enough free KV blocks",
  AFTER_PREEMPTION: "blocks ran out in this step, so nobody is let in",
  ADMISSION: `the admission policy (${data.config.admission}) expects the pool to run out of blocks`,
  IN_FLIGHT: "a step that still samples its next token is in flight",
  PARTIAL_PREFILLS: "enough prompts are computed in part already (max_num_partial_prefills)",
};
const reasonName = (code) => data.reasons[code] || `reason ${code}`;
const inWords = (name) => WORDS[name] || name.toLowerCase().replaceAll("_", " ");

// Reasons of steps [first, last], equal ones in a row as one: {first, last, name, behind}.
function reasons(request, first, last) {
  const found = [];
  const own = request.waits;
  let position = 0;
  for (let step = first; step <= last; step++) {
    while (position < own.length && own[position + 1] < step) position += 3;
    let name = "", behind = null;
    if (position < own.length && own[position] <= step) name = reasonName(own[position + 2]);
    else if (steps.headId[step] >= 0) {
      name = reasonName(steps.headReason[step]);
      behind = steps.headId[step];
    }
    const tail = found[found.length - 1];
    if (tail && tail.name === name && tail.behind === behind) tail.last = step;
    else found.push({ first: step, last: step, name, behind });
  }
  return found;
}

// The steps in which a request stood in the queue, for its stay number `stay`.
function queueSteps(request, stay) {
  const first = stay ? request.preemptions[stay - 1] : request.arrivedStep;
  const admitted = request.admissions[2 * stay];
  if (admitted !== undefined) return [first, admitted - 1];
  if (request.ended === "UNFINISHED") return [first, steps.count - 1];
  return [first, lowerBound(steps.count, (n) => steps.planned[n], request.to) - 1];
}

function reasonAt(request, us) {
  const step = stepAt(us);
  return step < 0 ? null : reasons(request, step, step)[0];
}

// How long a request waited for each reason, longest first: {name, behind, us, steps}.
function waitedFor(request) {
  const sums = new Map();
  const stays = request.preemptions.length + 1;
  for (let stay = 0; stay < stays; stay++) {
    const [first, last] = queueSteps(request, stay);
    for (const part of reasons(request, first, last)) {
      const key = `${part.behind === null ? "" : "behind "}${part.name}`;
      const sum = sums.get(key) || { name: part.name, behind: part.behind !== null, us: 0, steps: 0 };
      sum.us += stepEnd(part.last) - steps.planned[part.first];
      sum.steps += part.last - part.first + 1;
      sums.set(key, sum);
    }
  }
  return [...sums.values()].sort((a, b) => b.us - a.us);
}

const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function time(us) {
  if (us === null || us === undefined) return "–";
  const size = Math.abs(us);
  if (size < 1000) return `${Math.round(us)} µs`;
  if (size < 1e6) return `${(us / 1000).toFixed(size < 1e4 ? 2 : 1)} ms`;
  return `${(us / 1e6).toFixed(2)} s`;
}
