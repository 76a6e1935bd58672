// What the report and the inspector show of an RSV file, drawn from its facts (rsv_format/report.py says what they
// are). Text is set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const MOST_RECTANGLES = 2500; // of the byte map; beyond them a family is one
const KINDS = {
  codes: "so many bits for each weight", scales: "one float32 per row", biases: "as the model had them",
  codebooks: "the numbers that codes stand for", diagonals: "signs or scales of input channels",
  factors: "rotation matrices, or their witnesses", header: "names, shapes, digests",
  padding: "to cells and pages", tensors: "kept as they were", attachments: "config, tokenizer",
};

// --- words

export function size(nbytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; nbytes >= 999.5 && unit < units.length - 1; unit++) nbytes /= 1000;
  return `${nbytes.toFixed(unit && nbytes < 99.95 ? (nbytes < 9.995 ? 2 : 1) : 0)} ${units[unit]}`;
}

const count = (n) => (n >= 999.5e6 ? `${(n / 1e9).toFixed(2)} G` : n >= 999.5e3 ? `${(n / 1e6).toFixed(1)} M` : n.toLocaleString("en"));
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const short = (x) => (x === 0 ? "0" : Math.abs(x) >= 1e4 || Math.abs(x) < 1e-3 ? x.toExponential(1) : x.toPrecision(3));
const shape = (sides) => (sides.length ? sides.join(" × ") : "scalar");
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const total = (items, key) => sum(items.map((item) => item[key]));

// --- elements

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function table(columns, rows) {
  const cell = (tag) => (content, i) => element(tag, {
    class: columns[i].startsWith(">") ? "number" : null,
    "data-label": tag === "td" && i > 0 && content !== "" ? columns[i].replace(">", "") : null,
  }, content);
  const head = element("tr", {}, ...columns.map((text) => text.replace(">", "")).map(cell("th")));
  const body = rows.map(({ cells, ...attributes }) => element("tr", attributes, ...cells.map(cell("td"))));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}

const name = (text) => element("span", { class: "name" }, text);
const section = (title, ...content) => element("section", {}, element("h2", {}, title), ...content);

// --- statistics

// Shares of N(0, sigma^2) that fall to each centroid, the nearest one; sigma such that they have the mean square that
// the counts give the centroids.
export function idealShares(centroids, counts) {
  const all = sum(counts);
  const wanted = sum(centroids.map((c, i) => (c * c * counts[i]) / all));
  let [low, high] = [0, 10 * Math.max(...centroids.map(Math.abs))];
  let shares = [];
  for (let step = 0; step < 50; step++) {
    const sigma = (low + high) / 2;
    const below = centroids.map((c, i) => (i + 1 < centroids.length ? normal((c + centroids[i + 1]) / 2 / sigma) : 1));
    shares = below.map((p, i) => p - (i ? below[i - 1] : 0));
    if (sum(shares.map((p, i) => p * centroids[i] ** 2)) < wanted) low = sigma;
    else high = sigma;
  }
  return shares;
}

// The normal distribution's integral (Abramowitz and Stegun 26.2.17, to 1e-7).
function normal(x) {
  const t = 1 / (1 + 0.2316419 * Math.abs(x));
  const polynomial = t * (0.31938153 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))));
  const tail = (Math.exp((-x * x) / 2) / Math.sqrt(2 * Math.PI)) * polynomial;
  return x > 0 ? 1 - tail : tail;
}

// --- charts

