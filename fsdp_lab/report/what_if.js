// What-if without a kernel: finds the answer to what is chosen in the table of this file, and draws it.
//
// Every figure was predicted by fsdp_lab when the page was made. A combination is a cell: the place of its row in each
// column. What is chosen is a list of places, one on each axis, and stands in the address after the #.

const page = JSON.parse(document.getElementById("fsdp-lab-what-if").textContent);
const columns = Object.fromEntries(Object.entries(page.columns).map(([name, packed]) => [name, unpack(packed)]));
const RANKS = page.axes.findIndex((axis) => axis.name === "world_size");
const byId = (id) => document.getElementById(id);

let chosen = page.start;
let before = null; // the cell that was shown before, to compare with

function unpack(packed) {
  return new Float32Array(Uint8Array.from(atob(packed), (c) => c.charCodeAt(0)).buffer);
}

// -- cells ------------------------------------------------------------------------------------------------------------

const cellOf = (places) => places.reduce((cell, place, i) => cell * page.axes[i].labels.length + place, 0);
const changed = (axis, place) => chosen.map((old, i) => (i === axis ? place : old));
const figure = (cell, name) => columns[name]?.[cell] ?? NaN;
const text = (cell, kind) => page.texts[kind][columns[kind][cell]];
const refusal = (cell) => page.refusals[columns.refused[cell]];
const fits = (cell) => columns.fits[cell] === 1;
const standing = (cell) => (refusal(cell) ? "refused" : fits(cell) ? "fits" : "does not fit");

/** The ends of the 80 % band of a figure, or with "_50" of the 50 % band; the figure itself where the planner gave none. */
function band(cell, name, suffix = "") {
  return ["low", "high"].map((end) => {
    const known = figure(cell, `${name}_${end}${suffix}`);
    return Number.isNaN(known) ? figure(cell, name) : known;
  });
}

/** MFU is in proportion to tokens per second. */
function mfuBand(cell, suffix = "") {
  return band(cell, "tokens_per_s", suffix).map((end) => (figure(cell, "mfu") * end) / figure(cell, "tokens_per_s"));
}

const entries = (cell, column, names) =>
  Object.keys(names).map((name) => [name, figure(cell, `${column}.${name}`)]).filter(([, amount]) => amount > 0);

/** Memory with the allocator's slack and the CUDA context. */
const taken = (cell) => figure(cell, "memory_limit_bytes") - figure(cell, "margin_bytes");

// -- numbers as text, as in fsdp_lab/core/formatting.py ---------------------------------------------------------------

const GIB = 2 ** 30, MIB = 2 ** 20, KIB = 2 ** 10;
const whole = (number) => Math.round(number).toLocaleString("en-US");

function digits(number) {
  if (!number) return "0";
  const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number))));
  return number.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}

function size(bytes) {
  const [unit, one] = [["GiB", GIB], ["MiB", MIB], ["KiB", KIB]].find(([, one]) => Math.abs(bytes) >= one) ?? ["B", 1];
  return `${digits(bytes / one)} ${unit}`;
}

const duration = (s) => (s >= 1 ? `${digits(s)} s` : `${digits(s * 1e3)} ms`);
const count = (number) => (number >= 1e6 ? `${digits(number / 1e6)} M` : whole(number));
const plain = (number) => number.toLocaleString("en-US", { maximumSignificantDigits: 3 });
const percent = (share) => (share < 0.995 ? `${(100 * share).toFixed(1)} %` : "100 %");

/** "430 ms to 510 ms"; nothing where the ends are the same. */
const range = ([low, high], write) => (low === high ? "" : `${write(low)} to ${write(high)}`);

// -- elements ---------------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "text", "circle", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function key({ label, fill, hatch = " " }) {
  const swatch = make("i", { class: "swatch", "data-hatch": hatch, style: `--fill: var(--${fill})` });
  return make("span", { class: "key" }, swatch, label);
}

/** Words of a card: beside its title, its keys, and the sentences below it, of which some are empty. */
function caption(card, { reading, keys, notes }) {
  card.querySelector(".reading").textContent = reading;
  card.querySelector(".legend").replaceChildren(...keys.map(key));
  card.querySelector("figcaption").textContent = notes.filter(Boolean).join(" ");
}

