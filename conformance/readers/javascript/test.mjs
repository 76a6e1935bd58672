// The example of SPEC.md section 16, against what the text says about it: node test.mjs
import assert from "node:assert/strict";
import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import * as rsv from "./rsv.mjs";
import { canonicalJson, write } from "./write.mjs";

const spec = readFileSync(new URL("../../../SPEC.md", import.meta.url), "utf8");
export const tiny = new Uint8Array(16384);
for (const line of spec.match(/```hexdump\n([^]*?)```/)[1].split("\n")) {
  const row = line.match(/^([0-9a-f]{8}) ((?: {1,2}[0-9a-f]{2}){16})/);
  if (row) tiny.set(row[2].trim().split(/ +/).map((d) => parseInt(d, 16)), parseInt(row[1], 16));
}
const near = (a, b, tolerance) => a.forEach((v, i) => assert.ok(Math.abs(v - b[i]) <= tolerance, `${i}: ${v} ${b[i]}`));
const code = (bytes) => {
  try {
    rsv.verify(rsv.open(bytes));
  } catch (error) {
    assert.ok(error instanceof rsv.RsvError, error);
    return error.code;
  }
  return null;
};

const file = rsv.open(tiny).verify();
const layer = file.layer("mlp.up");
assert.deepEqual([...layer.codes(0)], [0, 1, 2, 3, 2, 1]);
assert.deepEqual([...layer.codes(1)], [3, 3, 0, 1, 2, 2]);
assert.deepEqual(
  layer.rotated(),
  Float32Array.of(
    -0.15104176, -0.045278005, 0.045278005, 0.15104176, 0.045278005, -0.045278005,
    3.0208352, 3.0208352, -3.0208352, -0.9055601, 0.9055601, 0.9055601,
  ),
);
near(
  layer.weight(),
  [0, -0.0493864, -0.0508113, 0.1094831, -0.1896303, -0.0293359,
    -1.6029441, -0.8635574, 0.8697622, 0.316084, 4.9267983, -1.1796414],
  1e-6,
);
near(layer.apply([1, -2, 0.5, 3, 0, -1]), [0.6811525, 1.6869451], 1e-6);
assert.deepEqual([...layer.bias()], [0.25, -1]);
assert.deepEqual(JSON.parse(file.attachments[0].text()), { model_type: "tiny" });
assert.equal(file.codebooks[0].uniform, false);
const shifted = new Uint8Array(tiny.length + 1).subarray(1); // nothing is aligned in it
shifted.set(tiny);
assert.deepEqual(rsv.open(shifted).verify().layer("mlp.up").weight(), layer.weight());

// every byte counts: flip one, and open or verify says so
for (let i = 0; i < tiny.length; i++) {
  const bad = tiny.slice();
  bad[i] ^= 1 << i % 8;
  assert.ok(code(bad), `byte ${i}`);
}
for (const n of [0, 1, 63, 64, 877, 16383]) assert.ok(code(tiny.subarray(0, n)));

// written again, it is the same
const { codebooks: [book], transforms: [transform] } = file;
assert.deepEqual(
  write({
    layers: [{
      name: "mlp.up", in_features: 6, out_features: 2, stack: 1,
      codebook: { bits: 2, window: 2, data: file.blobBytes(book.blob) },
      transform: {
        dim: 6, hadamard: 2,
        diagonal: { kind: "signs", data: file.blobBytes(transform.diagonalBlob) },
        factor: { kind: "hartley" },
      },
      codes: Uint8Array.of(...layer.codes(0), ...layer.codes(1)),
      scales: new Uint8Array(layer.scales().buffer, layer.scales().byteOffset, 8),
      bias: { dtype: "f16", data: Uint8Array.of(0x00, 0x34, 0x00, 0xbc) },
    }],
    tensors: [{ name: "norm.weight", dtype: "bf16", shape: [3], data: file.tensors[0].bytes() }],
    attachments: [{ name: "config.json", media_type: "application/json", data: file.attachments[0].bytes() }],
    metadata: { name: "tiny" },
  }),
  tiny,
);

