"""Builds the conformance vectors from SPEC.md with the standard library alone; imports no implementation.

Modules, bottom up:

- exact: sine, cosine, logarithm and square root that give the same bits on every platform
- kernel: floats, packing, SplitMix64, Haar, Hadamard, Hartley (SPEC 5 to 7)
- doc: a file as a header tree and blobs, and its bytes (SPEC 2 to 4, 8)
- expect: what an adapter must print of a file (PROTOCOL.md)
- cases: what a case is, the codes and the flags; recipe: large files as text
- valid: files to accept;  fault: what the files to refuse share
- framing, text, structure, reference, payload: files to refuse, by phase;  order: two faults
- encode: content in, bytes out;  kernels: tables of values
"""