const plural = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Round numbers from 0 to below `most`, about five. */
function ticks(most) {
  const rough = most / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

// -- bars -------------------------------------------------------------------------------------------------------------

/** A stacked bar. parts: [{ amount, fill, hatch, label }]. ends: of the error bar at its end. */
function bar(parts, most, { thin = false, ends = [0, 0] } = {}) {
  const share = (amount) => `${(100 * amount) / most}%`;
  const made = make("div", { class: thin ? "bar thin" : "bar" });
  for (const { amount, fill, hatch = " ", label } of parts) {
    const style = `width: ${share(amount)}; --fill: var(--${fill})`;
    made.append(make("i", { class: "swatch", "data-hatch": hatch, style, title: label }));
  }
  const [low, high] = ends;
  if (low < high) made.append(make("i", { class: "error", style: `left: ${share(low)}; width: ${share(high - low)}` }));
  return made;
}

/** A thin bar below the first one, and the words above it. */
const thinBar = (words, parts, most) => [make("span", { class: "words" }, words), bar(parts, most, { thin: true })];

/** Numbers below bars, the last with the unit. one: the amount of a unit. */
function axis(most, unit, one) {
  const shown = ticks((0.97 * most) / one);
  const marks = shown.map((tick, i) => {
    const words = i === shown.length - 1 ? `${plain(tick)} ${unit}` : plain(tick);
    return make("span", { style: `left: ${(100 * tick * one) / most}%` }, words);
  });
  return make("div", { class: "axis" }, ...marks);
}

function drawBars(card, bars, ruler) {
  card.querySelector(".bars").replaceChildren(make("div", { class: "tracks" }, ...bars), ruler);
}

function memoryParts(cell) {
  return entries(cell, "memory_at_peak_bytes", page.memory).map(([name, amount]) => {
    const { label, hatch } = page.memory[name];
    return { amount, hatch, fill: `memory-${name}`, label: `${label} ${size(amount)}` };
  });
}

/** What is taken beside what is allocated. */
function otherMemory(cell) {
  const reserved = figure(cell, "reserved_memory_bytes");
  const slack = reserved - figure(cell, "peak_memory_bytes"), context = taken(cell) - reserved;
  return [
    { amount: slack, fill: "ink-gap", hatch: "slack", label: `reserved, not allocated ${size(slack)}` },
    { amount: context, fill: "ink-faint", label: `CUDA context ${size(context)}` },
  ];
}

function showMemory(cell) {
  const card = byId("memory"), limit = figure(cell, "memory_limit_bytes"), ends = band(cell, "peak_memory_bytes");
  const former = before === null ? 0 : figure(before, "peak_memory_bytes");
  const most = 1.06 * Math.max(limit, taken(cell), ends[1], former);
  const parts = [...memoryParts(cell), ...otherMemory(cell)];
  const ofLimit = { label: `memory of a GPU ${size(limit)}`, fill: "ink-peak", hatch: "dashes" };
  const bars = [bar(parts, most, { ends })];
  if (former) bars.push(...thinBar(`before: ${size(former)}`, memoryParts(before), most));
  bars.push(make("i", { class: "limit", style: `left: ${(100 * limit) / most}%`, title: ofLimit.label }));
  drawBars(card, bars, most < GIB ? axis(most, "MiB", MIB) : axis(most, "GiB", GIB));
  const allocated = size(figure(cell, "peak_memory_bytes")), reserved = size(figure(cell, "reserved_memory_bytes"));
  const spread = range(ends, size), host = figure(cell, "host_memory_bytes");
  caption(card, {
    reading: `allocated ${allocated}, reserved ${reserved} of ${size(limit)}`,
    keys: [...parts, ofLimit],
    notes: ["At the peak of a step.", spread && `Allocated: ${spread}, 8 times in 10.`,
      host > 0 && `${size(host)} on the host, of each rank.`],
  });
}

function stepParts(cell) {
  const known = { computing: "computing_s", slowed: "slowed_s", exposed: "exposed_comm_s", host: "host_s", optimizer: "optimizer_s" };
  const amounts = Object.fromEntries(Object.entries(known).map(([name, column]) => [name, figure(cell, column)]));
  const sum = Object.values(amounts).reduce((a, b) => a + b, 0);
  amounts.rest = Math.max(0, figure(cell, "step_time_s") - sum);
  return timed(page.parts, Object.entries(amounts));
}

function timed(fills, amounts) {
  return amounts.map(([name, amount]) => {
    const { fill, label } = fills[name];
    return { amount, fill, label: `${label} ${duration(amount)}` };
  });
}

function showStep(cell) {
  const card = byId("step"), step_s = figure(cell, "step_time_s"), ends = band(cell, "step_time_s");
  const parts = stepParts(cell), sent = timed(page.kinds, entries(cell, "comm_s_per_step", page.kinds));
  const sent_s = sent.reduce((sum, { amount }) => sum + amount, 0);
  const most = 1.06 * Math.max(step_s, ends[1], sent_s);
  const bars = [bar(parts, most, { ends })];
  if (sent_s) bars.push(...thinBar(`sent: ${duration(sent_s)}, by itself`, sent, most));
  drawBars(card, bars, most >= 1 ? axis(most, "s", 1) : axis(most, "ms", 1e-3));
  const hidden = percent(Math.max(0, 1 - figure(cell, "exposed_comm_s") / sent_s)), spread = range(ends, duration);
  caption(card, {
    reading: `${duration(step_s)}; ${sent_s ? `${hidden} of the communication is hidden` : "nothing is sent"}`,
    keys: [...parts, ...sent].filter(({ amount }) => amount > 0),
    notes: [spread && `A step takes ${spread}, 8 times in 10.`],
  });
}

// -- scaling ----------------------------------------------------------------------------------------------------------

const CURVE = { height: 220, left: 44, right: 20, top: 22, bottom: 40 }; // pixels; the last four are margins

/** The cells along the axis of ranks that are not refused, by rising number of ranks. */
function along() {
  return page.ranks.map((ranks, place) => ({ ranks, place, cell: cellOf(changed(RANKS, place)) }))
    .filter(({ cell }) => !refusal(cell)).sort((a, b) => a.ranks - b.ranks);
}

function showScaling() {
  const card = byId("scaling"), points = along();
  card.hidden = page.ranks.length < 2 || !points.length;
  if (card.hidden) return;
  const room = card.querySelector(".curve");
  room.replaceChildren(curve(points, room.clientWidth));
  card.querySelector("table").replaceChildren(...scalingRows(points));
  const batches = new Set(points.map(({ cell }) => figure(cell, "global_batch")));
  const refused = page.ranks.length - points.length;
  caption(card, {
    reading: limits(points),
    keys: scalingKeys(points),
    notes: [batches.size < points.length ? "All have the same global batch." : "Each rank has the same work.",
      "Press a point to choose it.", refused && `Refused: ${plural(refused, "number")} of ranks.`],
  });
}

/** From how many ranks on it fits, and communication binds. */
function limits(points) {
  const fitting = points.find(({ cell }) => fits(cell));
  const bound = points.find(({ cell }) => text(cell, "binding") === "communication");
  const fit = fitting ? `fits from ${plural(fitting.ranks, "rank")} on` : "fits on none of these numbers of ranks";
  const limit = bound ? `bound by communication from ${plural(bound.ranks, "rank")} on` : "not bound by communication";
  return `${fit}; ${limit}`;
}

function scalingKeys(points) {
  const keys = [{ label: "fits", fill: "ink-mean", hatch: "line" }];
  if (points.some(({ cell }) => !fits(cell))) keys.push({ label: "✗ does not fit", fill: "ink-faint", hatch: "dashes" });
  const isBanded = points.some(({ cell }) => range(mfuBand(cell), percent));
  if (isBanded) keys.push({ label: "8 times in 10, and 5 in 10", fill: "ink-band", hatch: "band" });
  return keys;
}

function curve(points, width) {
  const { height, left, right, top, bottom } = CURVE;
  const logs = page.ranks.map(Math.log2), first = Math.min(...logs), last = Math.max(...logs);
  const most = 1.15 * Math.max(...points.map(({ cell }) => mfuBand(cell)[1]));
  const x = (ranks) => left + ((width - left - right) * (Math.log2(ranks) - first)) / (last - first || 1);
  const y = (mfu) => height - bottom - ((height - top - bottom) * mfu) / most;
  const line = (name, some) => {
    const corners = some.map(({ ranks, cell }) => [x(ranks), y(figure(cell, "mfu"))]);
    return make("path", { class: name, d: pathOf(corners) });
  };
  const about = "MFU over the number of ranks; the table below has the figures";
  const svg = make("svg", { width, height, role: "img", "aria-label": about });
  svg.append(...mfuRuler(most, y, width), ...ranksRuler(x, width), areaOf(points, "", x, y), areaOf(points, "_50", x, y),
    line("dim", points), line("fitting", points.filter(({ cell }) => fits(cell))),
    ...points.map((point) => dot(point, x(point.ranks), y(figure(point.cell, "mfu")), width)));
  return svg;
}

const pathOf = (corners) => corners.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

/** The band around the curve. */
function areaOf(points, suffix, x, y) {
  const ends = points.map(({ ranks, cell }) => mfuBand(cell, suffix).map((mfu) => [x(ranks), y(mfu)]));
  const around = [...ends.map(([low]) => low), ...ends.map(([, high]) => high).reverse()];
  return make("path", { class: "band", d: `${pathOf(around)}Z` });
}

function mfuRuler(most, y, width) {
  const { left, right } = CURVE;
  const marks = ticks(100 * most).flatMap((tick) => {
    const height = y(tick / 100);
    return [make("line", { class: "grid", x1: left, x2: width - right, y1: height, y2: height }),
      make("text", { x: left - 6, y: height + 4, "text-anchor": "end" }, `${plain(tick)} %`)];
  });
  return [...marks, make("text", { x: 4, y: 12 }, "MFU")];
}

/** As many numbers as there is room for. */
function ranksRuler(x, width) {
  const { height, left, right, bottom } = CURVE, marks = [];
  let free = -Infinity;
  for (const ranks of [...page.ranks].sort((a, b) => a - b)) {
    if (x(ranks) < free) continue;
    marks.push(make("text", { x: x(ranks), y: height - bottom + 16, "text-anchor": "middle" }, whole(ranks)));
    free = x(ranks) + 36;
  }
  const middle = (left + width - right) / 2;
  return [...marks, make("text", { x: middle, y: height - 6, "text-anchor": "middle" }, "ranks, one GPU each (log scale)")];
}

/** A point of the curve: a dot, or a cross where it does not fit; with a ring where it is chosen. */
function dot({ ranks, place, cell }, x, y, width) {
  const mfu = percent(figure(cell, "mfu")), speed = `${count(figure(cell, "tokens_per_s"))} tokens/s`;
  const made = make("g", { class: "point", onclick: () => choose(changed(RANKS, place)) });
  made.append(make("circle", { class: "aim", cx: x, cy: y, r: 14 }));
  if (fits(cell)) made.append(make("circle", { class: "dot", cx: x, cy: y, r: 3.5 }));
  else made.append(make("path", { class: "cross", d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8` }));
  made.append(make("title", {}, `${plural(ranks, "rank")}: MFU ${mfu}, ${speed}, ${standing(cell)}`));
  if (place === chosen[RANKS]) {
    const anchor = x < 90 ? "start" : x > width - 90 ? "end" : "middle";
    made.append(make("circle", { class: "here", cx: x, cy: y, r: 8 }),
      make("text", { class: "strong", x, y: y - 13, "text-anchor": anchor }, `${whole(ranks)}: ${mfu}`));
  }
  return made;
}

function scalingRows(points) {
  const head = ["ranks", "fits", "memory", "step", "tokens/s", "MFU", "bound by"];
  const rows = points.map(({ ranks, cell }) => [
    whole(ranks), fits(cell) ? "yes" : "no", size(taken(cell)), duration(figure(cell, "step_time_s")),
    count(figure(cell, "tokens_per_s")), percent(figure(cell, "mfu")), text(cell, "binding"),
  ]);
  return [
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map(([ranks, ...cells]) =>
      make("tr", {}, make("th", { scope: "row" }, ranks), ...cells.map((cell) => make("td", {}, cell))))),
  ];
}

// -- the answer -------------------------------------------------------------------------------------------------------

/** The value that is chosen on an axis. */
function value(name) {
  const i = page.axes.findIndex((axis) => axis.name === name);
  return page.axes[i].labels[chosen[i]];
}

function headline(cell) {
  const n = figure(cell, "parameters"), hosts = figure(cell, "hosts");
  const parameters = n >= 1e9 ? `${digits(n / 1e9)} billion` : `${digits(n / 1e6)} million`;
  const where = hosts > 1 ? `${whole(hosts)} hosts at ${whole(figure(cell, "network_gbit_per_s"))} Gb/s each` : "one host";
  const machine = `${whole(page.ranks[chosen[RANKS]])} × ${value("hardware")} in ${where}`;
  const batch = `global batch ${whole(figure(cell, "global_batch"))}`;
  return `${value("model")}, ${parameters} parameters · ${machine} · ${batch}`;
}

function verdict(cell) {
  const probability = figure(cell, "fits_probability");
  const isOpen = probability >= 0.02 && probability <= 0.98; // false for NaN: what is nearly certain needs no number
  const sure = isOpen ? `: ${Math.round(100 * probability)} %` : "";
  return fits(cell) ? `fits${sure}` : `does not fit${sure && ` (fits${sure})`}`;
}

function reading(cell) {
  const limit = size(figure(cell, "memory_limit_bytes")), margin = figure(cell, "margin_bytes");
  const bound = `Bound by ${text(cell, "binding")}.`;
  if (fits(cell)) return `It fits ${limit}, ${size(margin)} to spare. ${bound}`;
  return `It does not fit ${limit}: ${size(-margin)} too much. ${bound}`;
}

function figuresOf(cell) {
  const exposed = figure(cell, "exposed_comm_s") / figure(cell, "step_time_s");
  return [
    ["step", duration(figure(cell, "step_time_s")), range(band(cell, "step_time_s"), duration)],
    ["tokens/s", count(figure(cell, "tokens_per_s")), range(band(cell, "tokens_per_s"), count)],
    ["tokens/s a rank", count(figure(cell, "tokens_per_s_per_rank"))],
    ["TFLOPS a rank", digits(figure(cell, "tflops_per_rank"))],
    ["MFU", percent(figure(cell, "mfu")), range(mfuBand(cell), percent)],
    ["HFU", percent(figure(cell, "hfu"))],
    ["exposed communication", percent(exposed)],
  ];
}

function showAnswer(cell, refused) {
  byId("verdict").textContent = refused ? "refused" : verdict(cell);
  byId("verdict").className = `badge ${refused || !fits(cell) ? "different" : "equal"}`;
  byId("headline").textContent = refused ? "This combination cannot run" : headline(cell);
  byId("reading").textContent = refused ? `${refused.field}: ${refused.reason}; ${refused.hint}.` : reading(cell);
  const rows = refused ? [] : figuresOf(cell);
  byId("figures").replaceChildren(...rows.map(([name, value, spread = ""]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, ...(spread ? [make("small", {}, spread)] : [])))));
  const assumed = refused ? "" : text(cell, "assumed"), isBanded = rows.some(([, , spread]) => spread);
  const notes = [assumed && `Assumed: ${assumed}.`, isBanded && "The true figure is in its range 8 times in 10."];
  byId("assumed").textContent = notes.filter(Boolean).join(" ");
}

/** Buttons to what runs, or fits: what the refusal advises, and the nearest value of each axis. */
function showWays(cell, refused) {
  const ways = new Map(); // words -> places; each once
  if (standing(cell) !== "fits") {
    for (const places of [advised(refused), ...page.axes.map((_, axis) => nearest(axis, refused))]) {
      if (places) ways.set(difference(places), places);
    }
  }
  byId("ways").hidden = !ways.size;
  byId("ways").replaceChildren(refused ? "What runs: " : "What fits: ", ...[...ways].map(([words, places]) =>
    make("button", { type: "button", onclick: () => choose(places) }, words)));
}

const difference = (places) =>
  page.axes.flatMap(({ label, labels }, i) => (places[i] === chosen[i] ? [] : [`${label} ${labels[places[i]]}`])).join(", ");

function advised(refused) {
  const places = chosen.map((old, axis) => refused?.fix[axis] ?? old);
  return refusal(cellOf(places)) || !refused ? null : places;
}

/** The places with the nearest value of an axis with which it runs, or fits. */
function nearest(axis, refused) {
  const isWay = (cell) => !refusal(cell) && (refused || fits(cell));
  return page.axes[axis].labels.map((_, place) => changed(axis, place)).filter((places) => isWay(cellOf(places)))
    .sort((a, b) => Math.abs(a[axis] - chosen[axis]) - Math.abs(b[axis] - chosen[axis]))[0];
}

// -- choices, and the address -----------------------------------------------------------------------------------------

/** Selects the values, and says of each other value what became of it. */
function showChoices() {
  page.axes.forEach(({ option, labels }, axis) => {
    const select = byId("choices").elements[option];
    if (!select) return;
    labels.forEach((label, place) => {
      const stands = standing(cellOf(changed(axis, place)));
      select.options[place].text = stands === "fits" || place === chosen[axis] ? label : `${label} – ${stands}`;
    });
    select.value = chosen[axis];
  });
}

function address() {
  const values = page.axes.map(({ option, labels }, i) => [option.slice(2), labels[chosen[i]]]);
  return `#${new URLSearchParams(values.filter((_, i) => page.axes[i].labels.length > 1))}`;
}

/** What an address chooses; where it names what this page does not have, what is shown first, and that is said. */
function read(hash) {
  const unknown = [], places = [...page.start];
  for (const [name, label] of new URLSearchParams(hash.slice(1))) {
    const axis = page.axes.findIndex(({ option }) => option === `--${name}`);
    const place = axis < 0 ? -1 : page.axes[axis].labels.indexOf(label);
    if (place < 0) unknown.push(`${name} ${label}`);
    else places[axis] = place;
  }
  byId("notice").hidden = !unknown.length;
  byId("notice").textContent = `The link asks for ${unknown.join(", ")}, which this page does not have.`;
  return places;
}

function command() {
  const options = page.axes.map((axis, i) => `${axis.option} ${axis.words[chosen[i]]}`);
  return ["fsdp-lab plan", ...options, ...(page.options ? [page.options] : [])].join(" ");
}

function choose(places) {
  const former = cellOf(chosen);
  if (cellOf(places) !== former) before = refusal(former) ? null : former;
  chosen = places;
  history.replaceState(null, "", address());
  show();
}

function show() {
  const cell = cellOf(chosen), refused = refusal(cell);
  showChoices();
  showAnswer(cell, refused);
  showWays(cell, refused);
  byId("pictures").hidden = Boolean(refused);
  if (!refused) {
    showMemory(cell);
    showStep(cell);
  }
  showScaling();
  byId("command").textContent = command();
  byId("link").href = address();
}

async function copy(button) {
  const copied = { command: command(), link: byId("link").href }[button.dataset.copy];
  const done = await navigator.clipboard?.writeText(copied).then(() => true, () => false);
  button.textContent = done ? "Copied" : "Select it to copy";
}

byId("choices").addEventListener("change", ({ target }) => {
  byId("notice").hidden = true;
  choose(changed(page.axes.findIndex(({ option }) => option === target.name), Number(target.value)));
});
byId("choices").addEventListener("submit", (event) => event.preventDefault());
for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
addEventListener("hashchange", () => choose(read(location.hash)));
new ResizeObserver(showScaling).observe(byId("choices").parentElement);
chosen = read(location.hash);
show();
document.documentElement.dataset.ready = "";
