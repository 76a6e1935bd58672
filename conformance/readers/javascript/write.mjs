// RSV 1.0: canonical writing (SPEC.md section 11).

import {
  CELL,
  JsonObject,
  MAX_HEADER_NBYTES,
  OtherNumber,
  PROLOGUE_NBYTES,
  RsvError,
  WRITER_SHARE,
  align,
  checkFactors,
  checkHeader,
  headerDigest,
  open,
  sha256,
  verify,
} from "./rsv.mjs";

/** JSON in the form of RFC 8785: of JsonObject, Map, plain objects, arrays, strings, numbers, booleans, null. */
export function canonicalJson(value) {
  if (value instanceof OtherNumber) {
    const token = String.fromCharCode(...value.bytes.subarray(0, 400));
    return Number(token) === 0 && !/[.eE]/.test(token) ? "0" : token; // -0 is 0; the rest is for the check to refuse
  }
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (value === null || typeof value !== "object") {
    const text = JSON.stringify(value); // escapes of strings and forms of numbers are those of RFC 8785
    if (text === undefined) throw new TypeError(`no JSON value: ${String(value)}`);
    return text;
  }
  const members = value instanceof JsonObject || value instanceof Map ? [...value] : Object.entries(value);
  members.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0)); // by UTF-16 code units, as strings compare
  return `{${members.map(([name, item]) => `${JSON.stringify(name)}:${canonicalJson(item)}`).join(",")}}`;
}

// Order by code points. It differs from that of UTF-16 code units in that surrogates come last.
function compareCodePoints(a, b) {
  const [x, y] = [String(a), String(b)];
  const n = Math.min(x.length, y.length);
  for (let i = 0; i < n; i++) {
    let c = x.charCodeAt(i);
    let d = y.charCodeAt(i);
    if (c === d) continue;
    if (c >= 0xd800 && c <= 0xdfff) c += 0x10000;
    if (d >= 0xd800 && d <= 0xdfff) d += 0x10000;
    return c - d;
  }
  return x.length - y.length;
}

const byName = (items) => [...items].sort((a, b) => compareCodePoints(a.name, b.name));

/** Packs codes, row after row, into the bytes of RSV-510. */
export function packCodes(codes, rows, inFeatures, bits) {
  const rowNbytes = Math.ceil(inFeatures / 32) * bits * 4;
  const out = new Uint8Array(rows * rowNbytes);
  for (let row = 0, from = 0; row < rows; row++) {
    for (let j = 0, p = row * rowNbytes * 8; j < inFeatures; j++, from++, p += bits) {
      const code = codes[from];
      if (!(code < 2 ** bits)) throw new RangeError(`row ${row}, column ${j}: ${code} is no code of ${bits} bits`);
      const at = Math.floor(p / 8);
      const shifted = code << p % 8;
      out[at] |= shifted;
      if (shifted > 255) out[at + 1] |= shifted >> 8;
    }
  }
  return out;
}

/**
 * The canonical file of a content. All data are Uint8Array of little-endian elements:
 *
 *     layers: [{name, in_features, out_features, stack, codebook: {bits, window, data}, transform: null or
 *               {dim, hadamard, diagonal: null or {kind, data}, factor: null or {kind, seed, data}},
 *               codes (one byte each), scales, bias: null or {dtype, data}}]
 *     tensors: [{name, dtype, shape, data}]      attachments: [{name, media_type, data}]
 *     metadata, extensions: objects, Maps or JsonObjects
 *
 * Throws RsvError with the code that the file would have had.
 */
