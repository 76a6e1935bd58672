/** Types of lazy.mjs, which says more of each. */

import type { Blob as Place, Codebook, Layer, Options, RsvFile, Transform } from "./rsv.mjs";

/** A failure to read, which says nothing of the file. */
export class RsvReadError extends Error {
  readonly name: "RsvReadError";
}

export type Read = (offset: number, nbytes: number) => Promise<Uint8Array>;

export function openLazily(read: Read, nbytes: number, options?: Options): Promise<LazyFile>;
export function openBlob(blob: Blob, options?: Options): Promise<LazyFile>;
export function openUrl(url: string | URL, options?: Options): Promise<LazyFile>;

export class LazyFile {
  constructor(file: RsvFile, read: Read);
  /** Its header is there; what of it reads blobs is not to be called. */
  readonly file: RsvFile;
  bytes(offset: number, nbytes: number): Promise<Uint8Array>;
  blob(place: Pick<Place, "offset" | "nbytes">): Promise<Uint8Array>;
  centroids(codebook: Codebook): Promise<Float32Array>;
  scales(layer: Layer): Promise<Float32Array>;
  values(transform: Transform | null): Promise<Float32Array | null>;
  /** The codes of rows first to last - 1, counted from 0. */
  rows(layer: Layer, first: number, last: number): Promise<Layer>;
}
