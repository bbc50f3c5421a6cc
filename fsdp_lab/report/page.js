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

function paint() {
  const dark = prefersDark.matches && !onPaper.matches;
  const styleOf = (selector) => getComputedStyle(document.querySelector(selector));
  const tokens = { ...theme[dark ? "dark" : "light"], "ink.gap": styleOf(".card").backgroundColor };
  const soft = styleOf(".soft").color, font = styleOf("body").fontFamily;
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

async function draw() {
  const roots = Object.fromEntries(Object.entries(plots.roots).map(([name, id]) => [id, document.getElementById(`plot-${name}`)]));
  const item = { docid: "report", root_ids: Object.keys(roots), roots };
  if (item.root_ids.length) await window.Bokeh.embed.embed_items({ report: plots.document }, [item]);
  paint();
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
