// RSV 1.0: a reader and verifier, written from SPEC.md and the header's JSON Schema alone.
//
// One module, no dependencies, for Node >= 20 and browsers. Everything works on an ArrayBuffer or Uint8Array
// that holds the whole file; nothing is copied but what a caller asks to have unpacked or computed.
//
//     const file = open(bytes);          // phases framing to extent, or RsvError
//     verify(file);                      // phase payload, or RsvError
//     file.layer("mlp.up").weight();     // Float32Array, rows x in_features
//
// Numbers in brackets are rules of SPEC.md.

export const CELL = 64;
export const PAGE = 16384;
export const PROLOGUE_NBYTES = 64;
export const MAX_HEADER_NBYTES = 67108864;
export const MAX_JSON_DEPTH = 32;
export const FREE_JSON_VALUES = 4096;
export const JSON_VALUE_NBYTES = 16;
export const MAX_INTEGER = 9007199254740991;
export const MAX_IN_FEATURES = 16777216;
export const MAX_OUT_FEATURES = 2147483647;
export const MAX_BITS = 8;
export const MAX_WINDOW = 16;
export const MAX_STACK = 65535;
export const MAX_HAAR = 16384;
export const MAX_NAME = 512;
export const MAX_ATTACHMENT_NAME = 255;
export const MAX_RANK = 8;
export const ORTHOGONALITY_TOLERANCE = 1e-4;
export const HAAR_TOLERANCE = 1e-5;
export const WRITER_SHARE = 0.5; // of these tolerances

const MAGIC = [0x89, 0x52, 0x53, 0x56, 0x0d, 0x0a, 0x1a, 0x0a];
const HARTLEY_MATRIX_MAX = 4096; // above it, RSV-705 forbids memory of the order of m * m
const HARTLEY_DIRECT_MAX = 64; // up to it, the matrix is faster than the Fourier transform

/** What is wrong with a file: `code` is one of SPEC section 9, `where` says in prose where. */
export class RsvError extends Error {
  constructor(code, where = "") {
    super(where ? `${code}: ${where}` : code);
    this.name = "RsvError";
    this.code = code;
    this.where = where;
  }
}

/** A failure that is not about the file: it would take more memory or time than the caller allows. */
export class RsvResourceError extends Error {
  constructor(message) {
    super(message);
    this.name = "RsvResourceError";
  }
}

// ---------------------------------------------------------------------------------------------- SHA-256

let nodeCrypto = globalThis.process?.getBuiltinModule?.("node:crypto");
if (!nodeCrypto && globalThis.process?.versions?.node) {
  const specifier = "node:crypto"; // a variable, so that bundlers for browsers leave it alone
  nodeCrypto = await import(specifier).catch(() => undefined);
}

const K256 = new Int32Array(64);
const H256 = new Int32Array(8);
{
  // the first 32 bits of the fractional parts of the cube (square) roots of the first primes, exactly
  const root = (value, power) => {
    let low = 0n;
    let high = 1n << 64n;
    while (high - low > 1n) {
      const middle = (low + high) >> 1n;
      if (middle ** power <= value) low = middle;
      else high = middle;
    }
    return low;
  };
  for (let p = 2n, i = 0; i < 64; p++) {
    let prime = true;
    for (let q = 2n; q * q <= p; q++) if (p % q === 0n) prime = false;
    if (!prime) continue;
    K256[i] = Number(BigInt.asIntN(32, root(p << 96n, 3n)));
    if (i < 8) H256[i] = Number(BigInt.asIntN(32, root(p << 64n, 2n)));
    i++;
  }
}

/** SHA-256 in plain JavaScript, for where node:crypto is not there. */
export class Sha256 {
  #state = H256.slice();
  #w = new Int32Array(64);
  #block = new Uint8Array(64);
  #fill = 0;
  #length = 0;

