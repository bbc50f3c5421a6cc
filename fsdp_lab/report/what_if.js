// What-if: a page of fields, and the planner's answer to what is chosen in them.
//
// A page draws a state: the fields, the row of figures of the answer, the rows along the number of ranks, why something is
// refused. In a notebook the kernel makes the state (what_if.py) and answers any value. A file without a kernel has a table
// of every combination of its lists, and makes the state itself. Every figure was predicted by fsdp_lab.

const TEMPLATE = `
<p class="notice fidelity" role="status" hidden></p>
<div class="bar-of-page" hidden><h2>What if?</h2><button type="button" class="find">Find the best</button>
<span class="status soft" role="status"></span></div>
<figure class="strategies card" hidden>
<header><h3>Best strategies</h3><span class="soft reading"></span></header>
<div class="scroll" tabindex="0" role="region" aria-label="Strategies"><table></table></div><figcaption></figcaption></figure>
<div class="desk">
<form class="choices card" aria-label="Choices" autocomplete="off"></form>
<div class="answers">
<section class="answer card" aria-label="Prediction">
<header aria-live="polite"><h2><span class="verdict badge"></span> <span class="headline"></span></h2>
<p class="reading"></p></header>
<p class="ways" hidden></p><dl class="figures"></dl><form class="bill" aria-label="A whole training" autocomplete="off"></form>
<p class="assumed soft small"></p></section>
<div class="plots pictures">
<figure class="card memory"><header><h3>Memory of a GPU</h3><span class="soft reading"></span></header>
<div class="bars"></div><div class="legend"></div><figcaption></figcaption></figure>
<figure class="card step"><header><h3>A step</h3><span class="soft reading"></span></header>
<div class="bars"></div><div class="legend"></div><figcaption></figcaption></figure>
</div>
<figure class="card scaling" hidden><header><h3>Scaling</h3><span class="soft reading"></span></header>
<div class="curve"></div><div class="legend"></div><figcaption></figcaption>
<details><summary>As a table</summary><div class="scroll" tabindex="0" role="region" aria-label="Scaling as a table">
<table></table></div></details></figure>
<section class="card take" aria-label="Take it with you"><div class="texts"></div>
<p class="linked"><a href="#">Link to this choice</a> <button type="button" data-copy="link">Copy</button></p></section>
</div>
</div>`;

// -- rows of figures --------------------------------------------------------------------------------------------------

const fits = (row) => row.fits === 1;

/** The ends of the 80 % band of a figure, or with "_50" of the 50 % band; the figure itself where the planner gave none. */
const band = (row, name, suffix = "") => ["low", "high"].map((end) => row[`${name}_${end}${suffix}`] ?? row[name]);

/** MFU is in proportion to tokens per second. */
const mfuBand = (row, suffix = "") => band(row, "tokens_per_s", suffix).map((end) => (row.mfu * end) / row.tokens_per_s);

const entries = (row, column, names) =>
  Object.keys(names).map((name) => [name, row[`${column}.${name}`]]).filter(([, amount]) => amount > 0);

/** Memory with the allocator's slack and the CUDA context. */
const taken = (row) => row.memory_limit_bytes - row.margin_bytes;

// -- numbers as text, as in fsdp_lab/base/formatting.py ---------------------------------------------------------------

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

const UNITS_OF_TIME = [["days", 86400], ["h", 3600], ["s", 1]];

function duration(s) {
  const [unit, one] = UNITS_OF_TIME.find(([, one]) => s >= one) ?? ["ms", 1e-3];
  return `${digits(s / one)} ${unit}`;
}

const flopRate = (tflops) => (tflops >= 0.1 ? `${digits(tflops)} TFLOPS` : `${digits(tflops * 1e3)} GFLOPS`);
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

