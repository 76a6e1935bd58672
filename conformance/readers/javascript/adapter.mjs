// The adapter of PROTOCOL.md: node adapter.mjs decode|verify|dequantize|encode FILE, or batch.

import { closeSync, fstatSync, openSync, readSync, writeSync } from "node:fs";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { ELEMENT_NBYTES, JsonObject, RsvError, checkPrologue, hasher, open, parseJson, verify } from "./rsv.mjs";
import { write } from "./write.mjs";

function readFile(path, isRsv) {
  const fd = openSync(path, "r");
  try {
    const size = fstatSync(fd).size;
    const read = (bytes) => {
      let at = 0;
      while (at < bytes.length) {
        const n = readSync(fd, bytes, at, Math.min(bytes.length - at, 1 << 30), at);
        if (n === 0) throw new Error(`${path} became shorter`);
        at += n;
      }
      return bytes;
    };
    if (isRsv) checkPrologue(read(new Uint8Array(Math.min(size, 64))), size); // before memory is taken
    return read(new Uint8Array(size));
  } finally {
    closeSync(fd);
  }
}

// ------------------------------------------------------------------------------------------- notation

const bytesOf = (values) => new Uint8Array(values.buffer, values.byteOffset, values.byteLength);

// Collects the elements of an array piece by piece, as bytes.
class ArrayText {
  constructor(shape, dtype) {
    this.head = { shape, dtype };
    this.size = ELEMENT_NBYTES[dtype];
    this.first = [];
    this.hash = hasher();
  }

  add(bytes) {
    this.hash.update(bytes);
    for (let at = 0; at < bytes.length && this.first.length < 8; at += this.size) {
      let text = "";
      for (let i = this.size - 1; i >= 0; i--) text += bytes[at + i].toString(16).padStart(2, "0");
      this.first.push(text);
    }
    return this;
  }

  end() {
    return { ...this.head, sha256: this.hash.hex(), first: this.first };
  }
}

const array = (shape, dtype, bytes) => new ArrayText(shape, dtype).add(bytes).end();

const F32 = new DataView(new ArrayBuffer(4));
function float(value) {
  F32.setFloat32(0, value);
  return F32.getUint32(0).toString(16).padStart(8, "0");
}

// Takes text in pieces. `write` is called with what has come together.
class Output {
  constructor(write) {
    this.write = write;
    this.text = "";
  }

  add(text) {
    this.text += text;
    if (this.text.length > 65536) this.flush();
    return this;
  }

  flush() {
    this.write(this.text);
    this.text = "";
  }

  list(items, each) {
    this.add("[");
    items.forEach((item, i) => {
      if (i) this.add(",");
      this.add(JSON.stringify(each(item)));
    });
    return this.add("]");
  }

  // The header: an object would lose names such as __proto__.
  header(value) {
    if (Array.isArray(value)) {
      this.add("[");
      value.forEach((item, i) => {
        if (i) this.add(",");
        this.header(item);
      });
      this.add("]");
    } else if (value instanceof JsonObject) {
      this.add("{");
      let comma = "";
      for (const [name, item] of value) {
        this.add(`${comma}${JSON.stringify(name)}:`);
        this.header(item);
        comma = ",";
      }
      this.add("}");
    } else this.add(JSON.stringify(value));
    return this;
  }
}

// ----------------------------------------------------------------------------------------- operations