  update(data) {
    let at = 0;
    this.#length += data.length;
    if (this.#fill) {
      at = Math.min(64 - this.#fill, data.length);
      this.#block.set(data.subarray(0, at), this.#fill);
      this.#fill += at;
      if (this.#fill < 64) return this;
      this.#compress(this.#block, 0);
      this.#fill = 0;
    }
    for (; at + 64 <= data.length; at += 64) this.#compress(data, at);
    this.#block.set(data.subarray(at));
    this.#fill = data.length - at;
    return this;
  }

  hex() {
    const length = this.#length;
    const tail = new Uint8Array(this.#fill < 56 ? 64 - this.#fill : 128 - this.#fill);
    tail[0] = 0x80;
    const view = new DataView(tail.buffer);
    view.setUint32(tail.length - 8, Math.floor(length / 0x20000000));
    view.setUint32(tail.length - 4, (length << 3) >>> 0);
    this.update(tail);
    return Array.from(this.#state, (word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
  }

  #compress(data, at) {
    const w = this.#w;
    const state = this.#state;
    for (let i = 0; i < 16; i++, at += 4) {
      w[i] = (data[at] << 24) | (data[at + 1] << 16) | (data[at + 2] << 8) | data[at + 3];
    }
    for (let i = 16; i < 64; i++) {
      const x = w[i - 15];
      const y = w[i - 2];
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (w[i - 16] + s0 + w[i - 7] + s1) | 0;
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + K256[i] + w[i]) | 0;
      const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g;
      g = f;
      f = e;
      e = (d + t1) | 0;
      d = c;
      c = b;
      b = a;
      a = (t1 + t2) | 0;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
    state[5] += f;
    state[6] += g;
    state[7] += h;
  }
}

class NodeSha256 {
  #hash = nodeCrypto.createHash("sha256");

  update(data) {
    for (let at = 0; at < data.length; at += 1 << 28) this.#hash.update(data.subarray(at, at + (1 << 28)));
    return this;
  }

  hex() {
    return this.#hash.digest("hex");
  }
}

/** An object with update(Uint8Array) and hex(). */
export function hasher() {
  return nodeCrypto ? new NodeSha256() : new Sha256();
}

export function sha256(data) {
  return hasher().update(data).hex();
}

/** What the bytes 32 to 63 of a file must be [RSV-109]. */
export function headerDigest(file, text) {
  return hasher().update(file.subarray(0, 32)).update(text).hex();
}

// ------------------------------------------------------------------------------------------------ bytes

const LITTLE_ENDIAN_HOST = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

export function align(x, a) {
  return Math.ceil(x / a) * a; // a is a power of two and x < 2^53: the quotient is exact
}

// A checked product and sum [RSV-503]: a double that is at most 2^53 - 1 is exact here, since rounding to
// nearest is monotonic.
function mul(a, b, where) {
  const p = a * b;
  if (p > MAX_INTEGER) throw new RsvError("file_extent", `${where}: a size above 2^53 - 1`);
  return p;
}

function add(a, b, where) {
  const s = a + b;
  if (s > MAX_INTEGER) throw new RsvError("file_extent", `${where}: an offset above 2^53 - 1`);
  return s;
}

function alignChecked(x, a, where) {
  const rest = x % a;
  return rest ? add(x, a - rest, where) : x;
}

function allZero(bytes, start, end) {
  for (let i = start; i < end; i++) if (bytes[i] !== 0) return false;
  return true;
}

function allocate(Type, length) {
  try {
    return new Type(length);
  } catch (error) {
    if (error instanceof RangeError) throw new RsvResourceError(`no memory for ${length} elements`);
    throw error;
  }
}

// Little-endian elements as a typed array: a view where the host allows it, otherwise a copy.
function elements(Type, bytes, offset, count) {
  const size = Type.BYTES_PER_ELEMENT;
  const at = bytes.byteOffset + offset;
  if (LITTLE_ENDIAN_HOST && at % size === 0) return new Type(bytes.buffer, at, count);
  const out = allocate(Type, count);
  const raw = new Uint8Array(out.buffer);
  raw.set(bytes.subarray(offset, offset + count * size));
  if (!LITTLE_ENDIAN_HOST) for (let i = 0; i < raw.length; i += size) raw.subarray(i, i + size).reverse();
  return out;
}

// The bits of the f32 that an f16 or bf16 stands for [RSV-533].
const F32 = new Float32Array(1);
const F32_BITS = new Uint32Array(F32.buffer);

export function f16ToF32Bits(h) {
  const sign = (h & 0x8000) << 16;
  const exponent = (h >> 10) & 31;
  const fraction = h & 1023;
  if (exponent === 31) return (sign | 0x7f800000 | (fraction << 13)) >>> 0;
  if (exponent) return (sign | ((exponent + 112) << 23) | (fraction << 13)) >>> 0;
  F32[0] = fraction * 2 ** -24;
  return (sign | F32_BITS[0]) >>> 0;
}

// ------------------------------------------------------------------------------------------------- JSON

/** A JSON object: a flat list of names and values, in the order of the text. */
export class JsonObject {
  constructor(items) {
    this.items = items;
  }

  get size() {
    return this.items.length / 2;
  }

  get(name) {
    const { items } = this;
    for (let i = 0; i < items.length; i += 2) if (items[i] === name) return items[i + 1];
    return undefined;
  }

  *[Symbol.iterator]() {
    for (let i = 0; i < this.items.length; i += 2) yield [this.items[i], this.items[i + 1]];
  }

  toMap() {
    return new Map(this);
  }
}

/** A number token that RSV-205 does not allow: what a parser that is not strict gives for it. */
export class OtherNumber {
  constructor(bytes) {
    this.bytes = bytes;
  }
}

const EMPTY_OBJECT = new JsonObject([]);

// The loops over all bytes of a header go piece by piece: a compiled function is entered anew for each piece,
// where one long loop may be left to an interpreter after an earlier, small header.
const PIECE = 65536;

function checkUtf8(b) {
  for (let i = 0; i < b.length; ) i = checkUtf8Piece(b, i, Math.min(i + PIECE, b.length));
}

function checkUtf8Piece(b, i, end) {
  const n = b.length;
  const bad = (at) => {
    throw new RsvError("invalid_utf8", `header byte ${at}`);
  };
  while (i < end) {
    const c = b[i];
    if (c < 0x80) {
      i++;
      continue;
    }
    let more;
    let low = 0x80;
    let high = 0xbf;
    if (c >= 0xc2 && c <= 0xdf) more = 1;
    else if (c >= 0xe0 && c <= 0xef) {
      more = 2;
      if (c === 0xe0) low = 0xa0;
      if (c === 0xed) high = 0x9f;
    } else if (c >= 0xf0 && c <= 0xf4) {
      more = 3;
      if (c === 0xf0) low = 0x90;
      if (c === 0xf4) high = 0x8f;
    } else bad(i);
    if (i + more >= n) bad(i);
    if (b[i + 1] < low || b[i + 1] > high) bad(i);
    for (let k = 2; k <= more; k++) if ((b[i + k] & 0xc0) !== 0x80) bad(i);
    i += more + 1;
  }
  return i;
}

function scan(b, maxDepth, maxValues) {
  const state = { depth: 0, count: 0, inString: false, maxDepth, maxValues };
  for (let i = 0; i < b.length; ) i = scanPiece(b, i, Math.min(i + PIECE, b.length), state);
}

function scanPiece(b, i, end, state) {
  let { depth, count, inString } = state;
  for (; i < end; i++) {
    const c = b[i];
    if (inString) {
      if (c === 0x5c) i++;
      else if (c === 0x22) inString = false;
    } else if (c === 0x22) inString = true;
    else if (c === 0x5d || c === 0x7d) depth--;
    else if (c === 0x5b || c === 0x7b || c === 0x2c) {
      count++;
      if (c !== 0x2c) depth++;
      if (depth > state.maxDepth || count > state.maxValues) throw new RsvError("json_limit", `header byte ${i}`);
    }
  }
  state.depth = depth;
  state.count = count;
  state.inString = inString;
  return i;
}

// The first place from i on, before end, that is not white space.
function skipSpace(b, i, end) {
  while (i < end && (b[i] === 0x20 || b[i] === 0x0a || b[i] === 0x0d || b[i] === 0x09)) i++;
  return i;
}

function wellFormed(s) {
  for (let i = 0; i < s.length; i++) {
    const c = s.charCodeAt(i);
    if (c < 0xd800 || c > 0xdfff) continue;
    if (c > 0xdbff) return false;
    const d = s.charCodeAt(++i);
    if (!(d >= 0xdc00 && d <= 0xdfff)) return false;
  }
  return true;
}

// The position of a string that occurred before among count strings, or -1. A hash table with a hash of its
// own, a polynomial at a random point modulo a prime: no header can be made whose names all collide.
const HASH_PRIME = 67108859; // below 2^26: a product of two residues is exact
const HASH_POINT = 65536 + Math.floor(Math.random() * 67000000);

function findTwice(count, nameAt) {
  if (count <= 16) {
    for (let i = 1; i < count; i++) for (let j = 0; j < i; j++) if (nameAt(i) === nameAt(j)) return i;
    return -1;
  }
  const size = 2 ** Math.ceil(Math.log2(count * 2));
  const table = new Int32Array(size); // positions, from 1
  for (let i = 0; i < count; i++) {
    const name = nameAt(i);
    let hash = 0;
    for (let k = 0; k < name.length; k++) {
      const v = hash * HASH_POINT + name.charCodeAt(k) + 1;
      hash = v - Math.floor(v / HASH_PRIME) * HASH_PRIME; // perhaps one prime off, which does no harm
    }
    let slot = hash & (size - 1);
    for (; table[slot]; slot = (slot + 1) & (size - 1)) if (nameAt(table[slot] - 1) === name) return i;
    table[slot] = i + 1;
  }
  return -1;
}

class Parser {
  constructor(bytes) {
    this.b = bytes;
    this.at = 0;
    this.stack = [];
    this.units = new Uint16Array(256);
    this.number = this.twice = this.lone = -1; // where the first breach of RSV-205, 206, 207 is
  }

  fail() {
    throw new RsvError("invalid_json", `header byte ${this.at}`);
  }

  space() {
    const { b } = this;
    let end;
    do {
      end = Math.min(this.at + PIECE, b.length);
      this.at = skipSpace(b, this.at, end);
    } while (this.at === end && end < b.length);
    return this.peek(); // -1 at the end
  }

  peek() {
    return this.at < this.b.length ? this.b[this.at] : -1;
  }

  text() {
    const value = this.value();
    if (this.space() !== -1) this.fail();
    return value;
  }

  value() {
    const c = this.space();
    switch (c) {
      case 0x22:
        return this.string();
      case 0x7b:
        return this.object();
      case 0x5b:
        return this.array();
      case 0x74:
        return this.word("true", true);
      case 0x66:
        return this.word("false", false);
      case 0x6e:
        return this.word("null", null);
      default:
        return this.numeral(c);
    }
  }

  word(word, value) {
    for (let i = 0; i < word.length; i++, this.at++) if (this.peek() !== word.charCodeAt(i)) this.fail();
    return value;
  }

  digits() {
    const { b } = this;
    const start = this.at;
    while (this.at < b.length && b[this.at] >= 0x30 && b[this.at] <= 0x39) this.at++;
    if (this.at === start) this.fail();
  }

  numeral(c) {
    const { b } = this;
    const start = this.at;
    if (c === 0x2d) this.at++;
    const first = this.at;
    const zero = this.peek() === 0x30;
    if (zero) this.at++;
    else this.digits();
    let integer = !zero || c !== 0x2d; // no -0
    if (this.at - first > 16) integer = false;
    if (this.peek() === 0x2e) {
      this.at++;
      this.digits();
      integer = false;
    }
    if (this.peek() === 0x65 || this.peek() === 0x45) {
      this.at++;
      if (this.peek() === 0x2b || this.peek() === 0x2d) this.at++;
      this.digits();
      integer = false;
    }
    if (integer) {
      let value = 0;
      for (let i = first; i < this.at; i++) value = value * 10 + (b[i] - 0x30);
      if (value <= MAX_INTEGER) return c === 0x2d ? -value : value;
    }
    if (this.number < 0) this.number = start;
    return new OtherNumber(b.subarray(start, this.at));
  }

  string() {
    const { b } = this;
    const start = ++this.at;
    let plain = true;
    let i = start;
    for (; ; i++) {
      const c = i < b.length ? b[i] : -1;
      if (c === 0x22) break;
      if (c < 0x20) {
        this.at = i;
        this.fail();
      }
      if (c === 0x5c) {
        plain = false;
        i++;
      } else if (c > 0x7e) plain = false;
    }
    if (plain) {
      this.at = i + 1;
      if (i - start <= 4096) return String.fromCharCode.apply(null, b.subarray(start, i));
    }
    return this.escaped(start, i);
  }

  escaped(start, end) {
    const { b } = this;
    if (this.units.length < end - start) {
      this.units = new Uint16Array(Math.min(Math.max(end - start, 2 * this.units.length), b.length));
    }
    const { units } = this;
    let n = 0;
    let surrogate = false;
    for (let i = start; i < end; ) {
      const c = b[i++];
      if (c === 0x5c) {
        const e = b[i++];
        const k = '"\\/bfnrt'.indexOf(String.fromCharCode(e));
        if (k >= 0) units[n++] = '"\\/\b\f\n\r\t'.charCodeAt(k);
        else if (e === 0x75) {
          let unit = 0;
          for (let j = 0; j < 4; j++, i++) {
            const h = b[i];
            let digit;
            if (h >= 0x30 && h <= 0x39) digit = h - 0x30;
            else if (h >= 0x41 && h <= 0x46) digit = h - 0x37;
            else if (h >= 0x61 && h <= 0x66) digit = h - 0x57;
            else {
              this.at = i;
              this.fail();
            }
            unit = unit * 16 + digit;
          }
          if (unit >= 0xd800 && unit <= 0xdfff) surrogate = true;
          units[n++] = unit;
        } else {
          this.at = i - 1;
          this.fail();
        }
      } else if (c < 0x80) units[n++] = c;
      else if (c < 0xe0) units[n++] = ((c & 0x1f) << 6) | (b[i++] & 0x3f);
      else if (c < 0xf0) {
        units[n++] = ((c & 0x0f) << 12) | ((b[i] & 0x3f) << 6) | (b[i + 1] & 0x3f);
        i += 2;
      } else {
        const point = ((c & 7) << 18) | ((b[i] & 0x3f) << 12) | ((b[i + 1] & 0x3f) << 6) | (b[i + 2] & 0x3f);
        i += 3;
        units[n++] = 0xd7c0 + (point >> 10);
        units[n++] = 0xdc00 + (point & 0x3ff);
      }
    }
    let s = "";
    for (let i = 0; i < n; i += 4096) s += String.fromCharCode.apply(null, units.subarray(i, Math.min(n, i + 4096)));
    if (surrogate && this.lone < 0 && !wellFormed(s)) this.lone = start;
    this.at = end + 1;
    return s;
  }

  // Members are collected on one stack, so that every array kept has exactly its length.
  array() {
    const { stack } = this;
    const start = stack.length;
    this.at++;
    if (this.space() === 0x5d) {
      this.at++;
      return [];
    }
    for (;;) {
      stack.push(this.value());
      const c = this.space();
      if (c !== 0x2c && c !== 0x5d) this.fail();
      this.at++;
      if (c === 0x5d) return this.take(start);
    }
  }

  object() {
    const { stack } = this;
    const start = stack.length;
    const from = this.at++;
    if (this.space() === 0x7d) {
      this.at++;
      return EMPTY_OBJECT;
    }
    for (;;) {
      if (this.space() !== 0x22) this.fail();
      stack.push(this.string());
      if (this.space() !== 0x3a) this.fail();
      this.at++;
      stack.push(this.value());
      const c = this.space();
      if (c !== 0x2c && c !== 0x7d) this.fail();
      this.at++;
      if (c === 0x7d) {
        const items = this.take(start);
        if (this.twice < 0 && findTwice(items.length / 2, (i) => items[2 * i]) >= 0) this.twice = from;
        return new JsonObject(items);
      }
    }
  }

  take(start) {
    const items = this.stack.slice(start);
    this.stack.length = start;
    return items;
  }
}

/**
 * Parses a header by RSV-201 to RSV-207. Objects become JsonObject. With `strict: false`, other numbers
 * (OtherNumber) and lone surrogates are let through; the limits are the ones given.
 */
export function parseJson(bytes, options = {}) {
  const maximum = FREE_JSON_VALUES + Math.floor(bytes.length / JSON_VALUE_NBYTES);
  const { strict = true, maxDepth = MAX_JSON_DEPTH, maxValues = maximum } = options;
  checkUtf8(bytes);
  scan(bytes, maxDepth, maxValues);
  const parser = new Parser(bytes);
  const value = parser.text();
  if (strict && parser.number >= 0) throw new RsvError("json_number", `header byte ${parser.number}`);
  if (parser.twice >= 0) throw new RsvError("json_duplicate_key", `in the object at header byte ${parser.twice}`);
  if (strict && parser.lone >= 0) {
    throw new RsvError("json_lone_surrogate", `in the string at header byte ${parser.lone}`);
  }
  return value;
}

// ----------------------------------------------------------------------------------------------- schema

export const ELEMENT_NBYTES = {
  __proto__: null,
  bool: 1,
  u8: 1,
  i8: 1,
  u16: 2,
  i16: 2,
  u32: 4,
  i32: 4,
  u64: 8,
  i64: 8,
  f16: 2,
  bf16: 2,
  f32: 4,
  f64: 8,
};
const BIAS_NBYTES = { __proto__: null, f32: 4, f16: 2, bf16: 2 };

function breach(where, what) {
  throw new RsvError("schema_violation", `${where}: ${what}`);
}

function members(value, names, where) {
  if (!(value instanceof JsonObject)) breach(where, "not an object");
  if (value.size > names.length) breach(where, "unknown members");
  const out = {};
  for (const name of names) {
    const member = value.get(name);
    if (member === undefined) breach(where, `no member ${name}, or unknown members`);
    out[name] = member;
  }
  return out; // sizes agree, names differ from one another: there is no other member
}

function list(value, where, each) {
  if (!Array.isArray(value)) breach(where, "not an array");
  return value.map((item, i) => each(item, `${where}[${i}]`));
}

function integer(value, low, high, where) {
  if (typeof value !== "number" || !(value >= low && value <= high)) {
    breach(where, `not an integer from ${low} to ${high}`);
  }
}

function pattern(value, regex, low, high, where) {
  if (typeof value !== "string" || value.length < low || value.length > 2 * high || !regex.test(value)) {
    breach(where, "not a string of the form required");
  }
  let points = value.length;
  for (let i = 1; i < value.length; i++) {
    // strings are well-formed here: a low surrogate is the second half of a pair
    if ((value.charCodeAt(i) & 0xfc00) === 0xdc00) points--;
  }
  if (points > high) breach(where, "too long");
}

const digest = (value, where) => pattern(value, /^[0-9a-f]{64}$/, 64, 64, where);
// eslint-disable-next-line no-control-regex
const modelName = (value, where) => pattern(value, /^[^\0-\x1f\x7f]+$/, 1, MAX_NAME, where);

function codebookEntry(value, where) {
  const entry = members(value, ["bits", "window", "sha256"], where);
  integer(entry.bits, 1, MAX_BITS, `${where}.bits`);
  integer(entry.window, entry.bits, MAX_WINDOW, `${where}.window`);
  digest(entry.sha256, `${where}.sha256`);
  return entry;
}

function variant(value, kinds, where) {
  if (value === null) return null;
  const kind = value instanceof JsonObject ? value.get("kind") : undefined;
  if (typeof kind !== "string" || !Object.hasOwn(kinds, kind)) breach(where, "not null nor of a known kind");
  const entry = members(value, kinds[kind], where);
  if ("sha256" in entry) digest(entry.sha256, `${where}.sha256`);
  if ("seed" in entry) integer(entry.seed, 0, MAX_INTEGER, `${where}.seed`);
  return entry;
}

const DIAGONALS = { signs: ["kind", "sha256"], values: ["kind", "sha256"] };
const FACTORS = { hartley: ["kind"], matrix: ["kind", "sha256"], haar: ["kind", "seed", "sha256"] };

function transformEntry(value, where) {
  const entry = members(value, ["dim", "hadamard", "diagonal", "factor"], where);
  integer(entry.dim, 1, MAX_IN_FEATURES, `${where}.dim`);
  integer(entry.hadamard, 1, MAX_IN_FEATURES, `${where}.hadamard`);
  if (entry.hadamard & (entry.hadamard - 1)) breach(`${where}.hadamard`, "not a power of two");
  entry.diagonal = variant(entry.diagonal, DIAGONALS, `${where}.diagonal`);
  entry.factor = variant(entry.factor, FACTORS, `${where}.factor`);
  return entry;
}

const LAYER = ["name", "in_features", "out_features", "stack", "codebook", "transform", "bias", "sha256"];

function layerEntry(value, where) {
  const entry = members(value, LAYER, where);
  modelName(entry.name, `${where}.name`);
  integer(entry.in_features, 1, MAX_IN_FEATURES, `${where}.in_features`);
  integer(entry.out_features, 1, MAX_OUT_FEATURES, `${where}.out_features`);
  integer(entry.stack, 1, MAX_STACK, `${where}.stack`);
  integer(entry.codebook, 0, MAX_INTEGER, `${where}.codebook`);
  if (entry.transform !== null) integer(entry.transform, 0, MAX_INTEGER, `${where}.transform`);
  if (entry.bias !== null && !(typeof entry.bias === "string" && entry.bias in BIAS_NBYTES)) {
    breach(`${where}.bias`, "not null, f32, f16 or bf16");
  }
  digest(entry.sha256, `${where}.sha256`);
  return entry;
}

function tensorEntry(value, where) {
  const entry = members(value, ["name", "dtype", "shape", "sha256"], where);
  modelName(entry.name, `${where}.name`);
  if (!(typeof entry.dtype === "string" && entry.dtype in ELEMENT_NBYTES)) breach(`${where}.dtype`, "unknown");
  if (Array.isArray(entry.shape) && entry.shape.length > MAX_RANK) breach(`${where}.shape`, "too many axes");
  list(entry.shape, `${where}.shape`, (n, at) => integer(n, 0, MAX_INTEGER, at));
  digest(entry.sha256, `${where}.sha256`);
  return entry;
}

function attachmentEntry(value, where) {
  const entry = members(value, ["name", "media_type", "nbytes", "sha256"], where);
  pattern(entry.name, /^[A-Za-z0-9_][A-Za-z0-9._-]*$/, 1, MAX_ATTACHMENT_NAME, `${where}.name`);
  const type = /^[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*\/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*$/;
  pattern(entry.media_type, type, 3, 255, `${where}.media_type`);
  integer(entry.nbytes, 0, MAX_INTEGER, `${where}.nbytes`);
  digest(entry.sha256, `${where}.sha256`);
  return entry;
}

const HEADER = ["codebooks", "transforms", "layers", "tensors", "attachments", "metadata", "requires", "extensions"];

function checkSchema(value) {
  if (value instanceof JsonObject) {
    const requires = value.get("requires");
    if (Array.isArray(requires) && requires.length && requires.every((id) => typeof id === "string")) {
      throw new RsvError("unsupported_feature", `requires ${JSON.stringify(requires.slice(0, 4)).slice(0, 200)}`);
    }
  }
  const header = members(value, HEADER, "header");
  const { metadata, requires, extensions } = header;
  if (!Array.isArray(requires) || requires.length) breach("requires", "not an array of different strings");
  if (!(metadata instanceof JsonObject)) breach("metadata", "not an object");
  for (const [, text] of metadata) if (typeof text !== "string") breach("metadata", "a value is not a string");
  if (!(extensions instanceof JsonObject)) breach("extensions", "not an object");
  return {
    codebooks: list(header.codebooks, "codebooks", codebookEntry),
    transforms: list(header.transforms, "transforms", transformEntry),
    layers: list(header.layers, "layers", layerEntry),
    tensors: list(header.tensors, "tensors", tensorEntry),
    attachments: list(header.attachments, "attachments", attachmentEntry),
    metadata,
    extensions,
  };
}

// --------------------------------------------------------------------------------- references and extent

function checkReferences({ codebooks, transforms, layers, tensors, attachments }) {
  transforms.forEach(({ dim, hadamard, factor }, i) => {
    const bad = (what) => {
      throw new RsvError("transform_shape", `transforms[${i}]: ${what}`);
    };
    if (dim % hadamard) bad("hadamard does not divide dim");
    const m = dim / hadamard;
    if (m === 1 && factor) bad("a factor of order 1");
    if (factor?.kind === "haar" && m > MAX_HAAR) bad(`a haar factor of order ${m}`);
  });
  layers.forEach(({ codebook, transform }, i) => {
    if (codebook >= codebooks.length) throw new RsvError("bad_reference", `layers[${i}].codebook`);
    if (transform !== null && transform >= transforms.length) {
      throw new RsvError("bad_reference", `layers[${i}].transform`);
    }
  });
  const usedCodebooks = new Uint8Array(codebooks.length);
  const usedTransforms = new Uint8Array(transforms.length);
  layers.forEach(({ codebook, transform, in_features: width }, i) => {
    usedCodebooks[codebook] = 1;
    if (transform === null) return;
    usedTransforms[transform] = 1;
    if (transforms[transform].dim !== width) throw new RsvError("dim_mismatch", `layers[${i}]`);
  });
  const unusedCodebook = usedCodebooks.indexOf(0);
  if (unusedCodebook >= 0) throw new RsvError("unreferenced", `codebooks[${unusedCodebook}]`);
  const unusedTransform = usedTransforms.indexOf(0);
  if (unusedTransform >= 0) throw new RsvError("unreferenced", `transforms[${unusedTransform}]`);
  const claimed = (i) => {
    if (i >= 3 * layers.length) return tensors[i - 3 * layers.length].name;
    return layers[Math.floor(i / 3)].name + ["", ".weight", ".bias"][i % 3];
  };
  const twice = findTwice(3 * layers.length + tensors.length, claimed);
  if (twice >= 0) throw new RsvError("duplicate_name", JSON.stringify(claimed(twice)));
  const again = findTwice(attachments.length, (i) => attachments[i].name.toLowerCase()); // names are ASCII
  if (again >= 0) throw new RsvError("duplicate_name", `attachments[${again}]`);
}

function layerParts(entry, bits, where) {
  const rows = mul(entry.stack, entry.out_features, where);
  const rowWords = Math.ceil(entry.in_features / 32) * bits;
  const codes = mul(mul(rows, rowWords, where), 4, where);
  const scalesAt = alignChecked(codes, CELL, where);
  const scalesEnd = add(scalesAt, mul(rows, 4, where), where);
  const parts = { rows, rowWords, codesNbytes: codes, scalesAt, biasAt: null, biasNbytes: 0, nbytes: scalesEnd };
  if (entry.bias !== null) {
    parts.biasAt = alignChecked(scalesEnd, CELL, where);
    parts.biasNbytes = mul(rows, BIAS_NBYTES[entry.bias], where);
    parts.nbytes = add(parts.biasAt, parts.biasNbytes, where);
  }
  return parts;
}

// Blobs in walk order, and the length of the file that they ask for [RSV-501 to RSV-505].
function layOut(header, headerNbytes) {
  const blobs = [];
  let end = PROLOGUE_NBYTES + headerNbytes;
  const put = (kind, entry, nbytes, digestHex, parts = null) => {
    const where = `${kind} ${entry}`;
    const offset = alignChecked(end, CELL, where);
    end = add(offset, nbytes, where);
    blobs.push({ kind, entry, offset, nbytes, sha256: digestHex, parts });
  };
  header.codebooks.forEach((c, i) => put("codebook", i, 4 * 2 ** c.window, c.sha256));
  header.transforms.forEach(({ dim, hadamard, diagonal, factor }, i) => {
    const m = dim / hadamard;
    if (diagonal) put("diagonal", i, diagonal.kind === "signs" ? Math.ceil(dim / 8) : 4 * dim, diagonal.sha256);
    if (factor && factor.kind !== "hartley") {
      put("factor", i, factor.kind === "haar" ? 4 * m : 4 * m * m, factor.sha256); // at most 2^50
    }
  });
  header.layers.forEach((entry, i) => {
    const parts = layerParts(entry, header.codebooks[entry.codebook].bits, `layers[${i}]`);
    put("layer", i, parts.nbytes, entry.sha256, parts);
  });
  header.tensors.forEach(({ dtype, shape, sha256: digestHex }, i) => {
    let nbytes = ELEMENT_NBYTES[dtype];
    for (const n of shape) if (n) nbytes = mul(nbytes, n, `tensors[${i}]`);
    put("tensor", i, shape.includes(0) ? 0 : nbytes, digestHex);
  });
  header.attachments.forEach(({ nbytes, sha256: digestHex }, i) => put("attachment", i, nbytes, digestHex));
  return { blobs, end, fileNbytes: alignChecked(end, PAGE, "file") };
}

/** Phases json to reference and RSV-503 of a header alone; what open() does with it, and a writer too. */
export function checkHeader(text) {
  const json = parseJson(text);
  const header = checkSchema(json);
  checkReferences(header);
  return { json, header, ...layOut(header, text.length) };
}

// --------------------------------------------------------------------------------------------- the file

/**
 * RSV-101 to RSV-108 on the first bytes of a file (64, or all if there are fewer), given its actual length:
 * for callers that want to know this before they read the rest.
 */
export function checkPrologue(bytes, actualLength = bytes.length) {
  if (actualLength < PROLOGUE_NBYTES || bytes.length < PROLOGUE_NBYTES) {
    throw new RsvError("file_too_short", `${actualLength} bytes`);
  }
  for (let i = 0; i < 8; i++) if (bytes[i] !== MAGIC[i]) throw new RsvError("bad_magic", `byte ${i}`);
  const view = new DataView(bytes.buffer, bytes.byteOffset, PROLOGUE_NBYTES);
  const version = [view.getUint16(8, true), view.getUint16(10, true)];
  if (version[0] !== 1) throw new RsvError("unsupported_version", `${version[0]}.${version[1]}`);
  if (view.getUint32(12, true) !== 0) throw new RsvError("reserved_flags");
  const headerNbytes = view.getBigUint64(16, true);
  const fileNbytes = view.getBigUint64(24, true);
  if (headerNbytes > BigInt(MAX_HEADER_NBYTES)) throw new RsvError("header_too_large", `${headerNbytes} bytes`);
  const actual = BigInt(actualLength);
  if (actual < fileNbytes) throw new RsvError("file_truncated", `${actual} bytes of ${fileNbytes}`);
  if (actual > fileNbytes) throw new RsvError("trailing_bytes", `${actual - fileNbytes} bytes`);
  const header = Number(headerNbytes);
  if (align(PROLOGUE_NBYTES + header, CELL) > actualLength) {
    throw new RsvError("header_out_of_bounds", `a header of ${header} bytes`);
  }
  let headerSha256 = "";
  for (let i = 32; i < 64; i++) headerSha256 += bytes[i].toString(16).padStart(2, "0");
  return { version, headerNbytes: header, fileNbytes: actualLength, headerSha256 };
}

function asBytes(source) {
  if (ArrayBuffer.isView(source)) return new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
  const tag = Object.prototype.toString.call(source); // instanceof fails for another realm's
  if (tag === "[object ArrayBuffer]" || tag === "[object SharedArrayBuffer]") return new Uint8Array(source);
  throw new TypeError("not an ArrayBuffer, nor a view of one");
}

/**
 * Opens a file: every check of the phases framing to extent, in their order. `maxWork` bounds the
 * multiplications spent on one verify() (orthogonality, m^3 / 2 for each factor; haar, 4/3 m^3) and on deriving
 * one haar factor: a file of a page can ask for hours (m = 16384). Beyond it, RsvResourceError is thrown. The
 * default lasts some minutes; Infinity is no bound.
 */
export function open(source, { maxWork = 2 ** 38 } = {}) {
  const bytes = asBytes(source);
  const prologue = checkPrologue(bytes);
  const headerEnd = PROLOGUE_NBYTES + prologue.headerNbytes;
  const text = bytes.subarray(PROLOGUE_NBYTES, headerEnd);
  if (headerDigest(bytes, text) !== prologue.headerSha256) throw new RsvError("header_digest_mismatch");
  if (!allZero(bytes, headerEnd, align(headerEnd, CELL))) throw new RsvError("header_padding_nonzero");
  const checked = checkHeader(text);
  if (checked.fileNbytes !== prologue.fileNbytes) {
    throw new RsvError("file_extent", `the header asks for ${checked.fileNbytes} bytes, the file has ${bytes.length}`);
  }
  return new RsvFile(bytes, prologue, checked, maxWork);
}

export class RsvFile {
  #layers = null;

  constructor(bytes, prologue, { json, header, blobs, end }, maxWork) {
    this.bytes = bytes;
    this.maxWork = maxWork;
    this.version = prologue.version;
    this.headerNbytes = prologue.headerNbytes;
    this.headerSha256 = prologue.headerSha256;
    this.fileNbytes = prologue.fileNbytes;
    this.json = json; // the header as parsed: JsonObject, arrays, strings, numbers, booleans, null
    this.blobs = blobs; // {kind, entry, offset, nbytes, sha256, parts}, in walk order
    this.end = end; // of the last blob
    this.metadata = header.metadata.toMap();
    this.extensions = header.extensions;
    const of = { codebook: [], diagonal: [], factor: [], layer: [], tensor: [], attachment: [] };
    for (const blob of blobs) of[blob.kind][blob.entry] = blob;
    this.codebooks = header.codebooks.map((entry, i) => new Codebook(this, entry, of.codebook[i]));
    this.transforms = header.transforms.map(
      (entry, i) => new Transform(this, entry, of.diagonal[i], of.factor[i], i),
    );
    this.layers = header.layers.map((entry, i) => new Layer(this, entry, of.layer[i]));
    this.tensors = header.tensors.map((entry, i) => new Tensor(this, entry, of.tensor[i]));
    this.attachments = header.attachments.map((entry, i) => new Attachment(this, entry, of.attachment[i]));
  }

  /** The bytes of a blob: a view, not a copy. */
  blobBytes({ offset, nbytes }) {
    return this.bytes.subarray(offset, offset + nbytes);
  }

  layer(name) {
    this.#layers ??= new Map(this.layers.map((layer) => [layer.name, layer]));
    return this.#layers.get(name);
  }

  verify() {
    verify(this);
    return this;
  }
}

export class Codebook {
  constructor(file, entry, blob) {
    this.file = file;
    this.bits = entry.bits;
    this.window = entry.window;
    this.sha256 = entry.sha256;
    this.blob = blob;
  }

  centroids() {
    return elements(Float32Array, this.file.bytes, this.blob.offset, 2 ** this.window);
  }

  /** RSV-521: by equality in binary64. */
  get uniform() {
    if (this.window !== this.bits) return false;
    const c = this.centroids();
    const step = c[1] - c[0];
    return c.every((value, i) => value === c[0] + i * step);
  }
}

export class Tensor {
  constructor(file, entry, blob) {
    this.file = file;
    this.name = entry.name;
    this.dtype = entry.dtype;
    this.shape = entry.shape;
    this.sha256 = entry.sha256;
    this.blob = blob;
  }

  /** The elements as they are stored: little-endian. */
  bytes() {
    return this.file.blobBytes(this.blob);
  }
}

export class Attachment {
  constructor(file, entry, blob) {
    this.file = file;
    this.name = entry.name;
    this.mediaType = entry.media_type;
    this.sha256 = entry.sha256;
    this.blob = blob;
  }

  bytes() {
    return this.file.blobBytes(this.blob);
  }

  text() {
    return new TextDecoder().decode(this.bytes());
  }
}

export class Layer {
  constructor(file, entry, blob) {
    this.file = file;
    this.name = entry.name;
    this.inFeatures = entry.in_features;
    this.outFeatures = entry.out_features;
    this.stack = entry.stack;
    this.rows = blob.parts.rows;
    this.codebook = file.codebooks[entry.codebook];
    this.transform = entry.transform === null ? null : file.transforms[entry.transform];
    this.biasType = entry.bias;
    this.sha256 = entry.sha256;
    this.blob = blob;
  }

  get shape() {
    const matrix = [this.outFeatures, this.inFeatures];
    return this.stack === 1 ? matrix : [this.stack, ...matrix];
  }

  scales() {
    return elements(Float32Array, this.file.bytes, this.blob.offset + this.blob.parts.scalesAt, this.rows);
  }

  /** The bias in f32 [RSV-533], or null. */
  bias() {
    if (this.biasType === null) return null;
    const at = this.blob.offset + this.blob.parts.biasAt;
    if (this.biasType === "f32") return elements(Float32Array, this.file.bytes, at, this.rows);
    const stored = elements(Uint16Array, this.file.bytes, at, this.rows);
    const bits = allocate(Uint32Array, this.rows);
    for (let i = 0; i < bits.length; i++) {
      bits[i] = this.biasType === "f16" ? f16ToF32Bits(stored[i]) : stored[i] * 65536;
    }
    return new Float32Array(bits.buffer);
  }

  /** The packed words of a row of the stack [RSV-510]. */
  rowWords(row) {
    this.#checkRow(row);
    const { rowWords } = this.blob.parts;
    return elements(Uint32Array, this.file.bytes, this.blob.offset + row * rowWords * 4, rowWords);
  }

  #checkRow(row) {
    if (!Number.isInteger(row) || row < 0 || row >= this.rows) throw new RangeError(`no row ${row}`);
  }

  /** The codes of a row, without padding codes. */
  codes(row, out = allocate(Uint8Array, this.inFeatures)) {
    const words = this.rowWords(row);
    const { bits } = this.codebook;
    const mask = 2 ** bits - 1;
    const n = this.inFeatures;
    for (let j = 0, p = 0; j < n; j++, p += bits) {
      const k = p >>> 5;
      const shift = p & 31;
      let code = words[k] >>> shift;
      if (shift + bits > 32) code |= words[k + 1] << (32 - shift);
      out[j] = code & mask;
    }
    return out;
  }

  /** The indices of a row [RSV-512]: each begins with its own code and goes on with those behind it, around the row. */
  indices(row, out = allocate(Uint16Array, this.inFeatures)) {
    const codes = this.codes(row);
    const { bits, window } = this.codebook;
    const mask = 2 ** window - 1;
    const n = this.inFeatures;
    for (let j = 0; j < n; j++) {
      let index = codes[j];
      for (let have = bits, k = j + 1; have < window; have += bits, k++) index |= codes[k % n] << have;
      out[j] = index & mask;
    }
    return out;
  }

  /** A row of W_rot, exactly [RSV-720]: the product of two f32 is exact in binary64, so it is rounded once. */
  rotatedRow(row, out = allocate(Float32Array, this.inFeatures)) {
    return this.#rows(row, row + 1).fill(row, out);
  }

  // What the loops below share, made once for many rows.
  #rows(first, last) {
    this.#checkRow(first);
    if (last < first || last > this.rows) throw new RangeError(`no row ${last}`);
    const centroids = Float64Array.from(this.codebook.centroids());
    const scales = this.scales();
    const indices = allocate(Uint16Array, this.inFeatures);
    return {
      fill: (row, out) => {
        const scale = scales[row];
        this.indices(row, indices);
        for (let j = 0; j < indices.length; j++) out[j] = Math.fround(scale * centroids[indices[j]]);
        return out;
      },
    };
  }

  /** Calls back with (row, W_rot of the row) for rows first to last - 1; the array is used again. */
  forEachRotatedRow(callback, first = 0, last = this.rows) {
    if (first === last) return;
    const rows = this.#rows(first, last);
    const out = allocate(Float32Array, this.inFeatures);
    for (let row = first; row < last; row++) callback(row, rows.fill(row, out));
  }

  /** W_rot, rows x in_features, of the whole stack or of rows first to last - 1. */
  rotated(first = 0, last = this.rows) {
    const out = allocate(Float32Array, (last - first) * this.inFeatures);
    this.forEachRotatedRow((row, w) => out.set(w, (row - first) * this.inFeatures), first, last);
    return out;
  }

  /** A row of W in the original basis [RSV-721]. */
  weightRow(row) {
    return this.weight(row, row + 1);
  }

  /** W, rows x in_features, of the whole stack or of rows first to last - 1. */
  weight(first = 0, last = this.rows) {
    if (!this.transform) return this.rotated(first, last);
    const n = this.inFeatures;
    const out = allocate(Float32Array, (last - first) * n);
    const v = allocate(Float64Array, n);
    this.transform.prepare();
    this.forEachRotatedRow((row, w) => {
      v.set(w);
      this.transform.rowInPlace(v);
      out.set(v, (row - first) * n);
    }, first, last);
    return out;
  }

  /**
   * y = x @ W.T + bias for one vector x, computed as transform(x) @ W_rot.T + bias in binary64. Gives one
   * value for each row: of the whole stack, or of rows first to last - 1 (matrix s of a stack is rows
   * s * outFeatures to (s + 1) * outFeatures - 1).
   */
  apply(x, first = 0, last = this.rows) {
    const n = this.inFeatures;
    if (x.length !== n) throw new RangeError(`x has ${x.length} elements, not ${n}`);
    const t = allocate(Float64Array, n);
    t.set(x);
    this.transform?.activationInPlace(t);
    const bias = this.bias();
    const y = allocate(Float32Array, last - first);
    this.forEachRotatedRow((row, w) => {
      let sum = 0;
      for (let j = 0; j < n; j++) sum += t[j] * w[j];
      y[row - first] = bias ? sum + bias[row] : sum;
    }, first, last);
    return y;
  }
}

// ------------------------------------------------------------------------------------------- transforms

export class Transform {
  #factor = null; // f32, m x m
  #scratch = null;
  #hartley = null;

  constructor(file, entry, diagonalBlob, factorBlob, index) {
    this.file = file;
    this.index = index;
    this.dim = entry.dim;
    this.n = entry.hadamard;
    this.m = entry.dim / entry.hadamard;
    this.diagonalKind = entry.diagonal?.kind ?? null;
    this.factorKind = entry.factor?.kind ?? null;
    this.seed = entry.factor?.seed ?? null;
    this.diagonalBlob = diagonalBlob ?? null;
    this.factorBlob = factorBlob ?? null;
  }

  /** d, or null for all ones. */
  diagonal(start = 0, end = this.dim) {
    if (!this.diagonalBlob) return null;
    const { bytes } = this.file;
    const { offset } = this.diagonalBlob;
    if (this.diagonalKind === "values") return elements(Float32Array, bytes, offset + 4 * start, end - start);
    const d = allocate(Float32Array, end - start);
    for (let j = start; j < end; j++) d[j - start] = (bytes[offset + (j >> 3)] >> (j & 7)) & 1 ? -1 : 1;
    return d;
  }

  /** What is stored of the factor: a matrix, a haar factor's witness, or null. */
  stored() {
    if (!this.factorBlob) return null;
    return elements(Float32Array, this.file.bytes, this.factorBlob.offset, this.factorBlob.nbytes / 4);
  }

  /**
   * F, m x m, row-major; null is the identity. A haar factor is derived, compared to its witness and kept.
   */
  factor() {
    if (this.factorKind === null) return null;
    if (this.factorKind === "matrix") return this.stored();
    if (this.#factor) return this.#factor;
    if (this.factorKind === "hartley") {
      if (this.m > HARTLEY_MATRIX_MAX) throw new RsvResourceError(`a hartley factor of order ${this.m} as a matrix`);
      this.#factor = hartleyMatrix(this.m);
    } else {
      this.#factor = this.deriveHaar();
    }
    return this.#factor;
  }

  /** F of a haar factor, compared to its witness [RSV-713] and not kept. */
  deriveHaar() {
    if (haarWork(this.m) > this.file.maxWork) {
      throw new RsvResourceError(`deriving a haar factor of order ${this.m} takes more work than allowed`);
    }
    const f = haarMatrix(this.m, this.seed);
    if (!witnessAgrees(f, this.m, this.stored())) {
      throw new RsvError("haar_witness_mismatch", `transforms[${this.index}]`);
    }
    return f;
  }

  /** Derives what is needed to apply the transform; RsvError haar_witness_mismatch comes from here. */
  prepare() {
    if (this.factorKind === "haar") this.factor();
  }

  /** Forgets what was derived: it is derived again when it is needed again. */
  release() {
    this.#factor = this.#scratch = this.#hartley = null;
  }

  /** transform(x) = x @ T.T in f32. */
  activation(x) {
    if (x.length !== this.dim) throw new RangeError(`x has ${x.length} elements, not ${this.dim}`);
    const v = allocate(Float64Array, this.dim);
    v.set(x);
    this.activationInPlace(v);
    return new Float32Array(v);
  }

  activationInPlace(v) {
    this.#diagonalInPlace(v);
    this.#rotateInPlace(v, false);
  }

  /** w @ T in place: a row of W_rot becomes one of W. */
  rowInPlace(v) {
    this.#rotateInPlace(v, true);
    this.#diagonalInPlace(v);
  }

  #diagonalInPlace(v) {
    if (this.diagonalKind === "values") {
      const d = this.diagonal();
      for (let j = 0; j < v.length; j++) v[j] *= d[j];
    } else if (this.diagonalKind === "signs") {
      const { bytes } = this.file;
      const { offset } = this.diagonalBlob;
      for (let j = 0; j < v.length; j++) if ((bytes[offset + (j >> 3)] >> (j & 7)) & 1) v[j] = -v[j];
    }
  }

  // V, m x n, becomes F @ V @ H_n, or F.T @ V @ H_n.
  #rotateInPlace(v, transposed) {
    const { m, n } = this;
    if (n > 1) for (let row = 0; row < m; row++) walshHadamard(v, row * n, n);
    if (this.factorKind === null) return;
    if (this.factorKind === "hartley" && m > HARTLEY_DIRECT_MAX) {
      this.#hartley ??= new Hartley(m);
      this.#hartley.columnsInPlace(v, n);
      return;
    }
    const f = this.factor();
    this.#scratch ??= allocate(Float64Array, this.dim);
    const out = this.#scratch;
    if (n === 1 && !transposed) {
      for (let j = 0; j < m; j++) {
        let sum = 0;
        for (let k = 0, at = j * m; k < m; k++) sum += f[at + k] * v[k];
        out[j] = sum;
      }
    } else if (n === 1) {
      out.fill(0);
      for (let k = 0; k < m; k++) {
        const value = v[k];
        for (let j = 0, at = k * m; j < m; j++) out[j] += f[at + j] * value;
      }
    } else {
      out.fill(0);
      for (let j = 0; j < m; j++) {
        for (let k = 0; k < m; k++) {
          const weight = transposed ? f[k * m + j] : f[j * m + k];
          for (let c = 0, to = j * n, from = k * n; c < n; c++) out[to + c] += weight * v[from + c];
        }
      }
    }
    v.set(out);
  }
}

function walshHadamard(v, at, n) {
  for (let h = 1; h < n; h *= 2) {
    for (let i = at; i < at + n; i += 2 * h) {
      for (let j = i; j < i + h; j++) {
        const a = v[j];
        const b = v[j + h];
        v[j] = a + b;
        v[j + h] = a - b;
      }
    }
  }
  const scale = 1 / Math.sqrt(n);
  for (let j = at; j < at + n; j++) v[j] *= scale;
}

function hartleyMatrix(m) {
  const cas = new Float64Array(m);
  for (let q = 0; q < m; q++) {
    const t = (2 * Math.PI * q) / m;
    cas[q] = (Math.cos(t) + Math.sin(t)) / Math.sqrt(m);
  }
  const f = allocate(Float32Array, m * m);
  for (let j = 0; j < m; j++) for (let k = 0; k < m; k++) f[j * m + k] = cas[(j * k) % m];
  return f;
}

// A complex Fourier transform of a power of two, in binary64: `forward` takes natural order to bit-reversed
// order, `backward` takes that back and does not divide. Twiddles need memory of the order of length / 1024.
class Fft {
  static BASE = 16384;