export function write({ layers = [], tensors = [], attachments = [], metadata = {}, extensions = {} }) {
  layers = byName(layers);
  tensors = byName(tensors).map((item) => // RSV-541
    item.dtype === "bool" ? { ...item, data: item.data.map((byte) => +(byte !== 0)) } : item);
  attachments = byName(attachments);
  const shared = { codebooks: [], transforms: [] }; // {entry, blobs}, in order of first use
  const positions = new Map();
  const share = (table, entry, blobs) => {
    const key = `${table} ${canonicalJson(entry)}`;
    if (!positions.has(key)) positions.set(key, shared[table].push({ entry, blobs }) - 1);
    return positions.get(key);
  };
  const codebookOf = ({ bits, window, data }) =>
    share("codebooks", { bits, window, sha256: sha256(data) }, [data]);
  const transformOf = (transform) => {
    if (transform === null) return null;
    const blobs = [];
    const part = (source) => {
      if (source === null) return null;
      const { data, ...entry } = source;
      if (data) {
        entry.sha256 = sha256(data);
        blobs.push(data);
      }
      return entry;
    };
    const { dim, hadamard } = transform;
    const entry = { dim, hadamard, diagonal: part(transform.diagonal), factor: part(transform.factor) };
    return share("transforms", entry, blobs);
  };
  const layerEntries = layers.map(({ name, in_features, out_features, stack, codebook, transform, bias }) => ({
    name,
    in_features,
    out_features,
    stack,
    codebook: codebookOf(codebook),
    transform: transformOf(transform),
    bias: bias ? bias.dtype : null,
    sha256: "0".repeat(64), // has its length already, and its value below
  }));
  const header = {
    codebooks: shared.codebooks.map(({ entry }) => entry),
    transforms: shared.transforms.map(({ entry }) => entry),
    layers: layerEntries,
    tensors: tensors.map(({ name, dtype, shape, data }) => ({ name, dtype, shape, sha256: sha256(data) })),
    attachments: attachments.map(({ name, media_type, data }) => ({
      name,
      media_type,
      nbytes: data.length,
      sha256: sha256(data),
    })),
    metadata,
    requires: [],
    extensions,
  };
  const encode = () => new TextEncoder().encode(canonicalJson(header));
  let text = encode();
  if (text.length > MAX_HEADER_NBYTES) throw new RsvError("header_too_large", `${text.length} bytes`);
  const { blobs, fileNbytes } = checkHeader(text); // from here on, the header is valid

  const fits = (have, want, where) => {
    if (have !== want) throw new RsvError("file_extent", `${where}: ${have} instead of ${want} bytes`);
  };
  const layerBlobs = blobs.filter(({ kind }) => kind === "layer");
  const layerData = layers.map((layer, i) => {
    const { nbytes, parts } = layerBlobs[i];
    const { name, in_features: width, codebook, codes, scales, bias } = layer;
    fits(codes.length, parts.rows * width, `${name}: codes`);
    fits(scales.length, parts.rows * 4, `${name}: scales`);
    if (bias) fits(bias.data.length, parts.biasNbytes, `${name}: bias`);
    const data = new Uint8Array(nbytes);
    data.set(packCodes(codes, parts.rows, width, codebook.bits));
    data.set(scales, parts.scalesAt);
    if (bias) data.set(bias.data, parts.biasAt);
    layerEntries[i].sha256 = sha256(data);
    return data;
  });
  text = encode();

  const data = [
    ...shared.codebooks.flatMap((item) => item.blobs),
    ...shared.transforms.flatMap((item) => item.blobs),
    ...layerData,
    ...tensors.map((item) => item.data),
    ...attachments.map((item) => item.data),
  ];
  blobs.forEach(({ kind, entry, nbytes }, i) => fits(data[i].length, nbytes, `${kind} ${entry}`));
  const file = new Uint8Array(fileNbytes);
  const view = new DataView(file.buffer);
  file.set([0x89, 0x52, 0x53, 0x56, 0x0d, 0x0a, 0x1a, 0x0a]);
  view.setUint16(8, 1, true);
  view.setBigUint64(16, BigInt(text.length), true);
  view.setBigUint64(24, BigInt(fileNbytes), true);
  file.set(headerDigest(file, text).match(/../g).map((pair) => parseInt(pair, 16)), 32);
  file.set(text, PROLOGUE_NBYTES);
  let end = PROLOGUE_NBYTES + text.length;
  for (const item of data) {
    file.set(item, align(end, CELL));
    end = align(end, CELL) + item.length;
  }
  const written = open(file, { maxWork: Infinity });
  verify(written); // RSV-801
  checkFactors(written, WRITER_SHARE);
  return file;
}
