// The page's half of the live view; live.py says the protocol, and puts saving.js and finding.js before this.
//
// A view mounts, gets a snapshot, builds a card for each panel and lets Bokeh draw in them. Then ticks come: rows for the
// data sources (numbered, so that what comes twice is passed over and what is missing is noticed), properties of models,
// and the words of the cards. Ticks that arrive while a frame is being painted are merged into the next one.

const PING_EVERY_MS = 4000;
const SILENT_AFTER_MS = 15000;
const DRAW_AGAIN_MS = 1000; // after a failure; doubled each time until one is painted
const HIDDEN_FRAME_MS = 1000; // a hidden tab paints no frames; acknowledge all the same

const COPIED_MS = 1500;
const TAB_KEY = "fsdp-lab-tab"; // of the browser's storage
const OWN_TAB = "Show the dashboard in a tab of its own, beside the notebook";

const DEATHS = ["comm_live_update", "comm:close"]; // the widget manager's: the kernel restarted, the comm was closed

const GONE = "The kernel is gone. Run the cell again."; // as in live.css
const SILENT = "No answer from the kernel. It may be busy; if it was restarted, run the cell again.";

// -- BokehJS, from the kernel --------------------------------------------------------------------------------------

/** BokehJS of the wanted version: the one on the page, else the kernel's, which came with the widget or is asked for once. A
    busy kernel answers later. If it was restarted instead, the cell that is run again brings a widget with BokehJS. */
function loadBokeh(model) {
  const version = model.get("bokeh_version");
  const present = () => window.Bokeh?.[version] ?? (window.Bokeh?.version === version ? window.Bokeh : undefined);
  if (present()) return Promise.resolve(present());
  const loading = (window.__fsdpLabBokeh ??= {});
  const given = asBytes(model.get("first")?.bokehjs);
  if (!given && loading[version]) return loading[version];
  const load = async () => {
    const script = given ?? (await askForBokeh(model));
    if (!present()) await runScript(script); // another view may have had it first
    return present();
  };
  loading[version] = load().catch((error) => {
    delete loading[version]; // the next view may be luckier
    throw error;
  });
  return loading[version];
}

function askForBokeh(model) {
  return new Promise((resolve) => {
    const onMessage = (message, buffers) => {
      if (message.kind !== "bokehjs") return;
      const script = payload(message, buffers);
      if (!script && !message.base64) return void model.send({ kind: "bokehjs", text: true });
      model.off("msg:custom", onMessage);
      resolve(script);
    };
    model.on("msg:custom", onMessage);
    model.send({ kind: "bokehjs" });
  });
}

async function runScript(compressed) {
  const inflated = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const text = await new Response(inflated).blob();
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
    script.onload = () => (URL.revokeObjectURL(script.src), resolve());
    script.onerror = () => reject(new Error("BokehJS could not be loaded by this page."));
    document.head.appendChild(script);
  });
}

// -- theme ---------------------------------------------------------------------------------------------------------

const cssVariable = (name, fallback) => getComputedStyle(document.body).getPropertyValue(name).trim() || fallback;

