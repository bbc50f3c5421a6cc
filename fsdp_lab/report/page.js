// Draws the report's plots with the BokehJS above, in the colours that the reader prefers, and again when that changes.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const theme = read("fsdp-lab-theme");
const plots = read("fsdp-lab-plots");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const onPaper = matchMedia("print");

/** A visual of a glyph is a spec that may come from a column; one of an axis is a plain value. */
function set(model, property, value) {
  const now = model[property];
  model.setv({ [property]: typeof now === "object" && now !== null ? { value } : value });
}

/** What pictures are painted in now. */
function look() {
  const dark = prefersDark.matches && !onPaper.matches;
  const styleOf = (selector) => getComputedStyle(document.querySelector(selector));
  const tokens = { ...theme[dark ? "dark" : "light"], "ink.gap": styleOf(".card").backgroundColor };
  return { dark, tokens, soft: styleOf(".soft").color, text: styleOf(".card").color, font: styleOf("body").fontFamily };
}

function paint() {
  const { dark, tokens, soft, font } = look();
  for (const model of window.Bokeh.documents.flatMap((d) => [...d.all_models])) {
    if ("major_label_text_color" in model) {
      model.setv({ major_label_text_color: soft, axis_label_text_color: soft, major_label_text_font: font, axis_label_text_font: font });
    } else if ("grid_line_color" in model) {
      model.setv({ grid_line_color: dark ? "rgba(255,255,255,0.13)" : "rgba(0,0,0,0.09)" });
    }
    if ("text_font" in model) set(model, "text_font", font);
    for (const tag of model.tags) {
      for (const [property, token] of Object.entries(tag?.tint ?? {})) set(model, property, tokens[token]);
    }
  }
  for (const swatch of document.querySelectorAll("[data-token]")) swatch.style.setProperty("--fill", tokens[swatch.dataset.token]);
  document.documentElement.dataset.painted = dark ? "dark" : "light";
}

/** The small buttons of a picture. They make their files here, without the network. */
function addTools(figure, views) {
  const plot = figure.querySelector(".plot"), name = plot.id.slice("plot-".length);
  const [title, reading] = ["h3", "header .soft"].map((selector) => figure.querySelector(selector)?.textContent ?? "");
  const view = views.find(({ model }) => model.id === plots.roots[name]);
  const keys = () => [...figure.querySelectorAll(".key")].map((key) => ({
    label: key.textContent, fill: getComputedStyle(key.firstChild).getPropertyValue("--fill"),
  }));
  const picture = (type) => () => pictureOf(view, type, { title, reading, keys: keys() }, look());
  const drawn = () => view.model.renderers.filter(({ level }) => level === "glyph"); // without what a search marks
  const rows = () => {
    const sources = view ? [...new Set(drawn().map((r) => r.data_source))] : [rowsOfBars(plot, `${title} ${reading}`.trim())];
    return new Blob([csvOf(sources, view ? [view.model] : [])], { type: "text/csv" });
  };
  const kinds = view ? { PNG: picture("png"), SVG: picture("svg"), CSV: rows } : { PNG: () => pictureOfBars(figure), CSV: rows };
  const saving = (kind, make) => async () => save(await make(), `${name}.${kind.toLowerCase()}`);
  const buttons = Object.entries(kinds).map(([kind, make]) => [kind, `Save ${title} as ${kind}`, saving(kind, make)]);
  const header = figure.querySelector("header");
  if (name.startsWith("timeline")) addFinder(header, view.model);
  header.append(smallButtons("tools", buttons));
}

function addFinder(header, timeline) {
  const finder = new SpanFinder();
  finder.attach(timeline);
  header.after(finder.root);
}

/** The numbers of bars, as `csvOf` reads a source of Bokeh's. */
function rowsOfBars(plot, name) {
  const parts = [...plot.querySelectorAll("[data-value]")];
  const run = parts.map((part) => part.closest(".track").previousElementSibling.textContent.replace(/\s+/g, " "));
  const data = { run, part: parts.map(({ title }) => title), [plot.dataset.unit]: parts.map(({ dataset }) => Number(dataset.value)) };
  return { name, data, get_length: () => parts.length };
}

/** Bars are elements of this page, and a picture of them is their figure, drawn in an SVG with the page's styles. */
async function pictureOfBars(figure) {
  const { width, height } = figure.getBoundingClientRect();
  const { scrollWidth, clientWidth } = figure.querySelector(".plot");
  const wide = width + scrollWidth - clientWidth;
  const copy = figure.cloneNode(true);
  copy.querySelector(".tools").remove();
  copy.querySelector(".plot").style.overflow = "visible";
  copy.style.cssText = `width: ${width}px; border: 0`;
  const style = `<style><![CDATA[${document.querySelector("style").textContent}]]></style>`;
  const inside = `<foreignObject width="100%" height="100%">${new XMLSerializer().serializeToString(copy)}</foreignObject>`;
  const scheme = `color-scheme: ${look().dark ? "dark" : "light"}; background: var(--card)`;
  const head = `<svg xmlns="http://www.w3.org/2000/svg" width="${wide}" height="${height}" style="${scheme}">`;
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(`${head}${style}${inside}</svg>`)}`;
  await image.decode();
  const page = document.createElement("canvas");
  [page.width, page.height] = [2 * wide, 2 * height];
  page.getContext("2d").drawImage(image, 0, 0, page.width, page.height);
  return new Promise((resolve) => page.toBlob(resolve));
}

async function draw() {
  const roots = Object.fromEntries(Object.entries(plots.roots).map(([name, id]) => [id, document.getElementById(`plot-${name}`)]));
  const item = { docid: "report", root_ids: Object.keys(roots), roots };
  const [views = []] = item.root_ids.length ? await window.Bokeh.embed.embed_items({ report: plots.document }, [item]) : [];
  paint();
  for (const figure of document.querySelectorAll("figure")) addTools(figure, [...views]);
  for (const media of [prefersDark, onPaper]) media.addEventListener("change", paint);
  document.documentElement.dataset.ready = "";
}

draw().catch((error) => {
  const message = document.createElement("p");
  message.className = "alarm";
  message.textContent = `The plots could not be drawn: ${error}`;
  document.querySelector("main").prepend(message);
  throw error;
});
