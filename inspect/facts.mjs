// The facts of an RSV file that rsv_format/page/draw.mjs draws, from its header, and a layer's numbers when they are
// asked for. rsv_format/report.py makes the same.

import { size } from "../rsv_format/page/draw.mjs";

const SAMPLE = 2 ** 18; // codes of a layer that are counted
const RUNS = 8; // of rows, evenly spaced, that they come from
const BINS = 32;
const MOST_CENTROIDS = 256;

const family = (name) => name.replace(/(?<![^.])\d+(?![^.])/g, "*");

/** All but the numbers of layers and what needs a source. */
export async function factsOf(lazy, name) {
  const { file } = lazy;
  const kinds = { codes: 0, scales: 0, biases: 0, codebooks: 0, diagonals: 0, factors: 0, header: 64 + file.headerNbytes,
    padding: 0, tensors: 0, attachments: 0 };
  for (const { kind, nbytes, parts } of file.blobs) {
    if (kind !== "layer") kinds[`${kind}s`] += nbytes;
    else {
      kinds.codes += parts.codesNbytes;
      kinds.scales += 4 * parts.rows;
      kinds.biases += parts.biasNbytes;
    }
  }
  kinds.padding = file.fileNbytes - Object.values(kinds).reduce((a, b) => a + b);
  const codebooks = [];
  for (const codebook of file.codebooks) {
    const { bits, window } = codebook;
    codebooks.push({ bits, window, centroids: window > 8 ? [] : [...(await lazy.centroids(codebook))].slice(0, MOST_CENTROIDS) });
  }
  const layers = file.layers.map((layer) => ({
    name: layer.name, family: family(layer.name), shape: layer.shape, weights: layer.rows * layer.inFeatures,
    nbytes: layer.blob.nbytes, codebook: file.codebooks.indexOf(layer.codebook), bias: layer.biasType,
    transform: transformWords(layer.transform), error: null, squared_error: null, squared_norm: null, numbers: null,
  }));
  const tensors = file.tensors.map(({ name, dtype, shape, blob }) => ({
    name, family: family(name), dtype, shape, nbytes: blob.nbytes, weights: shape.reduce((a, b) => a * b, 1),
  }));
  const weights = layers.reduce((all, layer) => all + layer.weights, 0);
  return {
    name, nbytes: file.fileNbytes,
    bits_per_weight: weights ? (8 * (file.fileNbytes - kinds.tensors - kinds.attachments)) / weights : 0,
    kinds, codebooks, layers, tensors,
    attachments: file.attachments.map(({ name, mediaType, blob }) => ({ name, media_type: mediaType, nbytes: blob.nbytes })),
    metadata: Object.fromEntries(file.metadata), warnings: warnings(file),
  };
}

/** How often each code occurs in some rows, the spread of scales and of the diagonal. */
export async function numbersOf(lazy, index) {
  const layer = lazy.file.layers[index];
  const counts = new Array(2 ** layer.codebook.bits).fill(0);
  const step = Math.max(1, Math.floor(Math.min(layer.rows, Math.floor(SAMPLE / layer.inFeatures)) / RUNS));
  const starts = new Set(Array.from({ length: RUNS }, (_, i) => Math.floor((i * (layer.rows - step)) / (RUNS - 1))));
  for (const start of starts) {
    const rows = await lazy.rows(layer, start, start + step);
    for (let row = 0; row < step; row++) for (const code of rows.codes(row)) counts[code]++;
  }
  const values = await lazy.values(layer.transform);
  return { counts, scales: spread(await lazy.scales(layer)), importance: values && spread(values) };
}

// Of the magnitudes: smallest, median and largest, and how many lie in each of equal steps of their logarithm.
function spread(values) {
  const sizes = Float64Array.from(values.filter((x) => x && Number.isFinite(x)), Math.abs).sort();
  const zeros = values.filter((x) => x === 0).length;
  const bins = new Array(BINS).fill(0);
  if (!sizes.length) return { zeros, min: 0, median: 0, max: 0, bins };
  const [low, high] = [Math.log(sizes[0]), Math.log(sizes.at(-1))];
  for (const x of sizes) bins[low < high ? Math.min(BINS - 1, Math.floor((BINS * (Math.log(x) - low)) / (high - low))) : BINS / 2]++;
  const half = (sizes.length - 1) / 2;
  return { zeros, min: sizes[0], median: (sizes[Math.floor(half)] + sizes[Math.ceil(half)]) / 2, max: sizes.at(-1), bins };
}

// T = (F (x) H) diag(d), read from right to left as it is written.
function transformWords(t) {
  if (!t) return "none";
  const parts = [];
  if (t.factorKind) parts.push(`${t.factorKind} ${t.m}${t.seed === null ? "" : ` seed ${t.seed}`}`);
  else if (t.m > 1 && t.n > 1) parts.push(`identity ${t.m}`);
  if (t.n > 1) parts.push(`hadamard ${t.n}`);
  const diagonal = { signs: "signs", values: "scales" }[t.diagonalKind];
  return [parts.join(" ⊗ "), diagonal].filter(Boolean).join(" · ") || "identity";
}

function warnings(file) {
  const told = [];
  const derived = file.transforms.filter((t) => t.factorKind === "haar").length;
  if (derived) told.push(`rotations that are derived from seeds on each load, which is slow: ${derived}`);
  const missing = ["config.json", "tokenizer.json"].filter((name) => !file.attachments.some((x) => x.name === name));
  if (missing.length && file.layers.length) told.push(`there is no ${missing.join(" and no ")}: rsv_mlx.load needs them`);
  const notes = told.map((text) => ({ level: "warn", text }));
  const bytes = size(64 + file.headerNbytes);
  return [...notes, { level: "good", text: `Framing, header, references and extent are sound: ${bytes} of ${size(file.fileNbytes)} were read.` }];
}