// packing of every width (section 5), transforms of every kind and shape against their definition
const json = (text) => rsv.parseJson(new TextEncoder().encode(text));
const f32Bytes = (values) => new Uint8Array(Float32Array.from(values).buffer);
const normal = (n) => Float32Array.from({ length: n }, () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random()));
let bits = 0;
for (const [m, n, factor] of [
  [1, 8, null], [5, 4, null], [3, 4, "hartley"], [64, 2, "hartley"], [65, 1, "hartley"], [128, 3 - 2, "hartley"],
  [97, 2, "hartley"], [300, 1, "hartley"], [512, 2, "hartley"], [7, 4, "matrix"], [33, 1, "matrix"], [7, 4, "haar"], [50, 1, "haar"],
]) {
  bits = (bits % 8) + 1;
  const dim = m * n;
  const q = m > 1 ? rsv.haarMatrix(m, 9007199254740991) : null;
  const rows = 6;
  const codes = Uint8Array.from({ length: rows * dim }, () => Math.floor(Math.random() * 2 ** bits));
  const d = normal(dim).map((v) => v + Math.sign(v) * 0.1);
  const centroids = normal(2 ** bits).sort();
  const bytes = write({
    layers: [{
      name: "x", in_features: dim, out_features: 3, stack: 2,
      codebook: { bits, window: bits, data: f32Bytes(centroids) },
      transform: {
        dim, hadamard: n, diagonal: { kind: "values", data: f32Bytes(d) },
        factor: factor && {
          kind: factor,
          ...(factor === "matrix" && { data: f32Bytes(q) }),
          ...(factor === "haar" && { seed: 9007199254740991, data: f32Bytes(rsv.witnessOf(q, m)) }),
        },
      },
      codes, scales: f32Bytes(normal(rows)), bias: { dtype: "f32", data: f32Bytes(normal(rows)) },
    }],
  });
  const got = rsv.open(bytes).layers[0];
  for (let r = 0; r < rows; r++) assert.deepEqual(got.codes(r), codes.slice(r * dim, (r + 1) * dim));
  const F = (j, k) => factor === null ? +(j === k) : factor === "hartley"
    ? Math.fround((Math.cos((2 * Math.PI * ((j * k) % m)) / m) + Math.sin((2 * Math.PI * ((j * k) % m)) / m)) / Math.sqrt(m))
    : q[j * m + k];
  const parity = (v) => v.toString(2).replaceAll("0", "").length % 2;
  const T = (j, k) => (F(Math.floor(j / n), Math.floor(k / n)) * (parity((j % n) & (k % n)) ? -1 : 1) / Math.sqrt(n)) * d[k];
  const x = normal(dim);
  const t = got.transform.activation(x);
  const norm = (v) => Math.hypot(...v);
  const want = Float64Array.from({ length: dim }, (_, j) => x.reduce((sum, v, k) => sum + v * T(j, k), 0));
  assert.ok(norm(want.map((v, j) => v - t[j])) <= 1e-6 * norm(x.map((v, j) => v * d[j])), `activation ${m} ${n} ${factor}`);
  const w = got.rotatedRow(4);
  const W = got.weightRow(4);
  const wantW = Float64Array.from({ length: dim }, (_, k) => w.reduce((sum, v, j) => sum + v * T(j, k), 0));
  assert.ok(norm(wantW.map((v, k) => (v - W[k]) / d[k])) <= 1e-6 * norm(w), `row ${m} ${n} ${factor}`);
  const y = got.apply(x);
  near([y[4]], [W.reduce((sum, v, k) => sum + v * x[k], got.bias()[4])], 1e-4 * norm(w) * norm(x));
}