function bars(kind, values, { ideal = null, left = "", middle = "", right = "", label }) {
  const [width, height] = [300, 96];
  const top = Math.max(...values, ...(ideal ?? []), 1e-12);
  const step = width / values.length;
  const y = (value) => height * (1 - value / top);
  const rectangles = values.map((value, i) =>
    drawn("rect", { x: i * step, y: y(value), width: Math.max(step - (step > 4 ? 1 : 0), 0.5), height: height - y(value) }),
  );
  const line = ideal && drawn("path", { d: ideal.map((p, i) => `${i ? "L" : "M"}${(i + 0.5) * step} ${y(p)}`).join("") });
  const text = (content, x, anchor) => drawn("text", { x, y: height + 14, "text-anchor": anchor }, content);
  return drawn(
    "svg", { class: `bars ${kind}`, viewBox: `0 0 ${width} ${height + 18}`, role: "img", "aria-label": label },
    ...rectangles, line || null, drawn("line", { x1: 0, x2: width, y1: height, y2: height }),
    text(left, 0, "start"), text(middle, width / 2, "middle"), text(right, width, "end"),
  );
}

function codesChart(numbers, codebook) {
  const all = sum(numbers.counts);
  const scalar = codebook.window === codebook.bits;
  const shares = numbers.counts.map((n) => n / all);
  const ideal = scalar ? idealShares(codebook.centroids, numbers.counts) : shares.map(() => 1 / shares.length);
  const [left, right] = scalar ? [codebook.centroids[0], codebook.centroids.at(-1)].map(short) : ["code 0", `${shares.length - 1}`];
  return bars("codes", shares, { ideal, left, right, label: "share of each code, and the ideal" });
}

const spreadChart = (kind, { bins, min, median, max }) =>
  bars(kind, bins, { left: short(min), middle: `median ${short(median)}`, right: short(max), label: `${kind}, smallest to largest` });

// Relative errors of a family, in its order.
function errorsChart(layers, most) {
  const [width, height] = [300, 70];
  const x = (i) => (layers.length > 1 ? 6 + (i * (width - 12)) / (layers.length - 1) : width / 2);
  const dots = layers.map((layer, i) =>
    layer.error === null ? null
      : drawn("circle", { cx: x(i), cy: height - (height - 6) * (layer.error / most), r: 3 },
        drawn("title", {}, `${layer.name}: ${percent(layer.error, 2)}`)),
  );
  return drawn(
    "svg", { class: "dots", viewBox: `0 0 ${width} ${height + 18}`, role: "img", "aria-label": "relative error of each" },
    drawn("line", { x1: 0, x2: width, y1: height, y2: height }), ...dots,
    drawn("text", { x: 0, y: height + 14 }, "first"), drawn("text", { x: width, y: height + 14, "text-anchor": "end" }, "last"),
  );
}

// --- the byte map

// Rectangles for sizes, largest first, as square as they come (Bruls, Huizing and van Wijk, 2000).
export function squarify(sizes, { x, y, width, height }) {
  const out = [];
  let left = sum(sizes);
  for (let at = 0; at < sizes.length; ) {
    const side = Math.min(width, height);
    const scale = (width * height) / left;
    let [end, row, worst] = [at, 0, Infinity];
    while (end < sizes.length) {
      const next = row + sizes[end];
      const ratio = Math.max((sizes[at] * side * side) / (next * next * scale), (next * next * scale) / (sizes[end] * side * side));
      if (ratio > worst) break;
      [row, worst, end] = [next, ratio, end + 1];
    }
    const thick = (row * scale) / side || 0;
    let along = 0;
    for (; at < end; at++) {
      const long = (sizes[at] / row) * side;
      out.push(width < height ? { x: x + along, y, width: long, height: thick } : { x, y: y + along, width: thick, height: long });
      along += long;
    }
    if (width < height) [y, height] = [y + thick, height - thick];
    else [x, width] = [x + thick, width - thick];
    left -= row;
  }
  return out;
}

