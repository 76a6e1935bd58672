"""Builds the conformance vectors from SPEC.md with the standard library alone; imports no implementation.

Modules, bottom up:

- exact: sine, cosine, logarithm and square root that give the same bits on every platform
- kernel: floats, packing, SplitMix64, Haar, Hadamard, Hartley (SPEC 5 to 7)
- doc: a file as a header tree and blobs, and its bytes (SPEC 2 to 4, 8)
- expect: what an adapter must print of a file (PROTOCOL.md)
- cases: the list of cases; recipe: large files as text
- valid, invalid, order, encode, kernels: the cases themselves
"""