// SplitMix64, section 7.3, against BigInt; 0 stands for the stream's start
const M = (1n << 64n) - 1n;
const z = (seed, k) => {
  let v = (seed + (k + 1n) * 0x9e3779b97f4a7c15n) & M;
  v = ((v ^ (v >> 30n)) * 0xbf58476d1ce4e5b9n) & M;
  v = ((v ^ (v >> 27n)) * 0x94d049bb133111ebn) & M;
  return v ^ (v >> 31n);
};
assert.equal(z(0n, 0n), 0xe220a8397b1dcdafn);
for (const seed of [0, 1, 42, 4294967295, 4294967296, 9007199254740991]) {
  const stream = new rsv.SplitMix64(seed);
  for (let k = 0n; k < 1000n; k++) assert.equal(BigInt(stream.next()), z(BigInt(seed), k) >> 11n);
}
near(rsv.haarMatrix(3, 42), [0.2777056, 0.154879, -0.9480992, 0.8884773, 0.3339364, 0.3147928, 0.3653596, -0.9297844, -0.0448705], 1e-6);

// SHA-256 of the module itself
for (let n = 0; n < 300; n++) {
  const data = new Uint8Array(randomBytes(n));
  const own = new rsv.Sha256().update(data.subarray(0, n / 3)).update(data.subarray(n / 3)).hex();
  assert.equal(own, createHash("sha256").update(data).digest("hex"));
}

// JSON
const jsonCode = (text) => {
  try {
    rsv.parseJson(typeof text === "string" ? new TextEncoder().encode(text) : Uint8Array.from(text));
  } catch (error) {
    assert.ok(error instanceof rsv.RsvError, error);
    return error.code;
  }
  return null;
};
for (const [text, want] of [
  ["", "invalid_json"], [" ", "invalid_json"], ["{}", null], ["\ufeff{}", "invalid_json"], ["[1,]", "invalid_json"],
  ["[,1]", "invalid_json"], ['{"a":1,}', "invalid_json"], ["[1 2]", "invalid_json"], ["01", "invalid_json"],
  ["-", "invalid_json"], ["+1", "invalid_json"], [".5", "invalid_json"], ["1.", "invalid_json"], ["1e", "invalid_json"],
  ["NaN", "invalid_json"], ["-Infinity", "invalid_json"], ["nul", "invalid_json"], ["nulll", "invalid_json"],
  ['"\u0001"', "invalid_json"], ['"\u007f"', null], ['"\\x"', "invalid_json"], ['"\\u12g4"', "invalid_json"],
  ['"\\u12"', "invalid_json"], ['"', "invalid_json"], ['"\\', "invalid_json"], ['"\\"', "invalid_json"], ["{} {}", "invalid_json"],
  ["'a'", "invalid_json"], ["\u00a01", "invalid_json"], ["\v1", "invalid_json"], ["[1]]", "invalid_json"], ["]", "invalid_json"],
  ["-0", "json_number"], ["1.0", "json_number"], ["1e2", "json_number"], ["9007199254740992", "json_number"],
  ["9007199254740991", null], ["-9007199254740991", null], ["-9007199254740992", "json_number"], ["9".repeat(1000), "json_number"],
  ["0", null], ["[0,-1]", null], ["1e999", "json_number"], ["-0.0", "json_number"],
  ['{"a":1,"\\u0061":2}', "json_duplicate_key"], ['{"a":{"a":1}}', null], ['{"a":1,"A":1}', null],
  ['{"\\ud83d\\ude00":1,"\u{1f600}":2}', "json_duplicate_key"], ['{"\\ud800":1,"\\uD800":2}', "json_duplicate_key"],
  ['{"__proto__":1,"__proto__":2}', "json_duplicate_key"], ['{"\\ud800":1}', "json_lone_surrogate"],
  ['"\\udc00\\ud800"', "json_lone_surrogate"], ['"\\ud800x\\udc00"', "json_lone_surrogate"], ['"\\ud800\\udc00"', null],
  ['["\\ud800",1.5]', "json_number"], ['["\\ud800",1.5', "invalid_json"], ['[{"a":1,"a":1},1.5]', "json_number"],
  ["[".repeat(32) + "]".repeat(32), null], ["[".repeat(33), "json_limit"], ["]".repeat(9) + "[".repeat(41), "invalid_json"],
  ["]".repeat(9) + "[".repeat(42), "json_limit"], ["[" + "0,".repeat(4680) + "0]", null], ["[" + "0,".repeat(4681) + "0]", "json_limit"],
  ["[" + "0,".repeat(4681) + "0]" + " ".repeat(10), "json_limit"], ["[" + "0,".repeat(4681) + "0]" + " ".repeat(11), null],
  [[0x22, 0xc0, 0x80, 0x22], "invalid_utf8"], [[0x22, 0xed, 0xa0, 0x80, 0x22], "invalid_utf8"], [[0x22, 0xf4, 0x90, 0x80, 0x80, 0x22], "invalid_utf8"],
  [[0x22, 0xe0, 0x9f, 0x80, 0x22], "invalid_utf8"], [[0x22, 0xf0, 0x8f, 0x80, 0x80, 0x22], "invalid_utf8"], [[0x22, 0xff, 0x22], "invalid_utf8"],
  [[0x22, 0xe2, 0x82], "invalid_utf8"], [[0x22, 0xe2, 0x82, 0x22], "invalid_utf8"], [[0x22, 0x80, 0x22], "invalid_utf8"],
]) assert.equal(jsonCode(text), want, JSON.stringify(text).slice(0, 80));
const manyNames = Array.from({ length: 1000 }, (_, i) => `"${i}":0`);
assert.equal(jsonCode(`{${manyNames}}`), null);
assert.equal(jsonCode(`{${manyNames},"7":1}`), "json_duplicate_key");
assert.equal(canonicalJson(json('{"\u{1f600}":"\\u000f\\/\\u00e9","\uffff":[1,true,null],"a":{}}')), '{"a":{},"\u{1f600}":"\\u000f/é","\uffff":[1,true,null]}');