function decode(path, out) {
  const file = open(readFile(path, true));
  const { bytes } = file;
  const slice = (offset, nbytes) => bytes.subarray(offset, offset + nbytes);
  out.add(`{"version":${JSON.stringify(file.version)},"header_nbytes":${file.headerNbytes}`);
  out.add(`,"header_sha256":"${file.headerSha256}","file_nbytes":${file.fileNbytes},"header":`);
  out.header(file.json);
  out.add(',"blobs":').list(file.blobs, ({ kind, entry, offset, nbytes }) => ({ kind, entry, offset, nbytes }));
  out.add(',"codebooks":').list(file.codebooks, (codebook) => ({
    centroids: array([2 ** codebook.window], "f32", file.blobBytes(codebook.blob)),
    uniform: codebook.uniform,
  }));
  out.add(',"transforms":').list(file.transforms, (t) => {
    let diagonal = null;
    if (t.diagonalKind) {
      diagonal = new ArrayText([t.dim], "f32");
      if (t.diagonalKind === "values") diagonal.add(file.blobBytes(t.diagonalBlob));
      else for (let j = 0; j < t.dim; j += 65536) diagonal.add(bytesOf(t.diagonal(j, Math.min(t.dim, j + 65536))));
      diagonal = diagonal.end();
    }
    const shape = t.factorKind === "matrix" ? [t.m, t.m] : [t.m];
    return { diagonal, factor: t.factorBlob && array(shape, "f32", file.blobBytes(t.factorBlob)) };
  });
  out.add(',"layers":').list(file.layers, (layer) => {
    const { offset, parts } = layer.blob;
    const { rows } = layer;
    const codes = new ArrayText([rows, layer.inFeatures], "u8");
    const indices = new ArrayText([rows, layer.inFeatures], "u16");
    const perPiece = Math.min(rows, Math.max(1, Math.floor(65536 / layer.inFeatures)));
    const codePiece = new Uint8Array(perPiece * layer.inFeatures);
    const indexPiece = new Uint16Array(perPiece * layer.inFeatures);
    for (let row = 0; row < rows; ) {
      let at = 0;
      for (; at < codePiece.length && row < rows; at += layer.inFeatures, row++) {
        layer.codes(row, codePiece.subarray(at));
        layer.indices(row, indexPiece.subarray(at));
      }
      codes.add(codePiece.subarray(0, at));
      indices.add(bytesOf(indexPiece.subarray(0, at)));
    }
    let bias = null;
    if (layer.biasType === "f32") bias = array([rows], "f32", slice(offset + parts.biasAt, 4 * rows));
    else if (layer.biasType) bias = array([rows], "f32", bytesOf(layer.bias()));
    return {
      name: layer.name,
      parts: {
        codes: [offset, parts.codesNbytes],
        scales: [offset + parts.scalesAt, 4 * rows],
        bias: layer.biasType && [offset + parts.biasAt, parts.biasNbytes],
      },
      codes: codes.end(),
      indices: indices.end(),
      scales: array([rows], "f32", slice(offset + parts.scalesAt, 4 * rows)),
      bias,
    };
  });
  out.add(',"tensors":');
  out.list(file.tensors, (t) => ({ name: t.name, data: array(t.shape, t.dtype, t.bytes()) }));
  out.add(',"attachments":');
  out.list(file.attachments, (a) => ({ name: a.name, data: array([a.blob.nbytes], "u8", a.bytes()) }));
  out.add("}");
}

function verifyFile(path, out) {
  verify(open(readFile(path, true)));
  out.add("{}");
}

function sampledColumns(n) {
  if (n <= 640) return Array.from({ length: n }, (_, j) => j);
  const step = Math.ceil(n / 256);
  const columns = [];
  for (let j = 0; j < n; j += step) columns.push(j);
  if (columns.at(-1) !== n - 1) columns.push(n - 1);
  return columns;
}

function dequantizeLayer(layer) {
  const n = layer.inFeatures;
  const { rows } = layer;
  const sampledRows =
    rows <= 16 ? Array.from({ length: rows }, (_, i) => i) : [0, Math.floor(rows / 2), rows - 1];
  const columns = sampledColumns(n);
  const wRot = new ArrayText([rows, n], "f32");
  layer.forEachRotatedRow((row, w) => wRot.add(bytesOf(w)));
  const x = Float32Array.from({ length: n }, (_, j) => (((7 * j + 3) % 17) - 8) / 8);
  const tx = layer.transform ? layer.transform.activation(x) : x;
  return {
    name: layer.name,
    w_rot: wRot.end(),
    w: sampledRows.map((row) => {
      const w = layer.weightRow(row);
      return columns.map((j) => float(w[j]));
    }),
    tx: columns.map((j) => float(tx[j])),
    y: sampledRows.map((row) => float(layer.apply(x, row, row + 1)[0])),
  };
}

function dequantize(path, out) {
  const file = open(readFile(path, true));
  const layers = new Array(file.layers.length);
  // one transform after another, so that no more than one derived factor is in memory
  for (const transform of [null, ...file.transforms]) {
    file.layers.forEach((layer, i) => {
      if (layer.transform === transform) layers[i] = dequantizeLayer(layer);
    });
    transform?.release();
  }
  out.add('{"layers":').list(layers, (layer) => layer).add("}");
}

// A description's bytes and floats: hexadecimal digits.
function fromHex(text) {
  if (typeof text !== "string" || text.length % 2 || /[^0-9a-f]/.test(text)) {
    throw new TypeError("not hexadecimal digits");
  }
  return new Uint8Array(Buffer.from(text, "hex"));
}