/** JupyterLab says its theme on the body, and other pages say what its cards are drawn on, or are one colour themselves. */
function isDark() {
  const said = document.body.dataset.jpThemeLight;
  if (said !== undefined) return said === "false";
  for (const colour of [resolved("var(--jp-layout-color0)"), getComputedStyle(document.body).backgroundColor]) {
    const [red, green, blue, opacity = 1] = colour.match(/[\d.]+/g)?.map(Number) ?? [0, 0, 0, 0];
    if (opacity > 0) return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** A colour of CSS as this page computes it; a transparent one where it knows no such variable. */
function resolved(colour) {
  const probe = document.body.appendChild(element("i"));
  probe.style.backgroundColor = colour;
  const computed = getComputedStyle(probe).backgroundColor;
  probe.remove();
  return computed;
}

function currentTheme(model) {
  const dark = isDark();
  const background = cssVariable("--jp-layout-color0", dark ? "#111111" : "#ffffff");
  return {
    dark,
    tokens: { ...model.get("tokens")[dark ? "dark" : "light"], "ink.gap": background },
    text: cssVariable("--jp-ui-font-color1", dark ? "#e5e7eb" : "#1f2a37"),
    soft: cssVariable("--jp-ui-font-color2", dark ? "#9ca3af" : "#6b7280"),
    line: dark ? "rgba(255,255,255,0.13)" : "rgba(0,0,0,0.09)",
    font: cssVariable("--jp-ui-font-family", "system-ui, sans-serif"),
  };
}

/** Axes, grids and whatever carries a {tint: {property: token}} tag take the theme's colours. */
function paintModels(doc, theme) {
  for (const m of doc.all_models) {
    if ("major_label_text_color" in m) {
      m.setv({ major_label_text_color: theme.soft, axis_label_text_color: theme.soft,
               major_label_text_font: theme.font, axis_label_text_font: theme.font });
    } else if ("grid_line_color" in m) {
      m.setv({ grid_line_color: theme.line });
    }
    if ("text_font" in m) setVisual(m, "text_font", theme.font);
    for (const tag of m.tags) {
      for (const [property, token] of Object.entries(tag?.tint ?? {})) {
        setVisual(m, property, theme.tokens[token]);
      }
    }
  }
}

/** A visual of a glyph is a spec that may come from a column; one of an axis is a plain value. */
function setVisual(m, property, value) {
  const now = m[property];
  const isSpec = typeof now === "object" && now !== null;
  m.setv({ [property]: isSpec ? { value } : value });
}

const plain = new WeakSet(); // documents without CSS variables, and the class of Bokeh's that knows them
const IDLE = ["decimated_glyph", "selection_glyph", "nonselection_glyph", "muted_glyph"];
const HATCH = ["hatch_color", "hatch_alpha", "hatch_pattern", "hatch_scale", "hatch_weight"];

/** Spares Bokeh what it computes anew for each paint though nothing of it has changed; without this all works, slower.
    - The font's size, and a CSS variable for each property: a document that `paintModels` colours has none.
    - The style of an empty element over each glyph, and equal styles of the others: a change of style makes the page
      compute its styles at the next text drawn.
    - The looks of a glyph when it is selected, muted or thinned, which nothing does here; a hatch like the one before. */
function lighten(doc, views) {
  plain.add(doc);
  for (const view of views) {
    Object.defineProperty(view, "base_font_size", { value: view.base_font_size });
    for (const renderer of view.renderer_views?.values() ?? []) {
      if (renderer.position?.replace) onChange(renderer.position, "replace", (text) => text);
      if (!renderer.glyph) continue;
      renderer.position?.replace(":host { display: none; }");
      renderer.update_position = () => {};
      for (const glyph of IDLE.map((name) => renderer[name]).filter(Boolean)) {
        Object.assign(glyph, { set_data: async () => {}, set_visuals() {}, map_data() {} });
      }
      const { hatch } = renderer.glyph.visuals;
      if (hatch) onChange(hatch, "update", () => HATCH.map((name) => (hatch[name].is_Scalar() ? hatch[name].value : Math.random())).join());
    }
  }
  let kind = views[0]?.visuals.outline_line;
  while (kind && !Object.hasOwn(kind, "_get_css_value")) kind = Object.getPrototypeOf(kind);
  if (!kind || plain.has(kind)) return;
  plain.add(kind);
  const ask = kind._get_css_value;
  kind._get_css_value = function (name) {
    return plain.has(this.obj.model?.document) ? "" : ask.call(this, name);
  };
}

/** Lets a method of an object run only when what `told` makes of its arguments is another than at the last call. */
function onChange(object, method, told) {
  const run = object[method];
  let last;
  object[method] = (...given) => {
    const now = told(...given);
    if (now !== last) run.apply(object, given);
    last = now;
  };
}

/** A mapping whose keys are no strings comes as Bokeh itself writes it. */
const revived = (value) => (value?.type === "map" ? new Map(value.entries) : value);

// -- data ----------------------------------------------------------------------------------------------------------

/** A buffer as bytes: JupyterLab gives views of memory, others the memory itself, of another frame even; or nothing. */
function asBytes(buffer) {
  if (ArrayBuffer.isView(buffer)) return new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  return Object.prototype.toString.call(buffer) === "[object ArrayBuffer]" ? new Uint8Array(buffer) : undefined;
}

/** What came with a message, also where a page passes on no buffers and has asked for text; undefined if nothing did. */
function payload(message, buffers) {
  if (message.base64) return Uint8Array.from(atob(message.base64), (character) => character.charCodeAt(0));
  return asBytes(buffers?.[0]);
}

/** Whether a message has the numbers that its tables describe. */
function isWhole(message, numbers) {
  const count = message.tables.reduce((sum, table) => sum + table.rows * table.columns.length, 0);
  return (numbers?.byteLength ?? 0) === 8 * count;
}

const doubles = (bytes) => new Float64Array(bytes.slice().buffer);

/** The tables of a message with their columns: {name, generation, first, rows, limit, data: {column: values}}. */
function readTables(descriptions, bytes) {
  const all = bytes ? doubles(bytes) : new Float64Array(0);
  let at = 0;
  return descriptions.map((d) => {
    const data = {};
    for (const column of d.columns) data[column] = all.subarray(at, (at += d.rows));
    for (const [column, values] of Object.entries(d.texts)) data[column] = values;
    return { ...d, data };
  });
}

const join = (a, b) => {
  if (Array.isArray(a)) return a.concat(b);
  const both = new Float64Array(a.length + b.length);
  both.set(a), both.set(b, a.length);
  return both;
};

/** Two blocks of one table as one, where the second follows the first; undefined where rows between them are missing. */
function mergeTables(a, b) {
  if (!a || a.generation !== b.generation) return b;
  const overlap = a.first + a.rows - b.first;
  if (overlap < 0) return undefined;
  if (overlap >= b.rows) return a;
  const surplus = Math.max(0, a.rows + b.rows - overlap - a.limit);
  const data = {};
  for (const column of Object.keys(b.data)) {
    data[column] = join(a.data[column], b.data[column].slice(overlap)).slice(surplus);
  }
  return { ...a, first: a.first + surplus, rows: a.rows + b.rows - overlap - surplus, data };
}

/** Writes blocks into Bokeh's sources; `false` from `write` says that rows are missing. */
class Sources {
  constructor(doc) {
    this.sources = new Map();
    for (const m of doc.all_models) if (m.type === "ColumnDataSource" && m.name) this.sources.set(m.name, m);
    this.at = new Map(); // name -> {generation, next}
  }

  write(table) {
    const source = this.sources.get(table.name);
    if (!source) return true;
    const at = this.at.get(table.name);
    const next = table.first + table.rows;
    const overlap = at ? at.next - table.first : 0;
    if (!at || at.generation !== table.generation || (overlap < 0 && table.rows === table.limit)) {
      source.data = Object.fromEntries(Object.entries(table.data).map(([c, v]) => [c, v.slice()]));
    } else {
      if (overlap < 0) return false;
      if (overlap >= table.rows) return true;
      source.stream(Object.fromEntries(Object.entries(table.data).map(([c, v]) => [c, v.slice(overlap)])), table.limit);
    }
    this.at.set(table.name, { generation: table.generation, next });
    return true;
  }
}

// -- words ---------------------------------------------------------------------------------------------------------

function element(tag, className, text) {
  const e = document.createElement(tag);
  if (className) e.className = className;
  if (text !== undefined) e.textContent = text;
  return e;
}

/** Into the text that is there, if it is: another child would make a page with `:has` in its styles compute them all anew. */
function write(at, text) {
  const node = at.firstChild;
  if (node?.nodeType === Node.TEXT_NODE && !node.nextSibling) node.data = text;
  else at.textContent = text;
}

/** A legend entry; its swatch takes the colour of a token from the theme, or a colour as it is. */
function legendEntry({ label, token, color, hatch = " " }) {
  const entry = element("span", "fsdp-key");
  const swatch = element("i", "fsdp-swatch");
  swatch.dataset.hatch = hatch;
  if (token) swatch.dataset.token = token;
  if (color) swatch.style.setProperty("--fsdp-fill", color);
  entry.append(swatch, element("span", "", label));
  return entry;
}

/** A table of words; a cell is text, or {text, title, tone, key, press, about, pressed}. */
class FigureTable {
  constructor(press) {
    this.press = press;
    this.root = element("table", "fsdp-figures");
    this.head = this.root.createTHead().insertRow();
    this.body = this.root.createTBody();
    this.shown = this.heads = [];
  }

  /** Cells whose words stay are left as they are, so that what is pointed at or pressed does not go away. */
  show([heads, ...rows], sortable = false) {
    this.told = [heads, ...rows];
    if (sortable) [heads, ...rows] = this.sorted(heads, rows);
    if (this.head.cells.length !== heads.length) {
      this.head.replaceChildren(...heads.map(() => element("th")));
      this.body.replaceChildren();
      this.shown = [];
      this.heads = [];
    }
    heads.forEach((head, i) => {
      const said = JSON.stringify(head);
      if (this.heads[i] === said) return;
      this.heads[i] = said;
      this.head.cells[i].scope = "col";
      this.write(this.head.cells[i], head);
    });
    while (this.body.rows.length > rows.length) this.body.deleteRow(-1);
    while (this.body.rows.length < rows.length) {
      const line = this.body.insertRow();
      for (const _ of heads) line.insertCell();
    }
    rows.forEach((row, i) => row.forEach((cell, j) => {
      const said = JSON.stringify(cell);
      if (this.shown[i]?.[j] === said) return;
      (this.shown[i] ??= [])[j] = said;
      this.write(this.body.rows[i].cells[j], cell);
    }));
    this.shown.length = rows.length;
  }

  /** The table in the order of the head that was pressed last; again for the other way round. */
  sorted(heads, rows) {
    const { by, way = -1 } = this.order ?? {};
    const marked = heads.map((text) => ({ text: text === by ? `${text} ${way < 0 ? "↓" : "↑"}` : text, title: `Sort by ${text}`, sort: text }));
    const at = heads.indexOf(by);
    const key = (row) => row[at].about ?? row[at];
    const compare = (a, b) => {
      const unknown = (a === "") - (b === ""); // comes last
      return unknown || way * (a - b || String(a).localeCompare(b));
    };
    return [marked, ...(at < 0 ? rows : [...rows].sort((a, b) => compare(key(a), key(b))))];
  }

  sort(head) {
    this.order = { by: head, way: this.order?.by === head ? -this.order.way : -1 };
    this.show(this.told, true);
  }

  write(at, cell) {
    if (typeof cell === "string") {
      at.className = at.title = at.form = "";
      write(at, cell);
      return;
    }
    const form = JSON.stringify({ ...cell, text: "", title: "", about: "" });
    if (at.form === form && !cell.press) {
      at.title = cell.title;
      write(at.querySelector(".fsdp-text"), cell.text);
      return;
    }
    at.form = form;
    at.className = cell.tone ? `fsdp-tone-${cell.tone}` : "";
    at.title = cell.title;
    const kind = cell.sort ? "fsdp-sort" : cell.press ? `fsdp-press fsdp-press-${cell.press}` : "fsdp-words";
    const words = element(cell.press || cell.sort ? "button" : "span", kind);
    if (cell.sort) words.addEventListener("click", () => this.sort(cell.sort));
    if (cell.press) {
      words.type = "button";
      words.setAttribute("aria-label", cell.title);
      if (cell.pressed !== null) words.setAttribute("aria-pressed", String(cell.pressed));
      words.addEventListener("click", () => this.press(cell.press, cell.about));
    }
    if (cell.key) words.append(legendEntry(cell.key).firstChild);
    words.append(element("span", "fsdp-text", cell.text));
    at.replaceChildren(words);
  }
}

/** Tabs of cards, which say theirs, and of the kernel's forms, which `live.css` shows where `root` names theirs. The choice is
    kept in this browser. */
class Tabs {
  constructor({ tabs, help }, cards, root) {
    this.help = help;
    this.cards = cards;
    this.shown = root;
    root.onclick = (event) => event.target.classList.contains("fsdp-copy") && copyBeside(event.target);
    root.onkeydown = pressByKey;
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.ariaLabel = "Dashboard";
    this.root = element("div", "fsdp-tabs");
    this.root.dataset.lmSuppressShortcuts = "true"; // arrows are not for the notebook
    this.list = element("div", "fsdp-tablist");
    this.list.setAttribute("role", "tablist");
    this.root.append(this.list);
    for (const { name, title } of tabs) {
      const tab = element("button", "fsdp-tab-button", title);
      tab.type = "button";
      tab.dataset.tab = name;
      tab.setAttribute("role", "tab");
      tab.addEventListener("click", () => this.open(name));
      this.list.append(tab);
    }
    this.list.addEventListener("keydown", (event) => this.move(event));
    let kept = null;
    try {
      kept = localStorage.getItem(TAB_KEY);
    } catch {} // this page may keep nothing
    this.choose(tabs.some(({ name }) => name === kept) ? kept : tabs[0].name);
  }

  open(name) {
    this.choose(name);
    const form = this.shown.querySelector(`.fsdp-tab-${name}, .fsdp-below > :not(.fsdp-away)`);
    form?.scrollIntoView({ block: "nearest" });
  }

  choose(name) {
    for (const label of this.shown.querySelectorAll(".fsdp-field label")) { // ipywidgets has no tooltip for a dropdown
      const input = label.parentElement.querySelector("select, input");
      if (input) input.title = label.title ||= this.help[label.textContent] ?? "";
    }
    this.shown.dataset.tab = name;
    for (const card of this.cards.children) card.classList.toggle("fsdp-away", card.dataset.tab !== name);
    for (const tab of this.list.children) {
      tab.setAttribute("aria-selected", String(tab.dataset.tab === name));
      tab.tabIndex = tab.dataset.tab === name ? 0 : -1;
    }
    try {
      localStorage.setItem(TAB_KEY, name);
    } catch {}
  }

  move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const tabs = [...this.list.children];
    const next = tabs[(tabs.indexOf(document.activeElement) + by + tabs.length) % tabs.length];
    this.choose(next.dataset.tab);
    next.focus();
  }

  addButton(text, title, press) {
    const button = element("button", "fsdp-press fsdp-own-tab", text);
    button.type = "button";
    button.title = title;
    button.addEventListener("click", press);
    this.root.append(button);
  }
}

/** Presses the button whose tooltip ends with this key, if it is in sight and nothing that takes keys has the focus. The
    notebook has no shortcut of these keys, and its others go on to it. */
function pressByKey(event) {
  const key = { " ": "space", n: "n" }[event.key];
  const modified = event.repeat || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;
  if (!key || modified || event.composedPath()[0].closest("button, input, select, textarea, summary, a, [contenteditable]")) return;
  const buttons = [...this.querySelectorAll(`button[title$="Key: ${key}"]`)];
  const button = buttons.find((one) => !one.disabled && one.offsetParent);
  if (!button) return;
  event.preventDefault(); // the space would scroll the page
  event.stopPropagation();
  button.click();
}

/** JupyterLab shows a cell's output in a tab of its own; the one door to that for a widget is the cell's context menu. */
function canOpenOwnTab(root) {
  return Boolean(root.closest(".jp-Notebook") && root.closest(".jp-OutputArea"));
}

async function openOwnTab(root) {
  const at = root.getBoundingClientRect();
  const mouse = { bubbles: true, cancelable: true, clientX: at.left + 4, clientY: Math.max(at.top + 4, 4) };
  root.dispatchEvent(new MouseEvent("mousedown", mouse)); // the command is for the cell that is active
  root.dispatchEvent(new MouseEvent("contextmenu", mouse));
  for (let left = 50; left > 0; left--) {
    const item = document.querySelector(".lm-Menu [data-command='notebook:create-output-view']");
    const box = item?.getBoundingClientRect();
    if (box?.height) {
      const over = { ...mouse, clientX: box.left + 4, clientY: box.top + 4 };
      for (const kind of ["move", "up"]) {
        item.dispatchEvent(new PointerEvent(`pointer${kind}`, over)); // of Lumino 2
        item.dispatchEvent(new MouseEvent(`mouse${kind}`, over));
      }
      return;
    }
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

/** Copies the code beside a button of a form. A page without a secure origin has no clipboard but its selection. */
function copyBeside(button) {
  const code = button.nextElementSibling;
  const words = (button.dataset.words ??= button.textContent);
  const range = document.createRange();
  range.selectNodeContents(code);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
  if (document.execCommand("copy")) button.textContent = "Copied";
  setTimeout(() => (button.textContent = words), COPIED_MS);
}

/** Which step a card shows: one before, one after, a number, held or not. `ask(step, by)` tells the kernel. */
class PinBar {
  constructor(title, ask) {
    this.root = element("span", "fsdp-pin");
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", `${title}: which step`);
    this.root.dataset.lmSuppressShortcuts = "true"; // what is typed here is not for the notebook
    this.root.hidden = true;
    this.before = this.button("‹", "The traced step before this one", () => ask(null, -1));
    this.after = this.button("›", "The traced step after this one", () => ask(null, 1));
    this.hold = this.button("Pin", "", () => ask(this.held ? null : this.step, 0));
    this.hold.classList.add("fsdp-hold");
    this.number = element("input");
    this.number.type = "number";
    this.number.setAttribute("aria-label", "step");
    this.number.addEventListener("change", () => {
      const step = Number.parseInt(this.number.value, 10);
      if (Number.isFinite(step)) ask(step, 0);
      else this.number.value = String(this.step);
    });
    this.number.addEventListener("keydown", (event) => event.key === "Enter" && this.number.blur());
    this.root.append(element("span", "", "step"), this.before, this.number, this.after, this.hold);
  }

  button(text, title, press) {
    const button = element("button", "", text);
    button.type = "button";
    button.title = title;
    if (title) button.setAttribute("aria-label", title);
    button.addEventListener("click", press);
    return button;
  }

  show({ step, held, oldest, newest, kept }) {
    Object.assign(this, { step, held });
    this.root.hidden = false;
    this.root.classList.toggle("fsdp-held", held);
    if (document.activeElement !== this.number) this.number.value = String(step);
    this.number.title = `${kept.toLocaleString("en")} traced steps are kept, from ${oldest} to ${newest}`;
    this.before.disabled = step <= oldest;
    this.after.disabled = step >= newest;
    this.hold.textContent = held ? "Unpin" : "Pin";
    this.hold.title = held ? "Show the newest step again" : "Hold this step while training goes on";
    this.hold.setAttribute("aria-pressed", String(held));
  }
}

// -- what part of the steps plots show -------------------------------------------------------------------------------

const HOW_TO_ZOOM = "Drag a plot to pan, Shift + wheel to zoom, double click to reset.";
const FEWEST_CUT = 20; // as in axis.py, with the next
const BEYOND = 1.5;
const MOST_HOLLOW = 400; // steps on the axis; of more, hollow points would cover the lines
const BAR_LABEL_PX = 62;
const FULLEST_BAR = 1 / 1.5; // of the kernel's range
const CHOICES = { // name -> label, options by their words; the first is chosen at the beginning
  last: ["steps", [["all", 0], ["last 200", 200], ["last 50", 50]]],
  smooth: ["smoothing", [["off", 0], ["10", 10], ["50", 50]]],
  log: ["loss axis", [["linear", 0], ["log", 1]]],
};

/** A row of switches for all plots over steps, and below it the numbered changes that the plots mark. */
function viewBar(chosen, changed) {
  const root = element("div", "fsdp-viewbar");
  for (const [name, [label, options]] of Object.entries(CHOICES)) {
    const group = element("span", "fsdp-choice");
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", label);
    const buttons = options.map(([words, value]) => {
      const button = element("button", "", words);
      button.type = "button";
      button.addEventListener("click", () => ((chosen[name] = value), show(), changed()));
      return [button, value];
    });
    const show = () => buttons.forEach(([b, value]) => b.setAttribute("aria-pressed", String(value === (chosen[name] ?? 0))));
    show();
    group.append(element("span", "", label), ...buttons.map(([button]) => button));
    root.append(group);
  }
  const changes = element("span", "fsdp-changes");
  root.title = HOW_TO_ZOOM;
  root.append(changes);
  return { root, changes };
}

/** Values without those far above the others, as `calm` of axis.py: what a y range is to hold. */
function calm(values) {
  if (values.length < FEWEST_CUT) return values;
  const sorted = Float64Array.from(values).sort();
  const most = sorted[Math.floor(0.99 * (sorted.length - 1))];
  const end = Math.max(sorted[0] + BEYOND * (most - sorted[0]), Math.min(...values.slice(-3)));
  return values.filter((value) => value <= end);
}

/** A range of round numbers around values; the former one where it still fits well, so that plots do not jump. */
function rangeAround(values, before, { zero, log }) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const fits = before && before.log === log && before.end >= high && (zero || before.start <= low);
  if (fits && (log || high - (zero ? 0 : low) > 0.45 * (before.end - before.start))) return before;
  if (log) return { start: low / 1.1, end: high * 1.1, log };
  const span = zero ? high : Math.max(high - low, 0.02 * Math.abs(high), 1e-9);
  const step = 10 ** Math.floor(Math.log10(span)) / 5;
  const start = zero ? 0 : Math.floor((low - 0.1 * span) / step) * step;
  return { start: low >= 0 ? Math.max(0, start) : start, end: Math.ceil((high + 0.1 * span) / step) * step, log };
}

/** The mean of the last `length` values at each step, begun again at each change. */
function smoothed(steps, values, length, changes) {
  let first = 0;
  let sum = 0;
  return steps.map((step, i) => {
    if (i && changes.some((change) => steps[i - 1] < change && change <= step)) (first = i), (sum = 0);
    sum += Number.isFinite(values[i]) ? values[i] : NaN;
    if (i - first >= length) sum -= values[first++];
    if (Number.isNaN(sum)) (first = i + 1), (sum = 0);
    return first > i ? NaN : sum / (i - first + 1);
  });
}

// -- one mounted view ----------------------------------------------------------------------------------------------

class View {
  /** `reader`: where the reader of this widget has moved the ranges of a scene; later views of it begin there. */
  constructor(model, el, reader) {
    this.model = model;
    this.el = el;
    this.reader = reader;
    this.id = Math.random().toString(36).slice(2);
    this.root = element("div", "fsdp-live");
    this.banner = element("div", "fsdp-banner");
    this.banner.setAttribute("role", "status");
    this.banner.hidden = true;
    this.body = element("div", "fsdp-body");
    this.root.append(this.banner, this.body);
    el.append(this.root);
    this.gone = false;
    this.step = 0; // the newest
    this.text = false;
    this.doc = null;
    this.drawAgainMs = DRAW_AGAIN_MS;
    this.resetPending();
    this.listen();
    this.start().catch((error) => this.fail(error));
  }

  listen() {
    this.onMessage = (message, buffers) => this.receive(message, buffers);
    this.onTheme = new MutationObserver(() => this.repaint());
    this.onTheme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
    this.model.on("msg:custom", this.onMessage);
    this.onDeath = () => this.say(GONE); // a message that comes all the same takes it back
    for (const event of DEATHS) this.model.on(event, this.onDeath);
    this.heard = Date.now();
    this.pinging = setInterval(() => this.checkPulse(), PING_EVERY_MS);
  }

  async start() {
    this.Bokeh = await loadBokeh(this.model);
    await this.drawFirst();
    if (!this.mounting && !this.root.dataset.ready) this.mount(); // else another scene came meanwhile
  }

  /** Bokeh draws only what is in the page, and JupyterLab takes outputs out of it while it restores or moves them. */
  async connected() {
    while (!this.gone && !this.root.isConnected) await new Promise((resolve) => setTimeout(resolve, 20));
  }

  /** What came with the widget itself: a kernel that is busy with the next cell answers later. */
  async drawFirst() {
    const first = this.model.get("first");
    if (!first?.layout || !isWhole(first, asBytes(first.numbers))) return;
    await this.draw(first, asBytes(first.numbers));
    this.root.dataset.first = String(first.scene);
  }

  mount() {
    this.mounting = true;
    this.resetPending();
    this.tell("mount", this.text ? { text: true } : {});
  }

  receive(message, buffers) {
    if (this.gone || (message.view && message.view !== this.id)) return;
    this.heard = Date.now();
    if (this.doc) this.banner.hidden = true;
    if (message.kind === "remount" && this.Bokeh) this.mount();
    if (message.kind !== "snapshot" && !(message.kind === "tick" && this.Bokeh)) return; // a snapshot brings earlier ticks
    const bytes = payload(message, buffers);
    if (!isWhole(message, bytes)) this.askForText();
    else if (message.kind === "tick") this.take(message, bytes);
    else this.draw(message, bytes);
  }

  /** This page does not pass on buffers: from now on all is to come as text, which is a third longer. */
  askForText() {
    if (this.text) return this.fail(new Error("this page passes on neither buffers nor text"));
    this.text = true;
    this.mount();
  }

  // A snapshot: all there is of a scene. Pictures that show this scene already are kept and filled anew.

  /** One at a time, since Bokeh builds over several turns of the event loop; the newest of those that come meanwhile. */
  draw(message, bytes) {
    this.next = [message, bytes];
    this.drawing ??= this.drawNext();
    return this.drawing;
  }

  async drawNext() {
    while (this.next && !this.gone) {
      const [message, bytes] = this.next;
      this.next = null;
      await this.drawWhole(message, bytes).catch((error) => this.drawAgain(error));
    }
    this.drawing = null;
  }

  /** The output may have been moved meanwhile. */
  drawAgain(error) {
    this.forgetDocument();
    this.fail(error);
    setTimeout(() => this.gone || this.doc || this.mount(), this.drawAgainMs);
    this.drawAgainMs *= 2;
  }

  async drawWhole(message, bytes) {
    this.seq = message.seq;
    await this.connected();
    if (this.gone) return;
    if (!this.doc || this.scene !== message.scene) await this.build(message);
    if (this.gone) return;
    this.seq = message.seq; // a tick that came meanwhile may have been given up
    this.banner.hidden = true;
    this.sources.at.clear();
    for (const card of this.cardOf.values()) card.waiting.clear();
    for (const table of readTables(message.tables, bytes)) this.note(table), this.sources.write(table);
    this.patch(message.patches);
    this.caption(message.captions);
    this.fit();
    this.root.dataset.scene = String(message.scene);
    if (!message.view || this.next) return; // what comes next has those ticks
    this.mounting = false;
    this.pump(); // ticks that came while Bokeh was building
    if (!this.mounting) this.root.dataset.ready = String(message.seq);
  }

  async build({ layout, scene }) {
    this.forgetDocument();
    this.body.replaceChildren();
    const plots = this.buildCards(layout);
    const docid = "document";
    const roots = Object.fromEntries(Object.entries(layout.roots).map(([card, id]) => [id, plots.get(card)]));
    const item = { docid, root_ids: Object.keys(roots), roots };
    const [views] = await this.Bokeh.embed.embed_items({ [docid]: JSON.parse(layout.document) }, [item]);
    if (this.gone) return;
    this.bokehViews = views;
    this.doc = this.Bokeh.documents.find((doc) => doc.views_manager === views); // another view may build meanwhile
    this.scene = scene;
    this.byName = new Map([...this.doc.all_models].filter((m) => m.name).map((m) => [m.name, m]));
    this.figures = new Map([...this.doc.all_models].filter((m) => m.type === "Figure").map((m) => [m.name, m]));
    lighten(this.doc, [...this.figures.values()].map((figure) => views.find_one(figure)));
    this.keepRanges();
    this.sources = new Sources(this.doc);
    this.finder?.attach(this.figures.get("timeline"));
    this.choose();
    this.repaint();
  }

  buildCards(layout) {
    const headline = element("div", "fsdp-headline");
    const ranks = element("div", "fsdp-ranks");
    const top = (this.top = element("div", "fsdp-top"));
    top.append(headline, ranks);
    for (const rank of layout.ranks) ranks.append(legendEntry(rank));
    if (layout.rank_count && !layout.ranks.length) ranks.append(element("span", "", `${layout.rank_count} ranks, drawn as mean and band`));
    const caution = element("p", "fsdp-note fsdp-caution");
    const grid = element("div", layout.tabs.length ? "fsdp-grid fsdp-overview" : "fsdp-grid");
    const below = element("div", "fsdp-grid fsdp-below");
    this.words = new Map([["", { reading: headline, note: caution }]]);
    this.finder = null; // of the timeline, if there is one
    const cards = new Map();
    this.bar = viewBar(this.reader.chosen, () => (this.choose(), this.fit()));
    this.cardOf = new Map(); // source -> its card
    const plots = new Map();
    for (const card of layout.cards) {
      const section = element("section", `fsdp-card fsdp-card-${card.name}${card.wide ? " fsdp-wide" : ""}`);
      section.dataset.card = card.name;
      section.dataset.tab = card.tab;
      const head = element("header");
      const reading = element("span", "fsdp-reading");
      const pin = new PinBar(card.title, (step, by) => this.tell("pin", { card: card.name, step, by }));
      const info = element("span", "fsdp-info", "i");
      info.tabIndex = 0;
      info.setAttribute("role", "note");
      head.append(element("h3", "", card.title), reading, info, pin.root);
      const legend = element("div", "fsdp-legend");
      const plot = element("div", "fsdp-plot");
      plot.addEventListener("dblclick", () => this.followAgain());
      if (card.name in layout.roots) {
        plot.setAttribute("role", "img");
        head.append(this.tools(card, layout.roots[card.name]));
      }
      const note = element("p", "fsdp-note");
      section.append(head, legend, plot, note);
      if (card.sources.includes("timeline.spans")) {
        this.finder = new SpanFinder(this.reader.chosen);
        head.after(this.finder.root);
      }
      section.setAttribute("aria-label", card.title);
      (layout.tabs.length && card.tab ? below : grid).append(section);
      plots.set(card.name, plot);
      const shown = { section, seen: true, held: false, waiting: new Map(), said: {} };
      // Not when a pointer that rests is over it, as when its tab is opened.
      plot.addEventListener("pointermove", () => (shown.held ||= !pin.root.hidden && !shown.waiting.size));
      plot.addEventListener("pointerleave", () => this.release(shown));
      for (const event of ["click", "change"]) pin.root.addEventListener(event, () => this.release(shown));
      cards.set(card.name, shown);
      for (const source of card.sources) this.cardOf.set(source, shown);
      this.words.set(card.name, { section, title: card.title, reading, legend, note, info, plot, pin, shown });
    }
    const under = element("div", "fsdp-under");
    under.append(caution, ...(this.cardOf.has("loss.steps") ? [this.bar.root] : []));
    if (layout.tabs.length) {
      const tabs = new Tabs(layout, below, this.root.closest(".fsdp-lab") ?? this.root);
      if (canOpenOwnTab(this.root)) tabs.addButton("Own tab", OWN_TAB, () => openOwnTab(this.root));
      this.body.append(top, grid, under, tabs.root, below);
    } else {
      this.body.append(top, under, grid);
    }
    this.placeTop();
    this.watchCards(cards);
    return plots;
  }

  /** The first line stands in the bar of the controls, which stays on the screen, where there is one. */
  placeTop() {
    const place = this.root.closest(".fsdp-lab")?.querySelector(".fsdp-headline-place .widget-html-content");
    if (place && this.top && this.root.querySelector(".fsdp-below") && this.top.parentNode !== place) place.replaceChildren(this.top);
  }

  /** The small buttons of a card with plots: nothing of them asks the kernel. */
  tools({ name, title, sources }, root) {
    const keys = () => [...this.words.get(name).legend.children].map((entry) => ({
      label: entry.textContent, fill: getComputedStyle(entry.firstChild).getPropertyValue("--fsdp-fill"),
    }));
    const picture = (type) => async () => {
      const plots = [...this.bokehViews].find((view) => view.model.id === root);
      const { reading } = this.words.get(name);
      save(await pictureOf(plots, type, { title, reading: reading.textContent, keys: keys() }, this.theme), `${name}.${type}`);
    };
    const table = () => {
      const shared = sources.some((source) => source.endsWith(".steps")) ? ["frame.markers"] : [];
      const wanted = [...sources, ...shared].map((source) => this.sources.sources.get(source)).filter(Boolean);
      save(new Blob([csvOf(wanted, [...this.figures.values()])], { type: "text/csv" }), `${name}.csv`);
    };
    return smallButtons("fsdp-tools", [
      ["↺", `Reset the zoom of all plots. ${HOW_TO_ZOOM}`, () => this.followAgain()],
      ["PNG", `Save ${title} as a PNG picture`, picture("png")],
      ["SVG", `Save ${title} as an SVG picture`, picture("svg")],
      ["CSV", `Save the rows of ${title} as CSV`, table],
    ]);
  }

  /** A card of one step keeps its step while it is pointed at; then it shows what has come meanwhile. */
  release(card) {
    if (!card.held) return;
    card.held = false;
    if (!this.doc) return;
    this.catchUp(card);
    const { captions = {}, patches = {} } = card.said;
    card.said = {};
    this.patch(patches);
    this.caption(captions);
  }

  // Plots over steps: the reader's choices.

  choose() {
    const { smooth = 0, log = 0 } = this.reader.chosen;
    for (const [name, m] of this.byName) {
      if (name.endsWith(".smoothed")) m.visible = smooth > 0;
      if (name.endsWith(".plain")) m.glyph.line_alpha = { value: smooth ? 0.3 : 1 };
    }
    for (const [name, at] of this.words) if (at.keys) this.showLegend(name, at);
    const loss = this.figures.get("loss");
    if (!loss || (loss.y_scale.type === "LogScale") === Boolean(log)) return;
    const made = (type) => new (this.Bokeh.Models.get(type))();
    const [axis] = loss.left;
    if (log) this.linearTicker = axis.ticker;
    if (log) this.followAgain("loss.y", { start: 1e-3, end: 10 }); // until it is fitted: a logarithm has no zero
    loss.y_scale = made(log ? "LogScale" : "LinearScale");
    axis.ticker = log ? made("LogTicker") : this.linearTicker;
  }

  /** The legend of a card; where its curve is smoothed, the line has another meaning. */
  showLegend(name, { legend, keys }) {
    const smooth = this.byName.has(`${name}.smooth`) && this.reader.chosen.smooth;
    const label = (key) => (smooth && key.token === "ink.mean" ? `mean of the last ${smooth}` : key.label);
    legend.replaceChildren(...keys.map((key) => legendEntry({ ...key, label: label(key) })));
    this.tintSwatches(legend);
  }

  /** Fits what the kernel's ranges do not know: the steps and the axis that the reader chose; smooths, and marks what is cut. */
  fit() {
    const axis = this.ranges?.get("frame.x");
    if (!axis) return;
    const { last = 0, smooth = 0, log = 0 } = this.reader.chosen;
    const told = axis.told ?? axis.wanted;
    const tenth = last / 10;
    const end = last ? Math.max(last, Math.ceil((this.step + 1) / tenth) * tenth) : told.end;
    const steps = last ? { start: end - last, end } : told;
    this.place("frame.x", steps);
    for (const [name, { told: bars }] of this.ranges) if (bars && name.endsWith(".now.x")) this.makeRoom(name, bars);
    const column = (source, name) => this.byName.get(source)?.data[name] ?? [];
    const changes = [...column("frame.markers", "step")];
    for (const [name, m] of this.byName) {
      const tag = m.tags[0];
      if (tag?.smooth && smooth) {
        const at = [...column(tag.smooth.source, "step")];
        m.data = { step: at, value: smoothed(at, column(tag.smooth.source, tag.smooth.column), smooth, changes) };
      }
      if (name.endsWith(".slowed")) m.visible = steps.end - steps.start <= MOST_HOLLOW;
      if (tag?.fit) this.fitPlot(name, tag.fit, steps, column, { last, log: Boolean(log) && name === "loss.y" });
    }
  }

  /** Bars end where their label still has room, however narrow the card is. */
  makeRoom(name, told) {
    const width = this.figures.get(name.slice(0, -2))?.inner_width ?? 0;
    const share = width ? 1 - Math.min(0.6, BAR_LABEL_PX / width) : 1; // of the width, for bars
    this.place(name, { ...told, end: told.end * Math.max(1, FULLEST_BAR / share) });
  }

  fitPlot(name, { source, columns, others, zero, scaled }, steps, column, { last, log }) {
    const known = this.ranges.get(name);
    const told = known.told ?? known.wanted;
    const within = (table, values) => {
      const at = column(table, "step");
      return [...values].map((value, i) => [at[i], value]).filter(([step, value]) => step >= steps.start && step <= steps.end && Number.isFinite(value) && (!log || value > 0));
    };
    const own = columns.map((c) => within(source, column(source, c)));
    let wanted = told;
    if (last || log) {
      const scale = scaled ? told.end / (this.ranges.get(scaled).told ?? { end: 1 }).end : 1;
      const beside = Object.keys(this.model.get("tokens").light).filter((token) => token.startsWith("pin."))
        .map((token) => token.replace("pin", "overlay")).flatMap((table) => within(table, column(table, others)).map(([, v]) => v * scale));
      const values = [...own.flatMap((part) => calm(part.map(([, value]) => value))), ...beside];
      if (values.length) wanted = known.fitted = rangeAround(values, known.fitted, { zero, log });
      else if (log) wanted = { start: 1e-3, end: 10 };
      if (scaled) this.place(scaled, { start: wanted.start / scale, end: wanted.end / scale });
    } else {
      delete known.fitted;
      if (scaled && this.ranges.get(scaled).told) this.place(scaled, this.ranges.get(scaled).told);
    }
    this.place(name, { start: wanted.start, end: wanted.end });
    const cut = own.flat().filter(([, value]) => value > wanted.end);
    const marks = this.byName.get(name.replace(/\.y$/, ".cut"));
    if (!marks || String(cut) === marks.tags[0]) return;
    marks.tags = [String(cut)];
    marks.data = { step: cut.map(([step]) => step), value: cut.map(([, value]) => value) };
  }

  /** The numbered changes in words, the newest last. */
  listChanges({ step, label, detail }) {
    const entries = Array.from(step, (_, i) => {
      const entry = element("span", "fsdp-change");
      entry.title = detail[i];
      entry.append(element("b", "", String(i + 1)), ` ${label[i]}`);
      return entry;
    });
    this.bar.changes.replaceChildren(...entries.slice(-8));
  }

  // A tick: what is new.

  resetPending() {
    this.pending = { tables: new Map(), patches: {}, captions: {}, seq: null };
    this.lost = false;
  }

  take(message, bytes) {
    const p = this.pending;
    const last = p.seq ?? this.seq;
    if (!this.mounting && message.seq !== last + 1) return void this.mount(); // something was lost on the way
    for (const table of readTables(message.tables, bytes)) {
      const merged = mergeTables(p.tables.get(table.name), table);
      if (!merged) return void this.mount();
      p.tables.set(table.name, merged);
    }
    for (const part of ["patches", "captions"]) {
      for (const [name, values] of Object.entries(message[part])) p[part][name] = { ...p[part][name], ...values };
    }
    p.seq = message.seq;
    this.pump();
  }

  pump() {
    if (this.painting || this.mounting || this.gone || this.pending.seq === null) return;
    const news = this.pending;
    this.resetPending();
    this.seq = Math.max(this.seq, news.seq);
    const whole = this.attempt(() => {
      const isWhole = this.write(news.tables.values());
      this.patch(news.patches);
      this.caption(news.captions);
      this.fit();
      return isWhole;
    });
    if (whole === null) return;
    this.painting = true;
    // Bokeh paints in the next frame; in the one after it, that frame is on the screen.
    nextFrame(() => nextFrame(() => {
      this.painting = false;
      if (this.gone) return;
      this.drawAgainMs = DRAW_AGAIN_MS;
      this.root.dataset.painted = String(news.seq);
      this.tell("ack", { seq: news.seq, text: this.text });
      if (whole) this.pump();
      else this.mount();
    }));
  }

  /** What `write` returns; null where it throws: then all is drawn anew, and ticks wait for the snapshot. */
  attempt(write) {
    try {
      return write();
    } catch (error) {
      this.mounting = true;
      this.drawAgain(error);
      return null;
    }
  }

  // Plots that are scrolled out of sight cost as much to paint as others: their rows wait until they are seen.

  write(tables) {
    let whole = true;
    for (const table of tables) {
      this.note(table);
      const card = this.cardOf.get(table.name);
      if (!card || (card.seen && !card.held)) {
        whole = this.sources.write(table) && whole;
        continue;
      }
      const merged = mergeTables(card.waiting.get(table.name), table);
      if (merged) card.waiting.set(table.name, merged);
      else whole = false;
    }
    return whole;
  }

  /** The newest step, also of plots out of sight; and the changes that are marked. */
  note({ name, rows, data }) {
    if (name.endsWith(".steps") && rows) this.step = data.step[rows - 1];
    if (name === "frame.markers") this.listChanges(data);
  }

  /** Writes the rows that have waited. */
  catchUp(card) {
    const waiting = [...card.waiting.values()];
    card.waiting.clear();
    if (this.attempt(() => this.write(waiting)) === false) this.mount();
    this.fit();
    this.find();
  }

  watchCards(cards) {
    this.onSight?.disconnect();
    this.onSight = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const card = cards.get(target.dataset.card);
        card.seen = isIntersecting;
        if (card.seen && this.doc) this.catchUp(card);
      }
    }, { rootMargin: "80px" });
    for (const { section } of cards.values()) this.onSight.observe(section);
  }

  patch(patches) {
    for (const [name, values] of Object.entries(patches)) {
      const m = this.byName.get(name);
      if (!m) continue;
      const { shown } = this.words.get(name.split(".")[0]) ?? {};
      if (shown?.held) {
        (shown.said.patches ??= {})[name] = { ...shown.said.patches[name], ...values };
        continue;
      }
      if (m.type === "Range1d") this.setRange(name, m, values);
      else m.setv(Object.fromEntries(Object.entries(values).map(([property, value]) => [property, revived(value)])));
    }
  }

  // A range that the reader has moved stays where it is until a double click.
  setRange(name, range, values) {
    const before = this.ranges.get(name);
    const told = { ...(before?.told ?? before?.wanted), ...values };
    this.ranges.set(name, { ...before, range, told });
    if (!range.tags.length && name !== "frame.x" && !name.endsWith(".now.x")) this.place(name, told); // else `fit` does
  }

  place(name, wanted) {
    const known = this.ranges.get(name);
    const { range, set } = known;
    const moved = set && isMoved(known);
    if (!moved && (range.start !== wanted.start || range.end !== wanted.end)) range.setv(wanted);
    Object.assign(known, { wanted, set: moved ? set : wanted });
  }

  // JupyterLab may draw an output again when it moves it or the window changes, in a new view.
  keepRanges() {
    const before = this.reader.scene === this.scene ? this.reader.ranges : new Map();
    const drawn = [...this.byName].filter(([, m]) => m.type === "Range1d").map(([name, range]) => [name, range, extent(range)]);
    this.ranges = new Map(drawn.map(([name, range, set]) => [name, { range, wanted: set, set }]));
    for (const [name, { range, wanted, set }] of [...before].filter(([, known]) => isMoved(known))) {
      const again = this.byName.get(name);
      again.setv(extent(range));
      this.ranges.set(name, { range: again, wanted, set });
    }
    Object.assign(this.reader, { scene: this.scene, ranges: this.ranges });
  }

  followAgain(only, wanted) {
    for (const [name, known] of this.ranges) {
      if (only && only !== name) continue;
      known.set = wanted ?? known.wanted;
      known.range.setv(known.set);
    }
  }

  caption(captions) {
    this.placeTop();
    for (const [name, words] of Object.entries(captions)) {
      const at = this.words.get(name);
      if (!at) continue;
      if (at.shown?.held) {
        (at.shown.said.captions ??= {})[name] = { ...at.shown.said.captions[name], ...words };
        continue;
      }
      if ("reading" in words) {
        write(at.reading, (at.reading.title = words.reading));
        if (at.title) at.plot.setAttribute("aria-label", `${at.title}: ${words.reading}`);
      }
      if ("note" in words) {
        write(at.note, words.note);
        if (at.info) at.info.ariaLabel = words.note, at.info.hidden = !words.note;
      }
      if (words.pin) at.pin.show(words.pin);
      if ("hidden" in words) at.section.hidden = words.hidden;
      if ("sortable" in words) at.sortable = words.sortable;
      if (words.table?.length) {
        at.table ??= new FigureTable((word, about) => this.tell("press", { card: name, word, about }));
        if (!at.table.root.isConnected) at.plot.replaceChildren(at.table.root);
        at.table.show(words.table, at.sortable);
        this.tintSwatches(at.plot);
      }
      if ("legend" in words) {
        at.keys = words.legend;
        this.showLegend(name, at);
      }
    }
    this.find();
  }

  /** The search in the timeline, of the step that is drawn now. */
  find() {
    this.finder?.update(this.words.get("timeline").pin.step);
  }

  // Theme.

  repaint() {
    const theme = (this.theme = currentTheme(this.model));
    for (const themed of [this.root, this.root.closest(".fsdp-lab")]) themed?.classList.toggle("fsdp-dark", theme.dark);
    this.tintSwatches(this.root);
    if (this.doc) paintModels(this.doc, theme);
  }

  tintSwatches(within) {
    const theme = (this.theme ??= currentTheme(this.model));
    for (const swatch of within.querySelectorAll("[data-token]")) {
      swatch.style.setProperty("--fsdp-fill", theme.tokens[swatch.dataset.token]);
    }
  }

  // Whether somebody is there.

  checkPulse() {
    const silent = Date.now() - this.heard;
    if (silent > SILENT_AFTER_MS) this.say(SILENT);
    if (silent > PING_EVERY_MS / 2) this.tell("ping");
  }

  tell(kind, more = {}) {
    try {
      this.model.send({ kind, view: this.id, ...more });
    } catch {
      this.say(GONE); // the comm died with its kernel
    }
  }

  say(text) {
    this.banner.textContent = text;
    this.banner.hidden = false;
  }

  fail(error) {
    if (this.gone) return;
    this.say(`The plots could not be drawn: ${error.message}`);
    console.error("fsdp_lab live view", error);
  }

  forgetDocument() {
    const doc = this.doc;
    if (!doc) return;
    this.doc = null;
    const index = this.Bokeh.documents.indexOf(doc);
    if (index >= 0) this.Bokeh.documents.splice(index, 1);
    try {
      this.bokehViews?.clear?.();
      doc.clear();
    } catch (error) {
      console.error("fsdp_lab live view", error); // what could not be drawn may not be cleared either
    }
  }

  remove() {
    this.gone = true;
    clearInterval(this.pinging);
    this.onTheme.disconnect();
    this.onSight?.disconnect();
    this.model.off("msg:custom", this.onMessage);
    for (const event of DEATHS) this.model.off(event, this.onDeath);
    this.tell("leave");
    this.forgetDocument();
    this.root.remove();
  }
}

/** In the next frame, or a second later where no frames are painted. */
function nextFrame(run) {
  let done = false;
  const once = () => done || ((done = true), run());
  requestAnimationFrame(once);
  setTimeout(once, HIDDEN_FRAME_MS);
}

function extent({ start, end }) {
  return { start, end };
}

/** Whether somebody else has set a range since this view did. */
function isMoved({ range, set }) {
  return range.start !== set.start || range.end !== set.end;
}

/** Called once for each widget, whose views share what their reader has done and chosen. */
export default function widget() {
  const reader = { scene: null, ranges: new Map(), chosen: {} };
  return {
    render({ model, el }) {
      const view = new View(model, el, reader);
      return () => view.remove();
    },
  };
}
