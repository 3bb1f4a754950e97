"use strict";
// Shows the views that the server sends. Everything is set as text, never as markup: names come from files.

const $ = (id) => document.getElementById(id);
const PHASES = [
  ["compute", "computing"], ["data", "waiting for data"], ["join", "on its way into an average"],
  ["average", "averaging, or waiting for others in it"], ["rest", "resting"], ["evaluation", "evaluating"],
  ["epoch boundary", "between epochs"], ["startup", "setting up"],
];
const DOING = Object.fromEntries(PHASES.map(([name, words]) => [name, words.split(",")[0]]));
const colours = new Map();  // reading a style is slow, and lanes need it thousands of times
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name.replaceAll(" ", "-")).trim());
  return colours.get(name);
}
const rankColour = (rank) => colour("rank-" + (rank % 8));

// Numbers in words

const isKnown = (value) => typeof value === "number" && Number.isFinite(value);
const UNKNOWN = "–";
const count = (value) => isKnown(value) ? Math.round(value).toLocaleString("en") : UNKNOWN;
const percent = (part, digits = 0) => isKnown(part) ? (100 * part).toFixed(digits) + " %" : UNKNOWN;
const significant = (value, digits = 3) => isKnown(value) ? String(Number(value.toPrecision(digits))) : UNKNOWN;
const short = (value) => !isKnown(value) ? UNKNOWN : value >= 1e6 ? significant(value / 1e6) + " M" : value >= 1e4 ? significant(value / 1e3) + " k" : significant(value, 4);
function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return significant(value) + " " + units[unit];
}
function duration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  const s = Math.floor(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60);
  return h ? `${h} h ${m % 60} min` : m ? `${m} min ${s % 60} s` : `${s} s`;
}
function clock(seconds) {
  const s = Math.floor(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60), two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m % 60)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

// Header, verdict, facts

function showHeader(view) {
  const run = view.run;
  setText($("name"), run.name);
  document.title = `${run.name} · ${run.status}`;
  setText($("status"), run.status);
  $("status").className = "pill " + run.status;
  const facts = [run.policy && `policy ${run.policy}`, (run.devices || []).join(", "), duration(run.seconds)];
  if (isKnown(run.num_epochs)) facts.push(`epoch ${Math.min(run.epoch + (run.is_over ? 0 : 1), run.num_epochs)} of ${run.num_epochs}`);
  else if (run.epoch) facts.push(`${run.epoch} epochs`);
  facts.push(`${count(run.samples)} samples`);
  if (run.unseen) facts.push(`${run.unseen} ranks on other hosts are not shown`);
  setText($("about"), facts.filter(Boolean).join(" · "));
  $("progress").hidden = !isKnown(run.progress);
  if (isKnown(run.progress)) $("progress").firstElementChild.style.width = 100 * run.progress + "%";
}

function showRuns(view) {
  const select = $("runs");
  select.hidden = view.names.length < 2;
  const names = view.names.includes(view.run.name) ? view.names : [view.run.name, ...view.names];
  if (select.dataset.names === names.join("\n") && select.value === view.run.name) return;
  select.dataset.names = names.join("\n");
  select.replaceChildren(...names.map((name) => new Option(name, name, false, name === view.run.name)));
}

function showVerdict(verdict) {
  $("verdict").className = "verdict " + verdict.level;
  $("verdict").dataset.kind = verdict.kind;
  $("verdict").dataset.rank = verdict.rank ?? "";
  setText($("sentence"), verdict.sentence);
  $("evidence").replaceChildren(...verdict.evidence.map((words) => element("li", words)));
}

