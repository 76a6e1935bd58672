/** Types of write.mjs. All data are little-endian elements. */

import type { BiasType, Dtype } from "./rsv.mjs";

export interface LayerContent {
  name: string;
  in_features: number;
  out_features: number;
  stack: number;
  codebook: { bits: number; window: number; data: Uint8Array };
  transform: null | {
    dim: number;
    hadamard: number;
    diagonal: null | { kind: "signs" | "values"; data: Uint8Array };
    factor: null | { kind: "hartley" } | { kind: "matrix"; data: Uint8Array } | { kind: "haar"; seed: number; data: Uint8Array };
  };
  /** One byte each. */
  codes: Uint8Array;
  scales: Uint8Array;
  bias: null | { dtype: BiasType; data: Uint8Array };
}

export interface Content {
  layers?: LayerContent[];
  tensors?: { name: string; dtype: Dtype; shape: number[]; data: Uint8Array }[];
  attachments?: { name: string; media_type: string; data: Uint8Array }[];
  metadata?: Record<string, string> | Map<string, string>;
  extensions?: Record<string, unknown> | Map<string, unknown>;
}

/** The canonical file of a content; RsvError with the code that the file would have had. */
export function write(content: Content): Uint8Array;
export function packCodes(codes: ArrayLike<number>, rows: number, inFeatures: number, bits: number): Uint8Array;
export function canonicalJson(value: unknown): string;
