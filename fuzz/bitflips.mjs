// What readers/c/bitflips.c does, by the reader in JavaScript: node fuzz/bitflips.mjs FILE

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { RsvError, open } from "../conformance/readers/javascript/rsv.mjs";

class Tally {
  answers = {};
  hash = createHash("sha256");

  add(code) {
    this.answers[code] = (this.answers[code] ?? 0) + 1;
    this.hash.update(`${code}\n`);
  }

  end() {
    return { answers: this.answers, sha256: this.hash.digest("hex") };
  }
}

function answer(bytes, verify) {
  try {
    const file = open(bytes);
    if (verify) file.verify();
    return "ok";
  } catch (error) {
    if (!(error instanceof RsvError)) throw error;
    return error.code;
  }
}

const bytes = new Uint8Array(readFileSync(process.argv[2]));
if (answer(bytes, true) !== "ok") throw new Error("the file itself must be sound");
const flips = new Tally();
for (let bit = 0; bit < 8 * bytes.length; bit++) {
  bytes[bit >> 3] ^= 1 << (bit & 7);
  flips.add(answer(bytes, true));
  bytes[bit >> 3] ^= 1 << (bit & 7);
}
const truncations = new Tally();
for (let length = 0; length < bytes.length; length++) truncations.add(answer(bytes.slice(0, length), false));
console.log(JSON.stringify({ flips: flips.end(), truncations: truncations.end() }));