  constructor(length) {
    this.length = length;
    const base = Math.min(length, Fft.BASE);
    this.base = base;
    [this.c, this.s] = Fft.#roots(base >> 1, base, 1);
    this.large = new Map();
    for (let n = 2 * base; n <= length; n *= 2) {
      this.large.set(n, [...Fft.#roots(n >> 11, n, 1024), ...Fft.#roots(1024, n, 1)]);
    }
  }

  // exp(-2 pi i step j / n), j = 0 to count - 1
  static #roots(count, n, step) {
    const c = new Float64Array(count);
    const s = new Float64Array(count);
    for (let j = 0; j < count; j++) {
      const t = (2 * Math.PI * step * j) / n;
      c[j] = Math.cos(t);
      s[j] = -Math.sin(t);
    }
    return [c, s];
  }

  forward(re, im, at = 0, n = this.length) {
    if (n > this.base) {
      this.#largeStage(re, im, at, n, false);
      this.forward(re, im, at, n >> 1);
      this.forward(re, im, at + (n >> 1), n >> 1);
      return;
    }
    const { c, s, base } = this;
    for (let len = n; len > 1; len >>= 1) {
      const h = len >> 1;
      const step = base / len;
      for (let i = at; i < at + n; i += len) {
        for (let j = 0, k = 0; j < h; j++, k += step) {
          const a = i + j;
          const b = a + h;
          const x = re[a] - re[b];
          const y = im[a] - im[b];
          re[a] += re[b];
          im[a] += im[b];
          re[b] = x * c[k] - y * s[k];
          im[b] = x * s[k] + y * c[k];
        }
      }
    }
  }

  backward(re, im, at = 0, n = this.length) {
    if (n > this.base) {
      this.backward(re, im, at, n >> 1);
      this.backward(re, im, at + (n >> 1), n >> 1);
      this.#largeStage(re, im, at, n, true);
      return;
    }
    const { c, s, base } = this;
    for (let len = 2; len <= n; len <<= 1) {
      const h = len >> 1;
      const step = base / len;
      for (let i = at; i < at + n; i += len) {
        for (let j = 0, k = 0; j < h; j++, k += step) {
          const a = i + j;
          const b = a + h;
          const x = re[b] * c[k] + im[b] * s[k];
          const y = im[b] * c[k] - re[b] * s[k];
          re[b] = re[a] - x;
          im[b] = im[a] - y;
          re[a] += x;
          im[a] += y;
        }
      }
    }
  }

  #largeStage(re, im, at, n, inverse) {
    const [hc, hs, lc, ls] = this.large.get(n);
    const h = n >> 1;
    for (let high = 0; high < hc.length; high++) {
      for (let low = 0; low < 1024; low++) {
        const c = hc[high] * lc[low] - hs[high] * ls[low];
        const s = hc[high] * ls[low] + hs[high] * lc[low];
        const a = at + high * 1024 + low;
        const b = a + h;
        if (inverse) {
          const x = re[b] * c + im[b] * s;
          const y = im[b] * c - re[b] * s;
          re[b] = re[a] - x;
          im[b] = im[a] - y;
          re[a] += x;
          im[a] += y;
        } else {
          const x = re[a] - re[b];
          const y = im[a] - im[b];
          re[a] += re[b];
          im[a] += im[b];
          re[b] = x * c - y * s;
          im[b] = x * s + y * c;
        }
      }
    }
  }
}

// The Hartley transform of any length m by Fourier transforms: directly where m is a power of two, otherwise
// by Bluestein's convolution. Two columns are done at once, as real and imaginary part.
class Hartley {
  constructor(m) {
    this.m = m;
    this.direct = (m & (m - 1)) === 0;
    let length = 1;
    while (length < (this.direct ? m : 2 * m - 1)) length *= 2;
    this.length = length;
    this.fft = new Fft(length);
    this.re = allocate(Float64Array, length);
    this.im = allocate(Float64Array, length);
    if (this.direct) return;
    // c_k = exp(-i pi k^2 / m); the convolution kernel is its conjugate
    this.cosine = m <= 1 << 20 ? allocate(Float64Array, m) : null;
    this.sine = this.cosine && allocate(Float64Array, m);
    const kr = (this.kr = allocate(Float64Array, length));
    const ki = (this.ki = allocate(Float64Array, length));
    for (let k = 0; k < m; k++) {
      const t = this.#angle(k);
      const c = Math.cos(t);
      const s = Math.sin(t);
      if (this.cosine) {
        this.cosine[k] = c;
        this.sine[k] = s;
      }
      kr[k] = c;
      ki[k] = s;
      if (k) {
        kr[length - k] = c;
        ki[length - k] = s;
      }
    }
    this.fft.forward(kr, ki);
  }

