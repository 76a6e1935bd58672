// An RSV file of which only what is asked for is read: of a Blob or File in a browser, or by ranges of a URL.
//
//     const lazy = await openBlob(file);             // or openUrl("https://..."), or openLazily(read, nbytes)
//     const rows = await lazy.rows(lazy.file.layers[0], 0, 16); // a Layer of these rows
//     rows.codes(0);

import { CELL, Layer, PROLOGUE_NBYTES, RsvError, RsvFile, align, checkHeader, checkPrologue, headerDigest } from "./rsv.mjs";

/** A failure to read, which says nothing of the file. */
export class RsvReadError extends Error {
  constructor(message) {
    super(message);
    this.name = "RsvReadError";
  }
}

/**
 * Phases framing to extent with two reads. `read(offset, nbytes)` gives a promise of so many bytes, a Uint8Array;
 * `nbytes` is the length of the file.
 */
export async function openLazily(read, nbytes, { maxWork = 2 ** 38 } = {}) {
  const exactly = async (offset, length) => {
    const bytes = length ? await read(offset, length) : new Uint8Array(0);
    if (bytes.length !== length) throw new RsvReadError(`${bytes.length} of ${length} bytes came from byte ${offset} on`);
    return bytes;
  };
  const start = await exactly(0, Math.min(PROLOGUE_NBYTES, nbytes));
  const prologue = checkPrologue(start, nbytes);
  const { headerNbytes } = prologue;
  const cells = await exactly(PROLOGUE_NBYTES, align(PROLOGUE_NBYTES + headerNbytes, CELL) - PROLOGUE_NBYTES);
  const text = cells.subarray(0, headerNbytes);
  if (headerDigest(start, text) !== prologue.headerSha256) throw new RsvError("header_digest_mismatch");
  if (cells.subarray(headerNbytes).some((byte) => byte)) throw new RsvError("header_padding_nonzero");
  const checked = checkHeader(text);
  if (checked.fileNbytes !== nbytes) {
    throw new RsvError("file_extent", `the header asks for ${checked.fileNbytes} bytes, the file has ${nbytes}`);
  }
  return new LazyFile(new RsvFile(start, prologue, checked, maxWork), exactly);
}

/** Of a Blob, such as a File that was dropped on a page. */
export function openBlob(blob, options) {
  const read = async (offset, nbytes) => new Uint8Array(await blob.slice(offset, offset + nbytes).arrayBuffer());
  return openLazily(read, blob.size, options);
}

/** Of a URL whose server gives ranges, and says so to other origins if it is one. */
export async function openUrl(url, options) {
  const range = async (offset, nbytes) => {
    let response;
    try {
      response = await fetch(url, { headers: { Range: `bytes=${offset}-${offset + nbytes - 1}` } });
    } catch (error) {
      throw new RsvReadError(`${url} cannot be read from here: ${error.message}`);
    }
    if (response.status === 200) await response.body?.cancel(); // all of it
    if (response.status !== 206) throw new RsvReadError(`${url}: status ${response.status}, not 206: it gives no ranges`);
    return response;
  };
  const total = (await range(0, 1)).headers.get("Content-Range")?.match(/\/(\d+)$/)?.[1];
  if (total === undefined) throw new RsvReadError(`${url}: its length is not told (Content-Range)`);
  const read = async (offset, nbytes) => new Uint8Array(await (await range(offset, nbytes)).arrayBuffer());
  return openLazily(read, Number(total), options);
}

/** `file` is an RsvFile whose header is there and whose blobs are not: they are read here. */
export class LazyFile {
  #read;

  constructor(file, read) {
    this.file = file;
    this.#read = read;
  }

  /** Bytes of the file. */
  bytes(offset, nbytes) {
    return this.#read(offset, nbytes);
  }

  /** The bytes of a blob: of a layer, codebook, tensor, attachment, or `transform.diagonalBlob`. */
  blob({ offset, nbytes }) {
    return this.#read(offset, nbytes);
  }

  /** Centroids of a codebook, f32. */
  async centroids(codebook) {
    return floats(await this.blob(codebook.blob));
  }

  /** Scales of a layer, f32. */
  async scales(layer) {
    return floats(await this.#read(layer.blob.offset + layer.blob.parts.scalesAt, 4 * layer.rows));
  }

  /** Diagonal values of a transform, f32, or null where there are none or only signs. */
  async values(transform) {
    return transform?.diagonalKind === "values" ? floats(await this.blob(transform.diagonalBlob)) : null;
  }

  /** A Layer of the codes of rows first to last - 1, counted from 0; its scales, bias and transform are not there. */
  async rows(layer, first, last) {
    const { rowWords } = layer.blob.parts;
    const bytes = await this.#read(layer.blob.offset + 4 * rowWords * first, 4 * rowWords * (last - first));
    const entry = {
      name: layer.name, in_features: layer.inFeatures, out_features: last - first, stack: 1, codebook: 0,
      transform: null, bias: null, sha256: layer.sha256,
    };
    return new Layer({ bytes, codebooks: [layer.codebook] }, entry, { offset: 0, parts: { rows: last - first, rowWords } });
  }
}

function floats(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: bytes.byteLength / 4 }, (_, i) => view.getFloat32(4 * i, true));
}