function littleEndian(values, size) {
  const bytes = fromHex(values.join(""));
  if (bytes.length !== size * values.length) throw new TypeError("a float of another width");
  for (let at = 0; at < bytes.length; at += size) bytes.subarray(at, at + size).reverse();
  return bytes;
}

function signBits(values) {
  const bytes = new Uint8Array(Math.ceil(values.length / 8));
  values.forEach((value, j) => {
    if (value !== 1 && value !== -1) throw new TypeError("a sign that is not 1 or -1");
    if (value === -1) bytes[j >> 3] |= 1 << (j & 7);
  });
  return bytes;
}

function part(value, data) {
  const { values: _values, witness: _witness, ...entry } = value;
  return data ? { ...entry, data } : entry;
}

function encode(path, out) {
  const plain = (value, keep = []) => {
    if (Array.isArray(value)) return value.map((item) => plain(item));
    if (!(value instanceof JsonObject)) return value;
    const out = { __proto__: null };
    for (const [name, item] of value) out[name] = keep.includes(name) ? item : plain(item);
    return out;
  };
  const text = readFile(path, false);
  const content = plain(parseJson(text, { strict: false, maxDepth: 1000, maxValues: Infinity }), [
    "metadata",
    "extensions",
  ]);
  const diagonal = (d) =>
    d && part(d, d.kind === "signs" ? signBits(d.values) : d.values && littleEndian(d.values, 4));
  const factor = (f) => f && part(f, (f.values ?? f.witness) && littleEndian(f.values ?? f.witness, 4));
  content.layers = content.layers.map(({ codebook, transform, codes, scales, bias, ...entry }) => ({
    ...entry,
    codebook: { bits: codebook.bits, window: codebook.window, data: littleEndian(codebook.centroids, 4) },
    transform: transform && {
      ...transform,
      diagonal: diagonal(transform.diagonal),
      factor: factor(transform.factor),
    },
    codes: fromHex(codes),
    scales: littleEndian(scales, 4),
    bias: bias && { dtype: bias.dtype, data: littleEndian(bias.values, bias.dtype === "f32" ? 4 : 2) },
  }));
  content.tensors = content.tensors.map(({ data, ...entry }) => ({ ...entry, data: fromHex(data) }));
  content.attachments = content.attachments.map(({ data, ...entry }) => ({ ...entry, data: fromHex(data) }));
  const file = write(content);
  out.add(`{"file":"${Buffer.from(file.buffer).toString("base64")}"}`);
}

// ------------------------------------------------------------------------------------------ the program

const OPERATIONS = { __proto__: null, decode, verify: verifyFile, dequantize, encode };

// The exit code; what is to be printed goes to `write`. Nothing has been written when a file is refused.
function answer(operation, path, write) {
  const out = new Output(write);
  let code = 0;
  try {
    OPERATIONS[operation](path, out);
  } catch (error) {
    if (!(error instanceof RsvError)) throw error;
    out.add(JSON.stringify({ error: error.code, where: error.where }));
    code = 1;
  }
  out.flush();
  return code;
}

function print(text) {
  const bytes = Buffer.from(text);
  for (let at = 0; at < bytes.length; ) {
    try {
      at += writeSync(1, bytes, at);
    } catch (error) {
      if (error.code !== "EAGAIN") throw error; // a pipe that is full
    }
  }
}

function batch() {
  setFlagsFromString("--expose-gc");
  const collect = runInNewContext("gc"); // the memory of one line must not count for the next
  print('{"batch": 1}\n');
  const chunk = Buffer.alloc(65536);
  let rest = Buffer.alloc(0);
  for (;;) {
    let n = 0;
    try {
      n = readSync(0, chunk, 0, chunk.length, null);
    } catch (error) {
      if (error.code === "EAGAIN") {
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 2);
        continue;
      }
      if (error.code !== "EOF") throw error;
    }
    if (n === 0) return;
    rest = Buffer.concat([rest, chunk.subarray(0, n)]);
    for (let end; (end = rest.indexOf(10)) >= 0; rest = rest.subarray(end + 1)) {
      const line = rest.toString("utf8", 0, end);
      const tab = line.indexOf("\t");
      const operation = line.slice(0, tab);
      const pieces = [];
      const known = operation in OPERATIONS;
      const exit = known ? answer(operation, line.slice(tab + 1), (text) => pieces.push(text)) : 77;
      print(`{"exit":${exit},"output":${known ? pieces.join("") : null}}\n`);
      collect();
    }
  }
}

const [operation, path] = process.argv.slice(2);
if (operation === "batch") batch();
else if (!(operation in OPERATIONS)) process.exitCode = 77;
else process.exitCode = answer(operation, path, print);