  #angle(k) {
    return (Math.PI * ((k * k) % (2 * this.m))) / this.m; // k^2 < 2^48
  }

  // (re, im) becomes its discrete Fourier transform, in natural order, times a constant: the inverse of what
  // is returned
  #dft() {
    const { m, re, im, length, kr, ki, cosine, sine } = this;
    if (this.direct) {
      this.fft.forward(re, im);
      bitReverse(re, im);
      return 1;
    }
    const chirp = () => {
      for (let k = 0; k < m; k++) {
        const c = cosine ? cosine[k] : Math.cos(this.#angle(k));
        const s = sine ? sine[k] : Math.sin(this.#angle(k));
        const x = re[k];
        re[k] = x * c + im[k] * s;
        im[k] = im[k] * c - x * s;
      }
    };
    chirp();
    re.fill(0, m);
    im.fill(0, m);
    this.fft.forward(re, im);
    for (let k = 0; k < length; k++) {
      const x = re[k];
      re[k] = x * kr[k] - im[k] * ki[k];
      im[k] = x * ki[k] + im[k] * kr[k];
    }
    this.fft.backward(re, im);
    chirp();
    return 1 / length;
  }

  /** The m by n matrix V becomes F @ V. */
  columnsInPlace(v, n) {
    const { m, re, im } = this;
    for (let column = 0; column < n; column += 2) {
      const two = column + 1 < n;
      for (let k = 0, at = column; k < m; k++, at += n) {
        re[k] = v[at];
        im[k] = two ? v[at + 1] : 0;
      }
      const scale = (this.#dft() * 0.5) / Math.sqrt(m);
      // with Z the transform of z: sum of z_k cas t = ((1 + i) Z_j + (1 - i) Z_-j) / 2
      for (let j = 0, at = column; j < m; j++, at += n) {
        const o = j ? m - j : 0;
        v[at] = (re[j] - im[j] + re[o] + im[o]) * scale;
        if (two) v[at + 1] = (re[j] + im[j] - re[o] + im[o]) * scale;
      }
    }
  }
}

function bitReverse(re, im) {
  const n = re.length;
  for (let i = 1, j = 0; i < n; i++) {
    let bit = n >> 1;
    for (; j & bit; bit >>= 1) j ^= bit;
    j ^= bit;
    if (i < j) {
      let t = re[i];
      re[i] = re[j];
      re[j] = t;
      t = im[i];
      im[i] = im[j];
      im[j] = t;
    }
  }
}

// ------------------------------------------------------------------------------------------ haar factors

// SplitMix64 [RSV-710] on 32-bit halves. next() gives z >> 11, an integer below 2^53.
export class SplitMix64 {
  constructor(seed) {
    this.high = Math.floor(seed / 4294967296) >>> 0;
    this.low = seed >>> 0;
  }

  next() {
    const low = this.low + 0x7f4a7c15;
    this.high = (this.high + 0x9e3779b9 + (low > 0xffffffff ? 1 : 0)) >>> 0;
    this.low = low >>> 0;
    let h = this.high;
    let l = this.low;
    l ^= (l >>> 30) | (h << 2);
    h ^= h >>> 30;
    h = mulHigh(h, l, 0xbf58476d, 0x1ce4e5b9);
    l = Math.imul(l, 0x1ce4e5b9);
    l ^= (l >>> 27) | (h << 5);
    h ^= h >>> 27;
    h = mulHigh(h, l, 0x94d049bb, 0x133111eb);
    l = Math.imul(l, 0x133111eb);
    l ^= (l >>> 31) | (h << 1);
    h ^= h >>> 31;
    return (h >>> 0) * 2097152 + (l >>> 11);
  }
}

// Bits 32 to 63 of (ah, al) * (bh, bl).
function mulHigh(ah, al, bh, bl) {
  const a0 = al & 0xffff;
  const a1 = al >>> 16;
  const b0 = bl & 0xffff;
  const b1 = bl >>> 16;
  const low = a0 * b0;
  const mid = a1 * b0 + Math.floor(low / 65536); // below 2^32
  const mid2 = a0 * b1 + (mid % 65536);
  const carry = a1 * b1 + Math.floor(mid / 65536) + Math.floor(mid2 / 65536);
  return (carry + Math.imul(ah, bl) + Math.imul(al, bh)) | 0;
}

function haarWork(m) {
  return (4 / 3) * m * m * m; // multiplications
}

/** F of order m from a seed [RSV-710 to RSV-712]; it is not compared to anything here. */
export function haarMatrix(m, seed) {
  const a = allocate(Float64Array, m * m);
  const stream = new SplitMix64(seed);
  for (let k = 0; k < a.length; k += 2) {
    const u1 = (stream.next() + 1) * 2 ** -53;
    const u2 = stream.next() * 2 ** -53;
    const r = Math.sqrt(-2 * Math.log(u1));
    a[k] = r * Math.cos(2 * Math.PI * u2);
    if (k + 1 < a.length) a[k + 1] = r * Math.sin(2 * Math.PI * u2);
  }
  // Householder's method; reflection k is I - tau_k v v.T, with v_k = 1 and the rest of v kept below the
  // diagonal of column k
  const tau = new Float64Array(m);
  const sign = new Float64Array(m);
  const v = new Float64Array(m);
  const t = new Float64Array(m);
  for (let k = 0; k < m; k++) {
    let tail = 0;
    for (let i = k + 1; i < m; i++) tail += (v[i] = a[i * m + k]) ** 2;
    const alpha = a[k * m + k];
    if (tail === 0) {
      sign[k] = alpha < 0 ? -1 : 1;
      continue;
    }
    const norm = Math.sqrt(alpha * alpha + tail);
    const beta = alpha < 0 ? norm : -norm; // U[k, k]
    sign[k] = beta < 0 ? -1 : 1;
    tau[k] = (beta - alpha) / beta;
    v[k] = 1;
    for (let i = k + 1; i < m; i++) a[i * m + k] = v[i] /= alpha - beta;
    reflect(a, m, k, v, tau[k], t);
  }
  for (let k = m - 1; k >= 0; k--) {
    v[k] = 1;
    for (let i = k + 1; i < m; i++) v[i] = a[i * m + k];
    reflect(a, m, k, v, tau[k], t);
    for (let i = 0; i < k; i++) a[i * m + k] = 0;
    a[k * m + k] = 1 - tau[k];
    for (let i = k + 1; i < m; i++) a[i * m + k] = -tau[k] * v[i];
  }
  const f = allocate(Float32Array, m * m);
  for (let i = 0; i < f.length; i++) f[i] = a[i] * sign[i % m];
  return f;
}

// Rows k, k + 1, ... and columns k + 1, k + 2, ... of a become (I - tau v v.T) times themselves.
function reflect(a, m, k, v, tau, t) {
  if (tau === 0) return;
  const first = k + 1;
  t.fill(0, first);
  let i = k;
  for (; i + 3 < m; i += 4) {
    const r0 = i * m;
    const r1 = r0 + m;
    const r2 = r1 + m;
    const r3 = r2 + m;
    const v0 = v[i];
    const v1 = v[i + 1];
    const v2 = v[i + 2];
    const v3 = v[i + 3];
    for (let j = first; j < m; j++) t[j] += v0 * a[r0 + j] + v1 * a[r1 + j] + (v2 * a[r2 + j] + v3 * a[r3 + j]);
  }
  for (; i < m; i++) for (let j = first, r = i * m; j < m; j++) t[j] += v[i] * a[r + j];
  for (i = k; i + 3 < m; i += 4) {
    const r0 = i * m;
    const r1 = r0 + m;
    const r2 = r1 + m;
    const r3 = r2 + m;
    const v0 = tau * v[i];
    const v1 = tau * v[i + 1];
    const v2 = tau * v[i + 2];
    const v3 = tau * v[i + 3];
    for (let j = first; j < m; j++) {
      const x = t[j];
      a[r0 + j] -= v0 * x;
      a[r1 + j] -= v1 * x;
      a[r2 + j] -= v2 * x;
      a[r3 + j] -= v3 * x;
    }
  }
  for (; i < m; i++) {
    const w = tau * v[i];
    for (let j = first, r = i * m; j < m; j++) a[r + j] -= w * t[j];
  }
}

/** F @ u in binary64, with the u of RSV-713. */
export function witnessOf(f, m) {
  const u = new Float64Array(m);
  for (let j = 0; j < m; j++) u[j] = (((5 * j + 1) % 8) - 3.5) / Math.sqrt(5.25 * m);
  const w = new Float64Array(m);
  for (let i = 0; i < m; i++) {
    let sum = 0;
    for (let j = 0, at = i * m; j < m; j++) sum += f[at + j] * u[j];
    w[i] = sum;
  }
  return w;
}

function witnessAgrees(f, m, witness, share = 1) {
  // not "> tolerance": a NaN in an unverified witness must not agree with anything
  return witnessOf(f, m).every((value, i) => Math.abs(value - witness[i]) <= share * HAAR_TOLERANCE);
}

/** What a writer checks beyond `verify`: the factors, with a share of the tolerances [RSV-804]. */
export function checkFactors(file, share) {
  file.transforms.forEach((t, i) => {
    const fault = (code, what) => {
      throw new RsvError(code, `transforms[${i}]: ${what}`);
    };
    if (t.factorKind === "matrix") checkOrthogonal(t.stored(), t.m, fault, share);
    if (t.factorKind === "haar" && !witnessAgrees(t.deriveHaar(), t.m, t.stored(), share)) {
      fault("haar_witness_mismatch", "too far off for a writer");
    }
  });
}

// ----------------------------------------------------------------------------------------------- verify

/** The payload phase [RSV-004], in walk order; throws RsvError at the first fault. */
export function verify(file) {
  const { bytes } = file;
  let work = file.maxWork;
  let end = PROLOGUE_NBYTES + file.headerNbytes;
  for (const blob of file.blobs) {
    const where = `${blob.kind} ${blob.entry}`;
    const fault = (code, what) => {
      throw new RsvError(code, `${where}: ${what}`);
    };
    if (!allZero(bytes, end, blob.offset)) fault("padding_nonzero", "the gap before it");
    end = blob.offset + blob.nbytes;
    if (sha256(file.blobBytes(blob)) !== blob.sha256) fault("blob_digest_mismatch", "its SHA-256 differs");
    if (blob.kind === "codebook") {
      const { bits, window } = file.codebooks[blob.entry];
      const c = file.codebooks[blob.entry].centroids();
      checkFinite(c, fault);
      for (let i = 1; window === bits && i < c.length; i++) if (!(c[i - 1] < c[i])) fault("codebook_order", `centroid ${i}`);
    } else if (blob.kind === "diagonal") {
      const t = file.transforms[blob.entry];
      if (t.diagonalKind === "signs") {
        if (t.dim % 8 && bytes[end - 1] >> t.dim % 8) fault("padding_nonzero", "bits beyond dim");
      } else {
        const d = t.diagonal();
        checkFinite(d, fault);
        for (let j = 0; j < d.length; j++) if (d[j] === 0) fault("zero_diagonal", `element ${j}`);
      }
    } else if (blob.kind === "factor") {
      const t = file.transforms[blob.entry];
      checkFinite(t.stored(), fault);
      work -= t.factorKind === "matrix" ? t.m ** 3 / 2 : haarWork(t.m);
      if (work < 0) throw new RsvResourceError(`${where}: checking it takes more work than allowed`);
      if (t.factorKind === "haar") t.deriveHaar();
      else checkOrthogonal(t.stored(), t.m, fault);
    } else if (blob.kind === "layer") {
      verifyLayer(file.layers[blob.entry], fault);
    }
  }
  if (!allZero(bytes, end, file.fileNbytes)) throw new RsvError("padding_nonzero", "after the last blob");
}

function checkFinite(values, fault) {
  for (let i = 0; i < values.length; i++) if (!Number.isFinite(values[i])) fault("nonfinite_value", `element ${i}`);
}

function verifyLayer(layer, fault) {
  const { bytes } = layer.file;
  const { offset, parts } = layer.blob;
  if (!allZero(bytes, offset + parts.codesNbytes, offset + parts.scalesAt)) {
    fault("padding_nonzero", "before the scales");
  }
  if (parts.biasAt !== null && !allZero(bytes, offset + parts.scalesAt + 4 * layer.rows, offset + parts.biasAt)) {
    fault("padding_nonzero", "before the bias");
  }
  const rowNbytes = 4 * parts.rowWords;
  const used = layer.inFeatures * layer.codebook.bits;
  const first = used >> 3;
  if (first < rowNbytes) {
    for (let row = 0, at = offset; row < layer.rows; row++, at += rowNbytes) {
      if (bytes[at + first] >> (used & 7) || !allZero(bytes, at + first + 1, at + rowNbytes)) {
        fault("padding_nonzero", `padding codes of row ${row}`);
      }
    }
  }
  checkFinite(layer.scales(), fault);
  if (layer.biasType === null) return;
  if (layer.biasType === "f32") checkFinite(layer.bias(), fault);
  else {
    const mask = layer.biasType === "f16" ? 0x7c00 : 0x7f80;
    const stored = elements(Uint16Array, bytes, offset + parts.biasAt, layer.rows);
    for (let i = 0; i < stored.length; i++) if ((stored[i] & mask) === mask) fault("nonfinite_value", `bias ${i}`);
  }
}

// max abs(F @ F.T - I) <= tolerance, in binary64 [RSV-609]; blocks of 4 by 4 rows.
function checkOrthogonal(f, m, fault, share = 1) {
  const check = (i, j, dot) => {
    if (!(Math.abs(i === j ? dot - 1 : dot) <= share * ORTHOGONALITY_TOLERANCE)) {
      fault("not_orthogonal", `rows ${Math.min(i, j)} and ${Math.max(i, j)}`);
    }
  };
  const whole = m - (m % 4);
  const a = [0, 1, 2, 3].map(() => new Float64Array(m));
  for (let i = 0; i < whole; i += 4) {
    for (let r = 0; r < 4; r++) a[r].set(f.subarray((i + r) * m, (i + r + 1) * m));
    for (let j = i; j < whole; j += 4) dots(a, f, m, i, j, check);
  }
  for (let i = whole; i < m; i++) {
    for (let j = 0; j < m; j++) {
      let sum = 0;
      for (let k = 0; k < m; k++) sum += f[i * m + k] * f[j * m + k];
      check(i, j, sum);
    }
  }
}

function dots([a0, a1, a2, a3], f, m, i, j, check) {
  for (let half = 0; half < 4; half += 2) {
    const b0 = (j + half) * m;
    const b1 = b0 + m;
    let s00 = 0;
    let s01 = 0;
    let s10 = 0;
    let s11 = 0;
    let s20 = 0;
    let s21 = 0;
    let s30 = 0;
    let s31 = 0;
    for (let k = 0; k < m; k++) {
      const x = f[b0 + k];
      const y = f[b1 + k];
      s00 += a0[k] * x;
      s01 += a0[k] * y;
      s10 += a1[k] * x;
      s11 += a1[k] * y;
      s20 += a2[k] * x;
      s21 += a2[k] * y;
      s30 += a3[k] * x;
      s31 += a3[k] * y;
    }
    check(i, j + half, s00);
    check(i, j + half + 1, s01);
    check(i + 1, j + half, s10);
    check(i + 1, j + half + 1, s11);
    check(i + 2, j + half, s20);
    check(i + 2, j + half + 1, s21);
    check(i + 3, j + half, s30);
    check(i + 3, j + half + 1, s31);
  }
}
