// The search in a timeline, for live.js and for the pages of reports, which put this before their own code.

const PLACE = ["left", "right", "top", "bottom"];

/** A field whose words are looked for in the spans of a timeline: spans that have all of them are outlined, a veil is over the
    others, and `sum` says how long those found are together. `chosen.find` keeps the words for the next timeline. */
class SpanFinder {
  constructor(chosen = {}) {
    this.chosen = chosen;
    this.root = Object.assign(document.createElement("div"), { className: "fsdp-find" });
    this.root.dataset.lmSuppressShortcuts = "true"; // what is typed here is not for the notebook
    this.field = this.root.appendChild(document.createElement("input"));
    this.sum = this.root.appendChild(document.createElement("span"));
    Object.assign(this.field, { type: "search", placeholder: "Find spans", ariaLabel: "Find spans", spellcheck: false });
    this.field.title = "Finds the spans that have all words typed, such as: all-gather h.3, or: waits rank 1. Escape clears.";
    this.field.value = chosen.find ?? "";
    this.field.addEventListener("input", () => this.update(this.step));
    this.field.addEventListener("keydown", (event) => event.key === "Escape" && this.clear()); // not all browsers do so
  }

  attach(figure) {
    const source = (name) => figure.renderers.map((renderer) => renderer.data_source).find((s) => s.name === `timeline.${name}`);
    Object.assign(this, { spans: source("spans"), veiled: source("veiled"), found: source("found") });
  }

  clear() {
    this.field.value = "";
    this.update(this.step);
  }

  /** Searches where the words or the spans are others than at the last call. `step`: the one drawn, if it is to be said. */
  update(step) {
    this.step = step;
    const asked = this.field.value.trim().toLowerCase().replace(/\s+/g, " ");
    this.chosen.find = this.field.value;
    if (!this.spans || (asked === (this.asked ?? "") && (!asked || this.searched === this.spans.data))) return;
    Object.assign(this, { asked, searched: this.spans.data });
    const tests = matchers(asked);
    const { what, unit, more, rank } = this.searched;
    const told = (i) => `${what[i]} ${unit[i]} ${more[i]} rank ${rank[i]}`.toLowerCase();
    const rows = asked ? Array.from(rank, (_, i) => i) : [];
    const hits = rows.filter((i) => tests.every((test) => test.test(told(i))));
    const kept = new Set(hits);
    this.mark(this.veiled, rows.filter((i) => !kept.has(i)));
    this.mark(this.found, hits);
    this.field.ariaDescription = this.sum.textContent = asked && this.summary(hits, rows.length);
  }

  mark(source, rows) {
    source.data = Object.fromEntries(PLACE.map((name) => [name, Float64Array.from(rows, (i) => this.searched[name][i])]));
  }

  summary(hits, all) {
    const { rank, ms } = this.searched;
    const text = (value) => value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
    const byRank = new Map();
    for (const i of hits) byRank.set(rank[i], (byRank.get(rank[i]) ?? 0) + ms[i]);
    const parts = [...byRank].sort(([a], [b]) => a - b).map(([r, value]) => `rank ${r} ${text(value)}`);
    const together = hits.length ? `, ${text(hits.reduce((sum, i) => sum + ms[i], 0))} ms together: ${parts.join(", ")} ms` : "";
    const where = this.step === undefined ? "" : `step ${this.step.toLocaleString("en")}: `;
    return `${where}${hits.length.toLocaleString("en")} of ${all.toLocaleString("en")} spans${together}`;
  }
}

/** A test for each word of a search; "rank 1" is one word, and a number at the end is whole: "h.3" is not "h.30". */
function matchers(asked) {
  const words = asked.match(/rank \d+|\S+/g) ?? [];
  return words.map((word) => new RegExp(word.replace(/[^\w\s]/g, "\\$&") + (/\d$/.test(word) ? "(?!\\d)" : "")));
}