function byteMap(facts, choose) {
  const svg = drawn("svg", { class: "map", role: "img", "aria-label": "what takes how many bytes" });
  const groups = mapGroups(facts).map((group) => ({ ...group, nbytes: total(group.items, "nbytes") }));
  groups.sort((a, b) => b.nbytes - a.nbytes);
  const many = sum(groups.map((group) => group.items.length)) > MOST_RECTANGLES;
  const draw = () => {
    const { width, height } = svg.getBoundingClientRect();
    if (!width || !height) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const children = [];
    squarify(groups.map((group) => group.nbytes), { x: 0, y: 0, width, height }).forEach((place, g) => {
      const group = groups[g];
      const letters = Math.floor((place.width - 8) / 6.4);
      const title = place.height > 40 && letters > 6 ? 16 : 0;
      if (title) {
        const label = group.name.length > letters ? `…${group.name.slice(1 - letters)}` : group.name;
        children.push(drawn("text", { x: place.x + 3, y: place.y + 12 }, label));
      }
      const gap = Math.min(place.width, place.height) > 12 ? 2 : 0;
      const inside = { x: place.x, y: place.y + title, width: place.width - gap, height: place.height - title - gap };
      const items = many ? [{ name: group.name, nbytes: group.nbytes, kind: group.items[0].kind }] : group.items;
      squarify(items.map((item) => item.nbytes), inside).forEach((box, i) => {
        const item = items[i];
        const words = `${item.name}: ${size(item.nbytes)}, ${percent(item.nbytes / facts.nbytes, 2)}`;
        children.push(drawn("rect", {
          ...box, fill: `var(--${item.kind})`, "data-layer": item.layer ?? null,
          onclick: () => item.layer !== undefined && choose(item.layer),
        }, drawn("title", {}, words)));
      });
    });
    svg.replaceChildren(...children);
  };
  new ResizeObserver(draw).observe(svg);
  return svg;
}

function mapGroups(facts) {
  const groups = new Map();
  const into = (family, item) => {
    if (!item.nbytes) return;
    if (!groups.has(family)) groups.set(family, []);
    groups.get(family).push(item);
  };
  facts.layers.forEach((layer, i) => into(layer.family, { name: layer.name, nbytes: layer.nbytes, kind: "codes", layer: i }));
  for (const tensor of facts.tensors) into(tensor.family, { ...tensor, kind: "tensors" });
  for (const item of facts.attachments) into(item.name, { ...item, kind: "attachments" });
  for (const kind of ["codebooks", "diagonals", "factors", "header", "padding"]) {
    into(kind, { name: kind, nbytes: facts.kinds[kind], kind });
  }
  for (const items of groups.values()) items.sort((a, b) => b.nbytes - a.nbytes);
  return [...groups].map(([family, items]) => ({ name: family, items }));
}

function legend(facts) {
  const shown = Object.entries(facts.kinds).filter(([, nbytes]) => nbytes).sort((a, b) => b[1] - a[1]);
  return element("ul", { class: "legend" }, ...shown.map(([kind, nbytes]) =>
    element("li", { title: KINDS[kind] }, element("i", { style: `background: var(--${kind})` }),
      `${kind} ${size(nbytes)}, ${percent(nbytes / facts.nbytes, 2)}`)));
}

// --- sections

function head(facts) {
  const weights = total(facts.layers, "weights");
  const kept = total(facts.tensors, "weights");
  const [error, norm] = [total(facts.layers, "squared_error"), total(facts.layers, "squared_norm")];
  const pairs = [
    ["file", size(facts.nbytes)],
    ["weights", count(weights + kept)],
    ["of them quantized", percent(weights / Math.max(1, weights + kept))],
    ["bits per weight", weights ? facts.bits_per_weight.toFixed(3) : "–"],
    ["layers", facts.layers.length.toLocaleString("en")],
    ["kept tensors", facts.tensors.length.toLocaleString("en")],
  ];
  if (norm) pairs.push(["relative error", percent(Math.sqrt(error / norm), 2)]);
  const origin = ["name", "source", "generator"].filter((key) => key in facts.metadata).map((key) => `${key} ${facts.metadata[key]}`);
  return [
    element("h1", {}, facts.name),
    element("p", { class: "dim" }, ["RSV 1.0", ...origin].join(" · ")),
    element("dl", { class: "facts" }, ...pairs.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value)))),
  ];
}