function showFacts(view) {
  const totals = view.totals, last = view.series.loss.filter(isKnown).at(-1) ?? view.run.loss;
  const facts = [
    [count(totals.rate), "samples/s"],
    [significant(last, 4), "loss"],
    isKnown(view.run.eval) && [significant(view.run.eval, 4), "eval"],
    isKnown(totals.efficiency) && [percent(totals.efficiency), "efficiency", "samples/s of all, against the sum of the ranks' own paces"],
    isKnown(totals.of_ceiling) && [percent(totals.of_ceiling), "of ceiling", `samples/s of all, against ${totals.ceiling_run}: the same work on the same devices without averages`],
    isKnown(totals.gain) && [significant(totals.gain) + "×", "gain", "samples/s of all, against the fastest rank's own pace"],
    isKnown(totals.average_ms) && [significant(totals.average_ms) + " ms", "per average", "waits for others included"],
    isKnown(totals.average_bytes) && [bytes(totals.average_bytes), "averaged", "what each rank contributes to an average of parameters"],
    isKnown(totals.anchor) && [count(totals.anchor), "anchor", "batches of the slowest rank between two averages"],
    isKnown(totals.drift) && [significant(totals.drift, 2), "drift", "how far the replicas were apart at the last average"],
  ].filter(Boolean);
  const box = $("facts");
  while (box.children.length > facts.length) box.lastElementChild.remove();
  facts.forEach(([value, label, title = ""], i) => {
    if (!box.children[i]) { const fact = element("div", undefined, "fact"); fact.append(element("b"), element("span")); box.append(fact); }
    setText(box.children[i].children[0], value);
    setText(box.children[i].children[1], label);
    box.children[i].title = title;
  });
}

// Lanes

function showLanes(view) {
  const box = $("lanes");
  while (box.children.length > view.ranks.length) box.lastElementChild.remove();
  setText($("lanes-span"), `last ${Math.round(view.lane_s)} s`);
  view.ranks.forEach((rank, i) => {
    if (!box.children[i]) {
      const lane = element("div", undefined, "lane");
      lane.append(element("div", undefined, "who"), element("canvas"), element("div", undefined, "now"));
      box.append(lane);
    }
    const [who, canvas, now] = box.children[i].children;
    setText(who, `rank ${rank.rank} · ${rank.device}`);
    const seconds = rank.phase_s >= 1 ? ` for ${rank.phase_s.toFixed(0)} s` : "";
    setText(now, view.run.is_over ? "ended" : DOING[rank.phase] + seconds);
    now.title = now.textContent;
    const parts = Object.entries(rank.parts).sort((a, b) => b[1] - a[1]).map(([name, part]) => `${name} ${percent(part)}`);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `rank ${rank.rank}: ${parts.join(", ")}`);
    canvas.title = parts.join("\n");
    drawLane(canvas, view.lanes[rank.rank] || [], view.run.seconds, view.lane_s);
  });
  const used = new Set(Object.values(view.lanes).flat().flatMap((pulse) => Object.keys(pulse[2])));
  const key = PHASES.filter(([name]) => used.has(name));
  if ($("key").dataset.used === key.join()) return;
  $("key").dataset.used = key.join();
  $("key").replaceChildren(keyOf(key.map(([name, words]) => [words, `var(--${name.replaceAll(" ", "-")})`])));
}

function drawLane(canvas, pulses, now, span) {
  const scale = window.devicePixelRatio || 1, width = Math.round(canvas.clientWidth * scale), height = Math.round(26 * scale);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  const x = (t) => width * (1 - (now - t) / span);
  for (const [end, seconds, spent] of pulses) {
    // One column per pulse, filled from below by its phases.
    const left = Math.floor(x(end - seconds)), right = Math.floor(x(end));
    const total = Object.values(spent).reduce((a, b) => a + b, 0) || 1;
    let below = height;
    for (const [name] of PHASES) {
      if (!spent[name]) continue;
      const high = height * spent[name] / total;
      context.fillStyle = colour(name);
      context.fillRect(left, below - high, right - left + 1.5, high + 0.5);
      below -= high;
    }
  }
}

// Charts

const charts = {};
let lossBySamples = false;

