/** Types of rsv.mjs, which says more of each. Numbers of bytes and positions are integers below 2^53. */

/** What is wrong with a file: `code` is one of SPEC section 9, `where` says in prose where. */
export class RsvError extends Error {
  constructor(code: string, where?: string);
  readonly name: "RsvError";
  readonly code: string;
  readonly where: string;
}

/** A failure that is not about the file: it would take more memory or time than the caller allows. */
export class RsvResourceError extends Error {
  readonly name: "RsvResourceError";
}

export interface Options {
  /** Multiplications of one verify(), and of deriving one factor; 2^38 by default. */
  maxWork?: number;
}

export type Dtype =
  | "bool" | "u8" | "i8" | "u16" | "i16" | "u32" | "i32" | "u64" | "i64" | "f16" | "bf16" | "f32" | "f64";
export type BiasType = "f32" | "f16" | "bf16";

/** Where some bytes of a file lie, and their digest. */
export interface Blob {
  readonly kind: "codebook" | "diagonal" | "factor" | "layer" | "tensor" | "attachment";
  /** Position in its table of the header. */
  readonly entry: number;
  readonly offset: number;
  readonly nbytes: number;
  readonly sha256: string;
  readonly parts: LayerParts | null;
}

export interface LayerParts {
  readonly rows: number;
  readonly rowWords: number;
  readonly codesNbytes: number;
  readonly scalesAt: number;
  readonly biasAt: number | null;
  readonly biasNbytes: number;
  readonly nbytes: number;
}

/** Checks framing to extent; RsvError otherwise. */
export function open(source: ArrayBufferLike | ArrayBufferView, options?: Options): RsvFile;
/** Checks the payload, in walk order; RsvError at the first fault. */
export function verify(file: RsvFile): void;
export function sha256(data: Uint8Array): string;
export function parseJson(bytes: Uint8Array, options?: { strict?: boolean; maxDepth?: number; maxValues?: number }): unknown;

export class RsvFile {
  private constructor();
  readonly bytes: Uint8Array;
  readonly version: [number, number];
  readonly headerNbytes: number;
  readonly headerSha256: string;
  readonly fileNbytes: number;
  readonly blobs: readonly Blob[];
  readonly metadata: ReadonlyMap<string, string>;
  readonly codebooks: readonly Codebook[];
  readonly transforms: readonly Transform[];
  readonly layers: readonly Layer[];
  readonly tensors: readonly Tensor[];
  readonly attachments: readonly Attachment[];
  blobBytes(blob: { offset: number; nbytes: number }): Uint8Array;
  layer(name: string): Layer | undefined;
  verify(): this;
}

export class Codebook {
  private constructor();
  readonly bits: number;
  readonly window: number;
  readonly sha256: string;
  readonly blob: Blob;
  centroids(): Float32Array;
  readonly uniform: boolean;
}

export class Tensor {
  private constructor();
  readonly name: string;
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly sha256: string;
  readonly blob: Blob;
  /** Little-endian elements: a view. */
  bytes(): Uint8Array;
}

export class Attachment {
  private constructor();
  readonly name: string;
  readonly mediaType: string;
  readonly sha256: string;
  readonly blob: Blob;
  bytes(): Uint8Array;
  text(): string;
}

export class Layer {
  private constructor();
  readonly name: string;
  readonly inFeatures: number;
  readonly outFeatures: number;
  readonly stack: number;
  /** Of the whole stack. */
  readonly rows: number;
  readonly shape: number[];
  readonly codebook: Codebook;
  readonly transform: Transform | null;
  readonly biasType: BiasType | null;
  readonly sha256: string;
  readonly blob: Blob;
  scales(): Float32Array;
  bias(): Float32Array | null;
  rowWords(row: number): Uint32Array;
  codes(row: number, out?: Uint8Array): Uint8Array;
  indices(row: number, out?: Uint16Array): Uint16Array;
  /** W_rot, exact, rows x inFeatures. */
  rotated(first?: number, last?: number): Float32Array;
  rotatedRow(row: number, out?: Float32Array): Float32Array;
  forEachRotatedRow(callback: (row: number, w: Float32Array) => void, first?: number, last?: number): void;
  /** W in the original basis, rows x inFeatures. */
  weight(first?: number, last?: number): Float32Array;
  weightRow(row: number): Float32Array;
  /** x @ W.T + bias, a value for each row. */
  apply(x: ArrayLike<number>, first?: number, last?: number): Float32Array;
}

export class Transform {
  private constructor();
  readonly index: number;
  readonly dim: number;
  /** Order of the Hadamard part. */
  readonly n: number;
  /** Order of the factor. */
  readonly m: number;
  readonly diagonalKind: "signs" | "values" | null;
  readonly factorKind: "hartley" | "matrix" | "haar" | null;
  readonly seed: number | null;
  readonly diagonalBlob: Blob | null;
  readonly factorBlob: Blob | null;
  diagonal(start?: number, end?: number): Float32Array | null;
  stored(): Float32Array | null;
  factor(): Float32Array | null;
  release(): void;
  /** transform(x). */
  activation(x: ArrayLike<number>): Float32Array;
}