function notes(facts) {
  const items = facts.warnings.map(({ level, text }) => element("li", { class: level }, text));
  return items.length ? element("ul", { class: "notes" }, ...items) : null;
}

function familiesOf(layers) {
  const families = new Map();
  layers.forEach((layer, i) => {
    if (!families.has(layer.family)) families.set(layer.family, []);
    families.get(layer.family).push({ ...layer, index: i });
  });
  for (const family of families.values()) family.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  return families;
}

const unique = (values) => [...new Set(values)];
const few = (values) => (values.length > 3 ? `${values[0]} … ${values.at(-1)}` : values.join(", "));

function layersTable(facts, choose) {
  const columns = ["layer", ">", ">shape", ">bits", ">size", ">share"];
  const measured = facts.layers.some((layer) => layer.error !== null);
  if (measured) columns.push(">error", ">worst");
  const rows = [];
  for (const [family, layers] of familiesOf(facts.layers)) {
    const nbytes = total(layers, "nbytes");
    const cells = [
      name(family), layers.length > 1 ? `×${layers.length}` : "", few(unique(layers.map((x) => shape(x.shape)))),
      few(unique(layers.map((x) => bitsOf(facts.codebooks[x.codebook])))), size(nbytes), percent(nbytes / facts.nbytes),
    ];
    if (measured) {
      const [error, norm] = [total(layers, "squared_error"), total(layers, "squared_norm")];
      const errors = layers.map((x) => x.error).filter((x) => x !== null);
      cells.push(norm ? percent(Math.sqrt(error / norm), 2) : "–", errors.length ? percent(Math.max(...errors), 2) : "–");
    }
    rows.push({ cells, class: "choice", tabindex: 0, onclick: () => choose(layers[0].index),
      onkeydown: (event) => event.key === "Enter" && choose(layers[0].index) });
  }
  return table(columns, rows);
}

const bitsOf = ({ bits, window }) => (bits === window ? `${bits}` : `${bits}, window ${window}`);

// One layer, whose numbers may be yet to be read.
function detail(facts, index, read) {
  const layer = facts.layers[index];
  const codebook = facts.codebooks[layer.codebook];
  const order = [...familiesOf(facts.layers).values()].flat().map((x) => x.index);
  const lines = [
    `${shape(layer.shape)}, ${bitsOf(codebook)} bits, ${layer.transform}${layer.bias ? `, ${layer.bias} bias` : ""}`,
    `${size(layer.nbytes)}, ${(layer.nbytes * 8 / layer.weights).toFixed(3)} bits per weight` +
      (layer.error === null ? "" : `, relative error ${percent(layer.error, 2)}`),
  ];
  const panel = element("div", { class: "cards" });
  const fill = (numbers) => {
    const shown = facts.codebooks[layer.codebook];
    panel.replaceChildren(
      element("div", { class: "card" }, element("h3", {}, "codes"), codesChart(numbers, shown),
        element("p", { class: "dim" }, `of ${count(sum(numbers.counts))} weights; the line is the ideal`)),
      element("div", { class: "card" }, element("h3", {}, "scales"), spreadChart("scales", numbers.scales),
        element("p", { class: "dim" }, numbers.scales.zeros ? `${numbers.scales.zeros} rows are zero` : "of the rows, by magnitude, logarithmic")),
      ...(numbers.importance ? [element("div", { class: "card" }, element("h3", {}, "importance"),
        spreadChart("importance", numbers.importance), element("p", { class: "dim" }, "scales of the input channels, logarithmic"))] : []),
    );
  };
  if (layer.numbers) fill(layer.numbers);
  else if (read) {
    panel.append(element("p", { class: "dim" }, "reading …"));
    read(index).then((numbers) => { layer.numbers = numbers; fill(numbers); })
      .catch((error) => panel.replaceChildren(element("p", {}, `${error.message}`)));
  } else panel.append(element("p", { class: "dim" }, "its numbers were not looked at: there are too many layers"));
  const step = (by) => order[order.indexOf(index) + by];
  return { lines, panel, previous: step(-1), next: step(1), title: layer.name };
}