function axis(extra) {
  const ink = colour("quiet");
  return { stroke: ink, grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11.5px system-ui, sans-serif", ...extra };
}

function draw(name, data, lines, { x = (v) => clock(v), y = short, range } = {}) {
  const box = $(name);
  const hasData = data[0].length > 0 && data.slice(1).some((column) => column.some(isKnown));
  const shape = JSON.stringify([lines.map((line) => [line.label, line.dash]), hasData, x === short]);
  const size = { width: Math.max(120, box.clientWidth), height: lines.length > 1 ? 196 : 220 };
  let chart = charts[name];
  if (chart && chart.shape === shape) {
    chart.plot?.setData(data);
    if (chart.plot && chart.plot.width !== size.width) chart.plot.setSize(size);
    return;
  }
  chart?.plot?.destroy();
  box.replaceChildren();
  if (!hasData) {
    box.append(element("div", name === "percent" ? "not sampled" : "nothing yet", "empty"));
    charts[name] = { shape };
    return;
  }
  const options = {
    ...size,
    legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: range ? { range } : {} },
    axes: [axis({ values: (u, values) => values.map(x), space: 60, size: 30 }), axis({ values: (u, values) => values.map(y), size: 54 })],
    series: [{}, ...lines.map((line) => ({ width: 1.5, points: { show: false }, spanGaps: false, ...line }))],
  };
  charts[name] = { shape, plot: new uPlot(options, data, box) };
  const named = lines.filter((line) => !line.dash);
  if (named.length > 1) box.append(keyOf(named.map((line) => [line.label, line.stroke])));
}

function keyOf(pairs) {
  const key = element("div", undefined, "key");
  key.append(...pairs.map(([words, fill]) => {
    const one = element("span"), dot = element("span", undefined, "dot");
    dot.style.background = fill;
    one.append(dot, words);
    return one;
  }));
  return key;
}

function showCharts(view) {
  const s = view.series, labels = s.ranks.map((one) => `rank ${one.rank}`);
  const byRank = (key, extra = {}) => s.ranks.map((one, i) => ({ label: labels[i], stroke: rankColour(one.rank), ...extra }));
  const at = lossBySamples ? s.seen : s.t;
  draw("loss", [at, s.loss], [{ label: "loss", stroke: colour("compute"), width: 2, spanGaps: true }], { x: lossBySamples ? short : clock, y: (v) => significant(v, 4) });
  const isOne = s.ranks.length === 1;
  const total = isOne ? [] : [{ label: "all", stroke: colour("ink"), width: 2 }];
  const paces = s.ranks.map((one) => ({ label: `pace ${one.rank}`, stroke: rankColour(one.rank), dash: [4, 4], width: 1 }));
  draw("rate", [s.t, ...(isOne ? [] : [s.rate]), ...s.ranks.map((one) => one.rate), ...s.ranks.map((one) => one.pace)], [...total, ...byRank("rate"), ...paces], { range: (u, low, high) => [0, high * 1.08 || 1] });
  draw("share", [s.t, ...s.ranks.map((one) => one.share)], byRank("share"), { range: () => [0, 100] });
  draw("percent", [s.t, ...s.ranks.map((one) => one.percent)], byRank("percent", { spanGaps: true }), { range: () => [0, 100] });
}

// Tables and words

function showRanks(view) {
  const hasTemperature = view.ranks.some((rank) => isKnown(rank.condition.temperature_c));
  const columns = ["rank", "share", "samples/s", "own pace", "computing", "data", "averages", "waiting", "utilization", "memory", ...(hasTemperature ? ["temperature"] : [])];
  const head = element("tr");
  head.append(...columns.map((name) => element("th", name)));
  const rows = view.ranks.map((rank) => {
    const parts = rank.parts, c = rank.condition, row = element("tr"), who = element("td"), dot = element("span", undefined, "dot");
    dot.style.background = rankColour(rank.rank);
    who.append(dot, `${rank.rank} · ${rank.device}`);
    const memory = isKnown(c.memory_bytes) ? `${bytes(c.memory_bytes)} of ${bytes(c.memory_limit_bytes)}` : UNKNOWN;
    const cells = [percent(rank.share, 1), count(rank.rate), count(rank.pace), percent(parts.compute ?? 0), percent(parts.data ?? 0),
      percent((parts.average ?? 0) + (parts.join ?? 0)), percent(rank.waited + (parts.rest ?? 0)), isKnown(c.percent) ? c.percent.toFixed(0) + " %" : UNKNOWN, memory];
    if (hasTemperature) cells.push(isKnown(c.temperature_c) ? `${c.temperature_c} °C${c.throttled_by ? ", throttled: " + c.throttled_by : ""}` : UNKNOWN);
    row.append(who, ...cells.map((text) => element("td", text)));
    return row;
  });
  $("ranks").replaceChildren(head, ...rows);
  setText($("ranks-span"), view.run.is_over ? "the whole run" : "last 5 s");
}