/** Rows of cells under heads; the first cell of a row is its head. */
function fill(table, heads, rows) {
  const line = ([first, ...cells]) => make("tr", {}, make("th", { scope: "row" }, first), ...cells.map((c) => make("td", {}, c)));
  table.replaceChildren(make("thead", {}, make("tr", {}, ...heads.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map(line)));
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

function memoryParts(row, fills) {
  return entries(row, "memory_at_peak_bytes", fills).map(([name, amount]) => {
    const { label, hatch } = fills[name];
    return { amount, hatch, fill: `memory-${name}`, label: `${label} ${size(amount)}` };
  });
}

/** What is taken beside what is allocated. */
function otherMemory(row) {
  const slack = row.reserved_memory_bytes - row.peak_memory_bytes, context = taken(row) - row.reserved_memory_bytes;
  return [
    { amount: slack, fill: "ink-gap", hatch: "slack", label: `reserved, not allocated ${size(slack)}` },
    { amount: context, fill: "ink-faint", label: `CUDA context ${size(context)}` },
  ];
}

function memoryCard(row, before, fills) {
  const limit = row.memory_limit_bytes, ends = band(row, "peak_memory_bytes"), former = before?.peak_memory_bytes ?? 0;
  const most = 1.06 * Math.max(limit, taken(row), ends[1], former);
  const parts = [...memoryParts(row, fills), ...otherMemory(row)];
  const ofLimit = { label: `memory of a GPU ${size(limit)}`, fill: "ink-peak", hatch: "dashes" };
  const bars = [bar(parts, most, { ends })], spread = range(ends, size);
  if (former) bars.push(...thinBar(`before: ${size(former)}`, memoryParts(before, fills), most));
  bars.push(make("i", { class: "limit", style: `left: ${(100 * limit) / most}%`, title: ofLimit.label }));
  return {
    bars,
    ruler: most < GIB ? axis(most, "MiB", MIB) : axis(most, "GiB", GIB),
    reading: `allocated ${size(row.peak_memory_bytes)}, reserved ${size(row.reserved_memory_bytes)} of ${size(limit)}`,
    keys: [...parts, ofLimit],
    notes: [row.peak ?? "At the peak of a step.", spread && `Allocated: ${spread}, 8 times in 10.`,
      row.host_memory_bytes > 0 && `${size(row.host_memory_bytes)} on the host, of each rank.`],
  };
}

function stepParts(row, fills) {
  const known = { computing: "computing_s", slowed: "slowed_s", exposed: "exposed_comm_s", host: "host_s", optimizer: "optimizer_s" };
  const amounts = Object.fromEntries(Object.entries(known).map(([name, column]) => [name, row[column]]));
  amounts.rest = Math.max(0, row.step_time_s - Object.values(amounts).reduce((a, b) => a + b, 0));
  return timed(fills, Object.entries(amounts));
}

function timed(fills, amounts) {
  return amounts.map(([name, amount]) => {
    const { fill, label } = fills[name];
    return { amount, fill, label: `${label} ${duration(amount)}` };
  });
}

function stepCard(row, { parts: fills, kinds }) {
  const ends = band(row, "step_time_s"), parts = stepParts(row, fills);
  const sent = timed(kinds, entries(row, "comm_s_per_step", kinds));
  const sent_s = sent.reduce((sum, { amount }) => sum + amount, 0);
  const most = 1.06 * Math.max(row.step_time_s, ends[1], sent_s);
  const bars = [bar(parts, most, { ends })], spread = range(ends, duration);
  if (sent_s) bars.push(...thinBar(`sent: ${duration(sent_s)}, by itself`, sent, most));
  const hidden = percent(Math.max(0, 1 - row.exposed_comm_s / sent_s));
  return {
    bars,
    ruler: most >= 1 ? axis(most, "s", 1) : axis(most, "ms", 1e-3),
    reading: `${duration(row.step_time_s)}; ${sent_s ? `${hidden} of the communication is hidden` : "nothing is sent"}`,
    keys: [...parts, ...sent].filter(({ amount }) => amount > 0),
    notes: [spread && `A step takes ${spread}, 8 times in 10.`],
  };
}

// -- scaling ----------------------------------------------------------------------------------------------------------

const CURVE = { height: 220, left: 44, right: 20, top: 22, bottom: 40 }; // pixels; the last four are margins

/** From how many ranks on it fits, and communication binds. */
function limits(rows) {
  const fitting = rows.find(fits), bound = rows.find((row) => row.binding === "communication");
  const fit = fitting ? `fits from ${plural(fitting.ranks, "rank")} on` : "fits on none of these numbers of ranks";
  const limit = bound ? `bound by communication from ${plural(bound.ranks, "rank")} on` : "not bound by communication";
  return `${fit}; ${limit}`;
}

function scalingKeys(rows) {
  const keys = [{ label: "fits", fill: "ink-mean", hatch: "line" }];
  if (!rows.every(fits)) keys.push({ label: "✗ does not fit", fill: "ink-faint", hatch: "dashes" });
  const isBanded = rows.some((row) => range(mfuBand(row), percent));
  if (isBanded) keys.push({ label: "8 times in 10, and 5 in 10", fill: "ink-band", hatch: "band" });
  return keys;
}

function curve(rows, allRanks, here, width, choose) {
  const { height, left, right, top, bottom } = CURVE;
  const logs = allRanks.map(Math.log2), first = Math.min(...logs), last = Math.max(...logs);
  const most = 1.15 * Math.max(...rows.map((row) => mfuBand(row)[1]));
  const x = (ranks) => left + ((width - left - right) * (Math.log2(ranks) - first)) / (last - first || 1);
  const y = (mfu) => height - bottom - ((height - top - bottom) * mfu) / most;
  const line = (name, some) => make("path", { class: name, d: pathOf(some.map(({ ranks, mfu }) => [x(ranks), y(mfu)])) });
  const about = "MFU over the number of ranks; the table below has the figures";
  const svg = make("svg", { width, height, role: "img", "aria-label": about });
  svg.append(...mfuRuler(most, y, width), ...ranksRuler(allRanks, x, width), areaOf(rows, "", x, y), areaOf(rows, "_50", x, y),
    line("dim", rows), line("fitting", rows.filter(fits)),
    ...rows.map((row) => dot(row, x(row.ranks), y(row.mfu), width, row.ranks === here, choose)));
  return svg;
}

const pathOf = (corners) => corners.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

/** The band around the curve. */
function areaOf(rows, suffix, x, y) {
  const ends = rows.map((row) => mfuBand(row, suffix).map((mfu) => [x(row.ranks), y(mfu)]));
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
function ranksRuler(allRanks, x, width) {
  const { height, left, right, bottom } = CURVE, marks = [];
  let free = -Infinity;
  for (const ranks of [...allRanks].sort((a, b) => a - b)) {
    if (x(ranks) < free) continue;
    marks.push(make("text", { x: x(ranks), y: height - bottom + 16, "text-anchor": "middle" }, whole(ranks)));
    free = x(ranks) + 36;
  }
  const middle = (left + width - right) / 2;
  return [...marks, make("text", { x: middle, y: height - 6, "text-anchor": "middle" }, "ranks, one GPU each (log scale)")];
}

/** A point of the curve: a dot, or a cross where it does not fit; with a ring where it is chosen. */
function dot(row, x, y, width, isHere, choose) {
  const mfu = percent(row.mfu), ranks = row.ranks, speed = `${count(row.tokens_per_s)} tokens/s`;
  const made = make("g", { class: "point", onclick: () => choose("world_size", String(ranks)) });
  made.append(make("circle", { class: "aim", cx: x, cy: y, r: 14 }));
  if (fits(row)) made.append(make("circle", { class: "dot", cx: x, cy: y, r: 3.5 }));
  else made.append(make("path", { class: "cross", d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8` }));
  made.append(make("title", {}, `${plural(ranks, "rank")}: MFU ${mfu}, ${speed}, ${fits(row) ? "fits" : "does not fit"}`));
  if (isHere) {
    const anchor = x < 90 ? "start" : x > width - 90 ? "end" : "middle";
    made.append(make("circle", { class: "here", cx: x, cy: y, r: 8 }),
      make("text", { class: "strong", x, y: y - 13, "text-anchor": anchor }, `${whole(ranks)}: ${mfu}`));
  }
  return made;
}

// -- the answer -------------------------------------------------------------------------------------------------------

function headline(row) {
  const n = row.parameters;
  const parameters = n >= 1e9 ? `${digits(n / 1e9)} billion` : `${digits(n / 1e6)} million`;
  const where = row.hosts > 1 ? `${whole(row.hosts)} hosts at ${whole(row.network_gbit_per_s)} Gb/s each` : "one host";
  const machine = `${whole(row.ranks)} × ${row.hardware} in ${where}`;
  return `${row.model}, ${parameters} parameters · ${machine} · global batch ${whole(row.global_batch)}`;
}

function verdict(row) {
  const probability = row.fits_probability;
  const isOpen = probability >= 0.02 && probability <= 0.98; // false where it is unknown: what is nearly certain needs no number
  const sure = isOpen ? `: ${Math.round(100 * probability)} %` : "";
  return fits(row) ? `fits${sure}` : `does not fit${sure && ` (fits${sure})`}`;
}

function reading(row) {
  const limit = size(row.memory_limit_bytes), bound = `Bound by ${row.binding}.`;
  if (fits(row)) return `It fits ${limit}, ${size(row.margin_bytes)} to spare. ${bound}`;
  return `It does not fit ${limit}: ${size(-row.margin_bytes)} too much. ${bound}`;
}

function figuresOf(row) {
  return [
    ["step", duration(row.step_time_s), range(band(row, "step_time_s"), duration)],
    ["tokens/s", count(row.tokens_per_s), range(band(row, "tokens_per_s"), count)],
    ["tokens/s a rank", count(row.tokens_per_s_per_rank)],
    ["FLOPS a rank", flopRate(row.tflops_per_rank)],
    ["MFU", percent(row.mfu), range(mfuBand(row), percent)],
    ["HFU", percent(row.hfu)],
    ["exposed communication", percent(row.exposed_comm_s / row.step_time_s)],
  ];
}

/** "15B", "15e9" or "2.49" as a number; undefined where it is empty, NaN where it is none above 0. */
function amount(text) {
  if (!text.trim()) return undefined;
  const [, number, letter] = text.trim().match(/^([\d.]+(?:e\d+)?)\s*([kmbt]?)$/i) ?? [];
  const found = Number(number) * 1000 ** (" kmbt".indexOf(letter?.toLowerCase() || " "));
  return found > 0 ? found : NaN;
}

/** Time, GPU hours and cost of a whole training, with the range of the step; a billion tokens where only a price is given. */
function billOf(row, bill) {
  const price = amount(bill.price), tokens = amount(bill.tokens) ?? (price && 1e9);
  if (!(tokens > 0)) return [];
  const rates = [row.tokens_per_s, ...band(row, "tokens_per_s").reverse()], hours = (s) => digits((s * row.ranks) / 3600);
  const of = (write) => {
    const [value, low, high] = rates.map((rate) => tokens / rate);
    return [write(value), range([low, high], write)];
  };
  const costs = price > 0 ? [["cost", ...of((s) => digits((s * row.ranks * price) / 3600))]] : [];
  return [["time of training", ...of(duration)], ["GPU hours", ...of(hours)], ...costs];
}

// -- fields -----------------------------------------------------------------------------------------------------------

const OTHER = "other…";
let fieldsMade = 0;

/** One input: a list of values, the last of which may be for typing another; or a number or text. */
class Field {
  constructor(field, tell) {
    const id = `what-if-${fieldsMade++}`, send = (text) => tell(field.name, text);
    this.input = make(field.options.length ? "select" : "input", { id, name: field.name, title: field.help ?? "",
      ...(field.least == null ? {} : { type: "number", min: field.least, max: field.most }) });
    this.typed = make("input", { placeholder: field.typed ?? "", "aria-label": `${field.label}: another value`, hidden: "" });
    this.edited = false; // an answer that comes while a person types does not take the text away
    this.input.addEventListener("input", () => { this.edited = true; });
    this.input.addEventListener("blur", () => { this.edited = false; });
    this.input.addEventListener("change", () => {
      this.edited = false;
      this.typed.hidden = this.input.value !== OTHER;
      if (this.typed.hidden) send(this.input.value);
      else this.typed.focus();
    });
    // JupyterLab keeps Enter from an input, which then does not change before it is left.
    for (const input of [this.input, this.typed]) input.addEventListener("keyup", ({ key }) => key === "Enter" && input.blur());
    this.typed.addEventListener("change", () => {
      this.typed.hidden = true;
      if (this.typed.value.trim()) send(this.typed.value);
      this.typed.value = "";
    });
    this.note = make("span", { class: "note" });
    this.root = make("div", { class: "field" }, make("label", { for: id }, field.label), this.input,
      ...(field.typed ? [this.typed] : []), this.note);
  }

  /** stands: what became of each value, where that is known. Not while a person is about to type another value. */
  show({ options, value, stands = [], typed, placeholder, note = "", refused = false }) {
    this.root.classList.toggle("refused", refused);
    this.note.textContent = refused ? "refused" : note;
    if (!this.typed.hidden) return;
    if (options.length) {
      const labels = [...options, ...(typed ? [OTHER] : [])];
      const same = labels.length === this.input.options.length && labels.every((label, i) => this.input.options[i].value === label);
      if (!same) this.input.replaceChildren(...labels.map((label) => make("option", { value: label }, label)));
      labels.forEach((label, i) => { this.input.options[i].text = stands[i] ? `${label} – ${stands[i]}` : label; });
    } else this.input.placeholder = placeholder ?? "";
    if (!this.edited) this.input.value = value;
  }
}

// -- the page ---------------------------------------------------------------------------------------------------------

/** tell(name, text) chooses a value; it, and what the buttons of a state do, leads to another `show`. */
class Page {
  constructor(root, look, tell) {
    Object.assign(this, { root, look, tell, state: null, row: null, before: null, along: [], fields: new Map() });
    root.innerHTML = TEMPLATE;
    const { light, dark } = look.tokens;
    for (const name of Object.keys(light)) root.style.setProperty(`--${name.replace(".", "-")}`, `light-dark(${light[name]}, ${dark[name]})`);
    root.style.setProperty("--ink-gap", "transparent");
    for (const form of root.querySelectorAll("form")) form.addEventListener("submit", (event) => event.preventDefault());
    const copy = this.at("[data-copy]"), text = (name, label, placeholder) => ({ name, label, placeholder, options: [], value: "" });
    copy.addEventListener("click", () => this.copy(copy, this.at(".linked a").href));
    this.bill = [text("tokens", "tokens to train", "15B"), text("price", "price of a GPU hour", "2.49")].map((field) => {
      const made = new Field(field, tell);
      this.at(".bill").append(made.root);
      return [field, made];
    });
    this.sight = new ResizeObserver(() => this.state && this.showScaling(this.state));
    this.sight.observe(this.at(".desk"));
  }

  at(selector) { return this.root.querySelector(selector); }

  show(state) {
    const { row, refusals } = (this.state = state);
    if (row && this.row && row.peak_memory_bytes !== this.row.peak_memory_bytes) this.before = this.row;
    this.row = row ?? this.row;
    this.showFields(state.groups);
    for (const [field, made] of this.bill) {
      const value = state.bill[field.name];
      made.show({ ...field, value, refused: Number.isNaN(amount(value)) });
    }
    this.showAnswer(state);
    this.showStrategies(state);
    this.root.classList.toggle("stale", Boolean(refusals.length && row));
    this.at(".pictures").hidden = !row;
    if (row) {
      this.showCard(".memory", memoryCard(row, this.before, this.look.memory));
      this.showCard(".step", stepCard(row, this.look));
    }
    this.showScaling(state);
    const { texts, link } = state.take;
    this.at(".take .texts").replaceChildren(...texts.flatMap(([title, text]) => {
      const button = make("button", { type: "button", onclick: () => this.copy(button, text) }, "Copy");
      return [make("p", {}, make("b", {}, title), button), make("pre", { tabindex: 0 }, text)];
    }));
    this.at(".linked").hidden = link === undefined;
    if (link !== undefined) this.at(".linked a").href = link;
  }

  showFields(groups) {
    const form = this.at(".choices");
    if (!this.fields.size) {
      for (const { title, fields, same = [] } of groups) {
        const group = make("fieldset", {}, ...(title ? [make("legend", {}, title)] : []));
        for (const field of fields) this.fields.set(field.name, new Field(field, this.tell));
        const fixed = same.map(([label, value]) => make("div", {}, make("dt", {}, label), make("dd", {}, value)));
        group.append(...fields.map(({ name }) => this.fields.get(name).root), make("dl", { class: "same" }, ...fixed));
        form.append(group);
      }
    }
    for (const field of groups.flatMap(({ fields }) => fields)) this.fields.get(field.name).show(field);
  }

  showAnswer({ row, refusals, ways, bill }) {
    const isRefused = refusals.length > 0, rows = row ? [...figuresOf(row), ...billOf(row, bill)] : [];
    this.at(".verdict").textContent = isRefused ? "refused" : verdict(row);
    this.at(".verdict").className = `verdict badge ${isRefused || !fits(row) ? "different" : "equal"}`;
    this.at(".headline").textContent = isRefused ? "This combination cannot run" : headline(row);
    this.at(".answer .reading").textContent = isRefused ? refusals.join(" ") : reading(row);
    this.at(".ways").hidden = !ways.length;
    this.at(".ways").replaceChildren(isRefused ? "What runs: " : "What fits: ",
      ...ways.map(({ words, take }) => make("button", { type: "button", onclick: take }, words)));
    this.at(".answer .figures").replaceChildren(...rows.map(([name, value, spread = ""]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, value, ...(spread ? [make("small", {}, spread)] : [])))));
    const notes = [row?.assumed && `Assumed: ${row.assumed}.`,
      rows.some(([, , spread]) => spread) && "The true figure is in its range 8 times in 10."];
    this.at(".assumed").textContent = notes.filter(Boolean).join(" ");
  }

  /** What a search found; its buttons choose it. */
  showStrategies({ strategies }) {
    const card = this.at(".strategies");
    card.hidden = !strategies;
    if (!strategies) return;
    const use = ({ used, take }, i) => make("button", { type: "button", "aria-pressed": used, title: `Take strategy ${i + 1}`,
      onclick: take }, used ? "In use" : "Use");
    fill(card.querySelector("table"), strategies.heads, strategies.rows.map((row, i) => [use(row, i), ...row.cells]));
    this.caption(card, { reading: strategies.reading, notes: [] });
  }

  showCard(name, { bars, ruler, ...words }) {
    const card = this.at(name);
    card.querySelector(".bars").replaceChildren(make("div", { class: "tracks" }, ...bars), ruler);
    this.caption(card, words);
  }

  /** Words of a card: beside its title, its keys, and the sentences below it, of which some are empty. */
  caption(card, { reading, keys = [], notes }) {
    card.querySelector(".reading").textContent = reading;
    card.querySelector(".legend")?.replaceChildren(...keys.map(key));
    card.querySelector("figcaption").textContent = notes.filter(Boolean).join(" ");
  }

  /** The kernel sends the curve after the answer: until then the former one stays. */
  showScaling({ row, along, ranks, refused = 0 }) {
    const card = this.at(".scaling"), isOffline = Boolean(ranks);
    if (along.length || isOffline) this.along = along;
    const rows = this.along;
    card.hidden = !rows.length || (ranks ?? rows).length < 2;
    if (card.hidden) return;
    const room = card.querySelector(".curve");
    room.replaceChildren(curve(rows, ranks ?? rows.map((point) => point.ranks), row?.ranks, room.clientWidth, this.tell));
    fill(card.querySelector("table"), ["ranks", "fits", "memory", "step", "tokens/s", "MFU", "bound by"], rows.map((point) => [
      whole(point.ranks), fits(point) ? "yes" : "no", size(taken(point)), duration(point.step_time_s),
      count(point.tokens_per_s), percent(point.mfu), point.binding]));
    const batches = new Set(rows.map((point) => point.global_batch));
    this.caption(card, {
      reading: limits(rows),
      keys: scalingKeys(rows),
      notes: [batches.size < rows.length ? "All have the same global batch." : "Each rank has the same work.",
        "Press a point to choose it.", refused && `Refused: ${plural(refused, "number")} of ranks.`],
    });
  }

  async copy(button, copied) {
    const done = await navigator.clipboard?.writeText(copied).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Select it to copy";
  }
}

// -- without a kernel -------------------------------------------------------------------------------------------------

const BILL = ["tokens", "price"]; // fields of the bill, which are no axes

/** What is chosen is a list of places, one on each axis, and stands in the address after the #. Its cell is the place of
    its row in each column. */
class Table {
  constructor(root, data) {
    const unpack = (packed) => new Float32Array(Uint8Array.from(atob(packed), (c) => c.charCodeAt(0)).buffer);
    this.columns = Object.entries(data.columns).map(([name, packed]) => [name, unpack(packed)]);
    this.axes = data.axes;
    this.data = data;
    this.rows = new Map();
    this.asked = {}; // of the bill, by name: what a reader typed
    this.page = new Page(root, data.look, (name, label) => {
      if (BILL.includes(name)) {
        this.asked[name] = label;
        return this.choose(this.chosen);
      }
      const axis = this.axis(({ name: known }) => known === name);
      this.page.at(".notice").hidden = true;
      this.choose(this.changed(axis, this.axes[axis].labels.indexOf(label)));
    });
    addEventListener("hashchange", () => this.choose(this.read(location.hash)));
    this.chosen = this.read(location.hash);
    this.page.show(this.state());
  }

  axis(is) { return this.axes.findIndex(is); }

  changed(axis, place) {
    return this.chosen.map((old, i) => (i === axis ? place : old));
  }

  /** The row of a combination: its figures, or `refused`. */
  rowAt(places) {
    const cell = places.reduce((sum, place, i) => sum * this.axes[i].labels.length + place, 0);
    if (!this.rows.has(cell)) {
      const row = Object.fromEntries(this.columns.map(([name, column]) => [name, column[cell]]).filter(([, number]) => !Number.isNaN(number)));
      for (const [kind, texts] of Object.entries(this.data.texts)) row[kind] = texts[row[kind]];
      const label = (name) => { const i = this.axis((axis) => axis.name === name); return this.axes[i].labels[places[i]]; };
      Object.assign(row, { model: label("model"), hardware: label("hardware"), refused: this.data.refusals[row.refused] });
      this.rows.set(cell, row);
    }
    return this.rows.get(cell);
  }

  standing(row) { return row.refused ? "refused" : fits(row) ? "fits" : "does not fit"; }

  state() {
    const row = this.rowAt(this.chosen), { refused } = row, RANKS = this.axis(({ name }) => name === "world_size");
    const along = this.data.ranks.map((_, place) => this.rowAt(this.changed(RANKS, place))).filter((point) => !point.refused);
    const several = this.axes.map((axis, i) => [axis, i]).filter(([{ labels }]) => labels.length > 1);
    const fields = several.map(([{ name, label, labels }, i]) => ({ name, label, options: labels, value: labels[this.chosen[i]],
      stands: labels.map((_, place) => {
        const stands = this.standing(this.rowAt(this.changed(i, place)));
        return stands === "fits" || place === this.chosen[i] ? "" : stands;
      }) }));
    return {
      groups: [{ fields, same: this.axes.filter(({ labels }) => labels.length === 1).map(({ label, labels }) => [label, labels[0]]) }],
      row: refused ? null : row,
      bill: this.bill(row),
      refusals: refused ? [`${refused.words}.`] : [],
      ways: this.ways(row),
      along: along.sort((a, b) => a.ranks - b.ranks),
      ranks: this.data.ranks,
      refused: this.data.ranks.length - along.length,
      take: { texts: [["The same in a terminal", this.command(row)]], link: this.address() },
    };
  }

  bill({ hardware }) { return { tokens: "", price: "", ...this.data.bills[hardware], ...this.asked }; }

  /** To what runs, or fits: what the refusal advises, and the nearest value of each axis. */
  ways({ refused, ...row }) {
    const ways = new Map(); // words -> places; each once
    if (refused || !fits(row)) {
      for (const places of [this.advised(refused), ...this.axes.map((_, axis) => this.nearest(axis, refused))]) {
        if (places) ways.set(this.difference(places), places);
      }
    }
    return [...ways].map(([words, places]) => ({ words, take: () => this.choose(places) }));
  }

  difference(places) {
    return this.axes.flatMap(({ label, labels }, i) => (places[i] === this.chosen[i] ? [] : [`${label} ${labels[places[i]]}`])).join(", ");
  }

  advised(refused) {
    const places = this.chosen.map((old, axis) => refused?.fix[axis] ?? old);
    return !refused || this.rowAt(places).refused ? null : places;
  }

  /** The places with the nearest value of an axis with which it runs, or fits. */
  nearest(axis, refused) {
    const isWay = (row) => !row.refused && (refused || fits(row));
    const far = (places) => Math.abs(places[axis] - this.chosen[axis]);
    return this.axes[axis].labels.map((_, place) => this.changed(axis, place)).filter((places) => isWay(this.rowAt(places)))
      .sort((a, b) => far(a) - far(b))[0];
  }

  address() {
    const values = this.axes.map(({ option, labels }, i) => [option.slice(2), labels[this.chosen[i]]]);
    const several = values.filter((_, i) => this.axes[i].labels.length > 1);
    return `#${new URLSearchParams([...several, ...Object.entries(this.asked)])}`;
  }

  /** What an address chooses; where it names what this page does not have, what is shown first, and that is said. */
  read(hash) {
    const unknown = [], places = [...this.data.start], notice = this.page.at(".notice");
    for (const [name, label] of new URLSearchParams(hash.slice(1))) {
      if (BILL.includes(name)) {
        this.asked[name] = label;
        continue;
      }
      const axis = this.axis(({ option }) => option === `--${name}`);
      const place = axis < 0 ? -1 : this.axes[axis].labels.indexOf(label);
      if (place < 0) unknown.push(`${name} ${label}`);
      else places[axis] = place;
    }
    notice.hidden = !unknown.length;
    notice.textContent = `The link asks for ${unknown.join(", ")}, which this page does not have.`;
    return places;
  }

  command(row) {
    const options = this.axes.map((axis, i) => `${axis.option} ${axis.words[this.chosen[i]]}`);
    const bill = Object.entries(this.bill(row)).filter(([, text]) => amount(text) > 0).map(([name, text]) => `--${name} ${text}`);
    return ["fsdp-lab plan", ...options, ...(this.data.options ? [this.data.options] : []), ...bill].join(" ");
  }

  choose(places) {
    this.chosen = places;
    history.replaceState(null, "", this.address());
    this.page.show(this.state());
  }
}

const embedded = document.getElementById("fsdp-lab-what-if");
if (embedded) {
  new Table(document.querySelector(".what-if"), JSON.parse(embedded.textContent));
  document.documentElement.dataset.ready = "";
}

// -- in a notebook ----------------------------------------------------------------------------------------------------

const GONE = "The kernel is gone. Run the cell again.";

/** JupyterLab says its theme on the body; the ground of another page is measured. */
function isDark() {
  const said = document.body.dataset.jpThemeLight;
  if (said !== undefined) return said === "false";
  const [red, green, blue, opacity = 1] = getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g).map(Number);
  return opacity > 0 ? 0.2126 * red + 0.7152 * green + 0.0722 * blue < 128 : matchMedia("(prefers-color-scheme: dark)").matches;
}

function render({ model, el }) {
  const root = make("div", { class: "fsdp-what-if", "data-lm-suppress-shortcuts": "true" }), say = (text) => { page.at(".status").textContent = text; };
  const send = (kind, more) => { try { model.send({ kind, ...more }); } catch { say(GONE); } }; // the comm died with its kernel
  const page = new Page(root, model.get("look"), (name, text) => send("choose", { name, text }));
  const show = () => {
    const state = model.get("state"), { ways, strategies } = state;
    page.show({ ...state, ways: ways.map(({ words, name }) => ({ words, take: () => send("fix", { name }) })),
      strategies: strategies && { ...strategies, rows: strategies.rows.map((row, place) => ({ ...row, take: () => send("take", { place }) })) } });
    say(state.status);
    page.at(".find").disabled = state.searching;
    root.dataset.shown = state.number;
  };
  const paint = () => { root.style.colorScheme = isDark() ? "dark" : "light"; };
  const themed = new MutationObserver(paint), gone = () => say(GONE), DEATHS = ["comm_live_update", "comm:close"];
  el.append(root);
  page.at(".bar-of-page").hidden = false;
  page.at(".find").addEventListener("click", () => send("find"));
  paint();
  show();
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  model.on("change:state", show);
  for (const event of DEATHS) model.on(event, gone);
  return () => {
    themed.disconnect();
    page.sight.disconnect();
    model.off("change:state", show);
    for (const event of DEATHS) model.off(event, gone);
  };
}

export default { render };