function familyCards(facts) {
  const most = Math.max(...facts.layers.map((layer) => layer.error ?? 0), 1e-12);
  const cards = [];
  for (const [family, layers] of familiesOf(facts.layers)) {
    const looked = layers.filter((layer) => layer.numbers);
    if (!looked.length) continue;
    const { codebook } = looked[0];
    const alike = looked.filter((layer) => layer.codebook === codebook);
    const counts = alike[0].numbers.counts.map((_, i) => sum(alike.map((layer) => layer.numbers.counts[i])));
    const chart = codesChart({ counts }, facts.codebooks[codebook]);
    const errors = layers.length > 1 && layers.some((layer) => layer.error !== null) ? [element("p", { class: "dim" }, `relative error, 0 to ${percent(most, 2)}`), errorsChart(layers, most)] : [];
    cards.push(element("div", { class: "card" }, element("h3", {}, name(family)), chart, ...errors));
  }
  return cards;
}

function listing(title, columns, rows, most = 500) {
  const rest = rows.length > most ? element("p", { class: "dim" }, `… and ${rows.length - most} more`) : null;
  return rows.length ? section(title, table(columns, rows.slice(0, most)), rest ?? "") : null;
}

/**
 * Draws everything into an element. `read(index)` gives a promise of a layer's numbers where the facts lack them.
 */
export function drawPage(root, facts, read = null) {
  const chosen = element("section", { id: "layer" });
  const map = element("div", {});
  const choose = (index, scroll = true) => {
    const { lines, panel, previous, next, title } = detail(facts, index, read);
    const go = (label, to) => element("button", { type: "button", disabled: to === undefined ? "" : false, onclick: () => choose(to, false) }, label);
    chosen.replaceChildren(
      element("h2", {}, name(title)), ...lines.map((line) => element("p", { class: "dim" }, line)),
      element("p", {}, go("‹ previous", previous), " ", go("next ›", next)), panel,
    );
    for (const rect of map.querySelectorAll("rect.chosen")) rect.classList.remove("chosen");
    map.querySelector(`rect[data-layer="${index}"]`)?.classList.add("chosen");
    if (scroll) chosen.scrollIntoView({ behavior: "smooth", block: "nearest" });
  };
  map.append(byteMap(facts, choose));
  const cards = familyCards(facts);
  const parts = [
    ...head(facts), notes(facts), section("Where the bytes are", map, legend(facts)),
    facts.layers.length ? section("Layers", layersTable(facts, choose)) : null, chosen,
    cards.length ? section("Codes against the ideal", element("p", { class: "dim" },
      "How often each code occurs, smallest centroid to largest; the line is what normally distributed weights would give, " +
      "or with a trellis, equal shares."), element("div", { class: "cards" }, ...cards)) : null,
    listing("Kept tensors", ["name", ">", "dtype", ">shape", ">size"], [...familiesOf(facts.tensors)].map(([family, x]) => ({ cells: [
      name(family), x.length > 1 ? `×${x.length}` : "", few(unique(x.map((t) => t.dtype))), few(unique(x.map((t) => shape(t.shape)))),
      size(total(x, "nbytes"))] }))),
    listing("Attachments", ["name", "type", ">size"],
      facts.attachments.map((x) => ({ cells: [name(x.name), x.media_type, size(x.nbytes)] }))),
    listing("Metadata", ["key", "value"], Object.entries(facts.metadata).map(([key, value]) => ({ cells: [name(key), value] }))),
  ];
  root.replaceChildren(...parts.filter((part) => part !== null));
  if (facts.layers.length) choose(0, false);
}
