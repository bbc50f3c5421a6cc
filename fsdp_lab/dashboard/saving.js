// Pictures and tables of plots as files, for live.js and for the pages of reports, which put this before their own code.

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function smallButtons(className, buttons) {
  const bar = document.createElement("span");
  bar.className = className;
  for (const [words, about, press] of buttons) {
    const button = bar.appendChild(document.createElement("button"));
    Object.assign(button, { type: "button", textContent: words, title: about, ariaLabel: about, onclick: press });
  }
  return bar;
}

/** A card as a picture: Bokeh's of its plots, below its title, reading and legend, on the theme's background. */
function pictureOf(plots, type, { title, reading, keys }, theme) {
  const layer = plots.export(type);
  const width = layer.bbox.width;
  const rows = [[]];
  let x = 12;
  for (const { label, fill } of keys) {
    const wide = 28 + 6.2 * label.length;
    if (x + wide > width - 12) rows.push([]), (x = 12);
    rows.at(-1).push({ label, fill, x });
    x += wide;
  }
  const head = 34 + 17 * rows.length;
  const page = new layer.constructor(layer.backend, true);
  page.resize(width, layer.bbox.height + head + 8);
  const { ctx, pixel_ratio: ratio } = page;
  ctx.drawImage(layer.canvas, 0, head * ratio);
  ctx.save();
  ctx.scale(ratio, ratio);
  const write = (text, at, y, font, colour) => ((ctx.font = `${font} ${theme.font}`), (ctx.fillStyle = colour), ctx.fillText(text, at, y));
  write([title, reading].filter(Boolean).join(": "), 12, 21, "600 12px", theme.text);
  rows.forEach((row, i) => row.forEach(({ label, fill, x: at }) => {
    ctx.fillStyle = fill;
    ctx.fillRect(at, 31 + 17 * i, 11, 11);
    write(label, at + 16, 40 + 17 * i, "11px", theme.soft);
  }));
  ctx.restore();
  const whole = new layer.constructor(layer.backend, true); // the background, below what is there
  whole.resize(width, layer.bbox.height + head + 8);
  whole.ctx.fillStyle = theme.tokens["ink.gap"];
  whole.ctx.fillRect(0, 0, width * ratio, page.bbox.height * ratio);
  whole.ctx.drawImage(page.canvas, 0, 0);
  return whole.to_blob();
}

/** The rows of sources as CSV, a section each. A heading has the labels of the axes on which they are drawn, which say the units. */
function csvOf(sources, figures) {
  const cell = (value) => (typeof value === "string" && /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : String(value ?? ""));
  return sources.filter((source) => source.get_length()).map((source) => {
    const on = figures.find((figure) => figure.renderers.some((r) => r.data_source === source));
    const labels = on && !source.name.startsWith("frame.") ? [...on.left, ...on.below].map((axis) => axis.axis_label).filter(Boolean).join(" against ") : "";
    const names = Object.keys(source.data);
    const rows = Array.from({ length: source.get_length() }, (_, i) => names.map((name) => cell(source.data[name][i])).join(","));
    return [`# ${source.name}${labels && `: ${labels}`}`, names.join(","), ...rows].join("\n");
  }).join("\n\n") + "\n";
}