function showPlan(view) {
  const plan = view.plan, lines = [];
  if (plan?.policy) lines.push(`${plan.policy} steps: ${plan.policy_reason}`);
  if (plan?.kind === "plan") lines.push(`Next window: ${[plan.value].flat().map((n, rank) => `${n} batches on rank ${rank}`).join(", ")}.`);
  if (plan?.kind === "split") lines.push(`Each step: ${[plan.value].flat().map((n, rank) => `${n} samples on rank ${rank}`).join(", ")}.`);
  if (plan?.reason) lines.push(`Reason: ${plan.reason}.`);
  if (!lines.length) lines.push(view.run.policy ? `Policy ${view.run.policy}: no plan is needed, or none was made yet.` : "No plan yet.");
  $("plan").replaceChildren(...lines.map((words) => element("p", words)));
}

function showNotes(view) {
  $("notes").replaceChildren(...view.notes.map((note) => {
    const line = element("li"), words = element("span");
    const kind = note.kind === "epoch end" ? "" : note.kind + ": ";
    words.append(element("em", kind), note.words + (note.count > 1 ? ` (${note.count} times)` : ""));
    line.append(element("time", clock(note.t)), words);
    return line;
  }));
  if (!view.notes.length) $("notes").append(element("li", "nothing yet", "quiet"));
}

// The stream

let last = null, source = null;

function show(view) {
  if (!view.run) {
    setText($("status"), "waiting");
    setText($("sentence"), "No run here yet: this page shows the first one that begins.");
    return;
  }
  last = view;
  for (const part of [showHeader, showRuns, (v) => showVerdict(v.verdict), showFacts, showLanes, showCharts, showRanks, showPlan, showNotes]) part(view);
  document.body.dataset.views = Number(document.body.dataset.views || 0) + 1;
}

function follow(name) {
  source?.close();
  source = new EventSource("stream" + (name ? "?run=" + encodeURIComponent(name) : ""));
  source.onmessage = (message) => { setText($("footer"), ""); show(JSON.parse(message.data)); };
  source.addEventListener("bye", () => {
    source.close();
    lost("The page has ended with its run, and shows what was seen last.");
  });
  source.onerror = () => lost("No connection: the page shows what was seen last, and tries again.");
}

function lost(words) {
  setText($("footer"), words + (last ? ` To see the run again: outrider watch ${last.run.path}` : ""));
  if (last && !last.run.is_over) { setText($("status"), "disconnected"); $("status").className = "pill lost"; }
}

function redraw() {
  colours.clear();
  for (const name of Object.keys(charts)) { charts[name].plot?.destroy(); delete charts[name]; }
  if (last) { showLanes(last); showCharts(last); }
}

$("runs").addEventListener("change", (event) => follow(event.target.value));
for (const [id, isBySamples] of [["by-time", false], ["by-samples", true]]) {
  $(id).addEventListener("click", () => {
    lossBySamples = isBySamples;
    $("by-time").setAttribute("aria-pressed", String(!isBySamples));
    $("by-samples").setAttribute("aria-pressed", String(isBySamples));
    if (last) showCharts(last);
  });
}
let resizing = 0;
window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => last && (showLanes(last), showCharts(last)), 100); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
follow(new URLSearchParams(location.search).get("run"));