// windows against RSV-512, a bit at a time; rows shorter than a window too
for (const [width, window, dim] of [[1, 16, 1], [1, 16, 37], [2, 5, 4], [3, 8, 33], [4, 12, 2], [7, 8, 5], [8, 16, 3]]) {
  const codes = Uint8Array.from({ length: dim }, () => Math.floor(Math.random() * 2 ** width));
  const book = { bits: width, window, data: f32Bytes(normal(2 ** window)) };
  const entry = { name: "w", in_features: dim, out_features: 1, stack: 1, codebook: book, transform: null, bias: null };
  const [got] = rsv.open(write({ layers: [{ ...entry, codes, scales: f32Bytes([0.5]) }] })).layers;
  const bit = (p) => (codes[Math.floor(p / width) % dim] >> (p % width)) & 1;
  const index = (j) => Array.from({ length: window }, (_, i) => bit(j * width + i) << i).reduce((a, b) => a | b);
  const want = Array.from(codes, (_, j) => index(j));
  assert.deepEqual([...got.indices(0)], want);
  const centroids = got.codebook.centroids();
  assert.deepEqual([...got.rotatedRow(0)], want.map((i) => Math.fround(0.5 * centroids[i])));
}

// a header of random mutations, its digest set right: only codes come out
const text = new TextDecoder().decode(tiny.subarray(64, 878));
const withHeader = (bytes) => {
  const out = new Uint8Array(16384);
  out.set(tiny.subarray(0, 32));
  out.set(bytes, 64);
  new DataView(out.buffer).setBigUint64(16, BigInt(bytes.length), true);
  out.set(createHash("sha256").update(out.subarray(0, 32)).update(bytes).digest(), 32);
  return out;
};
const codes = {};
const tokens = ["null", "0", "-1", "[]", "{}", '""', '"f32"', "9007199254740991", "1.5", "true", '"haar"', '"kind"', "16777216", "3", "[0]", "[7,0,9007199254740991]"];
for (let i = 0; i < 20000; i++) {
  let s = text;
  if (i % 2) {
    const places = [...s.matchAll(/"[^"]*"|\d+|null|\[\]|\{\}/g)];
    const place = places[Math.floor(Math.random() * places.length)];
    s = s.slice(0, place.index) + tokens[Math.floor(Math.random() * tokens.length)] + s.slice(place.index + place[0].length);
  }
  const bytes = new TextEncoder().encode(s);
  if (i % 2 === 0) bytes[Math.floor(Math.random() * bytes.length)] = Math.floor(Math.random() * 256);
  const got = code(withHeader(bytes));
  codes[got] = (codes[got] ?? 0) + 1;
}
console.log("mutated headers:", codes);
console.log("all good");
